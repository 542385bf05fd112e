"""Whole jobs of a measured profile."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product

import pytest

import penstock as ps
from penstock.errors import CostsError, PlanError
from penstock.planner.job.costs import make_costs
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.job.pipelines import PipelineTrials, ScheduleTemplates
from penstock.planner.job.search import list_configurations
from penstock.planner.problem import Problem
from planner.job.small_jobs import profile_job, small_job, unequal_profile


@pytest.fixture(scope="module")
def plan():
    return ps.plan_job(profile_job(memory=2.2e6), schedules=("1f1b", "zb-h1"))


def computed_profile(job: ps.Job, microbatch: int = 1) -> ps.Profile:
    """The profile of a transformer on one GPU, as if it had been measured there."""
    return replace(LayerCosts(job, ps.Configuration(microbatch=microbatch)).profile(), estimated=False)


@pytest.mark.parametrize("sharding", [0, 1, 2, 3])
def test_a_profile_is_sharded_like_the_transformer_that_it_was_computed_for(sharding):
    job = small_job(gpus=8)
    chosen = ps.Configuration(pipeline=2, data=4, sharding=sharding)
    wanted, own = LayerCosts(job, chosen).profile(), make_costs(replace(job, model=computed_profile(job)), chosen).profile()
    assert (own.latency, own.bandwidth) == (wanted.latency, wanted.bandwidth)
    for layer, other in zip(own.layers, wanted.layers, strict=True):
        for name in ("f", "i", "w", "activation", "workspace", "output", "parameters", "gradients", "optimizer", "reduction", "update"):
            assert getattr(layer, name) == pytest.approx(getattr(other, name)), (layer.name, name)


def test_the_plan_of_such_a_profile_takes_as_long_as_the_transformer():
    job, options = small_job(), {"microbatch": 1, "pipeline": (1, 2), "schedules": ("1f1b",)}
    wanted = ps.plan_job(job, tensor=1, context=1, vocabulary="ends", **options)
    own = ps.plan_job(replace(job, model=computed_profile(job)), **options)
    assert own.seconds == pytest.approx(wanted.seconds)
    assert own.configuration == wanted.configuration


@pytest.mark.parametrize(("name", "share"), [("1f1b", 0.55), ("zb-h1", 0.65)])
def test_no_cut_and_no_recompute_has_a_much_faster_slowest_rank(name, share):
    """Every cut of five layers, with every choice of recomputed layers, simulated."""
    profile = replace(unequal_profile(), layers=unequal_profile().layers[:5])
    chosen, templates = ps.Configuration(pipeline=2, data=2, sharding=1), ScheduleTemplates((name,))
    free = PipelineTrials(make_costs(profile_job(profile=profile, memory=1e12), chosen), templates).run()[0]
    job = profile_job(profile=profile, memory=share * max(free.candidate.timeline.peak_memory))
    costs, schedule, least = make_costs(job, chosen), free.candidate.schedule, math.inf
    for cut, flags in product(combinations(range(1, 5), 1), product((False, True), repeat=5)):
        sizes = (cut[0], 5 - cut[0])
        problem = Problem.cut(costs.profile(flags), schedule.placement, 4, sizes, (False, False), (job.limit,) * 2)
        if problem.work < least and problem.fits(problem.evaluate(schedule)):
            least = problem.work
    (trial,) = PipelineTrials(costs, templates).run()
    if least == math.inf:
        assert trial.timed is None
        assert trial.excess > 0
    else:
        assert any(trial.recomputed)
        assert least <= trial.candidate.problem.work <= 1.1 * least
        assert max(trial.candidate.timeline.peak_memory) <= job.limit * (1 + 1e-9)


def test_a_recomputed_layer_keeps_its_input_and_runs_forward_twice():
    costs = make_costs(profile_job(), ps.Configuration())
    kept, again = costs.profile().layers, costs.profile([False, True, False, False, True, False]).layers
    assert [layer.i for layer in again] == pytest.approx([1.2e-3, 5.5e-3, 1.8e-3, 3.6e-3, 4.4e-3, 1.2e-3])
    assert [layer.activation for layer in again] == [3e4, 1e4, 5e4, 4e4, 1e4, 6e4]
    assert again[1].workspace == kept[1].workspace + 8e4


def test_the_update_is_the_profile_s_or_that_of_its_bytes():
    job = profile_job(memory_share=1.0)
    layer = job.model.layers[0]
    own = make_costs(job, ps.Configuration()).profile().layers[0]
    assert own.update == pytest.approx((layer.gradients + 2 * layer.optimizer + layer.parameters) / 1e11)
    measured = replace(job.model, layers=[replace(one, update=3.0) for one in job.model.layers])
    assert make_costs(replace(job, model=measured), ps.Configuration()).profile().layers[0].update == pytest.approx(3e-3)


def test_degrees_and_sizes_of_a_profile():
    variant = replace(unequal_profile(), microbatch=2, layers=[layer.scaled(1.5) for layer in unequal_profile().layers])
    job = profile_job(gpus=8, profile=replace(unequal_profile(), variants=[variant]))
    configurations = list_configurations(job, {})
    assert {(one.tensor, one.context, one.vocabulary) for one in configurations} == {(1, 1, "ends")}
    assert {one.pipeline for one in configurations} == {1, 2, 4}
    assert {one.microbatch for one in configurations} == {1, 2}
    assert {one.sharding for one in configurations} == {1, 2, 3}
    scaled = make_costs(job, ps.Configuration(microbatch=2)).profile()
    assert scaled.layers[0].f == pytest.approx(1.5e-3)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"tensor": (2,)}, "tensor=2 needs the sizes of the model: a profile has whole layers, so tensor is 1"),
        ({"context": (1, 2)}, "context=2 needs the sizes of the model"),
        ({"vocabulary": ("spread",)}, "vocabulary=spread needs the sizes of the model"),
        ({"pipeline": (8,)}, "pipeline=8 is more than layers=6"),
        ({"microbatch": (3,)}, "microbatch=3 does not divide the 8 samples of each of 1 data ranks"),
    ],
)
def test_impossible_choices_are_refused(wanted, message):
    with pytest.raises(PlanError) as caught:
        list_configurations(profile_job(gpus=8 if "pipeline" in wanted else 4), wanted)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": unequal_profile(time_unit="")}, "has time_unit='' and size_unit='B'"),
        ({"model": unequal_profile(size_unit="")}, "has time_unit='ms' and size_unit=''"),
        ({"optimizer": "muon"}, "optimizer='muon' with a profile, which has the state of its own optimizer"),
        ({"model": [1]}, "a mapping of sizes or a penstock.Profile, got list"),
    ],
)
def test_wrong_profiles_are_refused(values, message):
    with pytest.raises(CostsError) as caught:
        replace(profile_job(), **values)
    assert message in str(caught.value)


def test_the_report_has_samples_and_layers(plan):
    report = plan.report()
    assert "job: a profile of 6 layers with 429.7KiB of parameters on 4 GPUs" in report
    assert f"{plan.samples_per_second:,.4g} samples per second" in report
    assert "tensor and context degrees are 1: a profile has the times of whole layers" in report
    assert "of 6 layers" in report
    assert (plan.tokens_per_second, plan.flops_per_gpu, plan.utilization) == (None, None, None)
    assert plan.excess == 0.0
    assert plan.proof.rules
    with_tokens = replace(plan.job, model=unequal_profile(tokens=128))
    assert with_tokens.tokens == 8 * 128
