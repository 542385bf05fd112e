"""One colour for each kind of action, the same in every picture.

The fills are the colours of Okabe and Ito, which stay apart for people who do not see red and green as two colours,
with a grey in place of their black. The ink on each fill is black or white, whichever reads better.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ir.kind import Kind


@dataclass(frozen=True, slots=True)
class Tone:
    """How one family of kinds is drawn: `sample` as it looks in a picture, what it `means`, its two colours,
    and the nearest to its fill that a terminal of 16 colours has and no other tone takes."""

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
SEND = Tone("SEND", "send", "#56b4e9", "#000000", "cyan")
RECEIVE = Tone("RECV", "receive", "#bbbbbb", "#000000", "white")
SHARDING = Tone("SHARD/REDUCE", "parameters gathered or freed, gradients reduced", "#f0e442", "#000000", "bright_black")

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
}
