"""One GPU as four small ones: virtual ranks on 32 multiprocessors each, measured against what a profile of one predicts."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from benchmarks.gpu_models import blocks, mean_loss
from benchmarks.gpu_time import wait
from torch import Tensor, nn

import penstock as ps
from penstock.planner.stage_costs import stage_costs
from penstock.runtime import Pipeline, launch
from penstock.runtime.device import lanes as lanes_of
from penstock.runtime.profile import profile
from penstock.simulator.timeline import Timeline

RANKS, SMS, MICROBATCHES = 4, 32, 12
WANTED = 0.05


def partitions(device: Any, small: bool) -> dict[str, Any]:
    there = torch.cuda.is_available()
    width, tokens, layers = (16, 8, 8) if small else (4096, 4096, 8)
    sms = SMS if there else None
    lanes = lanes_of(RANKS, sms)
    alone, together = (_product_seconds(lanes[:count], small) for count in (1, RANKS)) if there else (0.0, 0.0)
    x = torch.randn(2 * MICROBATCHES, max(tokens // 2, 1), width, device=device, dtype=torch.bfloat16)
    model = blocks(layers, width, device)
    found = _profile(model, x[:2], lanes, small)
    rows = []
    for name, schedule, sizes in _schedules(found, layers, small):
        rows.append(_row(name, schedule, sizes, found, _measured(schedule, model, sizes, x, sms)))
    layer = found.layers[layers // 2]
    what = (
        f"{RANKS} virtual ranks, each on {SMS} multiprocessors that no other has, {layers} bf16 blocks of {width}, {MICROBATCHES} "
        f"microbatches of {tokens} tokens. Predicted from a profile that was measured in one part while the others multiplied "
        f"matrices: F {layer.f * 1e3:.2f}, I {layer.i * 1e3:.2f}, W {layer.w * 1e3:.2f} ms a block. A matrix product took "
        f"{alone * 1e3:.2f} ms in one part alone and {together * 1e3:.2f} ms with all parts at it; {_torchs(small)}. Times are the "
        f"device's own. Wanted: a step within {WANTED:.0%}."
    )
    return {"what": what, "rows": rows}


def _profile(model: nn.Sequential, sample: Tensor, lanes: Sequence[Any], small: bool) -> ps.Profile:
    """Of the blocks in one part, with all others as busy as in a step."""
    wait()
    if lanes[0] is not None:
        _load(lanes[1:], 0.2 if small else 4.0)
    with nullcontext() if lanes[0] is None else torch.cuda.stream(lanes[0]):
        found = profile(list(model), sample, loss_fn=mean_loss, target=sample, optimizer=None, warmup=1, repeats=1 if small else 3)
    wait()
    return found


def _load(lanes: Sequence[Any], lasting: float) -> None:
    """So many seconds of matrix products for each lane; the host does not wait."""
    size = 4096
    one = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    each = _product_seconds(lanes[:1], False, size)
    wait()
    for lane in lanes:
        with torch.cuda.stream(lane):
            room = torch.empty_like(one)
            for _ in range(min(round(lasting / each), 900)):
                torch.mm(one, one, out=room)


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


def _schedules(found: ps.Profile, layers: int, small: bool) -> list[tuple[str, ps.Schedule, list[int]]]:
    made: list[tuple[str, ps.Schedule, list[int]]] = []
    for name in ("1f1b", "zbv"):
        schedule = ps.schedule(name, RANKS, MICROBATCHES)
        made.append((name, schedule, [layers // schedule.stages] * schedule.stages))
    plan = ps.plan(found, ranks=RANKS, microbatches=MICROBATCHES, seconds=0 if small else 5)
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
        "good": "yes" if abs(off) <= WANTED else "NO",
    }


def _measured(schedule: ps.Schedule, model: nn.Sequential, sizes: list[int], x: Tensor, sms: int | None) -> Timeline:
    """The step in the middle of several."""

    def train() -> list[Timeline]:
        pipe = Pipeline(copy.deepcopy(model), schedule, split=sizes, loss_fn=mean_loss, record=True)
        found = []
        for _ in range(4):
            made = pipe.step(x, target=x).timeline
            assert made is not None
            found.append(made)
            for parameter in pipe.parameters():
                parameter.grad = None
        return found[1:]

    timelines = launch(train, RANKS, sms=sms)[0]
    middle = statistics.median_low(each.makespan for each in timelines)
    return next(each for each in timelines if each.makespan == middle)


def _torchs(small: bool) -> str:
    """Whether two of torch's own partitions are apart."""
    try:
        from torch.cuda.green_contexts import GreenContext

        contexts = [GreenContext.create(num_sms=SMS, device_id=0) for _ in range(2)]
        streams = []
        for context in contexts:
            context.set_context()
            streams.append(torch.cuda.Stream())
            context.pop_context()
        alone, together = (_product_seconds(streams[:count], small) for count in (1, 2))
    except Exception as error:
        return f"torch's own green contexts could not be compared ({type(error).__name__}: {str(error)[:80]})"
    return f"in two of torch's own green contexts {alone * 1e3:.2f} ms alone and {together * 1e3:.2f} ms together"
