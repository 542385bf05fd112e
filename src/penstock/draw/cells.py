"""Rank rows for the terminal: the names of actions where all of them fit, else a letter a cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import Boxes, compute_boxes, optimizer_boxes
from penstock.draw.palette import OPTIMIZER, OVERLAP, TONES, Tone, shaded
from penstock.draw.slices import main_class, shares
from penstock.ir.kind import COMPUTE

if TYPE_CHECKING:
    from penstock.draw.terminal import Piece
    from penstock.ir.rows import Ints
    from penstock.simulator.timeline import Timeline

IDLE = "."
# The classes of a cell: the kinds of computation by their numbers, several together, the optimizer's step.
LETTERS = "FBIW&S"
CLASS_TONES = (*(TONES[kind] for kind in COMPUTE), OVERLAP, OPTIMIZER)
_TOGETHER, _STEP = 4, 5


class Cells:
    """A timeline cut into so many columns."""

    def __init__(self, timeline: Timeline, columns: int) -> None:
        self.columns = columns
        self.chunks = timeline.table.chunks
        self.edges = np.linspace(0.0, timeline.makespan, columns + 1)
        self._boxes = _whole(timeline)
        self._named = _fit(self._boxes, columns, timeline.makespan)
        self._grid = self._majority(timeline) if self._named is None else None

    @property
    def classes(self) -> list[int]:
        """The classes that occur, in the order of the legend."""
        return np.unique(self._boxes.kind).tolist()

    def rows(self, ranks: Sequence[int]) -> Iterator[list[Piece]]:
        """The ranks' rows, each `columns` long."""
        bounds = np.searchsorted(self._boxes.rank, np.arange(max(ranks) + 2)).tolist()
        for rank in ranks:
            yield self._letters(self._grid[rank]) if self._grid is not None else self._names(range(bounds[rank], bounds[rank + 1]))

    def _majority(self, timeline: Timeline) -> Ints:
        """For each rank and cell, what runs the longest, as class x chunks + chunk; -1 for idle."""
        boxes, shape = self._boxes, (timeline.ranks, len(LETTERS) * self.chunks)
        lane = boxes.kind * self.chunks + boxes.chunk
        found = shares(boxes.rank, lane, boxes.start, boxes.end, self.edges, shape=shape)
        apart = found.reshape(timeline.ranks, len(LETTERS), self.chunks, self.columns)
        main = main_class(apart.sum(axis=2), self.edges)
        of_main = np.take_along_axis(apart, np.maximum(main, 0)[:, None, None, :], axis=1)[:, 0]
        return np.where(main < 0, -1, main * self.chunks + of_main.argmax(axis=1))

    def _letters(self, cells: Ints) -> list[Piece]:
        """A letter a cell, equal neighbours in one piece."""
        row: list[Piece] = []
        for cell, run in groupby(cells.tolist()):
            letter = IDLE if cell < 0 else LETTERS[cell // self.chunks]
            row.append((letter * len(list(run)), None if cell < 0 else self._tone(*divmod(cell, self.chunks))))
        return row

    def _names(self, boxes: range) -> list[Piece]:
        """Each box with its name at its left end."""
        assert self._named is not None
        row: list[Piece] = []
        at = 0
        for box in boxes:
            name, first, last = self._named[box]
            row += [(IDLE * (first - at), None)] if first > at else []
            row.append((name.ljust(last - first), self._tone(int(self._boxes.kind[box]), int(self._boxes.chunk[box]))))
            at = last
        return [*row, (IDLE * (self.columns - at), None)] if at < self.columns else row

    def _tone(self, kind: int, chunk: int) -> Tone:
        return shaded(CLASS_TONES[kind], chunk, self.chunks) if kind < _TOGETHER else CLASS_TONES[kind]


class _Whole(Boxes):
    """One box an action: `kind` is its class, and `names` says what it is."""

    names: list[str]


def _whole(timeline: Timeline) -> _Whole:
    """Every action as one box, with the optimizer's steps, by rank and time."""
    boxes = compute_boxes(timeline)
    first = np.flatnonzero(boxes.part == 0)
    rank, start, end = optimizer_boxes(timeline)
    together = boxes.parts[first] > 1
    none = np.zeros(len(rank), dtype=np.int64)
    columns = {
        "rank": (boxes.rank[first], rank),
        "start": (boxes.start[first], start),
        "end": (boxes.end[first], end),
        "kind": (np.where(together, _TOGETHER, boxes.kind[first]), none + _STEP),
        "stage": (boxes.stage[first], none),
        "chunk": (np.where(together, 0, boxes.chunk[first]), none),
        "microbatch": (boxes.microbatch[first], none),
        "part": (boxes.part[first], none),
        "parts": (boxes.parts[first], none + 1),
    }
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.argsort(joined["rank"], kind="stable")
    made = _Whole(**{name: column[order] for name, column in joined.items()})
    return made
