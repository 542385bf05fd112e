"""Evaluation and inference leave nothing behind."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, StepResult, launch
from penstock.schedules.registry import algorithms
from runtime.models import assert_equal, assert_same_results, blocks, by_loop, gradients, loop_step

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipe-v", "dualpipe", "hanayo", "inference"]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_eval_and_infer_equal_the_model(name: str, microbatches: int) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model, x, y = blocks(schedule.stages), torch.randn(11, 6), torch.randn(11, 6)

    def evaluate() -> tuple[StepResult, Tensor]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        return pipe.eval_step(x, target=y, microbatches=microbatches, outputs=True), pipe.infer(x, microbatches=microbatches)

    results = launch(evaluate, 2)
    assert_same_results([result for result, _ in results])
    with torch.no_grad():
        wanted = torch.cat([model(piece) for piece in x.tensor_split(microbatches)])
    for result, outputs in results:
        assert_equal(result.outputs, wanted)
        assert_equal(outputs, wanted)
        assert len(result.losses) == microbatches
        torch.testing.assert_close(result.loss, functional.mse_loss(wanted, y))


def test_evaluation_under_inference_mode() -> None:
    """Also of tensors that were made under it, and of one that is input and target; a training step is refused there."""
    model, x = blocks(2), torch.randn(8, 6)

    def evaluate() -> tuple[Tensor, Tensor | None, Tensor | None]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        with torch.inference_mode():
            made = x.clone()
            found = pipe.infer(made), pipe.eval_step(made, target=made).loss
            with pytest.raises(ScheduleError, match=r"a training step under torch.inference_mode\(\) gets no gradients"):
                pipe.step(made, target=made)
        assert torch.equal(pipe.infer(made), found[0])
        return *found, pipe.step(x, target=x).loss

    wanted = model(x)
    for outputs, evaluated, trained in launch(evaluate, 2):
        torch.testing.assert_close(outputs, wanted.detach())
        for loss in (evaluated, trained):
            torch.testing.assert_close(loss, functional.mse_loss(wanted, x).detach())


def test_every_schedule_can_evaluate() -> None:
    """For any training order and placement, a forward-only program is built for any microbatch count."""
    for name, each in algorithms().items():
        if name == "data-parallel" or each.is_sliced:
            continue
        schedule = ps.schedule(name, ranks=4, microbatches=5)
        model, x = blocks(schedule.stages, 3).double(), torch.randn(7, 3).double()
        outputs = launch(lambda m=model, s=schedule, v=x: Pipeline(m, s).infer(v, microbatches=7), 4)
        torch.testing.assert_close(outputs[0], model(x).detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "hanayo"])
def test_forwards_run_in_waves(name: str) -> None:
    """Ranks wait only while the pipeline fills and drains; each stage's forward takes 1."""
    schedule = ps.schedule(name, ranks=4, microbatches=4)

    def program() -> ps.Program:
        return Pipeline(blocks(schedule.stages), schedule).program(16, training=False)

    span = ps.simulate(launch(program, 4)[0], ps.Costs(f=1.0)).makespan
    assert span <= 16 * schedule.chunks + schedule.stages


def test_gradients_are_untouched() -> None:
    model, x, y = blocks(4), torch.randn(8, 6), torch.randn(8, 6)

    def train() -> None:
        pipe = Pipeline(model, ps.schedule("zbv", ranks=2, microbatches=4), loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        before = {name: (p.grad, p.grad.clone()) for name, p in pipe.named_parameters() if p.grad is not None}
        pipe.eval_step(x, target=y)
        pipe.infer(x)
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is before[name][0]
            assert_equal(parameter.grad, before[name][1])

    launch(train, 2)
    for name, grad in by_loop(model, x, y, 4).grads.items():
        assert_equal(gradients(model)[name], grad)


class Watch(nn.Module):
    """Records how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.inner = nn.Dropout(0.5)
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.map(x)
        self.seen.append((self.training, torch.is_grad_enabled(), out.requires_grad))
        return self.inner(out)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_no_graph_and_modes_restored(name: str) -> None:
    model = nn.Sequential(Watch(), Watch())
    model[1].inner.eval()  # a mixed state must come back as it was
    x = torch.randn(8, 6)

    def train() -> Any:
        pipe = Pipeline(model, ps.schedule(name, ranks=2, microbatches=4), loss_fn=functional.mse_loss)
        result = pipe.eval_step(x, target=x, outputs=True)
        assert result.loss is not None
        assert not result.loss.requires_grad
        assert not result.outputs.requires_grad
        return result.outputs

    outputs = launch(train, 2)
    for stage in model:
        assert stage.seen == [(False, False, False)] * 4
    assert [stage.training for stage in model] == [True, True]
    assert [stage.inner.training for stage in model] == [True, False]
    model.eval()
    assert_equal(outputs[0], torch.cat([model(piece) for piece in x.tensor_split(4)]).detach())


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "zbv"])
def test_eval_between_steps_changes_nothing(name: str) -> None:
    """Training with dropout, batch statistics and an optimizer is the same to the last bit with and without evaluation."""
    schedule = ps.schedule(name, ranks=2, microbatches=3)

    def model() -> nn.Sequential:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(schedule.stages)]
        return nn.Sequential(*layers)

    def train(model: nn.Sequential, evaluate: bool, seed: int | None) -> list[float]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, seed=seed)
        optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
        losses = []
        for step in range(4):
            x = torch.linspace(-1, 1, 54).reshape(9, 6) * (step + 1)
            losses.append(float(pipe.step(x, target=x.flip(1)).loss))
            if evaluate:
                pipe.eval_step(x[:5], target=x[:5], microbatches=2)
                pipe.infer(x, microbatches=5)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    for seed in (None, 7):
        one, other = model(), model()
        assert launch(train, 2, args=(one, False, seed)) == launch(train, 2, args=(other, True, seed))
        for (key, value), again in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert_equal(value, again, key)


def test_outputs_are_freed_and_at_most_two_are_in_flight() -> None:
    """No rank runs ahead: of 12 microbatches only a few activations are alive at once."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            out = x + 1
            alive.append(weakref.ref(out))
            most = max(most, sum(ref() is not None for ref in alive))
            return out

    model = nn.Sequential(*(Counting() for _ in range(4)))
    x = torch.randn(12, 6)

    def evaluate() -> None:
        result = Pipeline(model, ps.schedule("1f1b", ranks=4, microbatches=12), loss_fn=functional.mse_loss).eval_step(x, target=x)
        assert result.outputs is None

    launch(evaluate, 4)
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    assert most <= 3 * 2 + 4  # two on each of three edges, and one in the hands of each rank


def test_eval_without_target() -> None:
    model, x = blocks(2), torch.randn(4, 6)
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss)
    assert pipe.eval_step(x).loss is None
    alone = Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=lambda out: out.mean())
    torch.testing.assert_close(alone.eval_step(x).loss, model(x).mean().detach())
    bare = Pipeline(model, schedule="1f1b-v", microbatches=2)
    assert bare.eval_step(x).loss is None
    assert_equal(bare.eval_step(x, outputs=True).outputs, bare.infer(x))


def test_eval_with_a_failure_restores_the_modes() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    model = nn.Sequential(nn.Linear(6, 6), Breaks())
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss)
    with pytest.raises(ps.PenstockError, match=r"1F0 \(stage 1, forward of microbatch 0\) failed on rank 0: ValueError: broken"):
        pipe.eval_step(torch.randn(2, 6), target=torch.randn(2, 6))
    assert all(module.training for module in model.modules())


def test_random_state_is_left_alone_with_a_seed() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss, seed=1)
    x = torch.randn(4, 6)
    before = torch.get_rng_state()
    pipe.step(x, target=x)
    pipe.eval_step(x, target=x)
    pipe.parity(x, target=x)
    assert torch.equal(torch.get_rng_state(), before)


def test_eval_loss_is_weighted_as_in_training() -> None:
    model, x, y = blocks(2).double(), torch.randn(7, 6).double(), torch.randn(7, 6).double()
    again = copy.deepcopy(model)
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=3, loss_fn=functional.mse_loss)
    found = pipe.eval_step(x, target=y)
    pieces = list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))
    wanted = loop_step(again, pieces, [len(piece) / 7 for piece, _ in pieces], functional.mse_loss)
    assert_equal(found.loss, wanted.loss)
    torch.testing.assert_close(found.loss, functional.mse_loss(model(x), y).detach(), rtol=1e-12, atol=1e-12)
