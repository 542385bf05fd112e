"""Blocks and recomputed blocks of a schedule's stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest

import penstock as ps
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.job.pipelines import LONG_GAIN, PipelineTrials, ScheduleTemplates
from penstock.planner.problem import Problem
from penstock.schedules.registry import parse_name
from planner.job.small_jobs import small_job


def job_with(memory: float, batch: int = 8, **model):
    job = small_job(batch=batch, model=model)
    return replace(job, machines=replace(job.machines, memory=memory))


def try_everything(costs: LayerCosts, name: str, microbatches: int) -> float:
    """The least work of the slowest rank per microbatch, over all partitions and numbers of recomputed blocks that fit when simulated."""
    ranks, blocks = costs.configuration.pipeline, costs.job.transformer.layers
    schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches)
    least = float("inf")
    for cut in product(range(blocks + 1), repeat=ranks):
        sizes = tuple(size + (rank == 0) + (rank == ranks - 1) for rank, size in enumerate(cut))
        if sum(cut) != blocks or not all(sizes):
            continue
        for again in product(*(range(size + 1) for size in cut)):
            flags = tuple(number < count for size, count in zip(cut, again, strict=True) for number in range(size))
            problem = Problem.cut(
                costs.profile(flags), schedule.placement, microbatches, sizes, (False,) * ranks, (costs.job.limit,) * ranks
            )
            if problem.fits(problem.evaluate(schedule)):
                least = min(least, problem.work / microbatches)
    return least


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.65, 0.55, 0.45])
def test_no_partition_and_no_recompute_has_a_faster_slowest_rank(name, share):
    chosen = ps.Configuration(pipeline=3)
    free = LayerCosts(job_with(1e12, layers=4), chosen)
    (plain,) = PipelineTrials(free, ScheduleTemplates((name,))).run()
    costs = LayerCosts(job_with(share * max(plain.candidate.timeline.peak_memory), layers=4), chosen)
    (trial,) = PipelineTrials(costs, ScheduleTemplates((name,))).run()
    least = try_everything(costs, name, 8)
    if trial.timed is None:
        assert least == float("inf")
        assert trial.excess > 0
    else:
        assert trial.candidate.problem.work / 8 == pytest.approx(least)


def test_less_memory_recomputes_more_blocks_on_the_ranks_that_hold_more():
    chosen = ps.Configuration(pipeline=4)
    seen = []
    for share in (1.0, 0.8, 0.6):
        free = PipelineTrials(LayerCosts(job_with(1e12, layers=12), chosen), ScheduleTemplates(("1f1b",))).run()[0]
        limit = share * max(free.candidate.timeline.peak_memory)
        pipeline = PipelineTrials(LayerCosts(job_with(limit, layers=12), chosen), ScheduleTemplates(("1f1b",))).run()[0]
        assert max(pipeline.candidate.timeline.peak_memory) <= limit * (1 + 1e-9)
        seen.append(sum(pipeline.recomputed))
        if share < 1.0:
            half = len(pipeline.recomputed) // 2
            assert sum(pipeline.recomputed[:half]) >= sum(pipeline.recomputed[half:])
    assert seen[0] == 0 < seen[1] < seen[2] <= 12


def test_without_recompute_it_does_not_fit_and_says_by_how_much():
    chosen = ps.Configuration(pipeline=2)
    free = PipelineTrials(LayerCosts(job_with(1e12), chosen), ScheduleTemplates(("1f1b",))).run()[0]
    costs = LayerCosts(job_with(0.5 * max(free.candidate.timeline.peak_memory)), chosen)
    (trial,) = PipelineTrials(costs, ScheduleTemplates(("1f1b",)), recompute=False).run()
    assert trial.timed is None
    assert trial.excess > 0


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "v-half"])
@pytest.mark.parametrize("vocabulary", ["ends", "head", "spread"])
def test_bounds_are_below_the_simulated_time(name, vocabulary):
    costs = LayerCosts(small_job(batch=12, model={"layers": 10}), ps.Configuration(pipeline=4, vocabulary=vocabulary))
    trials = PipelineTrials(costs, ScheduleTemplates((name,))).run()
    assert trials
    for trial in trials:
        assert 0 < trial.bound <= trial.seconds * (1 + 1e-9)


def test_a_schedule_that_cannot_win_is_not_timed():
    costs = LayerCosts(small_job(), ps.Configuration(pipeline=4))
    (timed,) = PipelineTrials(costs, ScheduleTemplates(("1f1b",))).run()
    (skipped,) = PipelineTrials(costs, ScheduleTemplates(("1f1b",))).run(best=timed.bound)
    assert skipped.timed is None
    assert skipped.bound == pytest.approx(timed.bound)


def test_stages_of_the_result_cover_the_model():
    costs = LayerCosts(small_job(batch=16, model={"layers": 7}), ps.Configuration(pipeline=2))
    for trial in PipelineTrials(costs, ScheduleTemplates(("interleaved-1f1b", "zbv"))).run():
        sizes = trial.candidate.problem.sizes
        assert sum(sizes) == 9
        assert min(sizes) >= 1


@pytest.mark.parametrize("vocabulary", ["head", "spread"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b{chunks=2}", "zbv"])
def test_a_shared_vocabulary_is_as_fast_as_the_pass_makes_it(name, vocabulary):
    costs = LayerCosts(small_job(batch=12, model={"layers": 10, "vocabulary": 4096}), ps.Configuration(pipeline=4, vocabulary=vocabulary))
    (trial,) = PipelineTrials(costs, ScheduleTemplates((name,))).run()
    problem = trial.candidate.problem
    entry, options = parse_name(name)
    plain = entry.build(4, 12, options.get("chunks"))
    times = []
    for ahead in (0, 1, 2):
        spread = ps.spread_vocabulary(plain, problem.costs, ps.Vocabulary(embedding=vocabulary == "spread", ahead=ahead))
        times.append(ps.simulate(ps.lower(spread), problem.costs).makespan)
    assert trial.seconds <= min(times)
    assert trial.seconds == ps.simulate(ps.lower(trial.candidate.schedule), problem.costs).makespan
    ps.verify(ps.lower(trial.candidate.schedule), costs=problem.costs, memory_limit=(costs.job.limit,) * 4)


def test_a_shared_vocabulary_keeps_to_the_limit_and_counts_its_logits():
    chosen, model = ps.Configuration(pipeline=4, vocabulary="spread"), {"layers": 8, "vocabulary": 4096}
    free = PipelineTrials(LayerCosts(small_job(model=model), chosen), ScheduleTemplates(("1f1b",))).run()[0]
    for part in (1.0, 0.9, 0.8):
        job = small_job(model=model, memory=part * max(free.candidate.timeline.peak_memory))
        trial = PipelineTrials(LayerCosts(job, chosen), ScheduleTemplates(("1f1b",))).run()[0]
        assert trial.timed is not None
        assert max(trial.candidate.timeline.peak_memory) <= job.limit * (1 + 1e-9)
        assert trial.seconds >= free.seconds
    assert sum(trial.recomputed) > 0
    assert trial.candidate.problem.costs.of_stage("logits", 3) > 4096 / 4 * 128 * 2  # 16 bits, of all tokens and a quarter of the words


@pytest.mark.parametrize("names", list(permutations(("1f1b", "zb-h1", "zbv"))))
def test_a_long_order_that_is_much_faster_is_placed_although_another_fits(monkeypatch, names):
    monkeypatch.setattr("penstock.planner.job.pipelines._MOST_PLACED", 0)
    costs = LayerCosts(small_job(model={"layers": 8, "vocabulary": 8192}), ps.Configuration(pipeline=4, vocabulary="head"))
    alone = {name: PipelineTrials(costs, ScheduleTemplates((name,))).run()[0].seconds for name in names}
    assert alone["zbv"] < alone["1f1b"] * (1 - LONG_GAIN)
    best = PipelineTrials(costs, ScheduleTemplates(names)).run()[0]
    assert best.seconds <= min(alone.values()) / (1 - LONG_GAIN)


@pytest.mark.parametrize("part", [0.97, 0.955, 0.94])
def test_memory_that_is_short_with_more_activations_is_tried_with_fewer_however_fast_the_best_is(part):
    chosen, model = ps.Configuration(pipeline=4, vocabulary="spread"), {"layers": 8, "vocabulary": 4096}
    templates = ScheduleTemplates(("zb-h1",))
    free = PipelineTrials(LayerCosts(small_job(model=model), chosen), templates).run()[0]
    costs = LayerCosts(small_job(model=model, memory=part * max(free.candidate.timeline.peak_memory)), chosen)
    trials = PipelineTrials(costs, templates)
    (first,), (alone,) = trials.time(), trials.run()
    (against,) = trials.run(best=first.seconds * (1 + 1e-9))
    assert against.seconds == alone.seconds
