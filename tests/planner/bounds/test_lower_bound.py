"""Lower bounds against schedules that fit their memory to a hair, against formulas, and against each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.costs import Costs
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bounds.lower_bound import Bound, find_time_unit, lower_bound
from penstock.planner.bounds.rank_bounds import jackson
from penstock.planner.problem import Problem
from planner.solver_extra import needs_solver
from simulator import draws

CLOSE = 1e-9


def check(bound: Bound, objective: float) -> None:
    """Every argument holds, and the best of them is the bound."""
    for name, value in bound.all.items():
        assert value <= objective * (1 + CLOSE), f"{name}: {value} is more than {objective}"
    assert bound.value == bound.all[bound.name] == max(bound.all.values())


def as_tight_as_it_is(schedule: Schedule, costs: Costs, *, barrier: bool) -> tuple[Problem, float]:
    """The problem whose memory limit is just what the schedule holds, and the schedule's objective."""
    loose = Problem(schedule.placement, schedule.microbatches, costs, None, barrier, slices=schedule.slices)
    timeline = loose.evaluate(schedule)
    problem = replace(loose, memory_limit=tuple(timeline.peak_memory))
    return problem, problem.objective(timeline)


# Validity -------------------------------------------------------------------------------------------------------------


@st.composite
def timed(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """Any schedule, good or bad, overlapped or not, under any costs."""
    schedule = draw(st.one_of(draws.zoo(), draws.orders()).filter(lambda each: each.training))
    schedule = schedule.with_graph(StageGraph.chain(schedule.stages))
    contention = draw(draws.contentions)
    amounts = draws.eighths if contention == "independent" else draws.some_eighths
    return schedule, draw(draws.costs(schedule, amounts, contention))


@settings(deadline=None, max_examples=80)
@given(drawn=timed(), barrier=st.booleans())
def test_no_schedule_beats_a_bound_within_its_own_memory(drawn: tuple[Schedule, Costs], barrier: bool) -> None:
    problem, objective = as_tight_as_it_is(*drawn, barrier=barrier)
    check(lower_bound(problem), objective)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(drawn=timed(), barrier=st.booleans())
def test_no_schedule_beats_the_linear_program(drawn: tuple[Schedule, Costs], barrier: bool) -> None:
    problem, objective = as_tight_as_it_is(*drawn, barrier=barrier)
    check(lower_bound(problem, seconds=0.3), objective)


GOOD = [
    ("1f1b", 4, 8),
    ("zb-h1", 4, 8),
    ("zb-h2", 4, 12),
    ("zb-auto", 5, 10),
    ("zbv", 4, 8),
    ("v-half", 4, 8),
    ("v-min", 6, 9),
    ("interleaved-1f1b", 4, 8),
    ("interleaved-zb", 4, 8),
    ("hanayo", 4, 8),
    ("dualpipe", 4, 8),
    ("dualpipe-v", 4, 10),
    ("chimera", 4, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize(("name", "ranks", "microbatches"), GOOD)
def test_good_schedules_stay_above_their_bounds(name: str, ranks: int, microbatches: int, barrier: bool) -> None:
    """Near the optimum a wrong bound shows."""
    schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches)
    for costs in (Costs(), Costs(f=1.0, i=1.4, w=0.6, latency=0.05, weight_stash=0.5), Costs(latency=0.7, output=0.1, bandwidth=0.3)):
        problem, objective = as_tight_as_it_is(schedule, costs, barrier=barrier)
        check(lower_bound(problem, seconds=0.1), objective)


# Strength: known optima -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_few_microbatches_without_a_limit(ranks: int, latency: float) -> None:
    """For m <= p, without a limit, zero bubble takes (m + p - 1)(F + I) + W, and a hop more for each rank but one, there and back."""
    for microbatches in range(1, ranks + 1):
        problem = Problem(Placement.linear(ranks), microbatches, Costs(f=2.0, i=3.0, w=1.0, latency=latency))
        expected = (microbatches + ranks - 1) * 5 + 2 * (ranks - 1) * latency + 1
        assert lower_bound(problem).value == pytest.approx(expected)


def test_one_microbatch_is_its_own_bound() -> None:
    """There and back once, each hop counted, then the first stage's W."""
    problem = Problem(Placement.v(3), 1, Costs(f=1.0, i=2.0, w=0.5, latency=0.25))
    assert lower_bound(problem).value == 6 * 3.0 + 2 * 4 * 0.25 + 0.5


def test_a_single_rank_only_works() -> None:
    problem = Problem(Placement.linear(1), 5, Costs(f=1.0, i=2.0, w=3.0, optimizer=4.0, reduce=0.5))
    assert lower_bound(problem).value == 5 * 6.0 + 0.5 + 4.0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_limit_of_one_microbatch_leaves_no_pipeline(ranks: int) -> None:
    """With room for one, a microbatch must be back before the next starts."""
    costs = Costs(f=1.0, i=1.5, w=0.5, latency=0.25)
    problem = Problem(Placement.linear(ranks), 6, costs, (1.0,) * ranks)
    trip = ranks * 2.5 + 2 * (ranks - 1) * 0.25
    assert lower_bound(problem).value >= 6 * trip + 0.5
    assert lower_bound(problem).all["chains"] >= 6 * trip + 0.5


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_zb_h1_is_proven_at_its_own_memory(ranks: int) -> None:
    """With room for p activations and equal times its (p - 1)(F + I - W) of bubble is optimal."""
    microbatches = 2 * ranks + 1
    problem = Problem(Placement.linear(ranks), microbatches, Costs(), (float(ranks),) * ranks)
    made = problem.objective(problem.evaluate(ps.schedule("zb-h1", ranks=ranks, microbatches=microbatches)))
    assert made == 3 * microbatches + (ranks - 1)
    assert lower_bound(problem, seconds=10.0).value == made


def test_zbv_is_proven_at_its_own_memory() -> None:
    """Room for p, equal times: no idle but the way to the last rank."""
    problem = Problem(Placement.v(4), 8, Costs(f=0.5, i=0.5, w=0.5, activation=0.5), (4.0,) * 4)
    assert problem.objective(problem.evaluate(ps.schedule("zbv", ranks=4, microbatches=8))) == lower_bound(problem).value == 24 + 1.5


def test_the_first_backward_bound_by_hand() -> None:
    """Rank 0 of 4 with room for 2: two forwards, then nothing until the first gradient is back at 3 x (1 + 2) + 1."""
    problem = Problem(Placement.linear(4), 8, Costs(f=1.0, i=2.0, w=1.0), (2.0,) * 4)
    assert lower_bound(problem).all["first backward"] == 10 + (8 * 4 - 2)


def test_the_holding_bound_by_hand() -> None:
    """Twelve units per rank and microbatch over a room of 1, which is full from the first forward to the last gradient's end."""
    problem = Problem(Placement.linear(4), 5, Costs(f=1.0, i=2.0, w=1.0), (1.0,) * 4)
    assert lower_bound(problem).all["holding"] == pytest.approx(5 * 12)


def test_memory_that_holds_no_microbatch_bounds_everything() -> None:
    costs = Costs(activation=1.0)
    assert lower_bound(Problem(Placement.v(2), 3, costs, (2.0, 2.0))).value < math.inf
    found = lower_bound(Problem(Placement.v(2), 3, costs, (2.0, 1.9)))
    assert found.value == math.inf
    assert found.name == "memory"


# Strength: better than work and one way through ------------------------------------------------------------------------

SKEWED = {"f": 1.0, "i": 1.4, "w": 0.6, "latency": 0.05, "weight_stash": 0.5}
HALVES = {"f": 0.5, "i": 0.7, "w": 0.3, "latency": 0.05, "activation": 0.5, "weight_stash": 0.25}
UNEVEN = {"f": (3.0, 1.0, 2.0, 1.5), "i": (4.0, 1.5, 2.0, 2.0), "w": (2.0, 1.0, 2.0, 1.0)}
TIGHT: list[Any] = [
    pytest.param(Placement.linear(4), 8, SKEWED, 2.0, id="linear"),
    pytest.param(Placement.v(4), 8, HALVES, 2.0, id="v"),
    pytest.param(Placement.v(8), 24, HALVES, 4.0, id="v-8"),
    pytest.param(Placement.looped(4, 2), 8, HALVES, 2.0, id="looped"),
    pytest.param(Placement.wave(3, 2), 6, HALVES, 3.0, id="wave"),
    pytest.param(Placement.linear(4), 12, UNEVEN, 2.0, id="uneven"),
    pytest.param(Placement.linear(4), 8, {"latency": 2.0}, 3.0, id="slow links"),
]


@needs_solver
@pytest.mark.slow
@pytest.mark.parametrize(("placement", "microbatches", "costs", "limit"), TIGHT)
def test_tight_memory_bounds_more_than_work_does(placement: Placement, microbatches: int, costs: dict[str, Any], limit: float) -> None:
    problem = Problem(placement, microbatches, Costs(**costs), (limit,) * placement.ranks)
    quick, slow = lower_bound(problem), lower_bound(problem, seconds=1.0)
    assert slow.value >= quick.value > 1.02 * quick.all["work"]
    assert slow.all["one rank"] >= slow.all["flow"] >= quick.value


def test_a_size_next_to_nothing_counts_as_nothing() -> None:
    """Its share of the limit is too small for a number."""
    costs = Costs(activation=1.0, weight_stash=5e-324)
    problems = [Problem(Placement.linear(4), 3, each, (3.0, 3.0, 2.0, 1.0)) for each in (costs, replace(costs, weight_stash=0.0))]
    assert lower_bound(problems[0]).value == lower_bound(problems[1]).value


@needs_solver
def test_the_linear_program_closes_what_no_quick_bound_does() -> None:
    """Equal times on a V with room for half of what zbv needs: 59 steps, which the exact solver finds."""
    problem = Problem(Placement.v(4), 8, Costs(activation=0.5, weight_stash=0.25), (2.0,) * 4)
    assert lower_bound(problem).value < lower_bound(problem, seconds=10.0).all["flow"] == 59.0


@needs_solver
def test_a_rank_solved_in_whole_closes_what_the_linear_program_does_not() -> None:
    """Equal times, looped twice, room for half: 63 steps; in parts the actions would do in 61."""
    problem = Problem(Placement.looped(4, 2), 8, Costs(activation=0.5, weight_stash=0.25), (2.0,) * 4)
    found = lower_bound(problem, seconds=30.0)
    assert found.all["flow"] < found.all["one rank"] == 63.0


# Parts ----------------------------------------------------------------------------------------------------------------

amounts = st.integers(0, 12).map(float)


@settings(deadline=None)
@given(jobs=st.lists(st.tuples(amounts, amounts, amounts), min_size=1, max_size=7))
def test_jackson_is_the_best_of_all_subsets(jobs: list[tuple[float, float, float]]) -> None:
    """Interrupting, the best end is the largest of first release + work + least tail over all sets of jobs."""
    sets = [[job for k, job in enumerate(jobs) if chosen >> k & 1] for chosen in range(1, 1 << len(jobs))]
    expected = max(min(r for r, _, _ in each) + sum(p for _, p, _ in each) + min(q for _, _, q in each) for each in sets)
    assert jackson(*np.array(jobs).T) == expected


def test_times_are_rounded_to_what_they_are_multiples_of() -> None:
    assert find_time_unit(Problem(Placement.linear(2), 2, Costs(f=0.3, i=1.2, w=0.6, latency=0.9))) == pytest.approx(0.3)
    assert find_time_unit(Problem(Placement.linear(2), 2, Costs(f=0.3, i=math.pi, w=0.6))) is None
    assert find_time_unit(Problem(Placement.linear(2), 2, Costs(overlap=0.5))) is None


@pytest.mark.parametrize(
    ("contention", "lanes", "bound"),
    [("rank", None, 1 + 60 + 1), ("pair", None, 1 + 30 + 13), ("links", (((0, 0), (3, 4)), ((5, 3), (0, 0))), 1 + 60 + 1)],
)
def test_messages_on_one_link_go_one_after_the_other(contention: str, lanes: Any, bound: float) -> None:
    """Three messages there and three back of 10 each, after one forward and before one gradient; each way has its own link with `pair`."""
    problem = Problem(Placement.linear(2), 3, Costs(f=1.0, i=1.0, w=1.0, latency=10.0, contention=contention, lanes=lanes))
    assert lower_bound(problem).all["links"] == bound
    assert lower_bound(problem).value <= problem.objective(problem.evaluate(ps.schedule("zb-h1", 2, 3)))
