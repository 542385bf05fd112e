"""The formulas of the schedules' docstrings as numbers, for the pages to stand beside what the simulator measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from maker.figures import Times
from penstock.schedules.registry import algorithm

EQUAL = Times()
Idle = Callable[[int, int, int, Times], float]
Peak = Callable[[int, int, int], float]
Messages = Callable[[int, int, int], int]


@dataclass(frozen=True)
class Formula:
    """p ranks, m microbatches, v chunks, the default number of slices; the figures of the fullest rank, in a rank's share of the model."""

    idle: Idle | None
    peak: Peak | None
    times: Times = EQUAL
    """Where the formula holds."""
    of_span: bool = False
    """Whether idle time is counted from a rank's first action to its last."""
    at_most: bool = False
    """Whether the formula of the idle time is a limit."""


def _fill_and_drain(p: int, m: int, v: int, t: Times) -> float:
    return (p - 1) * t.all / v


def _zero_bubble(p: int, m: int, v: int, t: Times) -> float:
    return (p - 1) * (t.f + t.i - t.w) / v


def _dualpipe_v(p: int, m: int, v: int, t: Times) -> float:
    return (p - 1) * (t.all + t.b - 3 * t.w) / 2


def _v_half(p: int, m: int, v: int, t: Times) -> float:
    return (3 * p - (4 if p % 2 else 7)) * t.f / 2


def _v_min(p: int, m: int, v: int, t: Times) -> float:
    return (4 * p - (5 if p % 3 == 1 else 7)) * t.f / 2


def _grouped(p: int, m: int, v: int, t: Times) -> float:
    return ((p - 1) * (t.f + t.i) + (v - 1) * (p - _half(p)) * t.f) / v


def _slices(name: str) -> int:
    """The number of slices that the formulas and figures are for."""
    return algorithm(name).slices or 1


def _half(p: int) -> int:
    return -(-p // 2)


FORMULAS = {
    "1f1b": Formula(_fill_and_drain, lambda p, m, v: min(p, m)),
    "1f1b-v": Formula(lambda p, m, v, t: (p - 1) * t.all, lambda p, m, v: 2 * p // 3 + 1, at_most=True),
    "chimera": Formula(lambda p, m, v, t: p - 2, lambda p, m, v: p, Times(1.0, 0.5, 0.5)),
    "data-parallel": Formula(lambda p, m, v, t: 0, lambda p, m, v: 1),
    "dualpipe": Formula(lambda p, m, v, t: (p / 2 - 1) * (t.all + t.b - 3 * t.w), lambda p, m, v: p + 1),
    "dualpipe-v": Formula(_dualpipe_v, lambda p, m, v: (2 * p + 1) / 2),
    "eager-1f1b": Formula(_fill_and_drain, lambda p, m, v: min(2 * p - 1, m)),
    "gpipe": Formula(_fill_and_drain, lambda p, m, v: m),
    "grouped-interleaved": Formula(_grouped, lambda p, m, v: (_half(p) * (v - 1) + p) / v),
    "hanayo": Formula(lambda p, m, v, t: 2 / 3 * (p - 1) * t.all, lambda p, m, v: p),
    "inference": Formula(lambda p, m, v, t: (p - 1) * t.f, None),
    "interleaved-1f1b": Formula(_fill_and_drain, lambda p, m, v: (p * v + p - 1) / v),
    "interleaved-zb": Formula(_zero_bubble, lambda p, m, v: p),
    "looped-bfs": Formula(_fill_and_drain, lambda p, m, v: m),
    "seq-zb-h1": Formula(
        lambda p, m, v, t: _zero_bubble(p, m, v, t) / _slices("seq-zb-h1"),
        lambda p, m, v: min((p - 1 + _slices("seq-zb-h1")) / _slices("seq-zb-h1"), m),
    ),
    "seq1f1b": Formula(
        lambda p, m, v, t: _fill_and_drain(p, m, v, t) / _slices("seq1f1b"),
        lambda p, m, v: min((p - 1 + _slices("seq1f1b")) / _slices("seq1f1b"), m),
    ),
    "slimpipe": Formula(
        lambda p, m, v, t: _fill_and_drain(p, m, v, t) / _slices("slimpipe"),
        lambda p, m, v: min(1 + 2 * (p - 1) / (_slices("slimpipe") * v), m),
    ),
    "v-half": Formula(_v_half, lambda p, m, v: (p + 2) // 2),
    "v-min": Formula(_v_min, lambda p, m, v: (p + 4) // 3),
    "zb-auto": Formula(_zero_bubble, lambda p, m, v: p, at_most=True),
    "zb-h1": Formula(_zero_bubble, lambda p, m, v: min(p, m)),
    "zb-h2": Formula(lambda p, m, v, t: (p - 1) * (t.f + t.i - 2 * t.w), lambda p, m, v: min(2 * p - 1, m), of_span=True),
    "zbv": Formula(lambda p, m, v, t: (p - 1) * t.f / 2, lambda p, m, v: p),
}

MESSAGES: dict[str, tuple[str, Messages]] = {
    "linear": ("2(p-1)m", lambda p, m, v: 2 * (p - 1) * m),
    "looped": ("2(pv-1)m", lambda p, m, v: 2 * (p * v - 1) * m if p > 1 else 0),
    "v": ("4(p-1)m", lambda p, m, v: 4 * (p - 1) * m),
    "wave": ("4w(p-1)m", lambda p, m, v: 2 * v * (p - 1) * m),
    "bidirectional": ("2(p-1)m", lambda p, m, v: 2 * (p - 1) * m),
}
"""By placement: each microbatch crosses each border between two ranks once forward and once backward."""

FORWARD_ONLY = ("(p-1)m", lambda p, m, v: (p - 1) * m)


def messages_of(name: str, placement: str) -> tuple[str, Messages]:
    """How many messages a step has, in letters and as a function."""
    if name == "data-parallel":
        return "0", lambda p, m, v: 0
    text, count = FORWARD_ONLY if name == "inference" else MESSAGES[placement]
    slices = _slices(name)
    return (text, count) if slices == 1 else (f"{text}q", lambda p, m, v: slices * count(p, m, v))
