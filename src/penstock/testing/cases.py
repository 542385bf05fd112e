"""The shapes on which a schedule is tested."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from penstock.errors import ScheduleError
from penstock.schedules.registry import algorithm

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule


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
