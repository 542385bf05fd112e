"""Lines of text with colours, and how a terminal gets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from penstock.draw.palette import BASIC_INK, Tone

Piece = tuple[str, Tone | None]
"""A text and the tone it is drawn in, if any."""
Line = Sequence[Piece]
GAP = "  "


def text_lines(texts: Iterable[str]) -> Iterator[Line]:
    """Give lines without colour."""
    return ([(text, None)] for text in texts)


def legend_lines(tones: Iterable[tuple[str, Tone]], *, width: int | None = None, first: str = "") -> Iterator[Line]:
    """Say what samples of tones mean, in as many lines as `width` needs; `first` comes before them."""
    line: list[Piece] = [(first, None)] if first else []
    for sample, tone in tones:
        entry: list[Piece] = [(sample, tone), (f" {tone.means}", None)]
        if line and width is not None and _length(line) + len(GAP) + _length(entry) > width:
            yield line
            line = []
        line += [(GAP, None), *entry] if line else entry
    if line:
        yield line


def plain_text(lines: Iterable[Line]) -> Iterator[str]:
    """Give the lines without colour."""
    for line in lines:
        yield "".join(text for text, _ in line).rstrip()


def paint(lines: Iterable[Line], colours: str) -> Iterator[str]:
    """Give the lines with the escape codes of a terminal with `truecolor`, `256` or the `standard` 16 colours, as Rich calls them."""
    from rich.color import ColorSystem
    from rich.style import Style

    few = colours == "standard"
    system = ColorSystem.STANDARD if few else ColorSystem.EIGHT_BIT if colours == "256" else ColorSystem.TRUECOLOR

    @cache
    def style(tone: Tone) -> Style:
        return Style(color=BASIC_INK[tone.basic], bgcolor=tone.basic) if few else Style(color=tone.ink, bgcolor=tone.fill)

    for line in lines:
        yield "".join(style(tone).render(text, color_system=system) if tone else text for text, tone in line)


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)
