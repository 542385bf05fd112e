"""Plans of estimated profiles: memory that stays free, and times that count once per step."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.errors import CostsError, ScheduleError
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.bounds.overall import OverallBound

MODEL = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=1, gradients=1)] * 4)
SMALL = {"layers": 6, "hidden": 256, "heads": 8, "sequence": 512, "vocabulary": 1000, "flops": 1e12}


def plan_of(profile: ps.Profile, **asked: object) -> ps.Plan:
    return ps.plan(profile, **{"ranks": 2, "microbatches": 4, "schedules": ["1f1b", "gpipe", "zb-h1"], "seconds": 0, **asked})


# Headroom -------------------------------------------------------------------------------------------------------------


def test_an_estimate_leaves_five_percent_free() -> None:
    profile = ps.Profile.transformer(**SMALL)
    assert profile.estimated
    full = max(plan_of(profile, schedules="1f1b").predicted.peak_memory)
    plan = plan_of(profile, memory_limit=full / 0.94)
    assert max(plan.predicted.peak_memory) <= 0.95 * full / 0.94
    assert plan.memory_limit == pytest.approx((0.95 * full / 0.94,) * 2)
    assert any("5% of each memory limit is kept free" in note for note in plan.notes)
    with pytest.raises(ps.PlanError):
        plan_of(profile, memory_limit=full, schedules="1f1b", microbatches=4)
    assert plan_of(profile, memory_limit=full, schedules="1f1b", headroom=0).predicted.peak_memory


def test_a_measured_profile_may_use_the_whole_limit() -> None:
    full = max(plan_of(MODEL, schedules="1f1b").predicted.peak_memory)
    assert max(plan_of(MODEL, memory_limit=full, schedules="1f1b").predicted.peak_memory) == full
    with pytest.raises(ps.PlanError):
        plan_of(MODEL, memory_limit=full, schedules="1f1b", headroom=0.01)


@pytest.mark.parametrize("headroom", [-0.1, 1.0, "little"])
def test_headroom_is_a_share(headroom: object) -> None:
    with pytest.raises(ScheduleError, match="headroom"):
        plan_of(MODEL, memory_limit=100.0, headroom=headroom)


# Reduction and optimizer ----------------------------------------------------------------------------------------------


def test_reduction_and_optimizer_come_after_the_last_backward() -> None:
    """On one rank the step is the work, the sum of all gradients and the optimizer's step."""
    layers = [replace(layer, reduction=0.5, update=0.25) for layer in MODEL.layers]
    plan = ps.plan(replace(MODEL, layers=layers), ranks=1, microbatches=3, schedules="1f1b", seconds=0)
    assert plan.objective == pytest.approx(3 * 4 * 3 + 4 * 0.5 + 4 * 0.25)
    assert plan.bound == pytest.approx(plan.objective)


def test_reduction_and_update_do_not_grow_with_the_microbatch() -> None:
    layer = ps.Layer(f=1, i=1, w=1, reduction=0.5, update=0.25).scaled(4)
    assert (layer.f, layer.reduction, layer.update) == (4, 0.5, 0.25)


# Overlap and contention -----------------------------------------------------------------------------------------------


def test_overlap_and_contention_reach_the_simulator(tmp_path) -> None:
    profile = replace(MODEL, overlap=0.5, contention="pair", latency=0.1, estimated=True)
    profile.save(tmp_path / "p.toml")
    assert ps.Profile.load(tmp_path / "p.toml") == profile
    plan = ps.plan(profile, ranks=4, microbatches=8, schedules=["dualpipe", "1f1b"], seconds=0)
    assert (plan.costs.overlap, plan.costs.contention) == (0.5, "pair")
    slow = ps.plan(replace(profile, overlap=1.0), ranks=4, microbatches=8, schedules=["dualpipe", "1f1b"], seconds=0)
    assert plan.objective <= slow.objective


def test_bounds_hold_with_overlapped_actions() -> None:
    """DualPipe runs forwards and backwards together: half of the work may be all the time that it takes."""
    profile = replace(MODEL, overlap=0.5)
    plan = ps.plan(profile, ranks=4, microbatches=16, schedules=["dualpipe"], seconds=0)
    assert plan.problem.work <= plan.objective
    assert lower_bound(plan.problem).value <= plan.objective
    assert OverallBound(profile, 16, 4, copies=2).value() <= plan.objective


@pytest.mark.parametrize(("field", "value"), [("overlap", -1.0), ("overlap", "half"), ("contention", "none"), ("estimated", 1)])
def test_mistakes_are_reported(field: str, value: object) -> None:
    with pytest.raises(CostsError, match=field):
        replace(MODEL, **{field: value})
