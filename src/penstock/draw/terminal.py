"""A grid of steps and ranks for the terminal: coloured by kind, in blocks of ranks that fit the width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from penstock.draw.palette import BASIC_INK, TONES, Tone

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.grid import Grid

Piece = tuple[str, Tone | None]
"""A text and how it is drawn."""
Line = Sequence[Piece]
GAP = "  "


def grid_lines(grid: Grid, *, width: int | None = None, ranks: Sequence[int] | None = None) -> Iterator[Line]:
    """A row a step and a column a rank; ranks that do not fit into `width` follow below in blocks of their own.

    `ranks` are the numbers of the grid's columns, if they are not all ranks from 0 on.
    """
    label = len(str(max(grid.steps - 1, 0)))
    columns = [_column(grid, at, rank) for at, rank in enumerate(range(len(grid.columns)) if ranks is None else ranks)]
    widths = [max(len(text) for text, _ in column) for column in columns]
    size = len(columns) if width is None else max(1, (width - label) // (len(GAP) + max(widths)))
    for first in range(0, len(columns), size):
        if first:
            yield []
        yield from _block(columns[first : first + size], widths[first : first + size], label)


def legend_lines(grid: Grid, *, width: int | None = None) -> Iterator[Line]:
    """What the kinds that occur in the grid mean, in as many lines as `width` asks for."""
    kinds = {cell.kind for column in grid.columns for cell in column if cell is not None}
    line: list[Piece] = []
    for tone in dict.fromkeys(tone for kind, tone in TONES.items() if kind in kinds):
        entry: list[Piece] = [(tone.sample, tone), (f" {tone.means}", None)]
        if line and width is not None and _length(line) + len(GAP) + _length(entry) > width:
            yield line
            line = []
        line += [(GAP, None), *entry] if line else entry
    if line:
        yield line


def plain(lines: Iterable[Line]) -> Iterator[str]:
    """The lines without colour."""
    for line in lines:
        yield "".join(text for text, _ in line).rstrip()


def painted(lines: Iterable[Line], colours: str) -> Iterator[str]:
    """The lines with the escape codes of a terminal that has `truecolor`, `256` or the `standard` 16 colours, as Rich calls them."""
    from rich.color import ColorSystem
    from rich.style import Style

    few = colours == "standard"
    system = ColorSystem.STANDARD if few else ColorSystem.EIGHT_BIT if colours == "256" else ColorSystem.TRUECOLOR

    @cache
    def style(tone: Tone) -> Style:
        return Style(color=BASIC_INK[tone.basic], bgcolor=tone.basic) if few else Style(color=tone.ink, bgcolor=tone.fill)

    for line in lines:
        yield "".join(style(tone).render(text, color_system=system) if tone else text for text, tone in line)


def _column(grid: Grid, at: int, rank: int) -> list[Piece]:
    """The header and every step's cell."""
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


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)
