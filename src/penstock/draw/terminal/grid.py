"""A grid of steps and ranks for the terminal: coloured by kind, in blocks of ranks that fit the width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.draw.palette import TONES
from penstock.draw.terminal.lines import GAP, Line, Piece, legend_lines

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.grid import Grid


def grid_lines(grid: Grid, *, width: int | None = None, ranks: Sequence[int] | None = None) -> Iterator[Line]:
    """Draw one row per step and one column per rank; ranks that do not fit into `width` follow below in further blocks.

    `ranks` numbers the columns of the grid if they are not all ranks from 0 on.
    """
    label = len(str(max(grid.steps - 1, 0)))
    columns = [_column(grid, at, rank) for at, rank in enumerate(range(len(grid.columns)) if ranks is None else ranks)]
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


def _column(grid: Grid, at: int, rank: int) -> list[Piece]:
    """The header and the cell of every step."""
    return [(f"rank {rank}", None), *(_piece(grid.cell(at, step)) for step in range(grid.steps))]


def _piece(action: Action | None) -> Piece:
    """One cell; overlapped actions are joined by `&`, which is a third of the length of their text form."""
    return ("", None) if action is None else ("&".join(map(str, action.parts)), TONES[action.kind])


def _block(columns: list[list[Piece]], widths: list[int], label: int) -> Iterator[Line]:
    for number, row in enumerate(zip(*columns, strict=True)):
        line: list[Piece] = [((str(number - 1) if number else "").rjust(label), None)]
        for (text, tone), width in zip(row, widths, strict=True):
            line += [(GAP, None), (text.ljust(width), tone)]
        yield line
