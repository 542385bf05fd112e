"""A timeline as boxes, one per action, in flat arrays; and cut into time slices: what runs in each, and the most memory held in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.kind import COPIES, JOINS, WORK, Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.ir.table import Table
from penstock.simulator.memory import Curve
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
    slices: int = 1

    def name_unit(self, box: int) -> str:
        """Give the microbatch of a box as text, with its slice if there are several: `3`, `3.1`."""
        microbatch, part = divmod(int(self.microbatch[box]), self.slices)
        return str(microbatch) if self.slices == 1 else f"{microbatch}.{part}"

    def unit_widths(self) -> Ints:
        """Count the characters of each box's `name_unit`."""
        if self.slices == 1:
            return _count_digits(self.microbatch)
        return _count_digits(self.microbatch // self.slices) + 1 + _count_digits(self.microbatch % self.slices)

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def length(self) -> Floats:
        return self.end - self.start


def compute_boxes(timeline: Timeline) -> Boxes:
    """Give one box per compute action, and one per part of an overlapped action."""
    rows, placement = timeline.table.rows, timeline.table.placement
    entry = np.flatnonzero(rows.is_kind(*WORK))
    node, stage, microbatch = rows.group[entry], rows.stage[entry], rows.microbatch[entry]
    first = rows.group_starts[entry]
    return Boxes(
        rank=rows.rank[entry],
        start=timeline.start[node],
        end=timeline.end[node],
        kind=rows.kind[entry],
        stage=stage,
        chunk=_count_chunks(placement)[microbatch % len(placement.copies), stage],
        microbatch=microbatch,
        part=entry - first,
        parts=rows.group_ends[entry] - first,
        slices=rows.slices,
    )


def list_collective_boxes(timeline: Timeline) -> Boxes:
    """Give one box per all-gather of parameters, reduction of gradients and rank's part in a collective of all ranks that takes time."""
    return _list_side_boxes(timeline, Kind.UNSHARD, Kind.REDUCE_GRAD, *JOINS)


def copy_boxes(timeline: Timeline) -> Boxes:
    """Give one box per copy of an activation to host memory or back that takes time."""
    return _list_side_boxes(timeline, *COPIES)


def _list_side_boxes(timeline: Timeline, *kinds: Kind) -> Boxes:
    """Give the boxes of what these kinds of action start beside the computation."""
    rows = timeline.table.rows
    entry = np.flatnonzero(rows.is_kind(*kinds))
    node = rows.group[entry]
    start, end = timeline.collective_start[node], timeline.collective_end[node]
    real = end > start
    entry, none = entry[real], np.zeros(int(real.sum()), dtype=np.int64)
    columns = rows.rank[entry], start[real], end[real], rows.kind[entry], rows.stage[entry]
    return Boxes(*columns, chunk=none, microbatch=rows.microbatch[entry], part=none, parts=none + 1, slices=rows.slices)


def list_classes(kinds: Ints) -> Ints:
    """Give the place of each kind of computation in `WORK`."""
    places = np.zeros(max(WORK) + 1, dtype=np.int64)
    places[list(WORK)] = range(len(WORK))
    return np.asarray(places[kinds], dtype=np.int64)


def list_optimizer_boxes(timeline: Timeline) -> tuple[Ints, Floats, Floats]:
    """Give rank, start and end of each optimizer step that takes time."""
    rank = np.flatnonzero(timeline.optimizer > 0)
    end = timeline.finished[rank]
    return rank, end - timeline.optimizer[rank], end


def _count_chunks(placement: Placement) -> Ints:
    """The chunk of each stage in each copy of the model."""
    place = {(rank, stage): chunk for rank in range(placement.ranks) for chunk, stage in enumerate(placement.stages_of(rank))}
    return np.array([[place[rank, stage] for stage, rank in enumerate(copy)] for copy in placement.copies], dtype=np.int64)


def _count_digits(numbers: Ints) -> Ints:
    return np.floor(np.log10(np.maximum(numbers, 1))).astype(np.int64) + 1


def make_widest_label(table: Table) -> str:
    """Give a text as wide as any box's `name_unit`."""
    slices = "." + "0" * len(str(table.slices - 1)) if table.slices > 1 else ""
    return "0" * len(str(table.microbatches - 1)) + slices


def shares(rows: Ints, classes: Ints, start: Floats, end: Floats, edges: Floats, *, shape: tuple[int, int]) -> Floats:
    """Measure how long each class runs in each row and slice: an array of rows x classes x slices.

    `rows` and `classes` say where each box belongs, and `shape` how many rows and classes there are. Boxes of one row and class
    do not overlap.
    """
    lane = rows * shape[1] + classes
    order = np.lexsort((end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    bounds = np.searchsorted(lane, np.arange(shape[0] * shape[1] + 1))
    busy = np.zeros((shape[0] * shape[1], len(edges) - 1))
    for place in np.unique(lane).tolist():
        part = slice(bounds[place], bounds[place + 1])
        busy[place] = _sum_busy(start[part], end[part], edges)
    return busy.reshape(*shape, len(edges) - 1)


def _sum_busy(start: Floats, end: Floats, edges: Floats) -> Floats:
    """The busy time in each slice: differences of the busy time up to each edge."""
    times = np.column_stack((start, end)).ravel()
    done = np.cumsum(np.column_stack((np.zeros(len(start)), end - start)).ravel())
    return np.diff(np.interp(edges, times, done))


def main_class(busy: Floats, edges: Floats) -> Ints:
    """Find the class that runs longest in each row and slice; -1 if the row is idle for longer."""
    idle = np.diff(edges) - busy.sum(axis=1)
    longest = busy.argmax(axis=1)
    return np.where(busy.max(axis=1) >= np.maximum(idle, np.diff(edges) * 1e-9), longest, -1)


def find_most_held(curve: Curve, edges: Floats) -> Floats:
    """Find the most that a rank holds in each slice, including the static part."""
    before = np.searchsorted(curve.times, edges[:-1], side="left") - 1
    total = np.append(curve.total, 0.0)  # index -1: nothing has changed yet
    most = total[before]
    place = np.searchsorted(edges, curve.times, side="right") - 1
    inside = (place >= 0) & (place < len(most))
    np.maximum.at(most, place[inside], curve.total[inside])
    return most + curve.static
