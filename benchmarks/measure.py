"""Timing, and a table of the results."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One case: our seconds, those of what it is compared with (if there is one), and what is wanted of them.

    Wanted is that the other takes `wanted_ratio` times ours at least, that ours take `wanted_share` of the other at most, or
    `wanted_seconds` at most.
    """

    case: str
    ours: float
    peer: float | None = None
    wanted_ratio: float | None = None
    wanted_seconds: float | None = None
    wanted_share: float | None = None
    note: str = ""

    @property
    def good(self) -> bool:
        fast = self.wanted_seconds is None or self.ours <= self.wanted_seconds
        if not self.peer:
            return fast
        fast = fast and (self.wanted_share is None or self.ours / self.peer <= self.wanted_share)
        return fast and (self.wanted_ratio is None or self.peer >= self.wanted_ratio * self.ours)

    def cells(self) -> list[str]:
        ratio = "" if not self.peer or not self.ours else f"{self.peer / self.ours:.1f}x"
        if self.peer and self.wanted_share is not None:
            ratio = f"{self.ours / self.peer:.3f} of it"
        wanted = "" if self.wanted_ratio is None else f">= {self.wanted_ratio:g}x"
        wanted += "" if self.wanted_seconds is None else f"<= {self.wanted_seconds:g} s"
        wanted += "" if self.wanted_share is None else f"<= {self.wanted_share:g}"
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


def in_turn(rounds: int, works: Sequence[Callable[[], Sequence[float]]]) -> list[list[float]]:
    """Run several works in turn; for each the medians of the seconds that it gives.

    Every round counts in proportion to the first work's time in it, so that a slow moment of the machine is one for all.
    """
    for work in works:
        work()
    results = [[tuple(work()) for work in works] for _ in range(rounds)]
    paces = [sum(times[0]) for times in results]
    usual = statistics.median(paces)
    found = []
    for column in zip(*results, strict=True):
        even = [[part * usual / pace for part in parts] for parts, pace in zip(column, paces, strict=True)]
        found.append([statistics.median(part) for part in zip(*even, strict=True)])
    return found


@contextmanager
def steady() -> Iterator[None]:
    """One thread, and no garbage collector, as `timeit` has it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)
