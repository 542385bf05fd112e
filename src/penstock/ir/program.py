"""A schedule after lowering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from penstock.ir.graph import StageGraph
from penstock.ir.kind import COMPUTE, COPIES, SPREAD, Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table


@dataclass(frozen=True)
class BufferCounts:
    """How many slots a program needs, each rank's `(stage, count)` pairs and each channel's count of messages under way.

    A channel is `(from rank, to rank, kind)`, the kind that of its sends: `SEND_F` activations, `SEND_B` gradients.
    """

    activations: tuple[dict[int, int], ...] = ()
    """For each rank and stage: received (or loaded) inputs alive at once, from the receive to the backward that ends their use."""
    gradients: tuple[dict[int, int], ...] = ()
    """For each rank and stage: output gradients alive at once, from the receive to the backward that uses them."""
    channels: dict[tuple[int, int, Kind], int] = field(default_factory=dict)
    """For each channel: messages sent and not yet taken. A sender that finds them all taken waits."""

    def to_json(self) -> dict[str, Any]:
        return {
            "activations": [{str(s): n for s, n in rank.items()} for rank in self.activations],
            "gradients": [{str(s): n for s, n in rank.items()} for rank in self.gradients],
            "channels": [[a, b, kind.name, n] for (a, b, kind), n in sorted(self.channels.items())],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BufferCounts:
        return cls(
            tuple({int(s): int(n) for s, n in rank.items()} for rank in data["activations"]),
            tuple({int(s): int(n) for s, n in rank.items()} for rank in data["gradients"]),
            {(int(a), int(b), Kind[kind]): int(n) for a, b, kind, n in data["channels"]},
        )


class Program(Table):
    """Compute, communication, sharding, reduction and copies to the host, in the order in which each rank runs them.

    `lowered` is false for a program halfway through lowering: data that crosses ranks has no messages yet.
    """

    def __init__(
        self,
        rows: Rows,
        placement: Placement,
        microbatches: int,
        *,
        graph: StageGraph | None = None,
        name: str = "",
        passes: str = "",
        buffers: BufferCounts | None = None,
        lowered: bool = True,
        slices: int = 1,
    ) -> None:
        super().__init__(placement, microbatches, graph=graph, name=name, slices=slices)
        self.lowered = lowered
        self._rows = rows.cut_into(slices)
        self.passes = passes
        self.buffers = buffers

    @classmethod
    def from_rows(
        cls, rows: Rows, placement: Placement, microbatches: int, *, graph: StageGraph | None = None, name: str = "", slices: int = 1
    ) -> Self:
        return cls(rows, placement, microbatches, graph=graph, name=name, slices=slices)

    @property
    def rows(self) -> Rows:
        return self._rows

    @classmethod
    def start(cls, table: Table) -> Program:
        """A schedule as the program that lowering starts from; a program as it is."""
        if isinstance(table, Program):
            return table
        return cls(table.rows, table.placement, table.microbatches, graph=table.graph, name=table.name, lowered=False, slices=table.slices)

    def changed(self, **fields: Any) -> Program:
        """The same program with other `rows`, `passes`, `buffers` or `lowered`; new rows drop the buffers counted for the old ones."""
        values = {"rows": self.rows, "passes": self.passes, "lowered": self.lowered, "slices": self.slices}
        if "rows" not in fields:
            values["buffers"] = self.buffers
        return Program(placement=self.placement, microbatches=self.microbatches, graph=self.graph, name=self.name, **{**values, **fields})

    def schedule(self) -> Schedule:
        """The compute actions, the copies of activations to the host and back, and the collectives of a spread vocabulary."""
        return Schedule.from_rows(
            self.rows.keep(self.rows.is_kind(*COMPUTE, *COPIES, *SPREAD)),
            self.placement,
            self.microbatches,
            graph=self.graph,
            name=self.name,
            slices=self.slices,
        )
