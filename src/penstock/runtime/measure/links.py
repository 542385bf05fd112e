"""How long messages take between processes of torch.distributed, one pair at a time and several at once."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.device.gpu import finish_work

_SMALL, _LARGE = 64, 1 << 22
"""Bytes of the messages that give the latency and the bandwidth."""
_ROUNDS, _LARGE_ROUNDS = 15, 5


def make_messages(device: str) -> tuple[Tensor, Tensor]:
    """A small and a large message."""
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (_SMALL, _LARGE))
    return small, large


class Link(NamedTuple):
    """One direction between two processes."""

    latency: float
    """Seconds of a small message."""
    bandwidth: float | None
    """Bytes per second, if a large message takes longer than a small one."""


def measure_link(peer: int, *, first: bool, device: str = "cpu") -> Link:
    """The link from this process to another; both call it together, one of them as the first.

    A small message goes there and back: half of that is the latency, in both directions. A large one is answered by a small one, which
    gives the bandwidth of its direction. The least time of several counts, because disturbances only add to it.
    """
    small, large = make_messages(device)
    latency = min(_exchange(peer, small, small, first=first) for _ in range(_ROUNDS)) / 2
    times = {}
    for own in (first, not first):  # the direction of the first process, then the other
        out, back = (large, small) if own else (small, large)
        times[own] = min(_exchange(peer, out, back, first=own) for _ in range(_LARGE_ROUNDS))
    extra = times[True] - 2 * latency
    return Link(latency, _LARGE / extra if extra > 0 else None)


def time_large_messages(peer: int, *, sends: bool, device: str = "cpu") -> float:
    """The median seconds of large messages to another process, each answered by a small one; the receiver calls it too, and gets 0."""
    small, large = make_messages(device)
    out, back = (large, small) if sends else (small, large)
    times = [_exchange(peer, out, back, first=sends) for _ in range(_LARGE_ROUNDS)]
    return statistics.median(times) if sends else 0.0


def count_seconds(link: Link) -> float:
    """What `time_large_messages` takes on a link that nobody else uses."""
    return 2 * link.latency + (0.0 if link.bandwidth is None else _LARGE / link.bandwidth)


def _exchange(peer: int, out: Tensor, back: Tensor, *, first: bool) -> float:
    """Seconds of a message there and one back, the first process's there."""
    start = time.perf_counter()
    if first:
        dist.send(out, peer)
        dist.recv(back, peer)
    else:
        dist.recv(back, peer)
        dist.send(out, peer)
    finish_work()
    return time.perf_counter() - start
