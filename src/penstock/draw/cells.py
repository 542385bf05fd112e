"""Rank rows for the terminal: the names of actions where all of them fit, else a letter a cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from penstock.draw.boxes import compute_boxes, optimizer_boxes
from penstock.draw.palette import OPTIMIZER, OVERLAP, TONES, Tone, shaded
from penstock.draw.slices import main_class, shares
from penstock.ir.kind import COMPUTE

if TYPE_CHECKING:
    from penstock.draw.terminal import Piece
    from penstock.ir.rows import Flags, Ints
    from penstock.simulator.timeline import Timeline

IDLE = "."
# The classes of a cell: the kinds of computation by their numbers, several together, the optimizer's step.
LETTERS = "FBIW&S"
CLASS_TONES = (*(TONES[kind] for kind in COMPUTE), OVERLAP, OPTIMIZER)
_TOGETHER, _STEP = 4, 5


class Cells:
    """A timeline cut into so many columns; what runs together is one box, an optimizer's step too."""

    def __init__(self, timeline: Timeline, columns: int) -> None:
        self.columns, self.chunks, self.ranks = columns, timeline.table.chunks, timeline.ranks
        self.edges = np.linspace(0.0, timeline.makespan, columns + 1)
        self._parts = compute_boxes(timeline)
        self._heads = np.flatnonzero(self._parts.part == 0)
        rank, start, end = optimizer_boxes(timeline)
        of_step = np.zeros(len(rank), dtype=np.int64)
        together: Flags = self._parts.parts[self._heads] > 1
        self.rank = np.concatenate((self._parts.rank[self._heads], rank))
        self.start = np.concatenate((self._parts.start[self._heads], start))
        self.end = np.concatenate((self._parts.end[self._heads], end))
        self.label = np.concatenate((np.where(together, _TOGETHER, self._parts.kind[self._heads]), of_step + _STEP))
        self.chunk = np.concatenate((np.where(together, 0, self._parts.chunk[self._heads]), of_step))

    @property
    def tones(self) -> list[tuple[str, Tone]]:
        """The letters that occur and their tones."""
        return [(LETTERS[each], CLASS_TONES[each]) for each in np.unique(self.label).tolist()]

    def rows(self, ranks: Sequence[int]) -> Iterator[list[Piece]]:
        """The ranks' rows, each `columns` long."""
        if self._names_fit:
            order = np.argsort(self.rank, kind="stable")  # each optimizer's step behind its rank's actions
            bounds = np.searchsorted(self.rank[order], np.arange(self.ranks + 1))
            yield from (self._names(order[bounds[rank] : bounds[rank + 1]]) for rank in ranks)
        else:
            grid = self._majority()
            yield from (self._letters(grid[rank]) for rank in ranks)

    def _majority(self) -> Ints:
        """For each rank and cell, what runs the longest, as class x chunks + chunk; -1 for idle."""
        lane, shape = self.label * self.chunks + self.chunk, (self.ranks, len(LETTERS) * self.chunks)
        found = shares(self.rank, lane, self.start, self.end, self.edges, shape=shape)
        apart = found.reshape(self.ranks, len(LETTERS), self.chunks, self.columns)
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

    @cached_property
    def _cell_bounds(self) -> tuple[Ints, Ints]:
        """The first cell of each box and the one behind its last."""
        scale = self.columns / (self.edges[-1] or 1.0)
        return np.round(self.start * scale).astype(np.int64), np.round(self.end * scale).astype(np.int64)

    @property
    def _names_fit(self) -> bool:
        """Whether every box has the cells that its name takes: a letter and digits for each part, and the joints."""
        digits = np.floor(np.log10(np.maximum(self._parts.microbatch, 1))).astype(np.int64) + 1
        needed = np.add.reduceat(digits + 2, self._heads) - 1 if len(self._heads) else self._heads
        first, last = self._cell_bounds
        return bool((last - first >= np.pad(needed, (0, len(first) - len(needed)), constant_values=1)).all())

    def _names(self, boxes: Ints) -> list[Piece]:
        """Each box with its name at its left end."""
        first, last = self._cell_bounds
        row: list[Piece] = []
        at = 0
        for box in boxes.tolist():
            row += [(IDLE * int(first[box] - at), None)] if first[box] > at else []
            row.append((self._name(box).ljust(int(last[box] - first[box])), self._tone(int(self.label[box]), int(self.chunk[box]))))
            at = last[box]
        return [*row, (IDLE * int(self.columns - at), None)] if at < self.columns else row

    def _name(self, box: int) -> str:
        if self.label[box] == _STEP:
            return LETTERS[_STEP]
        head = int(self._heads[box])
        parts = range(head, head + int(self._parts.parts[head]))
        return "&".join(f"{LETTERS[int(self._parts.kind[part])]}{self._parts.microbatch[part]}" for part in parts)

    def _tone(self, label: int, chunk: int) -> Tone:
        return shaded(CLASS_TONES[label], chunk, self.chunks) if label < _TOGETHER else CLASS_TONES[label]
