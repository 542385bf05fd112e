"""A training file's model measured where it will run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from penstock.planner.profile import Profile
from penstock.runtime.here import current
from penstock.runtime.profile import profile
from penstock.runtime.trainer import How, Load, Moment

_ROUNDS = 15
_LARGE = 1 << 20
"""Bytes of the message that tells the bandwidth."""
_DEADLINE = 3600.0


def measured(load: Load, how: How, sizes: Sequence[int], tell: Callable[[Moment], None]) -> Profile | None:
    """The model's profile by the first rank, while the others keep quiet, and the link from it to the second."""
    group, rank = current()
    found = _profile(load, how, sizes, tell) if rank == 0 else None
    group.gather(rank, "profile", None, _DEADLINE)
    if how.device != "cpu" or group.ranks == 1 or rank > 1:
        return found
    latency, bandwidth = _link(rank)
    return None if found is None else replace(found, latency=latency, bandwidth=bandwidth)


def _profile(load: Load, how: How, sizes: Sequence[int], tell: Callable[[Moment], None]) -> Profile:
    script = load()
    model = script.model(how.seed)
    keywords: dict[str, Any] = {"split": script.split, "microbatch_sizes": sizes, "optimizer": script.optimizer, "device": how.place()}

    def say(what: str, at: int, of: int) -> None:
        tell(Moment(what))

    return profile(model.module, model.sample, loss_fn=model.loss_fn, target=model.target, progress=say, **keywords)


def _link(rank: int) -> tuple[float, float | None]:
    """Seconds that a message between the first two ranks takes at least, and how many bytes go over in a second."""
    small, large = (_one_way(rank, size) for size in (64, _LARGE))
    return small, _LARGE / (large - small) if large > small else None


def _one_way(rank: int, size: int) -> float:
    """Half of what there and back takes."""
    message, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for sender in (0, 1):
            if sender == rank:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) / 2
