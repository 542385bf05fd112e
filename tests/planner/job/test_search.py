"""The configurations of a job, and the search among them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.planner.candidate import Verdict
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.job.pipelines import LONG_GAIN, PipelineTrials, ScheduleTemplates
from penstock.planner.job.search import ConfigurationSearch, bound_memory, bound_seconds, list_configurations
from planner.job.small_jobs import small_job

SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b")


def tight_job(memory: float = 3.1e6, **values):
    return small_job(memory=memory, model={"layers": 4}, **values)


@cache
def time_all(memory, optimizer):
    """The time of every configuration, infinite if it does not fit."""
    job, orders = tight_job(memory, optimizer=optimizer, batch=8), ScheduleTemplates(SCHEDULES)
    return {one: PipelineTrials(LayerCosts(job, one), orders).run()[0].seconds for one in list_configurations(job, {})}


@pytest.mark.parametrize("memory", [64e6, 6e6, 3.1e6])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_the_choice_is_the_best_of_all_configurations(memory, optimizer):
    job = tight_job(memory, optimizer=optimizer, batch=8)
    configurations, every = list_configurations(job, {}), time_all(memory, optimizer)
    search = ConfigurationSearch(job, configurations, ScheduleTemplates(SCHEDULES))
    best = search.run()
    assert best.seconds == min(every.values()) < math.inf
    assert every[best.configuration] == best.seconds
    for trial in search.trials.values():
        assert trial.bound <= every[trial.configuration] * (1 + 1e-9)
        assert trial.verdict != Verdict.OVER or every[trial.configuration] == math.inf


@pytest.mark.parametrize(
    ("layers", "gpus", "values"), [(4, 8, {"memory": 4e6}), (8, 4, {"memory": 2.5e6, "bandwidth": 2e8, "optimizer": "muon"})]
)
def test_no_vocabulary_alone_is_faster_than_the_choice_among_all(layers, gpus, values):
    """Few microbatches over slow links, where the places of S and T decide."""
    job = small_job(gpus, 7, model={"layers": layers}, node_bandwidth=2e9, **values)
    names = (*SCHEDULES, "zbv")
    free = ps.plan_job(job, schedules=names).seconds
    alone = [ps.plan_job(job, schedules=names, vocabulary=vocabulary).seconds for vocabulary in ("ends", "head", "spread")]
    assert free == min(alone)


def test_memory_matters_to_that_choice():
    much, little = (sum(math.isfinite(seconds) for seconds in time_all(memory, "adam").values()) for memory in (64e6, 3.1e6))
    assert 0 < little < much


def test_degrees_multiply_to_the_gpus_and_divide_the_batch():
    job = small_job(gpus=8, batch=24, model={"layers": 5})
    configurations = list_configurations(job, {})
    assert len(set(configurations)) == len(configurations)
    for one in configurations:
        assert one.gpus == 8
        assert 24 % (one.data * one.microbatch) == 0
        assert one.pipeline <= 5
        assert one.tensor <= 4  # within a node of 4
    assert {one.pipeline for one in configurations} == {1, 2, 4}
    assert {one.sharding for one in configurations if one.replicas > 1} == {1, 2, 3}
    assert {one.sharding for one in configurations if one.replicas == 1} == {0}


def test_context_ranks_keep_enough_tokens():
    job = small_job(gpus=4, model={"sequence": 8192})
    assert {one.context for one in list_configurations(job, {})} == {1, 2}
    assert {one.context for one in list_configurations(job, {"context": (4,)})} == {4}


@pytest.mark.parametrize(
    ("wanted", "model", "message"),
    [
        ({"tensor": (4,)}, {"heads": 6, "hidden": 96}, "tensor=4 does not divide heads=6"),
        ({"tensor": (4,)}, {"heads": 12, "hidden": 96, "kv_heads": 6}, "tensor=4 and kv_heads=6: one must divide the other"),
        ({"tensor": (3,)}, {}, "is possible: tensor=3 does not divide gpus=4"),
        ({"pipeline": (3, 5)}, {}, "is possible: pipeline=3 does not divide gpus=4; pipeline=5 does not divide gpus=4"),
        ({"pipeline": (2,), "tensor": (4,)}, {}, "is possible: pipeline=2 x tensor=4 = 8 does not divide gpus=4"),
        (dict.fromkeys(("tensor", "pipeline", "context", "data"), (1,)), {}, "x tensor=1 x context=1 = 1 is less than gpus=4"),
        ({"pipeline": (4,)}, {"layers": 3}, "pipeline=4 is more than layers=3"),
        ({"data": (2,), "tensor": (1,), "pipeline": (1,)}, {}, "leaves data=4 of 4 GPUs, not 2"),
        ({"context": (4,)}, {"sequence": 126}, "sequence=126 cannot be shared among tensor=4 x context=4"),
        ({"microbatch": (3,)}, {}, "microbatch=3 does not divide the 10 samples of each of 1 data ranks"),
        ({"data": (4,)}, {}, "batch=10 cannot be shared among data=4"),
        ({"pipeline": (1,), "vocabulary": ("spread",)}, {}, "vocabulary='spread' needs more than one pipeline rank"),
        ({"selective": (True,)}, {}, "selective=True is for attention without flash"),
    ],
)
def test_impossible_degrees_are_refused_with_the_numbers(wanted, model, message):
    with pytest.raises(PlanError, match="no configuration of 4 GPUs with a batch of 10 is possible") as caught:
        list_configurations(small_job(batch=10, model=model), wanted)
    assert message in str(caught.value)
    assert str(caught.value).count(";") <= 2  # few reasons, those of the last check, however many configurations fail


def test_tokens_that_are_given_as_samples_are_refused_before_they_are_timed():
    with pytest.raises(PlanError, match=r"31250 microbatches of 16 on each of 2 data ranks are more than 4096: batch counts samples"):
        list_configurations(small_job(batch=1_000_000), {})
    assert list_configurations(small_job(batch=1_000_000), {"microbatch": (1,)})  # as asked for


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("chimera", "dualpipe"), "chimera: it runs two copies of the model, but a job with the sizes of a transformer"),
        (("seq1f1b",), "seq1f1b: it cuts sequences into slices"),
    ],
)
def test_schedules_that_no_configuration_can_have_are_refused_with_the_reason(names, reason):
    with pytest.raises(PlanError, match="none of the schedules is possible for any of") as caught:
        ps.plan_job(small_job(), pipeline=(2, 4), schedules=names)
    assert reason in str(caught.value)


def test_too_little_memory_is_refused_with_the_nearest_configuration():
    job = tight_job(1e6)
    with pytest.raises(
        PlanError, match=r"no configuration fits: \d+ were tried on 4 GPUs with 976.6KiB each( \(\S+ without the 5% that is kept free\))?\."
    ) as caught:
        ConfigurationSearch(job, list_configurations(job, {}), ScheduleTemplates(SCHEDULES)).run()
    assert "Nearest is pipeline 4, data 1, tensor 1" in str(caught.value)  # shares parameters and activations without copies
    assert "over on the fullest GPU. Take GPUs with at least" in str(caught.value)


def test_bounds_of_memory_are_below_the_simulated_peak():
    job = small_job(batch=8)
    for one in list_configurations(job, {}):
        costs = LayerCosts(job, one)
        trial = PipelineTrials(LayerCosts(job, one, recompute_all=True), ScheduleTemplates(("1f1b",)), limit=math.inf).run()[0]
        assert bound_memory(costs) <= max(trial.candidate.timeline.peak_memory) * (1 + 1e-9)
        plain = PipelineTrials(costs, ScheduleTemplates(("1f1b",)), limit=math.inf).run()[0]
        assert bound_seconds(costs, trial.candidate.microbatches) <= plain.seconds * (1 + 1e-9)


def test_stopping_keeps_the_best_so_far():
    job = small_job()
    calls = iter(range(1000))
    search = ConfigurationSearch(job, list_configurations(job, {}), ScheduleTemplates(SCHEDULES), stop=lambda: next(calls) >= 1)
    best = search.run()
    assert sum(trial.verdict == Verdict.FITS for trial in search.trials.values()) == 1
    assert best.seconds < math.inf
    with pytest.raises(PlanError, match="stopped before anything was found that fits"):
        ConfigurationSearch(job, list_configurations(job, {}), ScheduleTemplates(SCHEDULES), stop=lambda: True).run()


def test_a_slower_link_between_nodes_makes_the_job_slower():
    fast = small_job(gpus=8)
    slow = replace(fast, machines=replace(fast.machines, bandwidth=2e7))
    times = [ps.plan_job(job, schedules=SCHEDULES).seconds for job in (fast, slow)]
    assert times[0] < times[1]


@pytest.mark.parametrize("seed", range(4))
def test_long_orders_are_weighed_whatever_was_tried_first(monkeypatch, seed):
    monkeypatch.setattr("penstock.planner.job.pipelines._MOST_PLACED", 0)
    wanted = {"tensor": (1,), "microbatch": (1,), "pipeline": (2, 4)}
    job, names = small_job(model={"layers": 8, "vocabulary": 8192}), ("1f1b", "zb-h1", "zbv")
    alone = {
        (one, name): ConfigurationSearch(job, [one], ScheduleTemplates((name,))).run().seconds
        for one in list_configurations(job, wanted)
        for name in names
    }
    least = min(alone.values())
    assert least < min(seconds for (one, _), seconds in alone.items() if one.vocabulary == "ends") * (1 - 2 * LONG_GAIN)
    numbers = random.Random(seed)
    monkeypatch.setattr(ConfigurationSearch, "_guess", lambda self, trial: numbers.random())
    search = ConfigurationSearch(job, list_configurations(job, wanted), ScheduleTemplates(numbers.sample(names, 3)))
    assert least <= search.run().seconds <= least / (1 - LONG_GAIN)


def test_long_orders_that_are_hardly_faster_are_counted(monkeypatch):
    monkeypatch.setattr("penstock.planner.job.pipelines._MOST_PLACED", 0)
    monkeypatch.setattr("penstock.planner.job.search.gains_enough", lambda waiting, best: best == math.inf)
    plan = ps.plan_job(small_job(model={"layers": 4, "vocabulary": 8192}), tensor=1, microbatch=1, schedules="1f1b")
    long = [trial for trial in plan.trials if trial.verdict == Verdict.REFUSED]
    assert plan.configuration.vocabulary == "ends"
    assert long
    assert all(trial.configuration.vocabulary != "ends" for trial in long)
    assert f"{len(long)} not timed, because their orders are long and at most 2.5% faster" in plan.report()
