"""Plans of whole jobs."""

from __future__ import annotations

import json

import numpy as np
import pytest

import penstock as ps
from penstock.errors import FileFormatError, PenstockError, PlanError
from planner.job.small_jobs import profile_job, small_job, small_machines, unequal_profile


@pytest.fixture(scope="module")
def plan():
    return ps.plan_job(small_job(), pipeline=2, tensor=1, vocabulary="ends", schedules=("1f1b", "zb-h1"))


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


def test_a_loaded_plan_is_the_saved_one(plan, tmp_path):
    chosen = ps.Configuration(pipeline=2, data=2, sharding=1)
    free = ps.predict_job(profile_job(memory=1e12), chosen, schedule="gpipe")
    tight = profile_job(memory=0.7 * max(free.predicted.peak_memory))
    for number, one in enumerate((plan, ps.predict_job(tight, chosen, schedule="gpipe"))):
        one.save(tmp_path / f"{number}.json")
        loaded = ps.JobPlan.load(tmp_path / f"{number}.json")
        assert loaded.report() == one.report()
        assert loaded.to_json() == one.to_json()
        assert (loaded.job, loaded.schedule, loaded.costs) == (one.job, one.schedule, one.costs)
    assert sum(one.recomputed) == sum(one.recomputed_layers) > 0


@pytest.mark.parametrize(("vocabulary", "stages"), [("head", (7,)), ("spread", (0, 7))])
def test_a_plan_with_a_shared_vocabulary_has_its_actions_in_its_file(vocabulary, stages, tmp_path):
    chosen = ps.Configuration(pipeline=4, vocabulary=vocabulary)
    planned = ps.predict_job(small_job(model={"layers": 8}), chosen, schedule="zbv")
    assert planned.schedule.spread_stages == stages
    assert planned.recomputed_layers == (False,) * 10
    whole = ps.predict_job(planned.job, ps.Configuration(pipeline=4), schedule="zbv").profile
    assert sum(share.parameters for share in planned.profile.shares) == pytest.approx(
        sum(layer.parameters for layer in whole.layers[-1 if vocabulary == "head" else 0 :: 9]) / 4
    )
    assert planned.predicted.peak_memory == ps.simulate(ps.lower(planned.schedule), planned.costs).peak_memory
    planned.save(tmp_path / "job.json")
    loaded = ps.JobPlan.load(tmp_path / "job.json")
    assert (loaded.report(), loaded.schedule, loaded.costs) == (planned.report(), planned.schedule, planned.costs)
    assert {"joined", "vocabulary"} <= {rule.name if hasattr(rule, "name") else str(rule) for rule in loaded.proof.rules}
    data = json.loads((tmp_path / "job.json").read_text())
    data["configuration"]["vocabulary"] = "ends"
    (tmp_path / "job.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match="but the configuration has vocabulary='ends', which shares nothing"):
        ps.JobPlan.load(tmp_path / "job.json")


def test_schedules_with_two_copies_of_the_model_share_no_vocabulary():
    with pytest.raises(PlanError, match="it runs two copies of the model, but a job with the sizes"):
        ps.predict_job(small_job(), ps.Configuration(pipeline=4, vocabulary="spread"), schedule="chimera")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("seconds",), 1e-9, "it says that it takes 1e-09 s, but its schedule takes"),
        (("bound",), 1e9, "is false: its schedule takes"),
        (("partition",), [1, 1], "does not share 8 layers among 2 stages"),
        (("recomputed_layers",), [True] * 8, "and false for embedding and head"),
        (("configuration", "pipeline"), 4, "pipeline=4 x data=2 x tensor=1 x context=1 = 8 does not divide gpus=4"),
        (("configuration", "microbatch"), 8, "the configuration asks for 2 ranks and 1 microbatches"),
        (("configuration", "sharding"), 4, "'configuration': sharding must be a whole number of at least 0 and at most 3, got 4"),
        (("configuration", "vocabulary"), "all", "there is no vocabulary 'all'"),
        (("configuration", "vocabulary"), "head", "shares nothing among the pipeline ranks, but the configuration has vocabulary='head'"),
        (("configuration", "data"), "2", "'configuration': data must be a whole number of at least 1, got '2'"),
        (("job", "model", "layers"), None, "layers must be a whole number of at least 1, got None"),
        (("job", "batch"), 7, "batch=7 cannot be shared among"),
        (("job", "profile"), {}, "either a model or a profile"),
        (("schedules",), [{"name": 1}], "'name' must be"),
        (("verdicts",), {"good": 1}, "'verdicts' counts configurations by verdict"),
        (("type",), "plan", "job-plan"),
    ],
)
def test_files_that_were_changed_are_refused(plan, tmp_path, path, value, message):
    data = json.loads(json.dumps(plan.to_json()))
    *outer, last = path
    inner = data
    for name in outer:
        inner = inner[name]
    inner[last] = value
    (tmp_path / "job.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=r"job\.json") as caught:
        ps.JobPlan.load(tmp_path / "job.json")
    assert message in str(caught.value)


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
        ({"pipeline": 2.0}, "pipeline must be a whole number of at least 1, got 2.0"),
        ({"pipeline": ()}, "pipeline is empty"),
        ({"vocabulary": 3}, "there is no vocabulary 3"),
        ({"selective": "yes"}, "selective must be True or False, got 'yes'"),
        ({"sharding": 4}, "sharding must be a whole number of at least 0 and at most 3, got 4"),
        ({"vocabulary": "everywhere"}, "there is no vocabulary 'everywhere'"),
        ({"schedules": "2f2b"}, "there is no schedule '2f2b'"),
        ({"schedules": "searched"}, "jobs are planned with named schedules"),
        ({"pipeline": 8}, "pipeline=8 does not divide gpus=4"),
        ({"recompute": "no"}, "recompute must be True or False, got 'no'"),
        ({"progress": 3}, "progress must be a function, which is called as progress"),
        ({"stop": 3}, "stop must be a function, which is called as stop"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(PenstockError, match=message):
        ps.plan_job(small_job(), **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline": 0}, "pipeline must be a whole number of at least 1, got 0"),
        ({"tensor": "2"}, "tensor must be a whole number of at least 1, got '2'"),
        ({"microbatch": 0}, "microbatch must be a whole number of at least 1, got 0"),
        ({"sharding": 4}, "sharding must be a whole number of at least 0 and at most 3, got 4"),
        ({"vocabulary": "all"}, "there is no vocabulary 'all'"),
        ({"selective": 1}, "selective must be True or False, got 1"),
    ],
)
def test_impossible_configurations_are_refused_when_they_are_made(fields, message):
    with pytest.raises(PenstockError, match=message):
        ps.Configuration(**fields)


def test_numbers_of_numpy_are_numbers():
    chosen = ps.Configuration(pipeline=np.int64(2), data=np.int64(2))
    assert (chosen, type(chosen.pipeline)) == (ps.Configuration(pipeline=2, data=2), int)
    job = ps.Job(model=small_job().model, machines=small_machines(np.int64(4)), batch=np.int64(16))
    json.dumps(ps.plan_job(job, pipeline=np.array([2, 4]), tensor=1, sharding=1, vocabulary="ends", schedules="1f1b").to_json())


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe", "dualpipe-v"])
def test_copies_and_overlapped_actions_are_planned_from_a_profile(schedule):
    job = profile_job(profile=unequal_profile(overlap=0.9), batch=16, memory=1e9)
    plan = ps.plan_job(job, pipeline=2, schedules=schedule)
    assert plan.bound <= plan.seconds == ps.simulate(ps.lower(plan.schedule), plan.costs).makespan
    assert plan.seconds == pytest.approx(ps.predict_job(job, plan.configuration, schedule=schedule).seconds)


def test_an_unknown_schedule_of_a_prediction_is_refused():
    with pytest.raises(ps.PlanError, match=r"chunks=7}' does not go with pipeline 4, .*: 8 layers are too few for its 28 stages"):
        ps.predict_job(small_job(), ps.Configuration(pipeline=4), schedule="interleaved-1f1b{chunks=7}")
    with pytest.raises(PenstockError, match=r"a penstock.Job, got dict"):
        ps.plan_job({})
    with pytest.raises(PenstockError, match=r"a penstock.Configuration, got dict"):
        ps.predict_job(small_job(), {"pipeline": 4})
    for schedule in (3, None, ["1f1b", "zbv"]):
        with pytest.raises(PenstockError, match="schedule must be the name of a schedule, like '1f1b', got"):
            ps.predict_job(small_job(), ps.Configuration(pipeline=4), schedule=schedule)
    with pytest.raises(PenstockError, match=r"recompute must be True or False, got \[True\]"):
        ps.predict_job(small_job(), ps.Configuration(pipeline=4), recompute=[True])
    with pytest.raises(PenstockError, match="jobs are planned with named schedules"):
        ps.predict_job(small_job(), ps.Configuration(pipeline=4), schedule="searched")
