"""Full backwards into input and weight backwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.passes.base import Pass, Stages, check_stages, is_within


@dataclass(frozen=True)
class SplitBackward(Pass):
    """Each B becomes I and, right behind it, W. In an overlapped action the I stays inside and the W follows."""

    name = "split-backward"
    stages: Stages = None

    def apply(self, program: Program) -> Program:
        check_stages(self.name, self.stages, program)
        rows = program.rows
        full = np.flatnonzero(rows.is_kind(Kind.B) & is_within(self.stages, rows.stage))
        halved = Rows(change_kind(rows.codes, full, Kind.I), rows.offsets)
        weights = codes.pack(rows.stage[full], int(Kind.W), rows.microbatch[full])
        return self._record(program, rows=halved.insert(rows.group_ends[full], weights, rows.rank[full], tie=full))


def change_kind(entries: np.ndarray, at: np.ndarray, kind: Kind) -> np.ndarray:
    """A copy in which the entries at these places are of another kind."""
    changed = entries.copy()
    changed[at] = (entries[at] & ~codes.pack(0, 15)) | codes.pack(0, int(kind))
    return changed
