"""One GPU as four small ones: virtual ranks on 32 multiprocessors each, measured against what a profile of one predicts."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu_models import blocks, mean_loss
from benchmarks.gpu_time import wait
from torch import Tensor, nn

import penstock as ps
from penstock.ir.kind import Kind
from penstock.planner.partition.stage_costs import stage_costs
from penstock.runtime import Pipeline, launch
from penstock.runtime.batch.result import StepResult
from penstock.runtime.device.streams import create_streams
from penstock.runtime.measure.profile import profile
from penstock.simulator.timeline import Timeline

RANKS, SMS, ROWS = 4, 32, 4
LIMIT = "20GiB"
"""What the planner's choice may hold on a rank: all four share one GPU's memory."""
WANTED = 0.05


def partitions(device: Any, small: bool) -> dict[str, Any]:
    there = torch.cuda.is_available()
    width, tokens, layers, count = (16, 8, 8, 6) if small else (4096, 8192, 8, 20)
    sms = SMS if there else None
    lanes = create_streams(RANKS, sms)
    alone, together = (_product_seconds(lanes[:count], small) for count in (1, RANKS)) if there else (0.0, 0.0)
    x = torch.randn(ROWS * count, tokens // ROWS, width, device=device, dtype=torch.bfloat16)
    model = blocks(layers, width, device)
    found = profile_part(model, x[:ROWS], lanes, small)
    rows = []
    for name, schedule, sizes in _schedules(found, layers, count, small):
        rows.append(_row(name, schedule, sizes, found, get_timeline(measure_step(schedule, model, x, RANKS, sms, split=sizes))))
    layer = found.layers[layers // 2]
    what = (
        f"{RANKS} virtual ranks, each on {SMS} multiprocessors that no other has, {layers} bf16 blocks of {width}, {count} "
        f"microbatches of {tokens} tokens. Predicted from a profile that was measured in one part while the others ran such "
        f"blocks too: F {layer.f * 1e3:.2f}, I {layer.i * 1e3:.2f}, W {layer.w * 1e3:.2f} ms a block. A matrix product of 4096 took "
        f"{alone * 1e3:.2f} ms in one part alone and {together * 1e3:.2f} ms with all parts at it. Times are the device's own. "
        f"Wanted: a step within {WANTED:.0%}."
    )
    return {"what": what, "rows": rows}


def profile_part(model: nn.Sequential, sample: Tensor, lanes: Sequence[Any], small: bool) -> ps.Profile:
    """Of the blocks in the first part, while every other part runs such a block."""
    options: dict[str, Any] = {"loss_fn": mean_loss, "target": sample, "optimizer": None, "warmup": 1, "repeats": 1 if small else 5}
    return leave_out_workspace(profile_beside_others(list(model), sample, lanes, model[0], sample, small, **options))


def leave_out_workspace(measured: ps.Profile) -> ps.Profile:
    """The allocator counts that of all parts."""
    return replace(measured, layers=[replace(layer, workspace=0.0) for layer in measured.layers])


def profile_beside_others(  # noqa: PLR0917
    layers: Sequence[nn.Module], sample: Tensor, lanes: Sequence[Any], block: nn.Module, busy_with: Tensor, small: bool, **options: Any
) -> ps.Profile:
    """Profile layers in one part, while every other part runs a block forward and backward over and over, as in a step."""
    wait()
    over = threading.Event()
    busy = [threading.Thread(target=_work, args=(lane, copy.deepcopy(block), busy_with, over)) for lane in lanes[1:] if lane is not None]
    for thread in busy:
        thread.start()
    time.sleep(0 if small else 1)  # until clocks and temperatures are those of a step
    try:
        with nullcontext() if lanes[0] is None else torch.cuda.stream(lanes[0]):
            return profile(list(layers), sample, **options)
    finally:
        over.set()
        for thread in busy:
            thread.join()
        wait()


def _work(lane: Any, block: nn.Module, sample: Tensor, over: threading.Event) -> None:
    """Keep a lane busy, the host not more than a few rounds ahead."""
    ends: deque[Any] = deque()
    with torch.cuda.stream(lane):
        given = sample.detach().clone().requires_grad_()
        while not over.is_set():
            torch.autograd.backward([block(given)], [sample])
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if len(ends) > 2:
                ends.popleft().synchronize()


def _product_seconds(lanes: Sequence[Any], small: bool, size: int = 4096) -> float:
    """What a matrix product takes in each of the lanes at once."""
    size, times = (256, 3) if small else (size, 10)
    one = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    rooms = [torch.empty_like(one) for _ in lanes]
    for count in (2, times):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            for lane, room in zip(lanes, rooms, strict=True):
                with torch.cuda.stream(lane):
                    torch.mm(one, one, out=room)
        wait()
    return (time.perf_counter() - start) / times


def _schedules(found: ps.Profile, layers: int, count: int, small: bool) -> list[tuple[str, ps.Schedule, list[int]]]:
    made: list[tuple[str, ps.Schedule, list[int]]] = []
    for name in ("1f1b", "zbv"):
        schedule = ps.schedule(name, RANKS, count)
        made.append((name, schedule, [layers // schedule.stages] * schedule.stages))
    plan = ps.plan(found, ranks=RANKS, microbatches=count, memory_limit=LIMIT, seconds=0 if small else 5)
    made.append((f"the planner's choice, {plan.schedule.name or 'its own order'}", plan.schedule, list(plan.partition)))
    return made


def _row(name: str, schedule: ps.Schedule, sizes: list[int], found: ps.Profile, measured: Timeline) -> dict[str, Any]:
    costs = stage_costs(found, sizes, schedule.placement, [False] * schedule.stages)
    predicted = ps.simulate(measured.table, costs)
    off = predicted.makespan / measured.makespan - 1
    return {
        "schedule": name,
        "stages": schedule.stages,
        "step ms measured": measured.makespan * 1e3,
        "predicted": predicted.makespan * 1e3,
        "off by": f"{off:+.1%}",
        "bubble measured": f"{measured.bubble:.1%}",
        "bubble predicted": f"{predicted.bubble:.1%}",
        "measured ms a block": _each(measured, sum(sizes)),
        "good": "yes" if abs(off) <= WANTED else "NO",
    }


def _each(measured: Timeline, layers: int) -> str:
    """What each kind of action took in the step."""
    costs, stages = measured.costs, measured.table.stages
    kinds = ("f", "b") if costs.b is not None else ("f", "i", "w")
    return ", ".join(f"{kind.upper()} {sum(costs.per_stage(kind, stages)) / layers * 1e3:.2f}" for kind in kinds)


def measure_step(plan: Any, model: nn.Sequential, x: Tensor, ranks: int, sms: Any, **options: Any) -> StepResult:
    """Run four steps, and return that of the last three whose time is in the middle.

    The ranks' stages are parts of one model, which is in memory once. The target is the input and the loss `mean_loss`, if `options` do
    not say otherwise. Ranks meet before each step: the host, which makes the last step's timeline on one rank after the other, would
    otherwise begin the next step in between.
    """
    options = {"loss_fn": mean_loss, "record": True, **options}
    target = options.pop("target", x)

    def train() -> list[StepResult]:
        pipe = Pipeline(model, plan, **options)
        results = []
        for _ in range(4):
            pipe.gather("begin", None)
            results.append(pipe.step(x, target=target))
            for parameter in pipe.parameters():
                parameter.grad = None
        return results[1:]

    results = launch(train, ranks, sms=sms)[0]
    return sorted(results, key=lambda result: get_timeline(result).makespan)[1]


def compare_kinds(measured: Timeline, predicted: Timeline) -> str:
    """What the actions of each kind took, over what was predicted for them."""
    ratios = []
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.T):
        rows = measured.table.rows
        own = rows.is_kind(kind)[rows.heads]
        took, expected = ((timeline.end - timeline.start)[own].sum() for timeline in (measured, predicted))
        if expected:
            ratios.append(f"{kind.name} {took / expected:.2f}")
    return ", ".join(ratios)


def get_timeline(result: StepResult) -> Timeline:
    """The timeline of a recorded step."""
    assert result.timeline is not None
    return result.timeline
