"""Candidates: what ranks hold at their peaks, and orders timed on other problems."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.planner.candidate import Candidate, find_moment
from penstock.planner.named_schedules import one_at_a_time
from penstock.planner.partition.cut import cut_layers
from penstock.planner.partition.layer_runs import Cutting, LayerRuns
from penstock.planner.problem import Problem
from penstock.schedules.registry import algorithms
from penstock.verifier.rules.memory import sum_held
from planner.model_strategies import models

A = ps.Layer(f=1, i=2, w=3, activation=10, weight_stash=4, output=2, parameters=100, gradients=50, optimizer=25)
B = ps.Layer(f=2, i=1, w=0, activation=20, weight_stash=1, output=3)
C = ps.Layer(f=4, i=4, w=4, activation=6, weight_stash=6, output=9, parameters=8)


PLACEMENTS = [ps.Placement.linear(2), ps.Placement.v(2), ps.Placement.looped(2, 2), ps.Placement.wave(2, 2)]


@given(st.data())
def test_one_microbatch_at_a_time_holds_what_the_partition_says(data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from(PLACEMENTS))
    profile = data.draw(models().filter(lambda model: len(model) >= placement.stages))
    recompute = tuple(data.draw(st.lists(st.booleans(), min_size=placement.stages, max_size=placement.stages)))
    sizes = cut_layers(profile, placement, recompute=recompute).sizes
    problem = Problem.cut(profile, placement, 3, sizes, recompute)
    schedule = one_at_a_time(placement, 3)
    ps.verify(ps.lower(schedule))
    peaks = ps.simulate(schedule, problem.costs).peak_memory
    cuts = np.array([[0, *np.cumsum(sizes)]])
    held = Cutting(LayerRuns(profile), placement, recompute, (0.0,) * placement.ranks, ()).excesses(cuts)[0]
    buffers = max(layer.output for layer in profile.layers)
    for peak, least in zip(peaks, held, strict=True):
        assert least <= peak + 1e-9
        assert peak <= least + 2 * buffers + 1e-9  # messages that have come in count for the simulator too


@pytest.mark.parametrize("moved", [0, 60])
@pytest.mark.parametrize("name", [name for name in algorithms() if name not in ("inference", "data-parallel")])
def test_the_fullest_moment_adds_up_to_the_peak(name, moved):
    schedule = ps.schedule(name, ranks=4, microbatches=9)
    stages = schedule.stages
    costs = ps.Costs(
        activation=[3 + stage for stage in range(stages)],
        weight_stash=[2] * stages,
        parameters=[100.0] * stages,
        output=[0.5] * stages,
        kept=[1 + stage for stage in range(stages)],
        kept_gradients=6.0,
    )
    program = ps.lower(schedule, offload=moved or None)
    peaks = ps.simulate(program, costs).peak_memory
    for rank in range(4):
        moment = find_moment(program, costs, rank, sum_held(program, costs))
        held = moment.other
        for stage, counts in zip(schedule.placement.stages_of(rank), moment.by_stage, strict=True):
            activations, stashes, kept, gradients = counts
            # Of a microbatch, which the slices share; the last one has no sum of gradients.
            held += 100 + (activations * (3 + stage) + stashes * 2 + kept * (1 + stage)) * schedule.slices
            held += gradients * 6 * (schedule.slices - 1)
        assert held == pytest.approx(peaks[rank])
        assert moment.other * 2 == pytest.approx(round(moment.other * 2))  # nothing but messages


@given(st.data())
@settings(max_examples=30)
def test_the_work_of_the_slowest_rank_is_a_bound(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1f1b", "zbv", "dualpipe", "chimera", "interleaved-zb"]))
    schedule = ps.schedule(name, ranks=2, microbatches=data.draw(st.integers(1, 5)))
    profile = data.draw(models().filter(lambda model: len(model) >= schedule.stages))
    sizes = cut_layers(profile, schedule.placement).sizes
    problem = Problem.cut(profile, schedule.placement, schedule.microbatches, sizes, (False,) * schedule.stages)
    candidate = Candidate.time(name, problem, schedule)
    assert problem.work <= candidate.objective * (1 + 1e-9)
    assert problem.work == pytest.approx(max(candidate.timeline.busy))


def test_an_order_on_another_problem_is_timed_as_if_it_was_built_for_it():
    schedule = ps.schedule("zbv", ranks=2, microbatches=5)
    profile = ps.Profile([A, B, C, A, B, C], latency=0.25, bandwidth=3)
    none = (False,) * 4
    one, other = (Problem.cut(profile, schedule.placement, 5, sizes, none, (500.0, 900.0)) for sizes in ((1, 2, 2, 1), (2, 1, 1, 2)))
    again, built = Candidate.time("zbv", one, schedule).retime(other), Candidate.time("zbv", other, schedule)
    assert (again.objective, again.fits, again.excess) == (built.objective, built.fits, built.excess)
    assert again.timeline.peak_memory == built.timeline.peak_memory
