"""The loss, how microbatches count in it, and what stages add to it."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PenstockError, ScheduleError
from penstock.runtime import Pipeline, StageOutput, StepResult, TokenCrossEntropy, add_loss, add_metric, collect, launch
from penstock.runtime.batch.loss import Loss
from runtime.models import (
    Numbers,
    assert_all_equal,
    assert_close,
    assert_equal,
    assert_same_results,
    blocks,
    by_batch,
    by_pipeline,
    gradients,
)

PAD = -100


def whole(model: nn.Module, x: Any, loss: Any) -> Numbers:
    """The loss of the whole batch on a copy."""
    again = copy.deepcopy(model)
    again.zero_grad()
    value = loss(again(x))
    value.backward()
    return Numbers(value.detach(), [], gradients(again))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 7])
def test_mean_and_sum_with_uneven_microbatches(name: str, microbatches: int) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=microbatches)
    model, x, y = blocks(schedule.stages).double(), torch.randn(7, 6).double(), torch.randn(7, 6).double()
    assert_close(by_pipeline(model, schedule, x, y), by_batch(model, x, y), 1e-12)

    def summed(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().sum()

    found = by_pipeline(model, schedule, x, y, summed, loss_reduction="sum")
    assert_close(found, by_batch(model, x, y, summed), 1e-12)


def padded(batch: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Scores' inputs, and targets of which very different numbers are valid."""
    x, target = torch.randn(batch, length, 6).double(), torch.randint(6, (batch, length))
    for row in range(batch):
        target[row, row % (length + 1) :] = PAD
    return x, target


def scores_loss(out: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=PAD)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("microbatches", [2, 4, 11])
def test_weight_counts_valid_targets(name: str, microbatches: int) -> None:
    """Microbatches with few valid targets count little; one without any has a NaN loss and weight 0."""
    schedule = ps.schedule(name, ranks=2, microbatches=microbatches)
    x, target = padded(11)
    model = blocks(2).double()
    found = by_pipeline(model, schedule, x, target, scores_loss, weight=lambda target: (target != PAD).sum())
    assert_close(found, whole(model, x, lambda out: scores_loss(out, target)), 1e-12)
    assert any(math.isnan(loss) for loss in found.losses) == (microbatches == 11)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_microbatch_with_zero_weight_does_not_change_the_gradients(name: str) -> None:
    """Its own gradient would be no number either: nothing over nothing."""

    def masked_mean(out: Tensor, target: Tensor) -> Tensor:
        valid = (target != PAD).double()
        return (out.mean(-1) * valid).sum() / valid.sum()

    schedule = ps.schedule(name, ranks=2, microbatches=6)
    x, target = padded(6)
    model = blocks(2).double()
    found = by_pipeline(model, schedule, x, target, masked_mean, weight=lambda target: (target != PAD).sum())
    assert math.isnan(found.losses[0])
    assert_close(found, whole(model, x, lambda out: masked_mean(out, target)), 1e-12)


def test_invalid_weights_are_refused() -> None:
    x, target = padded(4)
    pipe = Pipeline(blocks(1).double(), schedule="1f1b", microbatches=2, loss_fn=scores_loss, weight=lambda target: (target > 99).sum())
    with pytest.raises(ScheduleError, match=r"the weights of the microbatches are \[0.0, 0.0\]"):
        pipe.step(x, target=target)
    with pytest.raises(ScheduleError, match="the weight function needs a target, but the step was given none"):
        pipe.step(x)
    pipe = Pipeline(blocks(1).double(), schedule="1f1b", microbatches=2, loss_fn=scores_loss, weight=lambda target: float(target[0, 0]))
    target[0, 0], target[2, 0] = 3, -1
    with pytest.raises(ScheduleError, match=r"are \[3.0, -1.0\]: they must not be negative"):
        pipe.step(x, target=target)


@pytest.mark.parametrize(
    "loss_fn",
    [nn.CrossEntropyLoss(), functional.cross_entropy, functools.partial(functional.cross_entropy, ignore_index=PAD), nn.NLLLoss()],
)
def test_ignored_targets_under_a_plain_mean_are_warned_about(loss_fn: Any) -> None:
    x, target = torch.randn(6, 6), torch.tensor([0, 1, PAD, 2, 3, 4])
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=loss_fn)
    with pytest.warns(UserWarning, match=r"ignore_index -100 .*weight=lambda target: \(target != -100\).sum\(\)") as caught:
        pipe.step(x, target=target)
    assert caught[0].filename == __file__
    pipe.step(x, target=target)  # said once
    Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=loss_fn).step(x, target=target.clamp(min=0))
    Pipeline(blocks(1), schedule="1f1b", microbatches=1, loss_fn=loss_fn).step(x, target=target)
    weighted = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=loss_fn, weight=lambda target: (target != PAD).sum())
    weighted.step(x, target=target)


@pytest.mark.parametrize("own", ["sum", "none"])
def test_reductions_that_disagree(own: str) -> None:
    for loss_fn in (nn.MSELoss(reduction=own), functools.partial(functional.mse_loss, reduction=own)):
        with pytest.raises(ScheduleError, match=f"the loss function has reduction='{own}', but loss_reduction is 'mean'"):
            Pipeline(blocks(1), schedule="1f1b", microbatches=1, loss_fn=loss_fn)
    with pytest.raises(ScheduleError, match="loss_reduction must be 'mean' or 'sum', got 'max'"):
        Pipeline(blocks(1), schedule="1f1b", microbatches=1, loss_reduction="max")


def test_loss_module_with_its_own_sum() -> None:
    schedule = ps.schedule("1f1b", ranks=2, microbatches=3)
    model, x, y = blocks(2).double(), torch.randn(7, 6).double(), torch.randn(7, 6).double()
    found = by_pipeline(model, schedule, x, y, nn.MSELoss(reduction="sum"), loss_reduction="sum")
    assert_close(found, whole(model, x, lambda out: (out - y).square().sum()), 1e-12)


# With and without a target --------------------------------------------------------------------------------------------


def test_loss_without_target() -> None:
    model, x = blocks(2).double(), torch.randn(7, 6).double()
    wanted = whole(model, x, lambda out: out.square().mean())
    for loss_fn in (lambda out: out.square().mean(), lambda out, target=None: out.square().mean()):
        pipe = Pipeline(copy.deepcopy(model), schedule="1f1b-v", microbatches=3, loss_fn=loss_fn)
        torch.testing.assert_close(pipe.step(x).loss, wanted.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("call", ["step", "step_list"])
def test_target_none(call: str) -> None:
    """A target that is None is given to a loss function that takes one."""
    given: list[Any] = []

    def loss_fn(out: Tensor, target: Any) -> Tensor:
        given.append(target)
        return out.square().mean()

    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=loss_fn)
    x = torch.randn(4, 6)
    loss = pipe.step(x, target=None).loss if call == "step" else pipe.step_list([x[:2], x[2:]], [None, None]).loss
    assert given == [None, None]
    assert_equal(loss, pipe.eval_step(x, target=None).loss)


def test_loss_that_needs_a_target() -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
    with pytest.raises(ScheduleError, match="the loss function needs a target, but the step was given none"):
        pipe.step(torch.randn(4, 6))


def test_last_stage_that_returns_the_loss() -> None:
    """Without a loss function the output is the loss, weighted as any other."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.map(x).square().mean()

    model, x = nn.Sequential(nn.Linear(6, 6), WithLoss()).double(), torch.randn(7, 6).double()
    wanted = whole(model, x, lambda loss: loss)
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=3)
    torch.testing.assert_close(pipe.step(x).loss, wanted.loss, rtol=1e-12, atol=0)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted.grads[name], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(pipe.eval_step(x).loss, wanted.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (None, r"the last stage returned a tensor of shape \[2, 6\]: a loss is a tensor with one element; give loss_fn="),
        (lambda out: out.square(), r"the loss function returned a tensor of shape \[2, 6\]: a loss is a tensor with one element"),
        (lambda out: float(out.detach().mean()), "the loss function returned a float"),
    ],
)
def test_values_that_are_not_a_loss_are_refused(loss_fn: Any, message: str) -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=loss_fn)
    with pytest.raises(PenstockError, match=message):
        pipe.step(torch.randn(4, 6))


# Side losses and metrics ----------------------------------------------------------------------------------------------


class Router(nn.Module):
    """A stage with a side loss and a metric, returned or reported from inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.map, self.gate, self.how = nn.Linear(6, 6), nn.Linear(6, 2), how

    def forward(self, x: Tensor) -> Any:
        out, balance = torch.tanh(self.map(x)), self.gate(x).softmax(-1).square().mean()
        if self.how == "returned":
            return StageOutput(out, balance, {"load": balance})
        if self.how == "reported":
            add_loss(balance)
            add_metric("load", balance)
        return out


@pytest.mark.parametrize("how", ["returned", "reported"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipe"])
def test_side_losses_and_metrics(name: str, how: str) -> None:
    """They are weighted as their microbatch is, reach the gradients of earlier stages, and come back on every rank in order."""
    schedule = ps.schedule(name, ranks=2, microbatches=3)
    model = nn.Sequential(*(Router(how if k % 2 else "plain") for k in range(schedule.stages))).double()
    x, y = torch.randn(7, 6).double(), torch.randn(7, 6).double()
    trained, again = copy.deepcopy(model), copy.deepcopy(model)

    def train() -> StepResult:
        return Pipeline(trained, schedule, loss_fn=functional.mse_loss).step(x, target=y)

    results = launch(train, 2)
    assert_same_results(results)
    total: Any = 0
    loads = []
    for xx, yy in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        h, side = xx, []
        for stage in again:
            balance = stage.gate(h).softmax(-1).square().mean()
            h = torch.tanh(stage.map(h))
            side += [balance] if stage.how != "plain" else []
        total = total + (functional.mse_loss(h, yy) + sum(side)) * (len(xx) / 7)
        loads += [balance.detach() for balance in side]
    total.backward()
    torch.testing.assert_close(results[0].loss, total.detach(), rtol=1e-12, atol=0)
    for key, grad in gradients(again).items():
        if grad is None:
            assert gradients(trained)[key] is None
        else:
            torch.testing.assert_close(gradients(trained)[key], grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(results[0].metrics["load"], loads, rtol=1e-12, atol=0)
    assert all(not metric.requires_grad for metric in results[0].metrics["load"])


def test_metrics_of_the_loss_function() -> None:
    """The loss sees its microbatch; what it reports comes back."""

    def loss_fn(out: Tensor, target: dict[str, Tensor]) -> Tensor:
        add_metric("advantage", target["advantage"].mean())
        add_metric("count", len(out))
        return (out.mean(1) * target["advantage"]).mean()

    model, x, advantage = blocks(2), torch.randn(6, 6), torch.randn(6)
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=3, loss_fn=loss_fn)
    for result in (pipe.step(x, target={"advantage": advantage}), pipe.eval_step(x, target={"advantage": advantage})):
        assert_all_equal(result.metrics["advantage"], [part.mean() for part in advantage.tensor_split(3)])
        assert_all_equal(result.metrics["count"], [torch.tensor(2)] * 3)


def test_side_loss_reaches_a_stage_without_other_gradients() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> StageOutput:
            h = self.map(x)
            return StageOutput(h.detach(), h.square().mean())

    model, x, y = nn.Sequential(Detached(), nn.Linear(6, 6)).double(), torch.randn(6, 6).double(), torch.randn(6, 6).double()
    for name in ("1f1b", "zb-h1"):
        model.zero_grad()
        launch(lambda n=name: Pipeline(model, schedule=n, microbatches=2, loss_fn=functional.mse_loss).step(x, target=y), 2)
        found = model[0].map.weight.grad.clone()
        model.zero_grad()
        model[0].map(x).square().mean().backward()
        torch.testing.assert_close(found, model[0].map.weight.grad, rtol=1e-12, atol=1e-14)


def test_side_losses_outside_a_pipeline() -> None:
    router = Router("reported")
    x = torch.randn(3, 6)
    router(x)  # outside a step
    with collect() as extras:
        router(x)
        router(x)
    assert len(extras.losses) == 2
    assert extras.metrics.keys() == {"load"}


def test_ranks_without_data_get_the_same_result() -> None:
    """A rank in the middle may be given nothing: its result is that of the others all the same."""
    model, x, y = blocks(3).double(), torch.randn(7, 6).double(), torch.randn(7, 6).double()
    wanted = by_batch(model, x, y)

    def train() -> StepResult:
        from penstock.runtime import rank

        pipe = Pipeline(model, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
        return pipe.step(*([x] if rank() != 1 else []), **({"target": y} if rank() != 1 else {}))

    results = launch(train, 3)
    assert_same_results(results)
    torch.testing.assert_close(results[1].loss, wanted.loss, rtol=1e-12, atol=0)


def test_the_cross_entropy_of_tokens_is_that_of_torch() -> None:
    logits, targets = torch.randn(2, 3, 5, 7), torch.randint(7, (2, 3, 5))
    targets[0, 1] = 3
    expected = functional.cross_entropy(logits.movedim(-1, 1), targets, ignore_index=3)
    torch.testing.assert_close(TokenCrossEntropy(ignore_index=3)(logits, targets), expected)


@pytest.mark.parametrize(
    ("fn", "ignored"),
    [
        (TokenCrossEntropy(5), 5),
        (functional.cross_entropy, -100),
        (functools.partial(functional.cross_entropy, ignore_index=2), 2),
        (nn.CrossEntropyLoss(ignore_index=4), 4),
        (functools.partial(functional.cross_entropy, label_smoothing=0.1), None),
        (nn.CrossEntropyLoss(label_smoothing=0.1), None),
        (nn.CrossEntropyLoss(torch.ones(3)), None),
        (functional.nll_loss, None),
        (None, None),
    ],
)
def test_which_functions_are_the_mean_cross_entropy_of_tokens(fn: Any, ignored: int | None) -> None:
    entropy = Loss(fn, "mean").find_token_entropy()
    assert (None if entropy is None else entropy.ignore_index) == ignored
