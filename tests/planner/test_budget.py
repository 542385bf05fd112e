"""Budgets: rounds that make runs equal, seconds that end them, and requests that are refused at once."""

from __future__ import annotations

import time

import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.budget import SolverBudget
from penstock.planner.named_schedules import is_training, list_candidates
from penstock.planner.order_search.search import search
from penstock.planner.problem import Problem
from penstock.planner.request import check_names
from penstock.schedules.registry import algorithms
from planner.solver_extra import needs_solver

LAYER = ps.Layer(f=500, i=700, w=300, activation=0.5, weight_stash=0.25)
EIGHT = ps.Profile([LAYER] * 8, latency=50)


def plan_of(seed: int, **asked: object) -> ps.Plan:
    given = {"ranks": 4, "microbatches": 8, "memory_limit": 2.0, "rounds": 600, "seconds": 600, "seed": seed, **asked}
    return ps.plan(EIGHT, **given)


# Rounds ---------------------------------------------------------------------------------------------------------------


def test_equal_arguments_give_equal_plans() -> None:
    """Schedule, figures, bounds and all alternatives, whatever else the machine does meanwhile."""
    one, other = plan_of(3), plan_of(3)
    assert one.to_json() == other.to_json()
    assert all("OR-tools" in note for note in one.notes)  # nothing was cut short


@needs_solver
def test_the_bounds_of_linear_programs_and_solvers_are_equal_too() -> None:
    problem = Problem(ps.Placement.v(4), 8, ps.Costs(activation=0.5, weight_stash=0.25), (2.0,) * 4)
    budgets = [SolverBudget(600.0, 0.4) for _ in range(2)]
    first, second = (lower_bound(problem, budget=budget) for budget in budgets)
    assert first == second
    assert "flow" in first.all
    assert budgets[0].spent == budgets[1].spent > 0
    assert not budgets[0].late


def test_the_plan_says_that_the_seconds_ran_out_first() -> None:
    plan = plan_of(0, rounds=10**9, seconds=0.3)
    assert any(note.startswith("stopped after 0.3 s; ") and "so another run may find a different plan" in note for note in plan.notes)
    assert "stopped after 0.3 s; " in plan.report()


def test_a_search_with_both_counts_rounds_and_stops_by_the_clock() -> None:
    costs = ps.Costs(f=500.0, i=700.0, w=300.0, latency=50.0, activation=0.5, weight_stash=0.25)
    problem = Problem(ps.Placement.v(4), 8, costs, (2.0,) * 4)
    slow = search(problem, rounds=10**9, seconds=0.2)
    assert slow.late
    quick = [search(problem, rounds=50, seconds=600) for _ in range(2)]
    assert not quick[0].late
    assert quick[0].objective == quick[1].objective


@pytest.mark.parametrize("rounds", [-1, "many", float("nan")])
def test_rounds_are_a_number(rounds: object) -> None:
    with pytest.raises(ScheduleError, match="rounds"):
        plan_of(0, rounds=rounds)


# Scale ----------------------------------------------------------------------------------------------------------------


def test_a_thousand_ranks_are_listed_without_building_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = ps.Schedule.training

    def training(schedule: ps.Schedule) -> bool:
        built.append(schedule.ranks)
        return bool(original.__get__(schedule))

    is_training.cache_clear()
    monkeypatch.setattr(ps.Schedule, "training", property(training))
    found, refused = list_candidates(check_names(None), 1000, 4000)
    assert max(built, default=0) <= 8
    assert {family.algorithm.name for family in found} | set(refused) == set(algorithms())
    assert "no backward" in refused["inference"]


def test_seconds_are_respected_by_a_large_pipeline() -> None:
    """Timing all named schedules takes far longer: the rest is left out, and the plan says so."""
    profile = ps.Profile([LAYER] * 128, latency=50)
    before = time.process_time()
    plan = ps.plan(profile, ranks=64, microbatches=256, memory_limit=48.0, seconds=2)
    taken = time.process_time() - before
    assert any("named schedules not timed" in note for note in plan.notes)
    assert taken < 12


def test_a_thousand_ranks_can_be_stopped() -> None:
    """After the first candidate that fits."""
    profile = ps.Profile([LAYER] * 1000, latency=50)
    attempts: list[object] = []
    steps: list[str] = []
    asked = {"ranks": 1000, "microbatches": 8, "schedules": ["1f1b", "gpipe", "zb-h1", "searched"]}
    plan = ps.plan(profile, **asked, found=attempts.append, progress=lambda step: steps.append(step.what), stop=lambda: len(attempts) > 0)
    assert len(attempts) == 1
    assert plan.name == steps[0]


# Requests that cannot be met ------------------------------------------------------------------------------------------


def forbid(*_: object, **__: object) -> None:
    raise AssertionError("nothing need be tried")


def test_more_parameters_than_memory_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.planner.explore.Explorer.run", forbid)
    layer = ps.Layer(f=1, i=1, w=1, parameters=2.0, gradients=1.0, optimizer=3.0)
    with pytest.raises(ps.PlanError, match=r"keep 48 .* limit of 10 each have 40 in all\n(.*\n)*  a memory limit of 12: "):
        ps.plan(ps.Profile([layer] * 8), ranks=4, microbatches=8, memory_limit=10.0)


def test_a_layer_larger_than_any_rank_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.planner.explore.Explorer.run", forbid)
    layers = [ps.Layer(f=1, i=1, w=1), ps.Layer(name="head", f=1, i=1, w=1, parameters=7.0)]
    with pytest.raises(ps.PlanError, match=r"head alone keeps 7 .* no rank has more than 6"):
        ps.plan(ps.Profile(layers), ranks=2, microbatches=2, memory_limit=[6.0, 5.0])
