"""The exact solver and its bounds against every order, and against its own claims."""

from __future__ import annotations

import importlib.util
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import MissingExtraError
from penstock.ir.action import Action
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.exact import CLOSE, Solved, solve
from penstock.planner.problem import Problem
from planner.small_problems import SMALL, best_of_all, problems
from planner.solver_extra import needs_solver

ROUNDING = 1e-9


def check_claims(problem: Problem, solved: Solved) -> None:
    """What is said of a result is what the simulator says."""
    assert solved.bound <= solved.objective
    if solved.schedule is None:
        assert solved.objective == math.inf
        assert not solved.proven
        return
    timeline = problem.evaluate(solved.schedule)
    assert solved.objective == problem.objective(timeline)
    assert problem.fits(timeline)
    assert not solved.infeasible
    assert solved.proven == (solved.objective <= solved.bound * (1 + CLOSE))


# Against every order --------------------------------------------------------------------------------------------------


@needs_solver
@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(problem=problems())
def test_the_solver_finds_the_best_order_and_its_bound_stays_below(problem: Problem) -> None:
    check_against_all_orders(problem)


@needs_solver
@pytest.mark.slow
@settings(deadline=None, max_examples=3)
@given(problem=problems(SMALL))
def test_the_solver_finds_the_best_of_more_orders(problem: Problem) -> None:
    check_against_all_orders(problem)


def check_against_all_orders(problem: Problem) -> None:
    best = best_of_all(problem)
    for name, value in lower_bound(problem, seconds=0.3).all.items():
        assert value <= best * (1 + ROUNDING), name
    solved = solve(problem, seconds=20, workers=1)
    check_claims(problem, solved)
    assert solved.infeasible == (best == math.inf)
    if best < math.inf:
        assert solved.proven
        assert solved.objective == pytest.approx(best, rel=CLOSE)


@needs_solver
@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(problem=problems(output=True))
def test_the_bound_holds_with_receive_buffers(problem: Problem) -> None:
    """When buffers are taken depends on how receives are placed: the model may allow more, and says so by not claiming a proof."""
    best = best_of_all(problem)
    solved = solve(problem, seconds=5, workers=1)
    check_claims(problem, solved)
    assert solved.bound <= best * (1 + ROUNDING)
    assert solved.objective >= best * (1 - ROUNDING)
    if solved.infeasible:
        assert best == math.inf


ONE_LANE = (((0, 0), (0, 1)), ((2, 0), (0, 0)))
"""Both directions share a lane, and have one of their own."""


@needs_solver
@pytest.mark.slow
@pytest.mark.parametrize("contention", ["pair", "rank", "links"])
@pytest.mark.parametrize("barrier", [True, False])
def test_the_bound_holds_with_shared_links(contention: str, barrier: bool) -> None:
    costs = Costs(f=0.5, i=0.75, w=0.25, latency=1.25, contention=contention, lanes=ONE_LANE if contention == "links" else None)
    problem = Problem(Placement.linear(2), 2, costs, barrier=barrier)
    solved = solve(problem, seconds=5, workers=1)
    check_claims(problem, solved)
    best = best_of_all(problem)
    assert solved.bound <= best * (1 + ROUNDING)
    assert solved.objective >= best * (1 - ROUNDING)


@needs_solver
def test_a_link_slower_than_its_senders_is_first_come_first_served() -> None:
    """Two stages feed one channel: the message of the longer way may not overtake."""
    costs = Costs(f=(0.25, 1.0, 0.25, 0.5), i=0.5, w=0.25, latency=1.5)
    problem = Problem(Placement.looped(2, 2), 1, costs)
    solved = solve(problem, seconds=10, workers=1)
    check_claims(problem, solved)
    assert solved.proven
    assert solved.objective == pytest.approx(best_of_all(problem))


# Claims ---------------------------------------------------------------------------------------------------------------


@st.composite
def larger(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """A problem that takes more than the time given, and a schedule that fits it."""
    name = draw(st.sampled_from(("1f1b", "zb-h1", "zbv", "v-half", "interleaved-1f1b", "dualpipe-v", "chimera")))
    schedule = ps.schedule(name, ranks=4, microbatches=draw(st.integers(3, 6)))
    times = {field: draw(st.floats(0.2, 3.0)) for field in ("f", "i", "w")}
    costs = Costs(
        **times, latency=draw(st.floats(0.0, 1.0)), weight_stash=draw(st.floats(0.0, 1.0)), overlap=draw(st.sampled_from((0.8, 1.0)))
    )
    peak = ps.simulate(ps.lower(schedule), costs).peak_memory
    limit = tuple(each * draw(st.sampled_from((1.0, 1.2))) for each in peak)
    return Problem(schedule.placement, schedule.microbatches, costs, limit, barrier=draw(st.booleans())), schedule


@needs_solver
@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(drawn=larger())
def test_the_solver_returns_its_best_when_time_is_up(drawn: tuple[Problem, Schedule]) -> None:
    problem, start = drawn
    solved = solve(problem, seconds=0.3, start=start, workers=1)
    check_claims(problem, solved)
    assert solved.objective <= problem.objective(problem.evaluate(start))


@needs_solver
def test_a_start_that_meets_the_bound_needs_no_solver() -> None:
    """zbv at equal times is as good as the way to the last rank and its work."""
    problem = Problem(Placement.v(4), 8, Costs(f=0.5, i=0.5, w=0.5, activation=0.5), (4.0,) * 4)
    start = ps.schedule("zbv", ranks=4, microbatches=8)
    solved = solve(problem, seconds=0.0, start=start)
    assert solved.proven
    assert solved.schedule is start
    check_claims(problem, solved)


@needs_solver
def test_a_start_that_does_not_fit_is_not_a_result() -> None:
    problem = Problem(Placement.linear(2), 3, Costs(), (1.0, 1.0))
    solved = solve(problem, seconds=10, start=ps.schedule("gpipe", ranks=2, microbatches=3), workers=1)
    check_claims(problem, solved)
    assert solved.proven
    assert solved.objective == 3 * 4 + 1  # one microbatch at a time, each W in the next one's way over rank 1, and the last W


@needs_solver
def test_microbatches_of_a_start_may_come_in_any_order() -> None:
    rows = [["0F2", "0F0", "0F1", "0B0", "0B2", "0B1"], ["1F0", "1B0", "1F2", "1B2", "1F1", "1B1"]]
    start = Schedule.from_actions([[Action.parse(cell) for cell in row] for row in rows], Placement.linear(2))
    problem = Problem(Placement.linear(2), 3, Costs(), split=False)
    solved = solve(problem, seconds=10, start=start, workers=1)
    check_claims(problem, solved)
    assert solved.proven
    assert solved.objective == 3 * 3 + 3  # as 1f1b: (m + p - 1)(F + B)


@needs_solver
@pytest.mark.parametrize("barrier", [True, False])
def test_memory_below_one_microbatch_is_infeasible(barrier: bool) -> None:
    problem = Problem(Placement.v(2), 3, Costs(activation=1.0), (2.0, 1.9), barrier)
    solved = solve(problem, seconds=5)
    assert solved == Solved(None, math.inf, math.inf, proven=False, infeasible=True)


@needs_solver
def test_a_full_backward_is_chosen_if_it_is_better() -> None:
    """A stash larger than the activation: I and W do not fit, B does; if B takes less time, it is taken anyway."""
    tight = Problem(Placement.linear(2), 2, Costs(weight_stash=3.0), (2.0, 2.0))
    solved = solve(tight, seconds=10, workers=1)
    assert solved.proven
    assert solved.schedule is not None
    assert {action.kind.name for row in solved.schedule for action in row} == {"F", "B"}
    quick = Problem(Placement.linear(2), 1, Costs(b=1.25))
    solved = solve(quick, seconds=10, workers=1)
    assert solved.proven
    assert solved.objective == best_of_all(quick)


@needs_solver
@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "microbatches", "limit"),
    [(Placement.linear(4), 8, 2.0), (Placement.linear(4), 8, 4.0), (Placement.v(3), 6, 2.0), (Placement.looped(3, 2), 6, 3.0)],
)
def test_middling_problems_are_proven_and_bounds_are_near(placement: Placement, microbatches: int, limit: float) -> None:
    share = 1 / placement.chunks
    costs = Costs(f=share, i=share, w=share, activation=share, weight_stash=share / 2)
    problem = Problem(placement, microbatches, costs, (limit,) * placement.ranks)
    solved = solve(problem, seconds=60, workers=2)
    check_claims(problem, solved)
    assert solved.proven
    assert solved.objective <= 1.06 * lower_bound(problem, seconds=1.0).value


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ortools" else find(name, *rest))
    problem = Problem(Placement.linear(2), 2, Costs())
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[solve\]' in a clone"):
        solve(problem, seconds=1)
    assert lower_bound(problem, seconds=1.0) == lower_bound(problem)
