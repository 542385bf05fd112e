"""The same script over torch's names and ours: one process that holds all stages, against torch's own engine."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.measure import Row, in_turn, steady
from torch import nn
from torch.nn import functional

CASES = {"ScheduleInterleavedZeroBubble": 4, "ScheduleInterleaved1F1B": 4, "ScheduleZBVZeroBubble": 2}
"""Schedules, and how many stages the process holds."""
DEPTH, WIDTH, MICROBATCHES, EACH = 32, 16, 8, 4


def run() -> list[Row]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with steady():
            return [_row(name, stages) for name, stages in CASES.items()]
    finally:
        dist.destroy_process_group()


def _row(name: str, stages: int) -> Row:
    (ours,), (theirs,) = in_turn(
        10, [_step(package, name, stages) for package in ("penstock.compat.torch", "torch.distributed.pipelining")]
    )
    return Row(f"{name}, {stages} stages of {DEPTH} layers, one process: torch's script on our stages", ours, theirs)


def _step(package: str, name: str, count: int) -> Callable[[], Sequence[float]]:
    names: Any = importlib.import_module(package)
    torch.manual_seed(0)
    modules = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))) for _ in range(count)]
    stages = [names.PipelineStage(module, k, count, torch.device("cpu")) for k, module in enumerate(modules)]
    schedule = getattr(names, name)(stages, MICROBATCHES, loss_fn=functional.mse_loss)
    x, y = torch.randn(2, MICROBATCHES * EACH, WIDTH).unbind()

    def work() -> Sequence[float]:
        start = time.thread_time()
        schedule.step(x, target=y)
        seconds = time.thread_time() - start
        for module in modules:
            module.zero_grad()
        return (seconds,)

    return work
