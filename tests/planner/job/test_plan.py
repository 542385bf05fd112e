"""Plans of whole jobs."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.errors import FileFormatError, PenstockError
from planner.job.small_jobs import small_job


@pytest.fixture(scope="module")
def plan():
    return ps.plan_job(small_job(), pipeline=2, schedules=("1f1b", "zb-h1"))


def test_a_plan_is_proved_simulated_and_consistent(plan):
    assert plan.configuration.gpus == 4
    assert plan.configuration.pipeline == 2
    assert plan.seconds == plan.predicted.makespan >= plan.bound
    assert plan.proof.rules
    assert plan.tokens_per_second == pytest.approx(16 * 128 / plan.seconds)
    assert plan.utilization == pytest.approx(plan.job.operations / plan.seconds / 4 / 1e12)
    assert sum(plan.partition) == len(plan.profile)
    assert plan.excess == 0.0
    assert plan.microbatches * plan.configuration.microbatch * plan.configuration.data == 16
    again = ps.simulate(ps.lower(plan.schedule), plan.costs)
    assert again.makespan == plan.seconds


def test_pins_are_kept():
    plan = ps.plan_job(small_job(), tensor=2, data=(1, 2), sharding=2, microbatch=[1, 2], vocabulary="ends", schedules="1f1b")
    chosen = plan.configuration
    assert (chosen.tensor, chosen.sharding, chosen.vocabulary) == (2, 2, "ends")
    assert chosen.data in (1, 2)
    assert chosen.microbatch in (1, 2)


def test_recomputed_blocks_per_stage_are_those_of_the_profile():
    plan = ps.predict_job(small_job(), ps.Configuration(pipeline=2, data=2), schedule="1f1b", recompute=True)
    assert sum(plan.recomputed) == 6
    assert all(count == size - 1 for count, size in zip(plan.recomputed, plan.partition, strict=True))


def test_json_has_the_choice_and_the_alternatives(plan, tmp_path):
    plan.save(tmp_path / "job.json")
    data = json.loads((tmp_path / "job.json").read_text())
    assert data["type"] == "job-plan"
    assert data["configuration"] == plan.configuration.to_json()
    assert data["seconds"] == plan.seconds
    assert {row["dimension"] for row in data["alternatives"]} >= {"microbatch", "sharding"}
    assert all(row.get("seconds", plan.seconds) >= plan.seconds for row in data["alternatives"])
    assert ps.Job(**{**data["job"], "machines": ps.Machines(**data["job"]["machines"])}) == plan.job
    with pytest.raises(FileFormatError, match=r"the suffix '.yaml' is not .json"):
        plan.save(tmp_path / "job.yaml")


def test_a_prediction_equals_the_plan_of_the_same_configuration(plan):
    predicted = ps.predict_job(plan.job, plan.configuration, schedule=plan.name)
    assert predicted.seconds == plan.seconds
    assert predicted.partition == plan.partition


def test_a_prediction_may_be_over_the_limit():
    small = small_job(memory=1e6)
    predicted = ps.predict_job(small, ps.Configuration(pipeline=4), recompute=False)
    assert predicted.excess == max(predicted.predicted.peak_memory) - 1e6 > 0
    with pytest.raises(ps.PlanError, match=r"does not fit with 1f1b: .* over the limit of a GPU"):
        ps.predict_job(small, ps.Configuration(pipeline=4))


def test_recompute_takes_longer_and_holds_less():
    kept, again = (ps.predict_job(small_job(), ps.Configuration(pipeline=4), recompute=flag) for flag in (False, True))
    assert kept.seconds < again.seconds
    assert max(again.predicted.peak_memory) < max(kept.predicted.peak_memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor": 0}, "tensor must be a whole number of at least 1, got 0"),
        ({"pipeline": ()}, "pipeline is empty"),
        ({"sharding": 4}, "sharding must be a whole number of at least 0 and at most 3, got 4"),
        ({"vocabulary": "everywhere"}, "vocabulary must be 'ends' or 'spread', got 'everywhere'"),
        ({"schedules": "2f2b"}, "there is no schedule '2f2b'"),
        ({"schedules": "searched"}, "plan_job compares named schedules"),
        ({"pipeline": 8}, "pipeline=8 is more than layers=6"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(PenstockError, match=message):
        ps.plan_job(small_job(), **options)


def test_an_unknown_schedule_of_a_prediction_is_refused():
    with pytest.raises(ps.PlanError, match=r"chunks=7}' does not go with pipeline 4, .*: 8 layers are too few for its 28 stages"):
        ps.predict_job(small_job(), ps.Configuration(pipeline=4), schedule="interleaved-1f1b{chunks=7}")
    with pytest.raises(PenstockError, match=r"a penstock.Job, got dict"):
        ps.plan_job({})
