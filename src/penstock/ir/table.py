"""The common part of schedules and programs: one row of actions per rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, Self

from penstock.errors import ScheduleError, ScheduleTypeError
from penstock.ir.action import Action, unpack_row
from penstock.ir.codes import MAX_MICROBATCHES
from penstock.ir.dependencies import Deliveries, Linker, Links, find_deliveries
from penstock.ir.graph import StageGraph
from penstock.ir.kind import SPREAD, Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Ints, Rows, pack_rows
from penstock.text.numbers import format_count


class Table(ABC):
    """One row of actions per rank: `table[rank]` is a tuple of `Action`, `table.rows` holds all rows packed."""

    lowered: bool

    def __init__(
        self, placement: Placement, microbatches: int, *, graph: StageGraph | None = None, name: str = "", slices: int = 1
    ) -> None:
        check_counts(placement, microbatches, slices)
        self.placement = placement
        self.microbatches = microbatches
        self.slices = slices
        """How many slices each microbatch's sequences are cut into; 1 if they are not cut."""
        self.graph = StageGraph.chain(placement.stages) if graph is None else graph
        self.name = name
        if self.graph.stages != placement.stages:
            raise ScheduleError(f"the stage graph has {self.graph.stages} stages, the placement {placement.stages}")

    @classmethod
    @abstractmethod
    def from_rows(
        cls, rows: Rows, placement: Placement, microbatches: int, *, graph: StageGraph | None = None, name: str = "", slices: int = 1
    ) -> Self:
        """Build from rows that are already packed."""

    @classmethod
    def from_actions(
        cls,
        actions: Sequence[Iterable[Any]] | Mapping[int, Iterable[Any]],
        placement: Placement | None = None,
        *,
        microbatches: int | None = None,
        graph: StageGraph | None = None,
        name: str = "",
        slices: int = 1,
    ) -> Self:
        """Build from written-out actions, one sequence per rank: a list of them, or a dictionary by rank as PyTorch has it.

        An action is an `Action`, its text, or an object that prints as that text, such as PyTorch's `_Action`; None and empty text are
        idle slots. `microbatches` defaults to one more than the highest index, `placement` to the ranks that the actions are on.
        With `slices`, `2F3.1` is slice 1 of microbatch 3; the same action without a dot is `2F13` if there are 4 of them.
        """
        rows = pack_rows(actions, slices)
        if placement is None:
            from penstock.ir.formats.csv_form import infer_placement

            placement = infer_placement(rows)
        count = int(rows.microbatch.max(initial=0)) // slices + 1 if microbatches is None else microbatches
        return cls.from_rows(rows, placement, count, graph=graph, name=name, slices=slices)

    @property
    @abstractmethod
    def rows(self) -> Rows:
        """Every rank's actions, packed."""

    def row(self, rank: int) -> Ints:
        """One rank's packed actions."""
        return self.rows.row(self._check_rank(rank))

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def chunks(self) -> int:
        return self.placement.chunks

    @property
    def units(self) -> int:
        """The number of slices of all microbatches: how many numbers `rows.microbatch` has, and values per stage a table of costs."""
        return self.microbatches * self.slices

    @cached_property
    def training(self) -> bool:
        """Whether there is any backward."""
        return bool(self.rows.is_kind(Kind.B, Kind.I, Kind.W).any())

    @cached_property
    def spread_stages(self) -> tuple[int, ...]:
        """The stages of which a layer is spread over the ranks: 0 for the embedding, and the last for the head."""
        return tuple(sorted(set(self.rows.stage[self.rows.is_kind(*SPREAD)].tolist())))

    @cached_property
    def links(self) -> Links:
        """Every dependency, resolved to entries of `rows`."""
        return self.linker.links()

    @property
    def linker(self) -> Linker:
        """Built anew each time, because its tables take memory."""
        return Linker(self.rows, self.placement, self.graph, self.units, self.lowered)

    @property
    def deliveries(self) -> Deliveries:
        """Every message between ranks; built anew each time."""
        return find_deliveries(self.links, self.rows, sharing=self.graph.output_table.shape[1] > 1)

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return unpack_row(self.row(rank), self.slices)

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return (self[rank] for rank in range(self.ranks))

    def __eq__(self, other: object) -> bool:
        """Whether the rows and ranks are the same; names do not count."""
        if type(other) is not type(self) or not isinstance(other, Table):
            return NotImplemented
        own, others = ((table.placement.copies, table.graph, table.microbatches, table.slices) for table in (self, other))
        return own == others and self.ranks == other.ranks and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"<{type(self).__name__} {name}{self.describe()}>"

    def describe(self) -> str:
        """One line: `v, 4 ranks, 8 stages, 6 microbatches`, and the slices if there are any."""
        slices = f" of {self.slices} slices" if self.slices > 1 else ""
        return f"{self.placement.describe()}, {format_count(self.microbatches, 'microbatch')}{slices}"

    def _check_rank(self, rank: int) -> int:
        if not -self.ranks <= rank < self.ranks:
            raise IndexError(f"rank {rank}: there are {self.ranks} ranks, 0 to {self.ranks - 1}")
        return rank % self.ranks

    def grid(self, *, mark: int | None = None, steps: range | None = None) -> str:
        """Draw the table in text: one row per step, one column per rank; `mark` points at a step, `steps` cuts out a part."""
        from penstock.ir.grid import Grid

        return Grid.spaced(self).text(mark=mark, steps=steps)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write PyTorch's CSV form: one row per rank, one cell per action. Of the stage graph it has only the edges that messages name.

        `penstock.load` reads every such file back. PyTorch has no placements with two copies of a model, no edges that skip stages and no
        copies to host memory: it refuses or misreads a file with those, and the commands refuse to write one.
        """
        from penstock.ir.formats.csv_form import write_csv

        write_csv(self, path)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data; `penstock.load` reads it back from a file."""
        from penstock.ir.formats.json_form import encode

        return encode(self)


def check_table(value: object, function: str) -> None:
    """Refuse anything but a schedule or program as the argument of a function."""
    if isinstance(value, Table):
        return
    hint = ""
    if isinstance(value, str | PathLike):
        is_file = str(value).lower().endswith((".csv", ".json"))
        hint = (
            f": load the file, penstock.load({str(value)!r})"
            if is_file
            else f": build it, penstock.schedule({value!r}, ranks, microbatches)"
        )
    elif isinstance(getattr(value, "schedule", None), Table):
        hint = f": take the schedule of the {type(value).__name__}, its .schedule"
    raise ScheduleTypeError(f"{function} takes a Schedule or a Program, got {type(value).__name__}{hint}")


def check_counts(placement: Placement, microbatches: int, slices: int) -> None:
    """Refuse counts of microbatches and slices that no table can have."""
    if not 1 <= microbatches <= MAX_MICROBATCHES:
        raise ScheduleError(f"{microbatches} microbatches: the count must be from 1 to {MAX_MICROBATCHES}")
    if not 1 <= slices <= MAX_MICROBATCHES // microbatches:
        raise ScheduleError(
            f"{slices} slices of {microbatches} microbatches: there must be at least 1, and at most {MAX_MICROBATCHES} of all microbatches"
        )
    if slices > 1 and len(placement.copies) > 1:
        raise ScheduleError(
            f"slices={slices} on a {placement.kind} placement: its copies of a stage take turns by number, but the slices of a microbatch "
            "need the keys and values of the earlier ones, so they must stay on one rank"
        )
