"""Steps on real processes over gloo against torch's own pipelining: same model, same schedule, same processes, in turn.

Run alone: `python benchmarks/run.py runtime`. One thread a rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.measure import Row
from torch import nn
from torch.distributed import pipelining as peer
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline
from penstock.runtime.workers import Workers

PAIRS = {
    "gpipe": peer.ScheduleGPipe,
    "1f1b": peer.Schedule1F1B,
    "interleaved-1f1b": peer.ScheduleInterleaved1F1B,
    "interleaved-zb": peer.ScheduleInterleavedZeroBubble,
    "zbv": peer.ScheduleZBVZeroBubble,
    "dualpipe-v": peer.ScheduleDualPipeV,
}
"""Our names, and torch's classes of the same order."""
SHARES = {"1f1b": 0.9}
"""How much of torch's step time is wanted with tiny compute; 0.6 of others."""
TINY, ROUNDS = 8, 15


def run() -> list[Row]:
    rows = []
    with Workers(2) as workers:
        for count in (8, 32, 128):
            for name in PAIRS:
                rows += _tiny(workers, name, count)
    return rows


def _tiny(workers: Workers, name: str, count: int) -> list[Row]:
    found = workers.run(measure, (name, count, TINY, 1, ROUNDS))
    (ours, cpu), (theirs, peer_cpu) = ([max(column) for column in zip(*each, strict=True)] for each in zip(*found, strict=True))
    actions = len(ps.schedule(name, 2, count)[0])
    case = f"{name}, {count} microbatches, 8x8 linear stages, 2 ranks"
    return [
        Row(f"{case}: a step", ours, theirs, wanted_share=SHARES.get(name, 0.6)),
        Row(f"{case}: CPU an action", cpu / actions, peer_cpu / actions, wanted_share=0.5, note=f"{cpu / actions * 1e6:.0f} us"),
    ]


def measure(name: str, count: int, width: int, depth: int, rounds: int) -> list[tuple[float, float]]:
    """On one rank: seconds a step and of its main thread's processor time, ours and torch's."""
    torch.set_num_threads(1)
    schedule = ps.schedule(name, 2, count)
    x, y = torch.randn(2, count * 2, width).unbind()
    ours, theirs = _stages(schedule.stages, width, depth), _stages(schedule.stages, width, depth)
    pipe = Pipeline(ours, schedule, loss_fn=functional.mse_loss)
    step = torch_step(name, theirs, schedule, count)
    return in_rounds(rounds, [_clear(lambda: pipe.step(x, target=y), ours), _clear(lambda: step(x, y), theirs)])


def torch_step(name: str, modules: list[nn.Module], schedule: ps.Schedule, count: int) -> Callable[[Any, Any], Any]:
    """A step of torch's schedule on this rank."""
    rank, placement = dist.get_rank(), schedule.placement
    mine = [
        peer.PipelineStage(modules[stage], stage, schedule.stages, torch.device("cpu"))
        for stage in range(schedule.stages)
        if placement.rank_of(stage, 0) == rank
    ]
    given: Any = mine if schedule.stages > 2 else mine[0]
    runner = PAIRS[name](given, count, loss_fn=functional.mse_loss)

    def step(x: Any, y: Any) -> Any:
        args = (x,) if mine[0].is_first else ()
        last = any(stage.is_last for stage in mine)
        return runner.step(*args, target=y, losses=[]) if last else runner.step(*args)

    return step


def in_rounds(rounds: int, works: list[Callable[[], Any]]) -> list[tuple[float, float]]:
    """Each work's median seconds, and of this thread's processor time, from rounds that begin together."""
    times: list[list[tuple[float, float]]] = [[] for _ in works]
    for _ in range(rounds + 2):
        for work, found in zip(works, times, strict=True):
            dist.barrier()
            start, cpu = time.perf_counter(), time.thread_time()
            work()
            found.append((time.perf_counter() - start, time.thread_time() - cpu))
    return [(statistics.median(a for a, _ in each[2:]), statistics.median(b for _, b in each[2:])) for each in times]


def _stages(count: int, width: int, depth: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))) for _ in range(count)]


def _clear(step: Callable[[], Any], modules: list[nn.Module]) -> Callable[[], Any]:
    def work() -> None:
        step()
        for module in modules:
            module.zero_grad()

    return work
