"""Small models on small clusters, and every plan that there is for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations
from typing import Any

import penstock as ps
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.partition.assignment import Assignment
from penstock.planner.problem import Problem
from planner.every_order import EveryOrder, Job


@dataclass(frozen=True)
class Case:
    """A model with so few layers that each rank has one stage, on devices of different speeds and links."""

    profile: ps.Profile
    cluster: ps.Cluster
    microbatches: int
    limits: tuple[float, ...] | None
    split: bool

    @property
    def asked(self) -> dict[str, Any]:
        return {"cluster": self.cluster, "microbatches": self.microbatches, "memory_limit": self.limits, "split": self.split}

    def list_problems(self, placement: ps.Placement | None = None) -> Iterator[Problem]:
        """Every order of the devices with every partition, by default with one stage per rank."""
        ranks, layers = len(self.cluster), len(self.profile)
        placement = ps.Placement.linear(ranks) if placement is None else placement
        for devices in permutations(range(ranks)):
            assignment = Assignment(self.cluster, devices)
            limits = None if self.limits is None else assignment.arrange(self.limits)
            for inner in combinations(range(1, layers), placement.stages - 1):
                sizes = tuple(last - first for first, last in pairwise((0, *inner, layers)))
                shape = self.profile, placement, self.microbatches, sizes, (False,) * placement.stages
                yield Problem.cut(*shape, limits, True, self.split, (), assignment)

    def find_better(self, objective: float, most_nodes: int = 20_000) -> tuple[float, float]:
        """The least objective of any order of any problem, if it is below this one, else this one; and the least that may be possible.

        The two differ if the exact solver, which asks for less memory than the simulator, ends with an order that does not fit.
        """
        best = least = objective
        for problem in sorted(self.list_problems(), key=lambda problem: problem.work):
            if lower_bound(problem).value < least * (1 - 1e-9):
                found, jobs = EveryOrder(problem, most_nodes).beat(least)
                least = min(least, found)
                if jobs and problem.fits(problem.evaluate(build_schedule(problem, jobs))):
                    best = least
        return best, least

    def list_timed(self, names: Sequence[str]) -> Iterator[tuple[float, Problem]]:
        """Every order of the devices with every partition under each of these schedules that fits, and how long it takes."""
        by_placement: dict[ps.Placement, list[ps.Program]] = {}
        for name in names:
            schedule = ps.schedule(name, len(self.cluster), self.microbatches)
            by_placement.setdefault(schedule.placement, []).append(ps.lower(schedule))
        for placement, programs in by_placement.items():
            for problem in self.list_problems(placement):
                for timeline in (ps.simulate(program, problem.costs) for program in programs):
                    if problem.fits(timeline):
                        yield problem.objective(timeline), problem


def build_schedule(problem: Problem, jobs: tuple[Job, ...]) -> ps.Schedule:
    rows: list[list[str]] = [[] for _ in range(problem.ranks)]
    for job in jobs:
        rows[problem.placement.rank_of(job.stage)].append(f"{job.stage}{job.kind}{job.microbatch}")
    return ps.Schedule.from_actions(rows, problem.placement, microbatches=problem.microbatches)


def draw_case(chance: random.Random) -> Case:
    """Two to four devices, whole times, links of one latency and bandwidth or of one per pair; a memory limit now and then."""
    ranks = chance.choice((2, 3, 3, 4))
    layers = [
        ps.Layer(f=chance.randint(1, 4), i=chance.randint(1, 4), w=chance.randint(1, 3), activation=1, output=chance.choice((0.5, 1.0)))
        for _ in range(chance.randint(ranks, min(2 * ranks - 1, 5)))
    ]
    speeds: list[Any] = [1.0, 2.0, 0.5, {"f": 1.0, "i": 2.0, "w": 0.5}]
    devices = [ps.Device(speed=1.0), ps.Device(speed=chance.choice(speeds[1:]))]
    devices += [ps.Device(speed=chance.choice(speeds)) for _ in range(ranks - 2)]
    chance.shuffle(devices)
    latency: Any = chance.choice((0.0, 0.5, [[chance.choice((0.0, 0.5, 2.0)) for _ in range(ranks)] for _ in range(ranks)]))
    bandwidth: Any = chance.choice((None, 2.0, [[chance.choice((None, 1.0)) for _ in range(ranks)] for _ in range(ranks)]))
    limits = None if chance.random() < 0.6 else tuple(chance.choice((4.0, 6.0, 9.0)) for _ in range(ranks))
    cluster = ps.Cluster(devices, latency, bandwidth)
    return Case(ps.Profile(layers), cluster, chance.choice((2, 3) if ranks < 4 else (2,)), limits, chance.random() < 0.5)


def draw_links(chance: random.Random, devices: Sequence[ps.Device]) -> ps.Cluster:
    """Links of every kind: equal, of no time, one per pair, one of them very slow, of two nodes, on shared lanes, all on one lane."""
    ranks, kind = len(devices), chance.choice(("equal", "none", "pairs", "slow", "nodes", "cards", "lanes", "one lane"))
    if kind in ("nodes", "cards"):
        placed = [replace(device, node=chance.choice("ab")) for device in devices]
        placed[0] = replace(placed[0], node="a")
        rates = {"latency": chance.choice((0.5, 2.0, 4.0)), "bandwidth": chance.choice((None, 1.0, 0.5))}
        return ps.Cluster.from_nodes(placed, **rates, node_latency=0.1, card="node" if kind == "nodes" else "device")
    if kind == "pairs":
        latency = [[chance.choice((0, 0.5, 2.0, 5.0)) for _ in devices] for _ in devices]
        return ps.Cluster(devices, latency, [[chance.choice((None, 1.0, 0.3)) for _ in devices] for _ in devices])
    if kind == "slow":
        latency = [[0.1] * ranks for _ in devices]
        source, target = chance.sample(range(ranks), 2)
        latency[source][target] = 20.0
        return ps.Cluster(devices, latency)
    if kind in ("lanes", "one lane"):
        most = 0 if kind == "one lane" else 3
        lanes = [[(chance.randint(0, most), chance.randint(0, most)) for _ in devices] for _ in devices]
        return ps.Cluster(devices, chance.choice((0.3, 1.0)), chance.choice((None, 1.0)), lanes)
    return ps.Cluster(devices) if kind == "none" else ps.Cluster(devices, chance.choice((0.1, 1.0, 3.0)), chance.choice((None, 1.0)))


def draw_named_case(chance: random.Random) -> Case:
    """Three devices, layers and links that all differ, and a memory limit now and then, for named schedules."""
    return _draw_different(chance, chance.randint(5, 7), lambda speeds: [chance.choice(speeds) for _ in range(3)])


def draw_copied_case(chance: random.Random, *, paired: bool) -> Case:
    """The same with two or four devices for schedules with two copies of the model, which exchange gradients.

    If `paired`, the devices are in pairs of equal speed.
    """
    ranks = chance.choice((2, 4, 4))

    def draw_speeds(speeds: list[Any]) -> list[Any]:
        return chance.sample(speeds * 2, ranks // 2) * 2 if paired else [chance.choice(speeds) for _ in range(ranks)]

    case = _draw_different(chance, chance.randint(ranks + 1, 6), draw_speeds)
    layers = [replace(layer, gradients=chance.choice((0.0, 1.0, 4.0))) for layer in case.profile.layers]
    return replace(case, profile=replace(case.profile, layers=layers))


def _draw_different(chance: random.Random, count: int, draw_speeds: Callable[[list[Any]], list[Any]]) -> Case:
    layers = [
        ps.Layer(
            f=chance.uniform(0.5, 4),
            i=chance.uniform(0.5, 4),
            w=chance.choice((0.0, 1.0, 3.0)),
            activation=chance.uniform(0.5, 2),
            output=chance.choice((0.0, 0.5, 1.0, 3.0)),
            parameters=chance.choice((0, 1, 2)),
        )
        for _ in range(count)
    ]
    per_layer = {name: [chance.choice((0.5, 1.0, 3.0)) for _ in layers] for name in ("f", "i", "w")}
    devices = [ps.Device(speed=speed) for speed in draw_speeds([1.0, 2.0, 0.5, {"f": 1.0, "i": 2.0, "w": 0.5}, per_layer])]
    held = sum(layer.activation + layer.parameters for layer in layers)
    limits = tuple(held * chance.uniform(0.4, 1.2) for _ in devices) if chance.random() < 0.5 else None
    return Case(ps.Profile(layers), draw_links(chance, devices), chance.choice((2, 3, 4, 8)), limits, True)
