"""Timing, and a table of the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One case: our seconds, the peer's (if there is one), the ratio that is wanted at least, or the seconds that are wanted at most."""

    case: str
    ours: float
    peer: float | None = None
    wanted_ratio: float | None = None
    wanted_seconds: float | None = None
    note: str = ""

    @property
    def good(self) -> bool:
        fast = self.wanted_seconds is None or self.ours <= self.wanted_seconds
        return fast and (self.wanted_ratio is None or self.peer is None or self.peer / self.ours >= self.wanted_ratio)

    def cells(self) -> list[str]:
        ratio = "" if self.peer is None else f"{self.peer / self.ours:.1f}x"
        wanted = "" if self.wanted_ratio is None else f">= {self.wanted_ratio:g}x"
        wanted += "" if self.wanted_seconds is None else f"<= {self.wanted_seconds:g} s"
        return [self.case, _seconds(self.ours), "" if self.peer is None else _seconds(self.peer), ratio, wanted, self.note]


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def once(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    made = work()
    return time.perf_counter() - start, made


def best_of(times: int, work: Callable[[], T]) -> tuple[float, T]:
    """The least of several runs: the one that other processes disturbed least."""
    results = [once(work) for _ in range(times)]
    return min(seconds for seconds, _ in results), results[-1][1]
