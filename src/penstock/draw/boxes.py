"""A timeline as boxes, one per action, in flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.rows import Floats

if TYPE_CHECKING:
    from penstock.ir.placement import Placement
    from penstock.ir.rows import Ints
    from penstock.simulator.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Boxes:
    """Actions in the order of the rows. Actions that run together have one box each: box `part` of `parts`."""

    rank: Ints
    start: Floats
    end: Floats
    kind: Ints
    stage: Ints
    chunk: Ints
    microbatch: Ints
    part: Ints
    parts: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def length(self) -> Floats:
        return self.end - self.start


def compute_boxes(timeline: Timeline) -> Boxes:
    """Give one box per compute action, and one per part of an overlapped action."""
    rows, placement = timeline.table.rows, timeline.table.placement
    entry = np.flatnonzero(rows.is_kind(*COMPUTE))
    node, stage, microbatch = rows.group[entry], rows.stage[entry], rows.microbatch[entry]
    first = rows.group_starts[entry]
    return Boxes(
        rank=rows.rank[entry],
        start=timeline.start[node],
        end=timeline.end[node],
        kind=rows.kind[entry],
        stage=stage,
        chunk=_chunks(placement)[microbatch % len(placement.copies), stage],
        microbatch=microbatch,
        part=entry - first,
        parts=rows.group_ends[entry] - first,
    )


def collective_boxes(timeline: Timeline) -> Boxes:
    """Give one box per all-gather of parameters and reduction of gradients that takes time."""
    rows = timeline.table.rows
    entry = np.flatnonzero(rows.is_kind(Kind.UNSHARD, Kind.REDUCE_GRAD))
    node = rows.group[entry]
    start, end = timeline.collective_start[node], timeline.collective_end[node]
    real = end > start
    entry, none = entry[real], np.zeros(int(real.sum()), dtype=np.int64)
    return Boxes(rows.rank[entry], start[real], end[real], rows.kind[entry], rows.stage[entry], none, none, none, none + 1)


def optimizer_boxes(timeline: Timeline) -> tuple[Ints, Floats, Floats]:
    """Give rank, start and end of each optimizer step that takes time."""
    rank = np.flatnonzero(timeline.optimizer > 0)
    end = timeline.finished[rank]
    return rank, end - timeline.optimizer[rank], end


def _chunks(placement: Placement) -> Ints:
    """The chunk of each stage in each copy of the model."""
    held = [0] * placement.ranks
    chunk = np.zeros((len(placement.copies), placement.stages), dtype=np.int64)
    for copy, ranks in enumerate(placement.copies):
        for stage, rank in enumerate(ranks):
            chunk[copy, stage] = held[rank]
            held[rank] += 1
    return chunk
