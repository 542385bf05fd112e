"""Orders of microbatches within one schedule: times and memory against the simulator, plain and compiled alike."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

import penstock as ps
from penstock.planner.batches.batch_costs import BatchCosts
from penstock.planner.batches.batch_planner import BatchSearch, TimedOrder
from penstock.planner.batches.flat_schedule import FlatSchedule
from penstock.planner.order_search.evaluator import get_loops
from penstock.planner.problem import Problem


def uneven_problem(seed: int, schedule: ps.Schedule, limit: tuple[float, ...] | None = None, **options: object) -> Problem:
    chance, shape = np.random.default_rng(seed), (schedule.stages, schedule.microbatches)
    f, i, w, activation, output = (chance.integers(0, 9, shape).astype(float) for _ in range(5))
    costs = ps.Costs(f=f, i=i, w=w, activation=activation, weight_stash=activation / 2, output=output, bandwidth=8.0, latency=0.25)
    return Problem(schedule.placement, schedule.microbatches, costs, limit, **options)


def search(problem: Problem, schedule: ps.Schedule, plain: bool = False) -> BatchSearch:
    return BatchSearch(BatchCosts.read(problem), [FlatSchedule.build(schedule)], FlatSchedule.build, 0, get_loops(plain))


def climb(problem: Problem, schedule: ps.Schedule, start: list[int], tries: int, plain: bool = False) -> TimedOrder:
    """The order that the search ends with."""
    batch = search(problem, schedule, plain)
    return batch.climb(TimedOrder(batch.schedules[0], tuple(start), math.inf, batch), tries, 10**9)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("limit", [None, (30.0, 25.0, 20.0)])
def test_plain_and_compiled_find_the_same(name: str, limit: tuple[float, ...] | None) -> None:
    schedule = ps.schedule(name, 3, 6)
    problem = uneven_problem(1, schedule, limit)
    one, other = (climb(problem, schedule, [0, 1, 2, 3, 4, 5], 60, plain) for plain in (True, False))
    assert (one.microbatches, one.objective, one.excess) == (other.microbatches, other.objective, other.excess)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("1f1b", {}), ("zb-h2", {}), ("gpipe", {}), ("zbv", {}), ("v-min", {}), ("interleaved-1f1b", {"chunks": 3}), ("hanayo", {})),
        *(("dualpipe", {}), ("dualpipe-v", {}), ("chimera", {}), ("looped-bfs", {"chunks": 2}), ("grouped-interleaved", {"chunks": 2})),
    ],
)
def test_times_and_memory_are_those_of_the_simulator(name: str, options: dict) -> None:
    """To the last bit for the times, without running through the program; overlapped actions, copies of the model and reductions too."""
    schedule = ps.schedule(name, 4, 8, **options)
    chance = np.random.default_rng(len(name))
    for overlap, barrier in ((1.0, True), (0.75, True), (1.0, False)):
        problem = uneven_problem(2, schedule, (20.0,) * 4, barrier=barrier)
        extra = {"reduce": chance.integers(0, 9, schedule.stages).tolist(), "optimizer": 2.0, "parameters": 0.5, "overlap": overlap}
        links = {"latency": chance.random((4, 4)).tolist(), "b": chance.random((schedule.stages, 8))}
        problem = Problem(problem.placement, 8, ps.Costs(**problem.costs.to_json() | extra | links), (20.0,) * 4, barrier)
        batch = search(problem, schedule)
        for _ in range(3):
            order = tuple(chance.permutation(8).tolist())
            timeline = ps.simulate(ps.lower(schedule), problem.costs.permuted(order))
            (timed,) = batch.time_all(batch.schedules, {"": order})
            assert timed.objective == pytest.approx(problem.objective(timeline), rel=1e-14)
            assert timed.excess == pytest.approx(sum(max(0.0, peak - 20.0) for peak in timeline.peak_memory), rel=1e-6)


def test_the_search_stops_early_only_if_an_order_is_slower() -> None:
    """Brute force: with enough tries, the best of all orders."""
    schedule = ps.schedule("zb-h1", 3, 5)
    for seed in range(2):
        problem = uneven_problem(seed, schedule)
        best = min(ps.simulate(ps.lower(schedule), problem.costs.permuted(order)).makespan for order in permutations(range(5)))
        assert min(climb(problem, schedule, start, 400).objective for start in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0])) == best


def test_memory_over_the_limit_goes_first() -> None:
    """An order over the limit is changed until it fits, even if that takes longer."""
    schedule = ps.schedule("1f1b", 3, 5)
    costs = replace(uneven_problem(3, schedule).costs, output=0.0)
    peaks = {order: ps.simulate(ps.lower(schedule), costs.permuted(order)).peak_memory[0] for order in permutations(range(5))}
    worst = max(peaks, key=peaks.__getitem__)
    limit = min(peaks.values())
    limited = Problem(schedule.placement, 5, costs, (limit, 1e9, 1e9))
    assert climb(limited, schedule, list(worst), 0).excess == pytest.approx(peaks[worst] - limit)
    order = climb(limited, schedule, list(worst), 500)
    assert order.excess == 0.0
    assert peaks[order.microbatches] == pytest.approx(limit)


def test_one_microbatch() -> None:
    schedule = ps.schedule("1f1b", 3, 1)
    assert climb(uneven_problem(4, schedule), schedule, [0], 10).microbatches == (0,)
