"""The order search as a whole."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.named_schedules import list_named_schedules, one_at_a_time
from penstock.planner.order_search.search import SearchResult, search, shorten
from penstock.planner.problem import Problem
from planner.every_order import EveryOrder
from planner.sliced_models import random_model
from planner.small_problems import TINY, best_of_all, problems


def problem_of(placement: Placement, microbatches: int, limit: float | None, *, uneven: bool = False, latency: float = 50.0) -> Problem:
    """A rank's F, I and W take 1000, 1400 and 600 per microbatch, and it holds 1 until I and 0.5 until W."""
    chunks, stages = placement.chunks, range(placement.stages)
    parts = [(1.0 + 0.4 * (uneven and stage % 3 == 0)) / chunks for stage in stages]
    times = {name: [value * part for part in parts] for name, value in (("f", 1000.0), ("i", 1400.0), ("w", 600.0))}
    costs = ps.Costs(**times, latency=latency, activation=1 / chunks, weight_stash=0.5 / chunks)
    return Problem(placement, microbatches, costs, None if limit is None else (limit,) * placement.ranks)


def best_named(problem: Problem) -> float:
    timelines = [problem.evaluate(schedule) for schedule in list_named_schedules(problem)]
    return min((problem.objective(timeline) for timeline in timelines if problem.fits(timeline)), default=math.inf)


def check(problem: Problem, found: SearchResult) -> None:
    """The result is proved and fits, and its simulated time is its objective and not below the bound."""
    assert found.schedule is not None
    ps.verify(ps.lower(found.schedule), memory_limit=problem.memory_limit, costs=problem.costs)
    timeline = problem.evaluate(found.schedule)
    assert problem.fits(timeline)
    assert found.objective == problem.objective(timeline)
    assert found.objective >= lower_bound(problem).value * (1 - 1e-9)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(problems(TINY))
def test_tiny_problems_are_solved(problem: Problem) -> None:
    """Makespans are; a span without a barrier may stay a little longer than the best, as the search moves single actions."""
    assume(problem.barrier)
    assert search(problem, rounds=2000).objective == pytest.approx(best_of_all(problem))


@settings(deadline=None, max_examples=10)
@given(problems(TINY, output=True))
def test_tiny_problems_with_messages_lie_between_the_best_and_the_named(problem: Problem) -> None:
    """What is received takes memory that depends on all ranks' orders, which local search does not see before the end."""
    assert best_of_all(problem) * (1 - 1e-9) <= search(problem, rounds=1000).objective <= best_named(problem)


@pytest.mark.parametrize("seed", range(8))
def test_tiny_problems_with_slices_are_solved(seed: int) -> None:
    """Against every order of the slices: the search finds the best, and no bound is above it."""
    chance = np.random.default_rng(seed)
    shape, placement = ((2, 1, 3), (2, 2, 2), (3, 1, 2), (2, 1, 2))[seed % 4], Placement.linear(2 if seed % 4 != 2 else 3)
    stages, microbatches, slices = shape
    names = ("f", "i", "w", "activation", "kept", "kept_gradients")
    values = {name: np.tile(chance.integers(1, 6, (stages, slices)).astype(float), microbatches) for name in names}
    costs = ps.Costs(**values, latency=float(chance.integers(0, 3)))
    problem = Problem(placement, microbatches, costs, split=seed % 4 == 3, slices=slices)
    peaks = problem.evaluate(one_at_a_time(placement, microbatches, slices=slices)).peak_memory
    for limit in (None, tuple(peaks)):
        limited = replace(problem, memory_limit=limit)
        best, _ = EveryOrder(limited, most_nodes=10**6).beat()
        found = search(limited, rounds=2000)
        check(limited, found)
        assert found.objective == pytest.approx(best)


@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.v(2), Placement.looped(2, 2)], ids=lambda placement: placement.kind)
def test_orders_of_slices_are_never_worse_than_a_named_schedule(placement: Placement) -> None:
    profile = random_model(np.random.default_rng(1), layers=8)
    sizes = tuple(8 // placement.stages + (stage < 8 % placement.stages) for stage in range(placement.stages))
    shape = profile, placement, 3, sizes, (False,) * placement.stages
    free = Problem.cut(*shape, lengths=(40, 32, 24))
    least = min(max(free.evaluate(schedule).peak_memory) for schedule in list_named_schedules(free))
    for limit in (None, (least,) * placement.ranks):
        problem = Problem.cut(*shape, limit, lengths=(40, 32, 24))
        found = search(problem, rounds=300)
        check(problem, found)
        assert found.objective <= best_named(problem)


def test_a_search_starts_with_orders_of_as_many_slices() -> None:
    problem = Problem(Placement.linear(2), 2, ps.Costs(), slices=3)
    with pytest.raises(ScheduleError, match=r"cannot begin a search for .*2 microbatches of 3 slices"):
        search(problem, rounds=10, start=[ps.schedule("seq1f1b", 2, 2, slices=2)])


@pytest.mark.parametrize("limit", [2.0, 3.0, 4.0, None])
@pytest.mark.parametrize(
    "placement", [Placement.linear(4), Placement.v(4), Placement.looped(4, 2), Placement.wave(4, 2)], ids=lambda placement: placement.kind
)
def test_the_search_is_never_worse_than_a_named_schedule(placement: Placement, limit: float | None) -> None:
    problem = problem_of(placement, 8, limit, uneven=limit == 3.0)
    found = search(problem, rounds=300)
    check(problem, found)
    assert found.objective <= best_named(problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "limit", "uneven", "latency"),
    [
        (Placement.v(4), 2.0, False, 50.0),
        (Placement.v(4), 3.0, False, 50.0),
        (Placement.v(4), 4.0, False, 50.0),
        (Placement.linear(4), 4.0, True, 50.0),
        (Placement.v(4), 4.0, True, 50.0),
        (Placement.looped(4, 2), 6.0, True, 50.0),
        (Placement.linear(4), 6.0, False, 400.0),
        (Placement.v(4), 4.0, False, 400.0),
        (Placement.wave(4, 2), 4.0, False, 400.0),
    ],
)
def test_the_search_beats_every_named_schedule_if_that_is_possible(
    placement: Placement, limit: float, uneven: bool, latency: float
) -> None:
    problem = problem_of(placement, 8, limit, uneven=uneven, latency=latency)
    assert search(problem, rounds=8000).objective < best_named(problem)


@pytest.mark.parametrize(("limit", "peer"), [(2.0, 0.388), (3.0, 0.203), (4.0, 0.108)])
def test_the_search_beats_the_peers(limit: float, peer: float) -> None:
    """Bubbles of the best schedules elsewhere, for the same times and memory."""
    problem = problem_of(Placement.wave(4, 2), 8, limit)
    found = search(problem, rounds=6000)
    check(problem, found)
    assert found.schedule is not None
    assert problem.evaluate(found.schedule).bubble < peer


def test_the_same_seed_gives_the_same_schedule() -> None:
    problem = problem_of(Placement.v(3), 6, 2.5)
    first, second = (search(problem, rounds=2000, seed=7) for _ in range(2))
    assert first.schedule == second.schedule
    assert first == replace(second, schedule=first.schedule)


def test_nothing_is_found_if_nothing_fits() -> None:
    found = search(problem_of(Placement.v(3), 6, 0.9), rounds=500)
    assert found.schedule is None
    assert math.isinf(found.objective)


def test_backwards_are_full_or_split_whichever_is_faster() -> None:
    """A full backward saves a quarter of a rank's work; in the drain only I has to be waited for."""
    costs = ps.Costs(f=2.0, i=2.0, w=2.0, b=3.0)
    problem = Problem(Placement.linear(3), 6, costs)
    found = search(problem, rounds=6000)
    check(problem, found)
    assert found.schedule is not None
    kinds = found.schedule.rows
    assert kinds.is_kind(Kind.B).any()
    assert kinds.is_kind(Kind.W).any()
    full = problem.objective(problem.evaluate(ps.schedule("1f1b", 3, 6)))
    split = problem.objective(problem.evaluate(ps.schedule("zb-h2", 3, 6)))
    assert found.objective < min(full, split)


def test_backwards_stay_full_without_permission_to_split() -> None:
    problem = replace(problem_of(Placement.v(3), 6, 3.0), split=False)
    found = search(problem, rounds=1500)
    check(problem, found)
    assert found.schedule is not None
    assert not found.schedule.rows.is_kind(Kind.I, Kind.W).any()


def test_without_a_barrier_spans_are_minimised() -> None:
    problem = replace(problem_of(Placement.v(4), 8, 4.0, uneven=True), barrier=False)
    found = search(problem, rounds=4000)
    check(problem, found)
    assert found.objective < best_named(problem)


def test_received_messages_count_for_the_memory() -> None:
    problem = problem_of(Placement.v(3), 9, 3.0)
    problem = replace(problem, costs=replace(problem.costs, output=0.1, bandwidth=0.002))
    found = search(problem, rounds=2000)
    check(problem, found)
    assert found.objective < best_named(problem)


def test_both_directions_begin_with_the_named_schedules() -> None:
    problem = Problem(Placement.bidirectional(4), 8, ps.Costs(f=1.0, i=1.3, w=0.7, latency=0.1), memory_limit=(6.0,) * 4)
    found = search(problem, rounds=2000)
    check(problem, found)
    assert found.objective < best_named(problem)


def test_progress_tells_of_every_improvement() -> None:
    problem, told = problem_of(Placement.v(3), 6, 2.5), []
    found = search(problem, rounds=2000, progress=lambda schedule, objective: told.append((schedule, objective)))
    values = [objective for _, objective in told]
    assert values == sorted(values, reverse=True)
    assert told[-1] == (found.schedule, found.objective)


def test_the_search_can_be_stopped() -> None:
    problem = problem_of(Placement.linear(4), 8, 4.0)
    found = search(problem, seconds=1000.0, start=[ps.schedule("1f1b", 4, 8)], stop=lambda: True)
    assert found.schedule == ps.schedule("1f1b", 4, 8) or found.objective < problem.objective(problem.evaluate(ps.schedule("1f1b", 4, 8)))


@pytest.mark.parametrize("start", [ps.schedule("1f1b", 3, 8), ps.schedule("1f1b", 4, 9), ps.schedule("zbv", 4, 8)])
def test_a_start_must_belong_to_the_problem(start: ps.Schedule) -> None:
    with pytest.raises(ScheduleError, match="cannot begin a search"):
        search(problem_of(Placement.linear(4), 8, 4.0), rounds=10, start=[start])


def test_a_start_with_split_backwards_is_refused_without_permission() -> None:
    with pytest.raises(ScheduleError, match="splits its backwards"):
        search(replace(problem_of(Placement.linear(4), 8, 4.0), split=False), rounds=10, start=[ps.schedule("zb-h1", 4, 8)])


@pytest.mark.slow
def test_many_microbatches_are_sampled() -> None:
    problem = problem_of(Placement.v(4), 256, 3.0)
    sample = shorten(problem)
    assert sample is not None
    assert sample.microbatches < 64
    found = search(problem, rounds=400)
    check(problem, found)
    assert found.objective < best_named(problem)


def test_different_microbatches_are_not_sampled() -> None:
    costs = ps.Costs(f=[[1.0 + microbatch % 2 for microbatch in range(1000)]] * 4)
    assert shorten(Problem(Placement.linear(4), 1000, costs)) is None
