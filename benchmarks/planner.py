"""What the planner reaches: bubbles under memory limits against the best that other systems print, and a grid against exact optima.

Times of the cases are those that the found orders take, in the units of their costs, not seconds.
Alone: `python benchmarks/run.py planner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.measure import once
from benchmarks.planner_grid import Case as Problem
from benchmarks.planner_grid import grid
from benchmarks.rows import Case, Row, within

import penstock as ps
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.exact import solve
from penstock.planner.order_search.search import search

PEERS = {
    (1000.0, 1400.0, 600.0, 50.0): {(4, 8): {2: 0.388, 3: 0.203, 4: 0.108}, (8, 32): {4: 0.393, 5: 0.184, 6: 0.123, 8: 0.071}},
    (1.0, 1.0, 1.0, 0.0): {(8, 32): {4: 0.123, 5: 0.081, 8: 0.035}},
}
"""F, I, W and latency of a rank; ranks and microbatches; memory limit in activations of a rank; the peers' bubble."""
CHUNKS = 2
"""Layers per rank, as many as the peers have chunks, so that the peers do not cut the model more finely."""
FINE = 8
"""Layers per rank of the plans whose time is measured: every placement can be cut evenly, so all are tried."""
TWO_COPIES = ("chimera", "dualpipe")
"""Schedules left out of the comparison: they keep the parameters twice, which the limit, in activations, does not count."""
LONG = 25.0
"""Seconds of a plan that is compared."""
PRINTED = "the least printed"
"""The least bubble that other systems print for the same problem."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    if short:
        (costs, at), *_ = PEERS.items()
        chosen, speeds, budget = {costs: {(4, 8): {3: at[4, 8][3]}}}, ((2, 4, 10.0, 0.3),), 0.1
    else:
        chosen, speeds, budget = PEERS, ((8, 32, 10.0, None), (32, 128, 120.0, 60.0)), 3.0
    problems = grid()[:4] if short else grid()
    found: list[Outcome] = []
    yield [
        *(
            Case(f"p={shape[0]} m={shape[1]} limit {limit}", partial(_orientation, costs, shape, limit, peer, 0.3 if short else None))
            for costs, at in chosen.items()
            for shape, by in at.items()
            for limit, peer in by.items()
        ),
        *(Case(f"plan p={each[0]} m={each[1]}", partial(_speed, *each)) for each in speeds),
        *(Case(str(each), partial(_add, found, each, budget)) for each in problems),
        Case("the grid", lambda: _grid_rows(found)),
    ]


def _profile(f: float, i: float, w: float, latency: float, *, ranks: int, layers: int) -> ps.Profile:
    """A model with that many equal layers per rank."""
    layer = ps.Layer(f=f / layers, i=i / layers, w=w / layers, activation=1 / layers, weight_stash=0.5 / layers)
    return ps.Profile(layers=[layer] * (layers * ranks), latency=latency)


def _orientation(costs: tuple[float, ...], shape: tuple[int, int], limit: int, peer: float, seconds: float | None) -> list[Row]:
    f, i, w, latency = costs
    ranks, count = shape
    names = [*(name for name in ps.available() if name not in TWO_COPIES), "searched"]
    asked = {"ranks": ranks, "microbatches": count, "memory_limit": float(limit), "schedules": names, "seconds": seconds or LONG}
    plan = ps.plan(_profile(f, i, w, latency, ranks=ranks, layers=CHUNKS), **asked)
    note = f"{plan.name} on {plan.placement.kind}, at most {plan.overall_gap:.1%} to gain"
    case = f"bubble of a plan, {CHUNKS} chunks per rank, p={ranks} m={count} limit {limit}, F/I/W/latency {f:g}/{i:g}/{w:g}/{latency:g}"
    return [Row(case, [100 * plan.predicted.bubble], [100 * peer], PRINTED, limit=0.9999, unit="%", note=note)]


def _speed(ranks: int, count: int, wanted: float, seconds: float | None) -> list[Row]:
    profile = _profile(1000.0, 1400.0, 600.0, 50.0, ranks=ranks, layers=FINE)
    options = {} if seconds is None else {"seconds": seconds}
    taken, _ = once(lambda: ps.plan(profile, ranks=ranks, microbatches=count, memory_limit=ranks * 0.75, **options))
    return [within(f"seconds of a plan, p={ranks} m={count}", taken, wanted)]


@dataclass(frozen=True)
class Outcome:
    """One problem of the grid: what was found, the least that any order takes, and whether that is an optimum."""

    found: float
    bound: float
    work: float
    proven: bool


def _add(found: list[Outcome], case: Problem, seconds: float) -> list[Row]:
    """Search, bound and, as far as time allows, solve one problem; a row of it where it is more than 1 % off."""
    outcome = _outcome(case, seconds)
    if outcome is None:
        return []
    found.append(outcome)
    against = "optimum" if outcome.proven else "lower bound"
    return [Row(f"grid: {case}", [outcome.found], [outcome.bound], against, unit="")] if outcome.found > 1.01 * outcome.bound else []


def _outcome(case: Problem, seconds: float) -> Outcome | None:
    """The result of the search; None if no order is possible."""
    problem = case.problem
    found = search(problem, seconds=seconds)
    bound = lower_bound(problem, seconds=seconds)
    solved = solve(problem, seconds=seconds, start=found.schedule)
    if solved.infeasible:
        return None
    optimum = solved.objective if solved.proven else max(bound.value, solved.bound)
    reached = found.objective if solved.proven else min(found.objective, solved.objective)  # a plan takes the better of both
    return Outcome(reached, optimum, bound.all.get("work", 0.0), solved.proven)


def _grid_rows(found: list[Outcome]) -> list[Row]:
    """95 of 100 problems that are solved are to be within 1 % of the optimum, and others within 5 % of the bound in the median."""
    closed, still = [each for each in found if each.proven], [each for each in found if not each.proven]
    rows = []
    if closed:
        mark = sorted(closed, key=lambda each: each.found / each.bound)[math.ceil(0.95 * len(closed)) - 1]
        near = sum(each.found <= 1.01 * each.bound for each in closed)
        case = f"grid: 95th percentile of {len(closed)} solved problems (of {len(found)})"
        rows.append(Row(case, [mark.found], [mark.bound], "optimum", limit=1.01, unit="", note=f"{near} within 1 %"))
    if still:
        case, above = f"grid: median of {len(still)} problems not solved", sum(each.bound > each.work * (1 + 1e-9) for each in still)
        reached, bounds = [each.found for each in still], [each.bound for each in still]
        rows.append(Row(case, reached, bounds, "lower bound", limit=1.05, unit="", note=f"bound over work and chain in {above}"))
    return rows
