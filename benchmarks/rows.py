"""What a benchmark finds: rows, each a ratio with its spread, and the cases that give them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT = "its limit"
"""What a row is held against that has no peer."""


@dataclass(frozen=True)
class Row:
    """One measurement: our values and those of what it is compared with, one a round, and the ratio that is allowed at most.

    Rounds are compared one by one if both have as many, so that a slow moment of the machine is one for both; else each
    of ours is compared with the median of the other's.
    """

    case: str
    ours: Sequence[float]
    peer: Sequence[float]
    against: str = "torch"
    limit: float | None = None
    unit: str = "s"
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours over the other, a round each."""
        if len(self.ours) == len(self.peer):
            return [ours / peer for ours, peer in zip(self.ours, self.peer, strict=True)]
        middle = statistics.median(self.peer)
        return [ours / middle for ours in self.ours]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles, or the ends if there are fewer than four rounds."""
        found = sorted(self.ratios)
        if len(found) < 4:
            return found[0], found[-1]
        low, _, high = statistics.quantiles(found, n=4, method="inclusive")
        return low, high

    @property
    def met(self) -> bool | None:
        """Whether it keeps its limit, if it has one."""
        return None if self.limit is None else self.ratio <= self.limit

    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        low, high = self.spread
        return {
            "case": self.case,
            "against": self.against,
            "ratio": self.ratio,
            "spread": [low, high],
            "rounds": len(self.ratios),
            "limit": self.limit,
            "met": self.met,
            "unit": self.unit,
            "ours": statistics.median(self.ours),
            "peer": statistics.median(self.peer),
            "note": self.note,
        }


def within(case: str, value: float | Sequence[float], most: float, unit: str = "s", note: str = "") -> Row:
    """A row without a peer, held against the most that is allowed."""
    values = [value] if isinstance(value, float) else value
    return Row(case, values, [most], against=LIMIT, limit=1.0, unit=unit, note=note)


@dataclass(frozen=True)
class Case:
    """A piece of a suite, done at once: its name and what gives its rows."""

    name: str
    work: Callable[[], Iterable[Row]]


@dataclass
class Found:
    """What a suite has given: its rows, what failed, and what was left out."""

    name: str
    about: str
    rows: list[Row] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    """The case and what it raised."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """The case and the optional package, or the version of torch, that it needs."""
    seconds: float = 0.0

    @property
    def red(self) -> list[Row]:
        return [row for row in self.rows if row.met is False]


def amount(value: float, unit: str) -> str:
    """A value as a reader wants it."""
    if unit != "s":
        return f"{value:.4g} {unit}".strip()
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"
