"""What the planner reaches: bubbles under memory limits against the best that other systems print, and a grid against exact optima.

Times of the cases are those that the found orders take, in the units of their costs, not seconds.
Alone: `python benchmarks/run.py planner`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.measure import Row
from benchmarks.planner_grid import Case, grid

import penstock as ps
from penstock.planner.bounds import lower_bound
from penstock.planner.exact import solve
from penstock.planner.search import search

PEERS = {
    (1000.0, 1400.0, 600.0, 50.0): {(4, 8): {2: 0.388, 3: 0.203, 4: 0.108}, (8, 32): {4: 0.393, 5: 0.184, 6: 0.123, 8: 0.071}},
    (1.0, 1.0, 1.0, 0.0): {(8, 32): {4: 0.123, 5: 0.081, 8: 0.035}},
}
"""F, I, W and latency of a rank; ranks and microbatches; memory limit in activations of a rank; the peers' bubble."""
LAYERS = 8
"""Layers a rank, so that every placement can be cut evenly."""
SEARCH, BOUND, SOLVE = 3.0, 3.0, 3.0
"""Seconds for a case of the grid."""


def run() -> list[Row]:
    rows = [
        _orientation(costs, shape, limit, peer) for costs, at in PEERS.items() for shape, by in at.items() for limit, peer in by.items()
    ]
    return [*rows, *_speed(), *_grid_rows()]


def _profile(f: float, i: float, w: float, latency: float, ranks: int) -> ps.Profile:
    layer = ps.Layer(f=f / LAYERS, i=i / LAYERS, w=w / LAYERS, activation=1 / LAYERS, weight_stash=0.5 / LAYERS)
    return ps.Profile(layers=[layer] * (LAYERS * ranks), latency=latency)


def _orientation(costs: tuple[float, ...], shape: tuple[int, int], limit: int, peer: float) -> Row:
    f, i, w, latency = costs
    ranks, count = shape
    plan = ps.plan(_profile(f, i, w, latency, ranks), ranks=ranks, microbatches=count, memory_limit=float(limit))
    bubble = plan.predicted.bubble
    note = f"bubble {bubble:.2%} : {peer:.1%}, {plan.name} on {plan.placement.kind}, at most {plan.overall_gap:.1%} to gain"
    case = f"plan p={ranks} m={count} limit {limit}, F/I/W/latency {f:g}/{i:g}/{w:g}/{latency:g}: bubble"
    return Row(case, bubble, peer, wanted_share=0.9999, note=note)


def _speed() -> list[Row]:
    found = []
    for ranks, count, wanted, options in ((8, 32, 10.0, {}), (32, 128, 120.0, {"seconds": 60.0})):
        profile = _profile(1000.0, 1400.0, 600.0, 50.0, ranks)
        start = time.perf_counter()
        ps.plan(profile, ranks=ranks, microbatches=count, memory_limit=ranks * 0.75, **options)
        found.append(Row(f"plan p={ranks} m={count}: seconds", time.perf_counter() - start, wanted_seconds=wanted))
    return found


@dataclass(frozen=True)
class Outcome:
    """One case of the grid: what was found, the least that any order takes, and whether that is an optimum."""

    case: Case
    found: float
    bound: float
    work: float
    proven: bool

    @property
    def gap(self) -> float:
        return self.found / self.bound - 1


def outcomes() -> list[Outcome]:
    """Every case searched, bounded and, as far as time allows, solved."""
    made = []
    for case in grid():
        problem = case.problem
        found = search(problem, seconds=SEARCH)
        bound = lower_bound(problem, seconds=BOUND)
        solved = solve(problem, seconds=SOLVE, start=found.schedule)
        if solved.infeasible:
            continue
        optimum = solved.objective if solved.proven else max(bound.value, solved.bound)
        reached = found.objective if solved.proven else min(found.objective, solved.objective)  # a plan takes the better of both
        made.append(Outcome(case, reached, optimum, bound.all.get("work", 0.0), solved.proven))
    return made


def _grid_rows() -> list[Row]:
    found = outcomes()
    closed, still = [each for each in found if each.proven], [each for each in found if not each.proven]
    near = sum(each.gap <= 0.01 for each in closed)
    gaps = sorted(still, key=lambda each: -each.gap)
    rows = [
        Row(f"grid: {len(closed)} of {len(found)} solved, those over 1 % off", len(closed) - near, 0.05 * len(closed), wanted_share=1.0),
        Row(
            f"grid: median gap of the {len(still)} others",
            statistics.median(each.gap for each in still) if still else 0.0,
            0.05,
            wanted_share=1.0,
            note=f"bound over work and chain in {sum(each.bound > each.work * (1 + 1e-9) for each in still)}",
        ),
    ]
    return rows + [Row(f"open: {each.case}", each.found, each.bound, note=f"gap {each.gap:.1%}") for each in gaps if each.gap > 0.01]
