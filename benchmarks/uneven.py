"""Plans for clusters of unequal devices and links, against plans that take all devices for equal ones; simulated step times.

The model is a transformer of 32 blocks. The even plan has the same seconds and schedules, and runs on the devices in the order in which the
cluster lists them, or in the order that suits it best. Alone: `python benchmarks/run.py uneven`; the two tables of docs/uneven-clusters.md:
`python -m benchmarks.uneven`. The second compares named schedules with two copies of the model with those with one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

from benchmarks.rows import Case, Row

import penstock as ps
from penstock.planner.partition.assignment import Assignment, Orders
from penstock.planner.problem import Problem

MODEL = {"layers": 32, "hidden": 4096, "heads": 32, "sequence": 4096, "vocabulary": 32000, "flops": 400e12}
MICROBATCHES = 24
FAST, SLOW = ps.Device("fast"), ps.Device("slow", speed=0.4)
LEAST = 1.3
"""How many times as long the even plan takes, at least, on two fast and four slow devices."""


def _in_nodes(devices: list[ps.Device], size: int) -> list[ps.Device]:
    return [ps.Device(device.name, device.speed, device.memory, f"node {place // size}") for place, device in enumerate(devices)]


NETWORK = {"latency": 2e-5, "bandwidth": "12.5GB", "node_latency": 5e-6, "node_bandwidth": "200GB"}
CLUSTERS: dict[str, ps.Cluster] = {
    "2 fast, 4 slow": ps.Cluster([FAST, FAST, SLOW, SLOW, SLOW, SLOW], 1e-5, 50e9),
    "4 slow, 2 fast": ps.Cluster([SLOW, SLOW, SLOW, SLOW, FAST, FAST], 1e-5, 50e9),
    "7 equal, 1 at half speed": ps.Cluster([FAST] * 7 + [ps.Device("half", speed=0.5)], 1e-5, 50e9),
    "4 fast and 4 slow in 4 nodes": ps.Cluster.from_nodes(_in_nodes([FAST, SLOW] * 4, 2), **NETWORK),
    "8 equal in 2 nodes, listed in turn": ps.Cluster.from_nodes(
        [ps.Device("gpu", node=f"node {place % 2}") for place in range(8)], **NETWORK
    ),
}
COPIED: dict[str, ps.Cluster] = {
    "2 fast, 4 slow": CLUSTERS["2 fast, 4 slow"],
    "4 fast in one node, 4 slow in another": ps.Cluster.from_nodes(_in_nodes([FAST] * 4 + [SLOW] * 4, 4), **NETWORK),
    "4 fast and 4 slow in 4 nodes": CLUSTERS["4 fast and 4 slow in 4 nodes"],
    "7 equal, 1 at half speed": CLUSTERS["7 equal, 1 at half speed"],
}
"""Clusters for schedules with two copies of the model: all but the last have a partner of its speed for each device."""
TWO_COPIES = ("chimera", "dualpipe")
ONE_COPY = ("1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "dualpipe-v", "interleaved-1f1b", "interleaved-zb")
OVERLAPS = (1.0, 0.85)
"""What a forward and a backward that run together take, as a share of their sum."""


@dataclass(frozen=True)
class Outcome:
    """Simulated seconds of a step."""

    planned: float
    even: float
    """The even plan, with the devices as the cluster lists them."""
    rearranged: float
    """The even plan, with the devices in the best order for it."""
    plan: ps.Plan


@cache
def _plan_evenly(ranks: int, seconds: float, schedules: tuple[str, ...] | None) -> ps.Plan:
    profile = ps.Profile.transformer(**MODEL, latency=1e-5, bandwidth=50e9)
    return ps.plan(profile, ranks=ranks, microbatches=MICROBATCHES, seconds=seconds, schedules=schedules)


def run_cluster(cluster: ps.Cluster, seconds: float = 7.0, schedules: tuple[str, ...] | None = None) -> Outcome:
    profile = ps.Profile.transformer(**MODEL)
    plan = ps.plan(profile, cluster=cluster, microbatches=MICROBATCHES, seconds=seconds, schedules=schedules)
    even = _plan_evenly(len(cluster), seconds, schedules)

    def time(devices: tuple[int, ...]) -> float:
        shape = even.profile, even.placement, even.microbatches, even.partition, even.recompute
        problem = Problem.cut(*shape, assignment=Assignment(cluster, devices))
        return problem.objective(problem.evaluate(even.schedule))

    orders = list(Orders(cluster, even.placement).list_all())
    return Outcome(plan.objective, time(tuple(range(len(cluster)))), min(map(time, orders[:: max(1, len(orders) // 100)])), plan)


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    names = list(CLUSTERS)[:1] if short else list(CLUSTERS)
    options = (0.0, ("1f1b",)) if short else (7.0, None)
    yield [Case(name, partial(_rows, name, *options)) for name in names]


def _rows(name: str, seconds: float, schedules: tuple[str, ...] | None) -> list[Row]:
    outcome = run_cluster(CLUSTERS[name], seconds, schedules)
    plan = outcome.plan
    note = f"{plan.name}, devices {', '.join(map(str, plan.devices))}; {plan.overall_gap:.1%} above the bound of every plan"
    limit = 1 / LEAST if "2 fast" in name else 1.0
    return [
        Row(f"step, {name}", [outcome.planned], [outcome.even], "the even plan", limit=limit, note=note),
        Row(f"step, {name}", [outcome.planned], [outcome.rearranged], "the even plan, devices in its best order", limit=1.0),
    ]


def write_table() -> Iterator[str]:
    """The rows of docs/uneven-clusters.md."""
    for name, cluster in CLUSTERS.items():
        outcome = run_cluster(cluster)
        gains = (f"{time / outcome.planned:.2f}x" for time in (outcome.even, outcome.rearranged))
        plan = outcome.plan
        yield f"| {name} | {plan.name} | {outcome.planned * 1e3:.1f} ms | {' | '.join(gains)} | {plan.overall_gap:.1%} |"


def write_copies_table() -> Iterator[str]:
    """The rows of the table with two copies of the model there: the fastest schedule with two copies and with one, by overlap."""
    for name, cluster in COPIED.items():
        cells = []
        for overlap in OVERLAPS:
            profile = replace(ps.Profile.transformer(**MODEL), overlap=overlap)
            for schedules in (TWO_COPIES, ONE_COPY):
                plan = ps.plan(profile, cluster=cluster, microbatches=MICROBATCHES, seconds=0, schedules=schedules)
                cells.append(f"{plan.name} {plan.objective * 1e3:.1f} ms")
        yield f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join([*write_table(), "", *write_copies_table()]))
