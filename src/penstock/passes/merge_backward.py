"""Input and weight backwards into full ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows
from penstock.passes.base import Pass, Stages, check_stages, is_within
from penstock.passes.split_backward import change_kind


@dataclass(frozen=True)
class MergeBackward(Pass):
    """An I and the W of the same stage and microbatch that is next to it become one B, in the I's place.

    Next to it means that no other compute action is between. With `apart`, a W that stands farther off is
    merged too: for stages whose backward cannot be split.
    """

    name = "merge-backward"
    stages: Stages = None
    apart: bool = False

    def apply(self, program: Program) -> Program:
        check_stages(self.name, self.stages, program)
        rows = program.rows
        inputs, weights = _pair_anywhere(rows, program) if self.apart else _pair_neighbours(rows)
        allowed = is_within(self.stages, rows.stage[inputs])
        keep = np.ones(len(rows.codes), dtype=np.bool_)
        keep[weights[allowed]] = False
        merged = Rows(change_kind(rows.codes, inputs[allowed], Kind.B), rows.offsets)
        return self._record(program, rows=merged.keep(keep))


def _pair_neighbours(rows: Rows) -> tuple[Ints, Ints]:
    compute = np.flatnonzero(rows.is_kind(*COMPUTE))
    here, there = compute[:-1], compute[1:]
    match = (rows.kind[here] == Kind.I) & (rows.kind[there] == Kind.W) & (rows.rank[here] == rows.rank[there])
    match &= (rows.stage[here] == rows.stage[there]) & (rows.microbatch[here] == rows.microbatch[there])
    return here[match], there[match]


def _pair_anywhere(rows: Rows, program: Program) -> tuple[Ints, Ints]:
    def entries(kind: Kind) -> Ints:
        return np.flatnonzero(rows.is_kind(kind))

    def keys(of: Ints) -> Ints:
        return (rows.rank[of] * program.stages + rows.stage[of]) * program.units + rows.microbatch[of]

    inputs, weights = entries(Kind.I), entries(Kind.W)
    _, first, second = np.intersect1d(keys(inputs), keys(weights), return_indices=True)
    return inputs[first], weights[second]
