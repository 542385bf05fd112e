"""The requirements on every schedule, one small check each; the shapes to check; and the suite as a class that pytest collects."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.errors import PenstockError, ScheduleError
from penstock.ir.action import Action
from penstock.ir.formats.csv_form import read_csv, write_csv
from penstock.ir.formats.json_form import decode, encode
from penstock.ir.kind import COMPUTE
from penstock.passes.lower import lower
from penstock.schedules.registry import algorithm
from penstock.verifier.verify import verify

if TYPE_CHECKING:
    import pytest

    from penstock.ir.schedule import Schedule
    from penstock.ir.table import Table


_BOTH = ("channels", "rendezvous")
_LOWERINGS: tuple[tuple[dict[str, str | int | bool], tuple[str, ...]], ...] = (
    ({"receive": "paired"}, _BOTH),
    ({"receive": "paired", "fsdp": True}, _BOTH),
    ({"receive": "paired", "merge_backward": True}, _BOTH),
    ({"receive": "just-in-time"}, ("channels",)),
    ({"receive": 2}, ("channels",)),
)
"""Options of `lower`, and the semantics under which the program they give must be free of deadlock."""


def check_schedule(schedule: Schedule) -> None:
    """Raise `AssertionError` with the reason unless all of this holds.

    - A rank's row is the same whether generated alone or as part of the whole.
    - Every stage and microbatch has its forward once and, if anything trains, its backward (B, or I and W) once, each on
      its rank; a backward follows its forward and a W its I; the order can run to its end.
    - Text, CSV and JSON give the same schedule back.
    - Every way of lowering keeps the order and gives a program that the verifier proves, with receives as `paired` under
      both semantics.

    >>> import penstock as ps
    >>> check_schedule(ps.schedule("zbv", ranks=2, microbatches=3))
    """
    for check in (_check_ranks, _check_order, _check_files, _check_programs):
        try:
            check(schedule)
        except PenstockError as error:
            raise AssertionError(f"{schedule!r}: {error}") from error


def _check_ranks(schedule: Schedule) -> None:
    alone = [schedule.row(rank) for rank in reversed(range(schedule.ranks))][::-1]
    for rank, row in enumerate(alone):
        whole = schedule.rows.row(rank)
        if not np.array_equal(row, whole):
            at = int(np.argmin(np.append(row[: len(whole)] == whole[: len(row)], False)))
            raise AssertionError(f"{schedule!r}: rank {rank} asked alone differs from entry {at} on from rank {rank} of the whole")


def _check_order(schedule: Schedule) -> None:
    others = np.flatnonzero(~schedule.rows.is_kind(*COMPUTE))
    if len(others):
        raise AssertionError(f"{schedule!r}: {schedule.rows.part_at(int(others[0]))} is not compute; lowering adds all other actions")
    verify(schedule)


def _check_files(schedule: Schedule) -> None:
    for row in schedule:
        for action in row:
            if Action.parse(str(action)) != action:
                raise AssertionError(f"{schedule!r}: {action!r} read back is {Action.parse(str(action))!r}")
    _check_file_forms(schedule)


def _check_file_forms(table: Table) -> None:
    """Check that CSV gives back the rows, and JSON the whole table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write_csv(table, path)
        if read_csv(path).rows != table.rows:
            raise AssertionError(f"{table!r}: written as CSV and read back its rows differ")
    if decode(json.loads(json.dumps(encode(table)))) != table:
        raise AssertionError(f"{table!r}: written as JSON and read back it differs")


def _check_programs(schedule: Schedule) -> None:
    for options, meanings in _LOWERINGS:
        program = lower(schedule, **options)  # type: ignore[arg-type]
        if not options.get("merge_backward") and program.schedule() != schedule:
            raise AssertionError(f"{schedule!r}: lowered with {options} the order of its compute actions differs")
        for semantics in meanings:
            try:
                verify(program, semantics=semantics)
            except PenstockError as error:
                raise AssertionError(f"{schedule!r}: lowered with {options}, {semantics}: {error}") from error
        if options.get("fsdp"):  # the program with actions of every kind
            _check_file_forms(program)


@dataclass(frozen=True)
class Case:
    """One shape of one registered schedule.

    >>> print(Case("zbv", ranks=2, chunks=2, microbatches=3))
    zbv-p2-v2-m3
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Schedule:
        """The schedule of this shape."""
        return algorithm(self.name).build(self.ranks, self.microbatches, self.chunks, **self.options)

    def __str__(self) -> str:
        return f"{self.name}-p{self.ranks}-v{self.chunks}-m{self.microbatches}"


def conformance_cases(name: str, *, ranks: Iterable[int] = range(1, 5), chunks: Iterable[int] = range(1, 4), **options: Any) -> list[Case]:
    """Every microbatch count from 1 to three times the ranks, for each number of ranks and chunks that the schedule takes.

    A schedule may need an even number of ranks, say, but no particular microbatch count: if it accepts a shape, all counts are tried.

    >>> [str(case) for case in conformance_cases("dualpipe", ranks=[1, 2], chunks=[1])]
    ['dualpipe-p2-v2-m1', 'dualpipe-p2-v2-m2', 'dualpipe-p2-v2-m3', 'dualpipe-p2-v2-m4', 'dualpipe-p2-v2-m5', 'dualpipe-p2-v2-m6']
    """
    layout = algorithm(name).layout
    cases: list[Case] = []
    for p, v in product(ranks, [layout.chunks] if layout.fixed else chunks):
        of_pair = [Case(name, p, v, microbatches, options) for microbatches in range(1, 3 * p + 1)]
        if any(map(_is_taken, of_pair)):
            cases += of_pair
    if not cases:
        raise AssertionError(f"{name} takes none of the ranks and chunks that it was to be tried on")
    return cases


def _is_taken(case: Case) -> bool:
    try:
        case.build()
    except ScheduleError:
        return False
    return True


class ScheduleConformance:
    """Subclass it in a test file under a name that starts with `Test`, and set `name` to a registered schedule."""

    name: ClassVar[str]
    ranks: ClassVar[Iterable[int]] = range(1, 5)
    chunks: ClassVar[Iterable[int]] = range(1, 4)
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the schedule itself, the same for every shape."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Generate one test per shape."""
        if "case" in metafunc.fixturenames:
            cases = conformance_cases(self.name, ranks=self.ranks, chunks=self.chunks, **self.options)
            metafunc.parametrize("case", cases, ids=str)

    def test_shape(self, case: Case) -> None:
        check_schedule(case.build())

    def test_says_what_it_costs(self) -> None:
        known = algorithm(self.name)
        assert known.summary, f"{self.name}: the docstring's first line is the summary that `penstock list` shows"
        assert known.bubble, f"{self.name}: the docstring needs a line that starts with 'Bubble:'"
        assert known.memory, f"{self.name}: the docstring needs a line that starts with 'Memory:'"
