"""Bounds of sliced problems, against sliced schedules with slices of any lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.bounds.overall import OverallBound
from penstock.planner.problem import Problem
from planner.sliced_models import GRANULARITY, SLICED, random_lengths, random_model
from planner.solver_extra import needs_solver


def draw_case(seed: int) -> tuple[ps.Profile, ps.Schedule, Problem]:
    """A random model, a sliced schedule of it, and the problem that it solves with all the memory that it needs."""
    chance = np.random.default_rng(seed)
    name, ranks, slices = str(chance.choice(SLICED)), int(chance.integers(1, 5)), int(chance.integers(2, 6))
    schedule = ps.schedule(name, ranks=ranks, microbatches=int(chance.integers(1, 5)), slices=slices)
    profile = random_model(chance, layers=schedule.stages + int(chance.integers(0, 4)))
    cuts = np.sort(chance.choice(np.arange(1, len(profile)), schedule.stages - 1, replace=False))
    sizes = tuple(np.diff(np.concatenate(([0], cuts, [len(profile)]))).tolist())
    lengths = random_lengths(chance, profile.tokens or 0, slices)
    flags = tuple((chance.uniform(size=schedule.stages) < 0.2).tolist())
    split = bool(schedule.rows.is_kind(Kind.I).any())
    shape = profile, schedule.placement, schedule.microbatches, sizes, flags, None, bool(chance.integers(2)), split
    return profile, schedule, Problem.cut(*shape, lengths)


@pytest.mark.parametrize("seed", range(200))
def test_no_sliced_schedule_is_below_a_bound(seed):
    profile, schedule, problem = draw_case(seed)
    timeline = problem.evaluate(schedule)
    objective = problem.objective(timeline)
    tight = replace(problem, memory_limit=tuple(timeline.peak_memory))
    assert tight.fits(timeline)
    for name, bound in lower_bound(tight).all.items():
        assert bound <= objective * (1 + 1e-9), name
    within = tight.memory_limit, any(tight.recompute), tight.barrier, tight.split
    overall = OverallBound(profile, schedule.microbatches, schedule.ranks, 1, *within, schedule.slices, GRANULARITY)
    for argument in (overall.average, overall.bound_largest_layer, overall.bound_one_microbatch, overall.bound_holding):
        assert argument() <= objective * (1 + 1e-9), argument.__name__


@needs_solver
@pytest.mark.parametrize("seed", range(3))
def test_no_sliced_schedule_is_below_a_linear_program(seed):
    _, schedule, problem = draw_case(seed)
    timeline = problem.evaluate(schedule)
    tight = replace(problem, memory_limit=tuple(timeline.peak_memory))
    for name, bound in lower_bound(tight, seconds=0.2).all.items():
        assert bound <= problem.objective(timeline) * (1 + 1e-9), name


def test_a_backward_waits_for_all_slices_of_its_microbatch():
    """One microbatch of four slices on two ranks: rank 1 starts after one slice, and rank 0 is idle until all have gone through rank 1."""
    costs = ps.Costs(f=1.0, i=1.0, w=1.0)
    sliced = Problem(Placement.linear(2), 1, costs, slices=4)
    as_microbatches = Problem(Placement.linear(2), 4, costs)
    assert lower_bound(sliced).value > lower_bound(as_microbatches).value


def test_room_for_less_than_all_slices_of_a_microbatch_is_not_enough():
    costs = ps.Costs(activation=1.0)
    assert lower_bound(Problem(Placement.linear(2), 1, costs, (3.9, 3.9), slices=4)).value == float("inf")
    assert lower_bound(Problem(Placement.linear(2), 1, costs, (4.0, 4.0), slices=4)).value < float("inf")


def test_the_bound_is_close_for_slices_of_equal_times():
    """Seq1F1B idles for (p - 1) (F + B) / q; its bound is that far from it at most."""
    problem = Problem(Placement.linear(4), 4, ps.Costs(f=1.0, i=1.0, w=1.0), slices=8, split=False)
    taken = problem.objective(problem.evaluate(ps.schedule("seq1f1b", ranks=4, microbatches=4, slices=8)))
    assert taken == 4 * 8 * 3 + 3 * 3
    assert lower_bound(problem).value == taken
