"""The overall bound against the best orders of every candidate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.planner.order_search.search import search
from penstock.planner.problem import Problem
from penstock.schedules.registry import algorithm
from planner.small_problems import best_of_all, eighths, some_eighths

CLOSE = 1e-9


def considered(plan: ps.Plan) -> list[Problem]:
    """Every setting that was timed, whether it fits or not."""
    placements = {
        (name, 1 if placement.kind == "bidirectional" else placement.chunks): placement
        for name in {each.name for each in plan.alternatives}
        for placement in [algorithm(name).build(plan.placement.ranks, plan.microbatches).placement]
    }
    found = []
    for each in plan.alternatives:
        if each.sizes is not None:
            placement = placements[each.name, 1 if each.placement == "bidirectional" else each.chunks]
            flags = (False,) * placement.stages
            found.append(
                Problem.cut(plan.profile, placement, plan.microbatches, each.sizes, flags, plan.memory_limit, plan.barrier, plan.split)
            )
    return found


@st.composite
def small_models(draw: st.DrawFn) -> ps.Profile:
    times = [{name: draw(some_eighths) for name in ("f", "i", "w")} for _ in range(2)]
    layers = [ps.Layer(**taken, activation=1) for taken in times]
    return ps.Profile(layers, latency=draw(eighths))


@settings(max_examples=10, deadline=None)
@given(small_models(), st.sampled_from((None, 2.0, 1.5)), st.booleans())
def test_no_order_of_any_candidate_is_below_the_overall_bound(model: ps.Profile, limit: float | None, barrier: bool) -> None:
    given = {"ranks": 2, "microbatches": 2, "schedules": ["1f1b", "chimera"], "seconds": 0, "barrier": barrier, "split": False}
    try:
        plan = ps.plan(model, memory_limit=limit, **given)
    except ps.PlanError:
        return
    assert plan.overall_bound <= min(best_of_all(problem) for problem in considered(plan)) * (1 + CLOSE)


FOUR = ps.Profile([ps.Layer(f=2, i=2, w=2, activation=2, weight_stash=1)] * 4, latency=0.05)


@pytest.mark.parametrize("limit", [None, 9.0])
def test_the_overall_bound_holds_for_two_copies_of_the_model(limit):
    """DualPipe's own order is not the best of its placement, and that it is over a limit says nothing of others."""
    plan = ps.plan(FOUR, ranks=4, microbatches=8, schedules=["dualpipe", "1f1b"], memory_limit=limit, seconds=0)
    problem = next(each for each in considered(plan) if each.placement.kind == "bidirectional")
    start = ps.schedule("dualpipe", 4, 8)
    named = problem.evaluate(start)
    assert problem.fits(named) == (limit is None)
    found = search(problem, rounds=300, start=[start])
    assert found.schedule is not None
    ps.verify(ps.lower(found.schedule), memory_limit=limit, costs=problem.costs)
    assert plan.overall_bound <= found.objective
    assert found.objective < problem.objective(named) or limit is not None
    assert all(each.bound is not None and each.bound <= found.objective for each in plan.alternatives if each.name == "dualpipe")
