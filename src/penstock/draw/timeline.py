"""A timeline for the terminal: a row a rank, then what each rank holds, then the figures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import Boxes, compute_boxes, optimizer_boxes
from penstock.draw.numbers import count, number
from penstock.draw.palette import OPTIMIZER, OVERLAP, TONES, Tone, shaded
from penstock.draw.slices import main_class, most_held, shares
from penstock.draw.summary import shape_of, summary, title_of
from penstock.ir.kind import Kind

if TYPE_CHECKING:
    from penstock.draw.terminal import Line, Piece
    from penstock.ir.rows import Ints
    from penstock.simulator.timeline import Timeline

WIDTH = 100
"""Columns where no width is asked for."""
LEAST = 20
"""Columns that the time gets however narrow the terminal."""
MOST_RANKS = 64
"""Rows; of more ranks only some are shown."""
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"
IDLE = "."

# The classes of a cell: F, B, I, W, several together, the optimizer's step.
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_TOGETHER, _STEP = 4, 5
_LETTERS = "FBIW&S"
_TONES = (*(TONES[kind] for kind in _KINDS), OVERLAP, OPTIMIZER)


def timeline_lines(timeline: Timeline, *, width: int | None = None, bars: str = BARS) -> Iterator[Line]:
    """The whole picture: rows, memory, legend and figures, at most `width` columns wide."""
    shown = _shown(timeline.ranks)
    label = max(len(f"rank {shown[-1]}"), len("memory"))
    peaks = [number(timeline.peak_memory[rank]) for rank in shown]
    columns = max((WIDTH if width is None else width) - label - 2 - max(map(len, peaks)) - 1, LEAST)
    yield [(f"{title_of(timeline)}: {', '.join(shape_of(timeline))}", None)]
    yield _scale(timeline, label, columns)
    for rank, row in zip(shown, _rows(timeline, shown, columns), strict=True):
        yield [(f"rank {rank}".ljust(label + 2), None), *row]
    yield []
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    yield [("memory".ljust(label + 2), None), ("and its peak".rjust(columns + 1 + max(map(len, peaks))), None)]
    for rank, peak in zip(shown, peaks, strict=True):
        line = _bars(most_held(timeline.memory(rank), edges), max(timeline.peak_memory), bars)
        yield [(f"rank {rank}".ljust(label + 2) + line + " " + peak.rjust(max(map(len, peaks))), None)]
    yield []
    yield from _notes(timeline, shown, width)
    yield from summary_lines(timeline)


def summary_lines(timeline: Timeline, unit: str | None = None) -> Iterator[Line]:
    """The table of figures."""
    rows = summary(timeline, unit)
    widest = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield [(f"{name.ljust(widest)}  {text}", None)]


def _shown(ranks: int) -> range:
    return range(0, ranks, -(-ranks // MOST_RANKS))


def _scale(timeline: Timeline, label: int, columns: int) -> Line:
    end = number(timeline.makespan)
    return [("time".ljust(label + 2) + "0" + end.rjust(columns - 1), None)]


def _notes(timeline: Timeline, shown: range, width: int | None) -> Iterator[Line]:
    """What the letters mean, and which ranks are left out."""
    boxes = compute_boxes(timeline)
    used = set(_classes(boxes).tolist()) | ({_STEP} if timeline.optimizer.any() else set())
    line: list[Piece] = [(f"{IDLE} idle", None)]
    length = len(line[0][0])
    for each in sorted(used):
        entry: list[Piece] = [(_LETTERS[each], _TONES[each]), (f" {_TONES[each].means}", None)]
        size = sum(len(text) for text, _ in entry)
        if width is not None and length + 2 + size > width:
            yield line
            line, length = entry, size
        else:
            line, length = [*line, ("  ", None), *entry], length + 2 + size
    yield line
    if shown.step > 1:
        yield [(f"of {count(timeline.ranks, 'rank')} one in {shown.step} is shown", None)]
    yield []


def _classes(boxes: Boxes) -> Ints:
    """The class of each box; the kinds of computation are numbered from 0."""
    return np.where(boxes.parts > 1, _TOGETHER, boxes.kind)


def _rows(timeline: Timeline, shown: range, columns: int) -> Iterator[list[Piece]]:
    """Each shown rank's row: names of actions where all of them fit, else a letter a cell."""
    boxes = compute_boxes(timeline)
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    cells = _cells(timeline, boxes, edges)
    tones = _Tones(timeline)
    named = _Named.fit(boxes, timeline, columns)
    for rank in shown:
        yield named.row(rank, tones) if named is not None else _letters(cells[rank], tones)


def _cells(timeline: Timeline, boxes: Boxes, edges: NDArray[np.float64]) -> Ints:
    """For each rank and cell the class and chunk that runs the longest, as class x chunks + chunk; -1 for idle."""
    chunks = timeline.table.chunks
    first = boxes.part == 0
    rank, start, end = optimizer_boxes(timeline)
    together = boxes.parts[first] > 1
    classes = _classes(boxes)[first] * chunks + np.where(together, 0, boxes.chunk[first])
    found = shares(
        np.concatenate((boxes.rank[first], rank)),
        np.concatenate((classes, np.full(len(rank), _STEP * chunks))),
        np.concatenate((boxes.start[first], start)),
        np.concatenate((boxes.end[first], end)),
        edges,
        shape=(timeline.ranks, len(_LETTERS) * chunks),
    )
    return main_class(found, edges)


class _Tones:
    """The tone of each class and chunk."""

    def __init__(self, timeline: Timeline) -> None:
        self.chunks = timeline.table.chunks
        self._made = [
            shaded(tone, chunk, self.chunks) if at < _TOGETHER else tone for at, tone in enumerate(_TONES) for chunk in range(self.chunks)
        ]

    def of(self, cell: int) -> Tone | None:
        return None if cell < 0 else self._made[cell]


def _letters(cells: Ints, tones: _Tones) -> list[Piece]:
    """A letter a cell, equal neighbours in one piece."""
    row: list[Piece] = []
    for cell, run in groupby(cells.tolist()):
        letter = IDLE if cell < 0 else _LETTERS[cell // tones.chunks]
        row.append((letter * len(list(run)), tones.of(cell)))
    return row


class _Named:
    """Boxes that are wide enough to hold their names: `F0`, `B12`, `F3&B1`."""

    def __init__(self, boxes: Boxes, first: Ints, last: Ints, columns: int) -> None:
        self.boxes, self.first, self.last, self.columns = boxes, first, last, columns
        self.bounds = np.searchsorted(boxes.rank, np.arange(int(boxes.rank.max(initial=0)) + 2))

    @classmethod
    def fit(cls, boxes: Boxes, timeline: Timeline, columns: int) -> _Named | None:
        """The boxes with their cells, or None where a name does not fit."""
        if timeline.optimizer.any() or not len(boxes) or not timeline.makespan:
            return None
        scale = columns / timeline.makespan
        first = np.round(boxes.start * scale).astype(np.int64)
        last = np.round(boxes.end * scale).astype(np.int64)
        digits = np.floor(np.log10(np.maximum(boxes.microbatch, 1))).astype(np.int64) + 1
        group = np.cumsum(boxes.part == 0) - 1
        needed = np.bincount(group, weights=digits + 2) - 1  # a letter each, and a joint between them
        return cls(boxes, first, last, columns) if (last - first >= needed[group]).all() else None

    def row(self, rank: int, tones: _Tones) -> list[Piece]:
        boxes, row, at = self.boxes, list[Piece](), 0
        low, high = (int(bound) for bound in self.bounds[rank : rank + 2])
        for box in range(low, high):
            first, last = int(self.first[box]), int(self.last[box])
            if boxes.part[box]:
                continue
            parts = range(box, box + int(boxes.parts[box]))
            name = "&".join(f"{_LETTERS[int(boxes.kind[part])]}{boxes.microbatch[part]}" for part in parts)
            cell = _TOGETHER * tones.chunks if len(parts) > 1 else int(boxes.kind[box]) * tones.chunks + int(boxes.chunk[box])
            row += [(IDLE * (first - at), None)] if first > at else []
            row.append((name.ljust(last - first), tones.of(cell)))
            at = last
        return [*row, (IDLE * (self.columns - at), None)]


def _bars(held: NDArray[np.float64], most: float, bars: str) -> str:
    """A bar a slice, the highest the most that any rank holds; nothing held is blank."""
    levels = np.ceil(held / (most or 1.0) * len(bars) - 1e-9).astype(np.int64).clip(0, len(bars))
    return "".join(f" {bars}"[level] for level in levels.tolist())
