"""Steps on real processes over gloo against torch's own pipelining: same model, same schedule, same processes, in turn.

Run alone: `python benchmarks/run.py runtime`. One thread a rank.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
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
ROUNDS = 15
TINY = {"width": 8, "depth": 1, "each": 2}
MODERATE = {"width": 512, "depth": 5, "each": 64}
"""Actions of 5 to 20 ms on one core."""
TORCH_V = torch.__version__ >= "2.12"
"""torch 2.11's own V-shaped schedules do not run on gloo."""


def run() -> list[Row]:
    rows = []
    with Workers(2) as workers:
        for count in (8, 32, 128):
            for name in PAIRS:
                rows += _tiny(workers, name, count)
        for name in PAIRS:
            rows += _moderate(workers, name)
    return rows + (_many() if (os.cpu_count() or 1) >= 16 else [])


def _tiny(workers: Workers, name: str, count: int) -> list[Row]:
    found = _slowest(workers.run(measure, (name, (2, count), linear_stage, TINY, ROUNDS)))
    actions = len(ps.schedule(name, 2, count)[0])
    case, each = f"{name}, {count} microbatches, 8x8 linear stages, 2 ranks", found.cpu / actions
    added = None if found.peer_cpu is None else (found.cpu - found.bare) / (found.peer_cpu - found.bare)
    share = "" if added is None else f"{each * 1e6:.0f} us; added to a bare loop: {added:.2f} of what torch adds"
    return [
        Row(f"{case}: a step", found.step, found.peer_step, wanted_share=SHARES.get(name, 0.6)),
        Row(f"{case}: CPU an action", each, None if found.peer_cpu is None else found.peer_cpu / actions, wanted_share=0.5, note=share),
    ]


def _moderate(workers: Workers, name: str) -> list[Row]:
    found = _slowest(workers.run(measure, (name, (2, 8), linear_stage, MODERATE, 7)))
    case = f"{name}, 8 microbatches, actions of 5 to 20 ms, 2 ranks"
    return [Row(f"{case}: a step", found.step, found.peer_step, wanted_share=1.0), _prediction(case, found, 0.10)]


def _prediction(case: str, found: Measured, within: float) -> Row:
    ends = sorted((found.recorded, found.predicted))
    note = f"bubble {found.bubble:.1%} measured, {found.predicted_bubble:.1%} predicted"
    which = "measured over predicted" if found.recorded >= found.predicted else "predicted over measured"
    return Row(f"{case}: {which}", ends[1], ends[0], wanted_share=1 + within, note=note)


def _many() -> list[Row]:
    rows = []
    with Workers(8) as workers:
        for name in ("1f1b", "interleaved-1f1b", "zbv"):
            found = _slowest(workers.run(measure, (name, (8, 32), block_stage, {"width": 256, "depth": 1, "each": 2, "long": 64}, 5)))
            case = f"{name}, 32 microbatches, small GPT, 8 ranks"
            rows += [Row(f"{case}: a step", found.step, found.peer_step), _prediction(case, found, 0.25)]
    return rows


@dataclass(frozen=True)
class Measured:
    """Seconds on one rank: a step and its main thread's processor time, ours, torch's and a bare loop's; and what was predicted."""

    step: float
    cpu: float
    peer_step: float | None
    peer_cpu: float | None
    bare: float
    recorded: float
    predicted: float
    bubble: float
    predicted_bubble: float


def _slowest(ranks: list[Measured]) -> Measured:
    """The rank that takes longest is the step."""
    return max(ranks, key=lambda found: (found.cpu, found.step))


def measure(name: str, shape: tuple[int, int], stage: Callable[..., nn.Module], size: dict[str, int], rounds: int) -> Measured:
    """On one rank: ours and torch's in turn, then the prediction from costs that were recorded while all ranks were busy."""
    torch.set_num_threads(1)
    ranks, count = shape
    schedule = ps.schedule(name, ranks, count)
    x, y = (torch.randn(count * size["each"], *([size["long"]] if "long" in size else []), size["width"]) for _ in range(2))
    ours, theirs = (_stages(schedule.stages, stage, size) for _ in range(2))
    pipe = Pipeline(ours, schedule, loss_fn=functional.mse_loss)
    works = [_clear(lambda: pipe.step(x, target=y), ours)]
    if TORCH_V or name not in ("zbv", "dualpipe-v"):
        step = torch_step(name, theirs, schedule, count)
        works.append(_clear(lambda: step(x, y), theirs))
    (step_time, cpu), *peers = in_rounds(rounds, works)
    pipe.record = True
    pipe.step(x, target=y)
    timelines = [pipe.step(x, target=y).timeline for _ in range(5)]
    recorded = sorted((each for each in timelines if each is not None), key=lambda each: each.makespan)[2]
    predicted = ps.simulate(recorded.table, recorded.costs)
    bare = _bare(schedule, [ours[k] for k in schedule.placement.stages_of(dist.get_rank())], size, x)
    peer_step, peer_cpu = peers[0] if peers else (None, None)
    return Measured(step_time, cpu, peer_step, peer_cpu, bare, recorded.makespan, predicted.makespan, recorded.bubble, predicted.bubble)


def _bare(schedule: ps.Schedule, modules: list[nn.Module], size: dict[str, int], x: torch.Tensor) -> float:
    """The processor time of this rank's forwards and full backwards alone."""
    part = x[: size["each"]]
    found = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(schedule.microbatches):
            for module in modules:
                made = module(part.detach().requires_grad_())
                torch.autograd.backward(made, torch.ones_like(made))
        found.append(time.thread_time() - start)
    return statistics.median(found)


def linear_stage(width: int, depth: int, **_: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def block_stage(width: int, depth: int, **_: int) -> nn.Module:
    layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth))
    return nn.Sequential(*layers)


def torch_step(name: str, modules: list[nn.Module], schedule: ps.Schedule, count: int) -> Callable[[Any, Any], Any]:
    """A step of torch's schedule on this rank."""
    rank, placement = dist.get_rank(), schedule.placement
    mine = [
        peer.PipelineStage(modules[stage], stage, schedule.stages, torch.device("cpu"))
        for stage in range(schedule.stages)
        if placement.rank_of(stage, 0) == rank
    ]
    given: Any = mine if schedule.stages > schedule.ranks else mine[0]
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


def _stages(count: int, stage: Callable[..., nn.Module], size: dict[str, int]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [stage(**size) for _ in range(count)]


def _clear(step: Callable[[], Any], modules: list[nn.Module]) -> Callable[[], Any]:
    def work() -> None:
        step()
        for module in modules:
            module.zero_grad()

    return work
