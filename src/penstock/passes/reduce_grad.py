"""Gradient reduction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.passes.base import Pass


@dataclass(frozen=True)
class ReduceGrad(Pass):
    """REDUCE_GRAD of each stage right after its last weight gradient on the rank; stages that have one keep it."""

    name = "reduce-grad"

    def apply(self, program: Program) -> Program:
        rows = program.rows
        key = rows.rank * program.stages + rows.stage
        entries = np.flatnonzero(rows.is_kind(Kind.B, Kind.W))[::-1]
        keys, latest = np.unique(key[entries], return_index=True)
        last = entries[latest]
        last = last[~np.isin(keys, key[rows.is_kind(Kind.REDUCE_GRAD)])]
        reduce = codes.pack(rows.stage[last], int(Kind.REDUCE_GRAD))
        return self._passed(program, rows=rows.insert(rows.group_ends[last], reduce, rows.rank[last], tie=last))
