"""One colour for each kind of action, the same in every picture, and text in these colours.

The fills are the colours of Okabe and Ito, which colour-blind readers can tell apart, with a grey in place of
their black, a wine red for copies to the host, and a violet, a light green and a brown for a spread vocabulary. Chunks are shades of
them: forward and full backward only become darker, the two halves of a split backward only lighter, because readers
who see two of their hues as one tell them apart by lightness alone.
The ink on each fill is black or white, whichever reads better. `web/src/draw/colours.ts` has the same colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from penstock.ir.kind import Kind


@dataclass(frozen=True, slots=True)
class Tone:
    """How one family of kinds is drawn: its `sample` in a legend, what it `means`, its two colours,
    `basic`, the nearest of a terminal's 16 colours that no other tone has taken, and the `shades` of the first and the last chunk:
    the share of white in each, or of black if it is negative."""

    sample: str
    means: str
    fill: str
    ink: str
    basic: str
    shades: tuple[float, float] = (-0.2, 0.3)


_DARKER, _LIGHTER = (-0.45, 0.0), (0.0, 0.5)
FORWARD = Tone("F", "forward", "#0072b2", "#ffffff", "blue", _DARKER)
BACKWARD = Tone("B", "full backward", "#d55e00", "#000000", "red", _DARKER)
INPUT = Tone("I", "backward for the input", "#e69f00", "#000000", "yellow", _LIGHTER)
WEIGHT = Tone("W", "backward for the weights", "#009e73", "#000000", "green", _LIGHTER)
OVERLAP = Tone("&", "run together", "#cc79a7", "#000000", "magenta")
SEND = Tone("SEND", "send, and wait for a send", "#56b4e9", "#000000", "cyan")
RECEIVE = Tone("RECV", "receive", "#bbbbbb", "#000000", "white")
SHARDING = Tone("SHARD/REDUCE", "parameters gathered or freed, gradients reduced", "#f0e442", "#000000", "bright_black")
HOST = Tone("OFFLOAD/RELOAD", "activations moved to host memory and back", "#882255", "#ffffff", "bright_magenta")
SHARE = Tone("S", "share of the vocabulary: logits or embeddings", "#8844ee", "#ffffff", "bright_blue")
SHARE_GRADIENT = Tone("T", "weight gradients of the share", "#bbffaa", "#000000", "bright_green")
MEETING = Tone("BROADCAST/COMBINE", "collectives of all ranks", "#663311", "#ffffff", "bright_yellow")
OPTIMIZER = Tone("step", "optimizer's step", "#444444", "#ffffff", "black")

TONES = {
    Kind.F: FORWARD,
    Kind.B: BACKWARD,
    Kind.I: INPUT,
    Kind.W: WEIGHT,
    Kind.OVERLAP_F_B: OVERLAP,
    Kind.SEND_F: SEND,
    Kind.SEND_B: SEND,
    Kind.RECV_F: RECEIVE,
    Kind.RECV_B: RECEIVE,
    Kind.UNSHARD: SHARDING,
    Kind.RESHARD: SHARDING,
    Kind.REDUCE_GRAD: SHARDING,
    Kind.WAIT_SEND_F: SEND,
    Kind.WAIT_SEND_B: SEND,
    Kind.WAIT_REDUCE_GRAD: SHARDING,
    Kind.OFFLOAD: HOST,
    Kind.RELOAD: HOST,
    Kind.S: SHARE,
    Kind.T: SHARE_GRADIENT,
    Kind.BROADCAST: MEETING,
    Kind.COMBINE: MEETING,
}
BASIC_INK = {tone.basic: tone.ink for tone in (*TONES.values(), OPTIMIZER)}
"""The ink on each basic colour, which a shade does not change."""


def shade(tone: Tone, chunk: int, chunks: int) -> Tone:
    """Give the tone of one of a rank's chunks: the first is the darkest, the last the lightest."""
    first, last = tone.shades
    return tone if chunks < 2 else lighten(tone, first + (last - first) * chunk / (chunks - 1))


def lighten(tone: Tone, white: float) -> Tone:
    """Mix a share of white into the tone, or of black if the share is negative."""
    if not white:
        return tone
    share, other = abs(white), 255 if white > 0 else 0
    fill = "#" + bytes(round(c * (1 - share) + other * share) for c in rgb(tone.fill)).hex()
    return replace(tone, fill=fill, ink=ink_on(fill))


def ink_on(fill: str) -> str:
    """Choose black or white, whichever reads better on the fill: they are even at a luminance of 0.179."""
    return "#000000" if _luminance(fill) > 0.179 else "#ffffff"


def _luminance(colour: str) -> float:
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (c / 255 for c in rgb(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def rgb(colour: str) -> bytes:
    """Read `#rrggbb` as three bytes."""
    return bytes.fromhex(colour.removeprefix("#"))


# Lines of coloured text, and how a terminal gets them -----------------------------------------------------------------

Piece = tuple[str, Tone | None]
"""A text and the tone it is drawn in, if any."""
Line = Sequence[Piece] | str
"""A line in pieces, or as text without colour."""
GAP = "  "


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
        yield (line if isinstance(line, str) else "".join(text for text, _ in line)).rstrip()


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
        yield (
            line
            if isinstance(line, str)
            else "".join(style(tone).render(text, color_system=system) if tone else text for text, tone in line)
        )


def _length(line: Sequence[Piece]) -> int:
    return sum(len(text) for text, _ in line)
