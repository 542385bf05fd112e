"""One GPU as two large and four small ones: virtual ranks on different numbers of multiprocessors, planned as a cluster and as equals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu_models import blocks
from benchmarks.gpu_partitions import ROWS, WANTED, compare_kinds, get_timeline, measure_step, profile_part

import penstock as ps
from penstock.planner.partition.assignment import Assignment
from penstock.planner.problem import Problem
from penstock.runtime.device.streams import create_streams
from penstock.simulator.timeline import Timeline

SHARES = (8, 8, 16, 8, 16, 8)
"""Multiprocessors of each rank: multiples of 8, as the GPUs of compute capability 9 give them. They are half of a GPU: all of it lowers its
clock while all parts compute, so that they would be faster whenever one of them waits, and not like devices of their own."""
SCHEDULES = ("1f1b", "zb-h1", "zbv", "interleaved-zb", "searched")
"""With one copy of the model each."""
LIMIT = "16GiB"
"""Of each rank: all share one GPU's memory."""


def uneven(device: Any, small: bool) -> dict[str, Any]:
    there = torch.cuda.is_available()
    width, tokens, layers, count = (16, 8, 12, 6) if small else (2048, 4096, 16, 24)
    x = torch.randn(ROWS * count, tokens // ROWS, width, device=device, dtype=torch.bfloat16)
    model = blocks(layers, width, device)
    cluster, profile = _measure_cluster(model, x[:ROWS], small) if there else _pretend_cluster(model, x[:ROWS])
    options: dict[str, Any] = {"microbatches": count, "schedules": SCHEDULES, "seconds": 0 if small else 7, "memory_limit": LIMIT}
    sms = list(SHARES) if there else None
    even, planned = ps.plan(profile, ranks=len(SHARES), **options), ps.plan(profile, cluster=cluster, **options)
    rows = []
    for name, plan in (("even plan", even), ("plan for the cluster", planned)):
        measured = get_timeline(measure_step(plan, model, x, len(SHARES), sms))
        rows.append(_row(name, plan, cluster, measured))
    for name in ("gain", "gain predicted"):
        even_ms, planned_ms = (row["predicted" if "predicted" in name else "step ms measured"] for row in rows)
        rows[-1][name] = f"{even_ms / planned_ms:.2f}x"
    retries = torch.cuda.memory_stats()["num_alloc_retries"] if there else 0
    speeds = " and ".join(dict.fromkeys(cluster.devices[place].speeds.describe() for place in range(len(SHARES))))
    what = (
        f"{len(SHARES)} virtual ranks on {', '.join(map(str, SHARES))} multiprocessors that no other has, {layers} bf16 blocks of {width}, "
        f"{count} microbatches of {tokens} tokens. The blocks were measured in a part of each size while all other parts were busy: speeds "
        f"of {speeds}. The even plan takes all parts for equal, and runs on them in their order. Times are the device's own. The "
        f"allocator had to free memory {retries} times. Wanted: a step within {WANTED:.0%} of the prediction."
    )
    return {"what": what, "rows": rows}


def _measure_cluster(model: Any, sample: Any, small: bool) -> tuple[ps.Cluster, ps.Profile]:
    """The speed of a part of each size, per layer and kind of action, compared with the smallest."""
    lanes = create_streams(len(SHARES), SHARES)
    profiles = {}
    for size in sorted(set(SHARES)):
        first = SHARES.index(size)
        others = [lane for place, lane in enumerate(lanes) if place != first]
        profiles[size] = profile_part(model, sample, [lanes[first], *others], small)
    slowest = profiles[min(SHARES)]
    devices = [ps.Device(f"{size} multiprocessors", speed=slowest.compare_speeds(profiles[size])) for size in SHARES]
    return ps.Cluster(devices, time_unit="s"), slowest


def _pretend_cluster(model: Any, sample: Any) -> tuple[ps.Cluster, ps.Profile]:
    """Without a GPU: as fast as their shares, to see that everything runs."""
    profile = profile_part(model, sample, [None], small=True)
    return ps.Cluster([ps.Device(f"{size} multiprocessors", speed=size / min(SHARES)) for size in SHARES], time_unit="s"), profile


def _row(name: str, plan: ps.Plan, cluster: ps.Cluster, measured: Timeline) -> dict[str, Any]:
    devices = plan.devices or tuple(range(len(cluster)))
    shape = plan.profile, plan.placement, plan.microbatches, plan.partition, plan.recompute
    costs = replace(Problem.cut(*shape, assignment=Assignment(cluster, devices)).costs, optimizer=0.0)
    predicted = ps.simulate(measured.table, costs)
    off = predicted.makespan / measured.makespan - 1
    return {
        "plan": f"{name}: {plan.name}",
        "multiprocessors": ", ".join(str(SHARES[device]) for device in devices),
        "layers": ", ".join(str(sum(plan.partition[stage] for stage in plan.placement.stages_of(rank))) for rank in range(len(SHARES))),
        "step ms measured": measured.makespan * 1e3,
        "predicted": predicted.makespan * 1e3,
        "off by": f"{off:+.1%}",
        "compute over predicted, by rank": ", ".join(f"{ratio:.2f}" for ratio in measured.busy / predicted.busy),
        "by kind": compare_kinds(measured, predicted),
        "gain": "",
        "gain predicted": "",
        "good": "yes" if abs(off) <= WANTED else "NO",
    }
