"""Pipelines of whole jobs' plans: everything that was planned is run or refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, TokenCrossEntropy, launch
from penstock.runtime.job_plan import check_degrees, settle_recompute, settle_sharding
from penstock.runtime.model.transforms import Recomputed
from runtime.models import blocks, by_loop, count_forwards

RATES = {"flops": 1e12, "memory": 64e6, "memory_bandwidth": 1e11, "node_bandwidth": 2e10, "bandwidth": 2e9}
LAYER = ps.Layer(f=1.0, i=1.0, w=1.0, activation=1e5, output=1e4, parameters=1e5, gradients=1e5, optimizer=2e5)


def predict(gpus: int = 2, recompute: bool | None = False, **chosen: int) -> ps.JobPlan:
    profile = ps.Profile([LAYER] * 4, time_unit="ms", size_unit="B", input=1e4)
    job = ps.Job(model=profile, machines=ps.Machines(gpus=gpus, **RATES), batch=8)
    return ps.predict_job(job, ps.Configuration(**{"pipeline": 2, **chosen}), recompute=recompute)


def with_configuration(plan: ps.JobPlan, **values: object) -> ps.JobPlan:
    return replace(plan, configuration=replace(plan.configuration, **values))


def make_mesh(data: int = 1, tensor: int = 1) -> SimpleNamespace:
    return SimpleNamespace(data=SimpleNamespace(members=range(data)), tensor=SimpleNamespace(members=range(tensor)))


@pytest.mark.parametrize("recompute", [False, True])
def test_schedule_partition_and_recompute_of_a_loaded_plan_are_run(recompute, tmp_path):
    predict(recompute=recompute).save(tmp_path / "job.json")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)))
    batch, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)

    def train() -> tuple[bool, float, list[tuple[str, torch.Tensor]]]:
        plan = ps.JobPlan.load(tmp_path / "job.json")
        pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
        loss = pipe.step(batch, target=target).loss
        recomputed = all(isinstance(stage.module, Recomputed) for stage in pipe.stages.values())
        return recomputed, float(loss), [(name, parameter.grad) for name, parameter in pipe.named_parameters()]

    ranks = launch(train, ranks=2)
    gradients = {name: gradient for _, _, own in ranks for name, gradient in own}
    assert [again for again, _, _ in ranks] == [recompute] * 2
    model.zero_grad()
    loss = functional.mse_loss(model(batch), target)
    loss.backward()
    assert ranks[0][1] == pytest.approx(loss.item())
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_single_layers_of_a_plan_run_again(tmp_path):
    """A limit between everything kept and everything recomputed: the plan recomputes some layers, which run twice, the others once."""
    profile = ps.Profile([LAYER] * 6, time_unit="ms", size_unit="B", input=1e4)
    job = ps.Job(model=profile, machines=ps.Machines(gpus=2, **{**RATES, "memory": 1.7e6}), batch=8)
    found = ps.predict_job(job, ps.Configuration(pipeline=2))
    assert any(0 < again < size for again, size in zip(found.recomputed, found.partition, strict=True))
    found.save(tmp_path / "job.json")
    model, x = blocks(6), torch.randn(8, 6)
    runs = count_forwards(model)

    def train() -> torch.Tensor:
        return Pipeline(model, ps.JobPlan.load(tmp_path / "job.json"), loss_fn=functional.mse_loss).step(x, target=x.sin()).loss

    loss = launch(train, ranks=2)[0]
    assert runs == [8 * (2 if again else 1) for again in found.recomputed_layers]
    wanted = by_loop(model, x, x.sin(), 8)
    assert torch.equal(loss, wanted.loss)
    assert all(torch.equal(parameter.grad, wanted.grads[name]) for name, parameter in model.named_parameters())


def test_a_choice_of_recompute_goes_before_the_plan_s():
    plan = predict(recompute=True)
    assert settle_recompute(plan, False) is False
    assert settle_recompute(plan, [True, False]) == [True, False]
    assert settle_recompute(plan, None) == (True,) * 4
    assert settle_recompute(predict(), None) is False
    assert settle_recompute(ps.schedule("1f1b", ranks=2, microbatches=2), None) is None


@pytest.mark.parametrize(("sharding", "words"), [(1, "the optimizer's state over 2 GPUs"), (2, "gradients and the optimizer's state")])
def test_sharding_of_state_alone_needs_a_choice(sharding, words):
    plan = predict(gpus=4, data=2, sharding=sharding)
    with pytest.raises(ScheduleError, match=f"the plan shards {words}") as caught:
        settle_sharding(plan, None)
    assert f"(ZeRO-{sharding})" in str(caught.value)
    assert settle_sharding(plan, True) is True
    assert settle_sharding(plan, False) is False


def test_sharding_of_everything_is_the_pipeline_s_own():
    assert settle_sharding(predict(gpus=4, data=2, sharding=3), None) is True
    assert settle_sharding(predict(), None) is False
    assert settle_sharding("1f1b", None) is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": 2}, "the plan has 2 data ranks, but there is 1: give mesh=device_mesh(pp=2, dp=2)"),
        ({"tensor": 2}, "the plan has 2 tensor ranks, but there is 1: give mesh=device_mesh(pp=2, dp=1, tp=2)"),
        ({"context": 2}, "the plan has context=2, but a pipeline cuts no sequences among ranks"),
        ({"vocabulary": "head", "tensor": 2}, "the plan has vocabulary='head' and tensor=2, but a pipeline does not split the rows"),
        ({"selective": True}, "plan with selective=False"),
    ],
)
def test_degrees_that_are_not_there_are_refused(values, message):
    plan = with_configuration(predict(), **values)
    with pytest.raises(ScheduleError) as caught:
        check_degrees(plan, None)
    assert message in str(caught.value)


WORDS = 37


def predict_shared(vocabulary: str, data: int = 1, sharding: int = 0) -> ps.JobPlan:
    sizes = {"layers": 4, "hidden": 8, "heads": 2, "sequence": 6, "vocabulary": WORDS}
    job = ps.Job(model=sizes, machines=ps.Machines(gpus=2 * data, **RATES), batch=8)
    return ps.predict_job(job, ps.Configuration(pipeline=2, data=data, vocabulary=vocabulary, sharding=sharding), schedule="1f1b")


@pytest.mark.parametrize("vocabulary", ["head", "spread"])
def test_a_plan_with_a_shared_vocabulary_has_the_numbers_of_the_plain_model(vocabulary, tmp_path):
    plan = predict_shared(vocabulary)
    plan.save(tmp_path / "job.json")
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(WORDS, 8), *inner, nn.Linear(8, WORDS, bias=False)).double()
    tokens, targets = torch.randint(WORDS, (2, 8, 6))

    def train() -> tuple[int, float, list[tuple[str, torch.Tensor]]]:
        loaded = ps.JobPlan.load(tmp_path / "job.json")
        pipe = Pipeline(model, loaded, loss_fn=TokenCrossEntropy())
        result = pipe.step(tokens, target=targets)
        return len(result.losses), float(result.loss), [(name, parameter.grad) for name, parameter in pipe.named_parameters()]

    ranks = launch(train, ranks=2)
    model.zero_grad()
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    shared = set()
    for count, own_loss, gradients in ranks:
        assert count == plan.microbatches == 8
        assert own_loss == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in gradients:
            whole, _, rows = name.partition("[")
            low, high = map(int, rows.rstrip("]").split(":")) if rows else (0, len(wanted[whole]))
            torch.testing.assert_close(gradient, wanted[whole][low:high], rtol=1e-12, atol=1e-14)
            shared |= {whole} if rows else set()
    assert {name.partition("[")[0] for _, _, own in ranks for name, _ in own} == set(wanted)
    assert shared == {"head": {"5.weight"}, "spread": {"0.weight", "5.weight"}}[vocabulary]


def test_sharded_rows_of_a_shared_vocabulary_need_a_choice():
    plan = predict_shared("spread", data=2, sharding=3)
    with pytest.raises(ScheduleError, match="keeps a rank's rows of a shared vocabulary whole on each: they take"):
        settle_sharding(plan, None)
    assert settle_sharding(plan, True) is True


def test_degrees_that_are_there_are_accepted():
    plan = with_configuration(predict(), data=2, tensor=3)
    check_degrees(plan, make_mesh(2, 3))
    check_degrees(predict(), None)
    with pytest.raises(ScheduleError, match="the plan has 3 tensor ranks, but there are 2"):
        check_degrees(plan, make_mesh(2, 2))
