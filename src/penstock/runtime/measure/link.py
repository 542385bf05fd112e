"""Measure the link between the first two ranks."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

_ROUNDS = 15
_SMALL, _LARGE = 64, 1 << 20
"""Bytes of the messages that give the latency and the bandwidth."""


def measure_link(rank: int) -> tuple[float, float | None]:
    """The latency in seconds and the bandwidth in bytes per second, if it shows; ranks 0 and 1 call it together."""
    small, large = (_time_one_way(rank, size) for size in (_SMALL, _LARGE))
    return small, _LARGE / (large - small) if large > small else None


def _time_one_way(rank: int, size: int) -> float:
    """Half of the median round trip."""
    message, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for sender in (0, 1):
            if sender == rank:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2
