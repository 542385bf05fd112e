"""One colour for each kind of action, the same in every picture.

The fills are the colours of Okabe and Ito, which colour-blind readers can tell apart, with a grey in place of
their black. The ink on each fill is black or white, whichever reads better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.ir.kind import Kind


@dataclass(frozen=True, slots=True)
class Tone:
    """How one family of kinds is drawn: its `sample` in a legend, what it `means`, its two colours,
    and `basic`, the nearest of a terminal's 16 colours that no other tone has taken."""

    sample: str
    means: str
    fill: str
    ink: str
    basic: str


FORWARD = Tone("F", "forward", "#0072b2", "#ffffff", "blue")
BACKWARD = Tone("B", "full backward", "#d55e00", "#000000", "red")
INPUT = Tone("I", "backward for the input", "#e69f00", "#000000", "yellow")
WEIGHT = Tone("W", "backward for the weights", "#009e73", "#000000", "green")
OVERLAP = Tone("&", "run together", "#cc79a7", "#000000", "magenta")
SEND = Tone("SEND", "send, and wait for a send", "#56b4e9", "#000000", "cyan")
RECEIVE = Tone("RECV", "receive", "#bbbbbb", "#000000", "white")
SHARDING = Tone("SHARD/REDUCE", "parameters gathered or freed, gradients reduced", "#f0e442", "#000000", "bright_black")
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
}
BASIC_INK = {tone.basic: tone.ink for tone in (*TONES.values(), OPTIMIZER)}
"""The ink on each basic colour, which a shade does not change."""

_DARKEST, _LIGHTEST, _LIGHTEST_OF_MANY = -0.2, 0.3, 0.6


def shade(tone: Tone, chunk: int, chunks: int) -> Tone:
    """Give the tone of one of a rank's chunks: the first is the darkest, the last the lightest."""
    if chunks < 2:
        return tone
    lightest = min(_LIGHTEST + 0.1 * (chunks - 2), _LIGHTEST_OF_MANY)
    return lighten(tone, _DARKEST + (lightest - _DARKEST) * chunk / (chunks - 1))


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
