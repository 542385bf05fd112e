"""Timing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def once(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    made = work()
    return time.perf_counter() - start, made


def seconds_of(rounds: int, *works: Callable[[], Any]) -> list[list[float]]:
    """Run several works in turn, so that they meet the same moments of the machine; the seconds of each, one a round."""
    times = [[once(work)[0] for work in works] for _ in range(rounds)]
    return [list(column) for column in zip(*times, strict=True)]


def in_turn(rounds: int, works: Sequence[Callable[[], Sequence[float]]]) -> list[list[list[float]]]:
    """Run works that time their own parts in turn; for each work and part its seconds, one a round. The first round is left out."""
    for work in works:
        work()
    results = [[tuple(work()) for work in works] for _ in range(rounds)]
    return [[list(part) for part in zip(*column, strict=True)] for column in zip(*results, strict=True)]


def summed(*parts: Sequence[float]) -> list[float]:
    """Parts added up, round by round."""
    return [sum(each) for each in zip(*parts, strict=True)]


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


@contextmanager
def alone() -> Iterator[None]:
    """This process as a process group of one, and steady."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with steady():
            yield
    finally:
        dist.destroy_process_group()
