"""Pictures for the terminal, as lines of coloured text: a grid of steps and ranks, and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count, groupby

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import compute_boxes, find_most_held, list_classes, list_optimizer_boxes, main_class, shares
from penstock.draw.palette import GAP, OPTIMIZER, OVERLAP, TONES, Line, Piece, Tone, legend_lines, shade
from penstock.draw.summary import format_memory, format_time, list_summary_rows, memory_unit, shape_of, title_of, unit_of
from penstock.ir.action import Action
from penstock.ir.grid import Grid
from penstock.ir.kind import WORK
from penstock.ir.rows import Flags, Ints
from penstock.simulator.timeline import Timeline
from penstock.text.table import format_table

# A grid, coloured by kind, in blocks of ranks that fit the width ------------------------------------------------------


def grid_lines(grid: Grid, *, width: int | None = None, ranks: Sequence[int] | None = None) -> Iterator[Line]:
    """Draw one row per step and one column per rank; ranks that do not fit into `width` follow below in further blocks.

    `ranks` numbers the columns of the grid if they are not all ranks from 0 on.
    """
    label = len(str(max(grid.steps - 1, 0)))
    cells = ([_take_piece(grid.cell(at, step)) for step in range(grid.steps)] for at in range(len(grid.columns)))
    numbers = count() if ranks is None else ranks
    columns: list[list[Piece]] = [[(f"rank {rank}", None), *column] for rank, column in zip(numbers, cells, strict=False)]
    widths = [max(len(text) for text, _ in column) for column in columns]
    size = len(columns) if width is None else max(1, (width - label) // (len(GAP) + max(widths)))
    for first in range(0, len(columns), size):
        if first:
            yield []
        yield from _block(columns[first : first + size], widths[first : first + size], label)


def grid_legend(grid: Grid, *, width: int | None = None) -> Iterator[Line]:
    """Say what the kinds of the grid mean, in as many lines as `width` needs."""
    kinds = {cell.kind for column in grid.columns for cell in column if cell is not None}
    tones = dict.fromkeys(tone for kind, tone in TONES.items() if kind in kinds)
    return legend_lines(((tone.sample, tone) for tone in tones), width=width)


def _take_piece(action: Action | None) -> Piece:
    """One cell; overlapped actions are joined by `&`, which is a third of the length of their text form."""
    return ("", None) if action is None else ("&".join(map(str, action.parts)), TONES[action.kind])


def _block(columns: list[list[Piece]], widths: list[int], label: int) -> Iterator[Line]:
    for number, row in enumerate(zip(*columns, strict=True)):
        line: list[Piece] = [((str(number - 1) if number else "").rjust(label), None)]
        for (text, tone), width in zip(row, widths, strict=True):
            line += [(GAP, None), (text.ljust(width), tone)]
        yield line


# A timeline: one row per rank, then the memory of each rank, then the figures -----------------------------------------


WIDTH = 100
"""Columns of the picture if no width is asked for."""
LEAST = 20
"""Columns of the time axis on the narrowest terminal."""
MOST_RANKS = 64
"""Rows of the picture; of more ranks only some are shown."""
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"
IDLE = "."
# The classes of a cell: the kinds of computation in the order of `WORK`, several that run together, the optimizer's step.
LETTERS = "FBIWst&S"
CLASS_TONES = (*(TONES[kind] for kind in WORK), OVERLAP, OPTIMIZER)
_TOGETHER, _STEP = len(WORK), len(WORK) + 1


def timeline_lines(timeline: Timeline, *, width: int | None = None, bars: str = BARS, unit: str | None = None) -> Iterator[Line]:
    """Draw rows, memory, legend and figures, at most `width` columns wide."""
    ranks = range(0, timeline.ranks, -(-timeline.ranks // MOST_RANKS))
    names = [f"rank {rank}" for rank in ranks]
    unit = unit_of(timeline, unit)
    peaks = [format_memory(timeline.peak_memory[rank], timeline.units.in_bytes) for rank in ranks]
    left, right = max(map(len, [*names, "memory"])) + len(GAP), max(map(len, [*peaks, "peak"])) + 1
    cells = TimelineCells(timeline, max((WIDTH if width is None else width) - left - right, LEAST))
    yield [(f"{title_of(timeline)}: {', '.join(shape_of(timeline))}", None)]
    yield [("time".ljust(left) + "0" + format_time(timeline.makespan, unit).rjust(cells.columns - 1), None)]
    yield from ([(name.ljust(left), None), *row] for name, row in zip(names, cells.rows(ranks), strict=True))
    yield []
    memory = f"memory ({memory_unit(timeline)})" if memory_unit(timeline) else "memory"
    yield [(memory.ljust(left + cells.columns)[: left + cells.columns] + "peak".rjust(right), None)]
    most = max(timeline.peak_memory)
    for rank, name, peak in zip(ranks, names, peaks, strict=True):
        yield [(name.ljust(left) + sparkline(find_most_held(timeline.memory(rank), cells.edges), most, bars) + peak.rjust(right), None)]
    yield []
    if ranks.step > 1:
        yield [(f"1 in {ranks.step} of the {timeline.ranks} ranks is shown", None)]
    yield from legend_lines(cells.tones, width=width, first=f"{IDLE} idle")
    yield []
    yield from format_table(list_summary_rows(timeline, unit), left=None)


def sparkline(held: NDArray[np.float64], most: float, bars: str = BARS) -> str:
    """Draw one bar per slice, the highest for `most`, and a blank for 0.

    >>> sparkline(np.array([0.0, 1.0, 8.0]), most=8.0)
    ' ▁█'
    """
    levels = np.ceil(held / (most or 1.0) * len(bars) - 1e-9).astype(np.int64).clip(0, len(bars))
    return "".join(f" {bars}"[level] for level in levels.tolist())


class TimelineCells:
    """The rank rows of a timeline, cut into columns: the names of actions if all of them fit, else one letter per cell.

    Actions that run together are one box, and so is an optimizer's step.
    """

    def __init__(self, timeline: Timeline, columns: int) -> None:
        self.columns, self.chunks, self.ranks = columns, timeline.table.chunks, timeline.ranks
        self.edges = np.linspace(0.0, timeline.makespan, columns + 1)
        self._parts = compute_boxes(timeline)
        self._classes = list_classes(self._parts.kind)
        self._heads = np.flatnonzero(self._parts.part == 0)
        rank, start, end = list_optimizer_boxes(timeline)
        of_step = np.zeros(len(rank), dtype=np.int64)
        together: Flags = self._parts.parts[self._heads] > 1
        self.rank = np.concatenate((self._parts.rank[self._heads], rank))
        self.start = np.concatenate((self._parts.start[self._heads], start))
        self.end = np.concatenate((self._parts.end[self._heads], end))
        self.label = np.concatenate((np.where(together, _TOGETHER, self._classes[self._heads]), of_step + _STEP))
        self.chunk = np.concatenate((np.where(together, 0, self._parts.chunk[self._heads]), of_step))

    @property
    def tones(self) -> list[tuple[str, Tone]]:
        """The letters that occur and their tones."""
        return [(LETTERS[label], CLASS_TONES[label]) for label in np.unique(self.label).tolist()]

    def rows(self, ranks: Sequence[int]) -> Iterator[list[Piece]]:
        """The ranks' rows, each `columns` long."""
        if self._names_fit:
            order = np.argsort(self.rank, kind="stable")  # each optimizer's step after its rank's actions
            bounds = np.searchsorted(self.rank[order], np.arange(self.ranks + 1))
            yield from (self._choose_names(order[bounds[rank] : bounds[rank + 1]]) for rank in ranks)
        else:
            grid = self._find_majority()
            yield from (self._choose_letters(grid[rank]) for rank in ranks)

    def _find_majority(self) -> Ints:
        """The kind of action that runs longest in each cell of each rank, as class x chunks + chunk; -1 for idle."""
        lane, shape = self.label * self.chunks + self.chunk, (self.ranks, len(LETTERS) * self.chunks)
        busy = shares(self.rank, lane, self.start, self.end, self.edges, shape=shape)
        by_class = busy.reshape(self.ranks, len(LETTERS), self.chunks, self.columns)
        main = main_class(by_class.sum(axis=2), self.edges)
        of_main = np.take_along_axis(by_class, np.maximum(main, 0)[:, None, None, :], axis=1)[:, 0]
        return np.where(main < 0, -1, main * self.chunks + of_main.argmax(axis=1))

    def _choose_letters(self, cells: Ints) -> list[Piece]:
        """One letter per cell, equal neighbours in one piece."""
        row: list[Piece] = []
        for cell, run in groupby(cells.tolist()):
            letter = IDLE if cell < 0 else LETTERS[cell // self.chunks]
            row.append((letter * len(list(run)), None if cell < 0 else self._choose_tone(*divmod(cell, self.chunks))))
        return row

    @cached_property
    def _cell_bounds(self) -> tuple[Ints, Ints]:
        """The first cell of each box, and the one after its last."""
        scale = self.columns / (self.edges[-1] or 1.0)
        return np.round(self.start * scale).astype(np.int64), np.round(self.end * scale).astype(np.int64)

    @property
    def _names_fit(self) -> bool:
        """Whether every box is wide enough for its name: a letter and digits for each part, and the joints."""
        needed = np.add.reduceat(self._parts.unit_widths() + 2, self._heads) - 1 if len(self._heads) else self._heads
        first, last = self._cell_bounds
        return bool((last - first >= np.pad(needed, (0, len(first) - len(needed)), constant_values=1)).all())

    def _choose_names(self, boxes: Ints) -> list[Piece]:
        """Each box with its name at its left end."""
        first, last = self._cell_bounds
        row: list[Piece] = []
        at = 0
        for box in boxes.tolist():
            row += [(IDLE * int(first[box] - at), None)] if first[box] > at else []
            row.append((self._name(box).ljust(int(last[box] - first[box])), self._choose_tone(int(self.label[box]), int(self.chunk[box]))))
            at = last[box]
        return [*row, (IDLE * int(self.columns - at), None)] if at < self.columns else row

    def _name(self, box: int) -> str:
        if self.label[box] == _STEP:
            return LETTERS[_STEP]
        head = int(self._heads[box])
        parts = range(head, head + int(self._parts.parts[head]))
        return "&".join(f"{LETTERS[int(self._classes[part])]}{self._parts.name_unit(part)}" for part in parts)

    def _choose_tone(self, label: int, chunk: int) -> Tone:
        return shade(CLASS_TONES[label], chunk, self.chunks) if label < _TOGETHER else CLASS_TONES[label]
