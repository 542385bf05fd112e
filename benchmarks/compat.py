"""The same script over torch's names and ours: one process that holds all stages, against torch's own engine."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.measure import alone, in_turn
from benchmarks.rows import Case, Row
from torch import nn
from torch.nn import functional

CASES = {"ScheduleInterleavedZeroBubble": 4, "ScheduleInterleaved1F1B": 4, "ScheduleZBVZeroBubble": 2}
"""Schedules, and how many stages the process holds."""
WIDTH, MICROBATCHES, EACH = 16, 8, 4


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    depth, rounds = (2, 2) if short else (32, 10)
    with alone():
        yield [Case(name, lambda name=name, stages=stages: [_row(name, stages, depth, rounds)]) for name, stages in CASES.items()]


def _row(name: str, stages: int, depth: int, rounds: int) -> Row:
    packages = ("penstock.compat.torch", "torch.distributed.pipelining")
    (ours,), (theirs,) = in_turn(rounds, [_step(package, name, stages, depth) for package in packages])
    return Row(f"{name}, {stages} stages of {depth} layers, one process: torch's script on our stages", ours, theirs)


def _step(package: str, name: str, count: int, depth: int) -> Callable[[], Sequence[float]]:
    names: Any = importlib.import_module(package)
    torch.manual_seed(0)
    modules = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth))) for _ in range(count)]
    stages = [names.PipelineStage(module, k, count, torch.device("cpu")) for k, module in enumerate(modules)]
    for stage in stages:  # torch 2.11 connects a stage with its neighbours first, which gloo refuses if all are on one rank
        stage._get_init_p2p_neighbors_ops = list
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
