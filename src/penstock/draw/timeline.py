"""A timeline for the terminal: a row a rank, then what each rank holds, then the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.cells import IDLE, Cells
from penstock.draw.numbers import count, number
from penstock.draw.slices import most_held
from penstock.draw.summary import shape_of, summary, title_of

if TYPE_CHECKING:
    from penstock.draw.terminal import Line, Piece
    from penstock.simulator.timeline import Timeline

WIDTH = 100
"""Columns where no width is asked for."""
LEAST = 20
"""Columns that the time gets however narrow the terminal."""
MOST_RANKS = 64
"""Rows; of more ranks only some are shown."""
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"
_GAP = "  "


def timeline_lines(timeline: Timeline, *, width: int | None = None, bars: str = BARS, unit: str | None = None) -> Iterator[Line]:
    """The whole picture: rows, memory, legend and figures, at most `width` columns wide."""
    ranks = range(0, timeline.ranks, -(-timeline.ranks // MOST_RANKS))
    names = [f"rank {rank}" for rank in ranks]
    peaks = [number(timeline.peak_memory[rank]) for rank in ranks]
    left, right = max(map(len, [*names, "memory"])) + len(_GAP), max(map(len, [*peaks, "peak"])) + 1
    cells = Cells(timeline, max((WIDTH if width is None else width) - left - right, LEAST))
    yield [(f"{title_of(timeline)}: {', '.join(shape_of(timeline))}", None)]
    yield [("time".ljust(left) + "0" + f"{number(timeline.makespan)} {unit or ''}".rstrip().rjust(cells.columns - 1), None)]
    yield from ([(name.ljust(left), None), *row] for name, row in zip(names, cells.rows(ranks), strict=True))
    yield []
    yield [("memory".ljust(left) + " " * cells.columns + "peak".rjust(right), None)]
    most = max(timeline.peak_memory)
    for rank, name, peak in zip(ranks, names, peaks, strict=True):
        yield [(name.ljust(left) + sparkline(most_held(timeline.memory(rank), cells.edges), most, bars) + peak.rjust(right), None)]
    yield []
    if ranks.step > 1:
        yield [(f"of {count(timeline.ranks, 'rank')} one in {ranks.step} is shown", None)]
    yield from _legend(cells, width)
    yield []
    yield from summary_lines(timeline, unit)


def summary_lines(timeline: Timeline, unit: str | None = None) -> Iterator[Line]:
    """The table of figures."""
    rows = summary(timeline, unit)
    widest = max(len(name) for name, _ in rows)
    yield from ([(f"{name.ljust(widest)}{_GAP}{text}", None)] for name, text in rows)


def sparkline(held: NDArray[np.float64], most: float, bars: str = BARS) -> str:
    """A bar a slice, the highest for `most`; where nothing is held it is blank.

    >>> sparkline(np.array([0.0, 1.0, 8.0]), most=8.0)
    ' ▁█'
    """
    levels = np.ceil(held / (most or 1.0) * len(bars) - 1e-9).astype(np.int64).clip(0, len(bars))
    return "".join(f" {bars}"[level] for level in levels.tolist())


def _legend(cells: Cells, width: int | None) -> Iterator[Line]:
    """What the letters mean, in as many lines as the width asks for."""
    line: list[Piece] = [(f"{IDLE} idle", None)]
    length = len(line[0][0])
    for letter, tone in cells.tones:
        entry: list[Piece] = [(letter, tone), (f" {tone.means}", None)]
        size = sum(len(text) for text, _ in entry)
        if width is not None and length + len(_GAP) + size > width:
            yield line
            line, length = entry, size
        else:
            line, length = [*line, (_GAP, None), *entry], length + len(_GAP) + size
    yield line
