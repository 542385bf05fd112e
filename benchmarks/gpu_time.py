"""Timing of work on a device or without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline, launch


def wait() -> None:
    """Until the device has done all that it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], rounds: int, warmup: int = 3) -> float:
    """The median of several runs, each from an idle device until it is idle again."""
    for _ in range(warmup):
        work()
    found = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def cleared(modules: Sequence[nn.Module], work: Callable[[], Any]) -> Callable[[], None]:
    """The work, after which no gradients are left."""

    def run() -> None:
        work()
        for module in modules:
            module.zero_grad()

    return run


def step_seconds(schedule: ps.Schedule, modules: list[nn.Module], x: Any, loss_fn: Any, rounds: int, **options: Any) -> float:
    """A step on virtual ranks, from an idle device until it is idle again."""

    def train() -> float:
        pipe = Pipeline(modules, schedule, loss_fn=loss_fn, **options)
        found = []
        for number in range(rounds + 2):
            pipe.gather("begin", None)
            wait()
            start = time.perf_counter()
            pipe.step(x, target=x)
            wait()
            pipe.gather("end", None)
            if number >= 2:
                found.append(time.perf_counter() - start)
            for parameter in pipe.parameters():
                parameter.grad = None
        return statistics.median(found)

    return max(launch(train, schedule.ranks))
