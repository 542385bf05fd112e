"""Gradient reduction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.passes.base import Pass

WAITS = ("none", "now", "deferred")


@dataclass(frozen=True)
class ReduceGrad(Pass):
    """REDUCE_GRAD of each stage right after its last weight gradient on the rank; stages that have one keep it.

    `wait` adds a WAIT_REDUCE_GRAD to each reduction that has none: `now` right after it, `deferred` before the rank's next
    reduction or at the end of its row, so that computation goes on beside it. With `none` the step's end waits for all of them.
    With `at_end` all reductions of a rank come at the end of its row, in the order of stages: ranks that hold the same stages but run
    different rows then reduce in the same order, and none waits for another that still needs its messages.
    """

    name = "reduce-grad"
    wait: str = "none"
    at_end: bool = False

    def __post_init__(self) -> None:
        if self.wait not in WAITS:
            raise PassError(f"wait={self.wait} of pass {self.name}: it must be one of {', '.join(WAITS)}")

    def apply(self, program: Program) -> Program:
        rows = program.rows
        key = rows.rank * program.stages + rows.stage
        entries = np.flatnonzero(rows.is_kind(Kind.B, Kind.W))[::-1]
        keys, latest = np.unique(key[entries], return_index=True)
        last = entries[latest]
        last = last[~np.isin(keys, key[rows.is_kind(Kind.REDUCE_GRAD)])]
        reduce = codes.pack(rows.stage[last], int(Kind.REDUCE_GRAD))
        places, ties = (rows.offsets[rows.rank[last] + 1], rows.stage[last]) if self.at_end else (rows.group_ends[last], last)
        reduced = rows.insert(places, reduce, rows.rank[last], tie=ties)
        return self._record(program, rows=self.add_waits(reduced, program.stages))

    def add_waits(self, rows: Rows, stages: int) -> Rows:
        """The rows with the waits that `wait` asks for, and no more reductions than they have."""
        if self.wait == "none":
            return rows
        key = rows.rank * stages + rows.stage
        reduces = np.flatnonzero(rows.is_kind(Kind.REDUCE_GRAD))
        following = np.append(reduces[1:], len(rows.codes)) if len(reduces) else reduces
        end = np.minimum(following, rows.offsets[rows.rank[reduces] + 1])
        bare = ~np.isin(key[reduces], key[rows.is_kind(Kind.WAIT_REDUCE_GRAD)])
        places = reduces + 1 if self.wait == "now" else end
        waits = codes.pack(rows.stage[reduces], int(Kind.WAIT_REDUCE_GRAD))
        return rows.insert(places[bare], waits[bare], rows.rank[reduces][bare], tie=reduces[bare])
