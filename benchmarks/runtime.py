"""Steps on real processes over gloo against torch's own pipelining: same model, same schedule, same processes, in turn.

Run alone: `python benchmarks/run.py runtime`. One thread per rank.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import by_hand
from benchmarks.rows import Case, Row
from torch import nn
from torch.distributed import pipelining as peer
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline
from penstock.runtime.launch.workers import Workers

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
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):  # torch 2.11's own V-shaped schedules do not run on gloo
    del PAIRS["zbv"], PAIRS["dualpipe-v"]
ROUNDS = 15
TINY = {"width": 8, "depth": 1, "each": 2}
MODERATE = {"width": 512, "depth": 5, "each": 64}
"""Actions of 5 to 20 ms on one core."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    names, counts, rounds = (("1f1b", "interleaved-zb"), (4,), 2) if short else (tuple(PAIRS), (8, 32, 128), ROUNDS)
    moderate = {"width": 32, "depth": 2, "each": 4} if short else MODERATE
    with Workers(2) as workers:
        yield [
            *(Case(f"{name}, {count}, tiny", partial(_tiny, workers, name, count, rounds)) for count in counts for name in names),
            *(Case(f"{name}, moderate", partial(_moderate, workers, name, moderate, min(7, rounds))) for name in names),
            *([Case("8 ranks", _many)] if not short and (os.cpu_count() or 1) >= 16 else []),
        ]


def _tiny(workers: Workers, name: str, count: int, rounds: int) -> list[Row]:
    found = _slowest(workers.run(measure, (name, (2, count), linear_stage, TINY, rounds)))
    case = f"{name}, {count} microbatches, 8x8 linear stages, 2 ranks"
    cpu, peer_cpu = statistics.median(found.cpu), statistics.median(found.peer_cpu)
    actions = len(ps.schedule(name, 2, count)[0])
    added = (cpu - found.bare) / (peer_cpu - found.bare)
    note = f"{cpu / actions * 1e6:.0f} us per action; added to a bare loop: {added:.2f} of what torch adds"
    rows = [
        Row(f"{case}: a step", found.step, found.peer_step, limit=SHARES.get(name, 0.6)),
        Row(f"{case}: CPU of the main thread", found.cpu, found.peer_cpu, limit=0.5, note=note),
    ]
    if found.hand_cpu:
        least = "the modules, backward and gloo's calls alone: not ours, but what there is to reach"
        rows.append(Row(f"{case}: CPU of a loop written by hand", found.hand_cpu, found.peer_cpu, note=least))
    return rows


def _moderate(workers: Workers, name: str, size: dict[str, int], rounds: int) -> list[Row]:
    found = _slowest(workers.run(measure, (name, (2, 8), linear_stage, size, rounds)))
    case = f"{name}, 8 microbatches, stages of {size['depth']} linear maps of {size['width']}, 2 ranks"
    return [Row(f"{case}: a step", found.step, found.peer_step, limit=1.0), _prediction(case, found, 0.10)]


def _prediction(case: str, found: Measured, allowed: float) -> Row:
    """How far apart the two are, whichever is longer."""
    ends = sorted((found.recorded, found.predicted))
    note = f"bubble {found.bubble:.1%} measured, {found.predicted_bubble:.1%} predicted"
    which, against = ("measured", "predicted") if found.recorded >= found.predicted else ("predicted", "measured")
    return Row(f"{case}: {which} step", [ends[1]], [ends[0]], against, limit=1 + allowed, note=note)


def _many() -> Iterator[Row]:
    with Workers(8) as workers:
        for name in (name for name in ("1f1b", "interleaved-1f1b", "zbv") if name in PAIRS):
            found = _slowest(workers.run(measure, (name, (8, 32), block_stage, {"width": 256, "depth": 1, "each": 2, "long": 64}, 5)))
            case = f"{name}, 32 microbatches, small GPT, 8 ranks"
            yield from (Row(f"{case}: a step", found.step, found.peer_step), _prediction(case, found, 0.25))


@dataclass(frozen=True)
class Measured:
    """Seconds on one rank, one per round: a step and its main thread's processor time, ours and torch's; and what was predicted."""

    step: list[float]
    cpu: list[float]
    peer_step: list[float]
    peer_cpu: list[float]
    hand_cpu: list[float]
    """Of a loop that is written for this order, if there is one."""
    bare: float
    recorded: float
    predicted: float
    bubble: float
    predicted_bubble: float


def _slowest(ranks: list[Measured]) -> Measured:
    """The busiest rank, with each round's step from the common start until the last rank is done.

    Torch's step returns on the last rank while the first still has a backward to run; ours returns on all ranks when the result is there.
    So steps on one rank do not compare.
    """
    busiest = max(ranks, key=lambda found: statistics.median(found.cpu))
    step = [max(times) for times in zip(*(found.step for found in ranks), strict=True)]
    peer_step = [max(times) for times in zip(*(found.peer_step for found in ranks), strict=True)]
    return replace(busiest, step=step, peer_step=peer_step)


def measure(name: str, shape: tuple[int, int], stage: Callable[..., nn.Module], size: dict[str, int], rounds: int) -> Measured:
    """On one rank: ours and torch's in turn, then the prediction from costs that were recorded while all ranks were busy."""
    torch.set_num_threads(1)
    ranks, count = shape
    schedule = ps.schedule(name, ranks, count)
    x, y = (torch.randn(count * size["each"], *([size["long"]] if "long" in size else []), size["width"]) for _ in range(2))
    ours, theirs = (_stages(schedule.stages, stage, size) for _ in range(2))
    pipe = Pipeline(ours, schedule, loss_fn=functional.mse_loss)
    peer_step = torch_step(name, theirs, schedule, count)
    works = [_clear(lambda: pipe.step(x, target=y), ours), _clear(lambda: peer_step(x, y), theirs)]
    if name in by_hand.ORDERS and ranks == 2:
        hand = by_hand.step(name, _stages(schedule.stages, stage, size)[dist.get_rank()], count)
        works.append(lambda: hand(x, y))
    (step, cpu), (torchs, torch_cpu), *more = in_rounds(rounds, works)
    hand_cpu = more[0][1] if more else []
    pipe.record = True
    pipe.step(x, target=y)
    timelines = [pipe.step(x, target=y).timeline for _ in range(5)]
    recorded = sorted((each for each in timelines if each is not None), key=lambda each: each.makespan)[2]
    predicted = ps.simulate(recorded.table, recorded.costs)
    bare = _bare(schedule, [ours[k] for k in schedule.placement.stages_of(dist.get_rank())], size, x)
    ends = recorded.makespan, predicted.makespan
    return Measured(step, cpu, torchs, torch_cpu, hand_cpu, bare, *ends, recorded.bubble, predicted.bubble)


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


def in_rounds(rounds: int, works: list[Callable[[], Any]]) -> list[tuple[list[float], list[float]]]:
    """Each work's seconds, and this thread's processor time, one a round; rounds begin together, and the first two are left out."""
    times: list[list[tuple[float, float]]] = [[] for _ in works]
    for _ in range(rounds + 2):
        for work, found in zip(works, times, strict=True):
            dist.barrier()
            start, cpu = time.perf_counter(), time.thread_time()
            work()
            found.append((time.perf_counter() - start, time.thread_time() - cpu))
    return [([a for a, _ in each[2:]], [b for _, b in each[2:]]) for each in times]


def _stages(count: int, stage: Callable[..., nn.Module], size: dict[str, int]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [stage(**size) for _ in range(count)]


def _clear(step: Callable[[], Any], modules: list[nn.Module]) -> Callable[[], Any]:
    def work() -> None:
        step()
        for module in modules:
            module.zero_grad()

    return work
