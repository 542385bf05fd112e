"""The search for an order of microbatches: plain and compiled, against times of the exchanged costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

import penstock as ps
from penstock.planner.order_search.evaluator import Evaluator
from penstock.planner.order_search.flat_problem import flatten, read_order
from penstock.planner.order_search.permutations import PermutationState
from penstock.planner.problem import Problem


def run(problem: Problem, schedule: ps.Schedule, start: list[int], tries: int, plain: bool) -> tuple[list[int], float, float]:
    """The order, its objective and its memory over the limits."""
    evaluator = Evaluator(flatten(problem), plain=plain)
    nodes, full = read_order(evaluator.flat, schedule)
    base = evaluator.copy_flat(full)
    flat = evaluator.copy_flat(full)._replace(travel=evaluator.as_column(evaluator.flat.travel.copy()))
    at = evaluator.as_column(np.array(start))
    state = PermutationState(evaluator.as_column(nodes), at, base.duration, base.travel, base.takes, base.keeps, evaluator.seed(3))
    found = evaluator.loops.search_permutations(flat, state, evaluator.clock, tries, problem.memory_limit is not None)
    return [int(k) for k in at], *found


def uneven_problem(seed: int, count: int, limit: tuple[float, ...] | None = None) -> Problem:
    chance = np.random.default_rng(seed)
    f, i, w, activation, output = (chance.integers(1, 9, (3, count)).astype(float) for _ in range(5))
    costs = ps.Costs(f=f, i=i, w=w, activation=activation, weight_stash=activation / 2, output=output, bandwidth=8.0, latency=0.25)
    return Problem(ps.Placement.linear(3), count, costs, limit)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("limit", [None, (30.0, 25.0, 20.0)])
def test_plain_and_compiled_find_the_same(name: str, limit: tuple[float, ...] | None) -> None:
    problem, schedule = uneven_problem(1, 6, limit), ps.schedule(name, 3, 6)
    assert run(problem, schedule, [0, 1, 2, 3, 4, 5], 60, plain=True) == run(problem, schedule, [0, 1, 2, 3, 4, 5], 60, plain=False)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_objective_is_that_of_the_exchanged_costs(name: str) -> None:
    """Every field of every microbatch moves with it, messages included."""
    problem, schedule = uneven_problem(2, 7), ps.schedule(name, 3, 7)
    start = [3, 1, 4, 0, 6, 5, 2]
    for tries in (0, 50):
        order, objective, _ = run(problem, schedule, start, tries, plain=False)
        assert sorted(order) == list(range(7))
        timed = ps.simulate(ps.lower(schedule), problem.costs.permuted(order)).makespan
        assert objective == pytest.approx(timed, rel=1e-12)
    assert objective < ps.simulate(ps.lower(schedule), problem.costs.permuted(start)).makespan


def test_memory_over_the_limit_goes_first() -> None:
    """An order over the limit is changed until it fits, even if that takes longer."""
    problem, schedule = uneven_problem(3, 6), ps.schedule("1f1b", 3, 6)
    costs = replace(problem.costs, output=0.0)
    peaks = {order: ps.simulate(schedule, costs.permuted(order)).peak_memory[0] for order in permutations(range(6))}
    worst = max(peaks, key=peaks.__getitem__)
    limit = min(peaks.values())
    limited = replace(problem, costs=costs, memory_limit=(limit, 1e9, 1e9))
    _, _, excess = run(limited, schedule, list(worst), 0, plain=False)
    assert excess == pytest.approx(peaks[worst] - limit)
    order, _, excess = run(limited, schedule, list(worst), 500, plain=False)
    assert excess == 0.0
    assert peaks[tuple(order)] == pytest.approx(limit)


def test_one_microbatch() -> None:
    problem = uneven_problem(4, 1)
    assert run(problem, ps.schedule("1f1b", 3, 1), [0], 10, plain=False)[0] == [0]
