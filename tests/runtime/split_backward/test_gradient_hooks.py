"""Post-accumulate hooks, among them optimizers that run in one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, launch
from runtime.models import assert_equal, blocks


def update(parameter: Tensor) -> None:
    """Run an optimizer step and clear the gradient."""
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def update_unseen(parameter: Tensor) -> None:
    """The same through `data`, which autograd does not see as a change."""
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def replace(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.data = parameter.data - 0.1 * parameter.grad


def hooked(model: nn.Module, hook: Callable[[Tensor], Any]) -> nn.Module:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return model


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("hook", [update, update_unseen, replace])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_optimizer_in_a_hook_is_refused(name: str, hook: Callable[[Tensor], Any]) -> None:
    """The step is refused, and the weights are as before."""
    model, x = hooked(blocks(2), hook), torch.randn(4, 6)
    before = values(model)

    def train() -> None:
        pipe = Pipeline(model, schedule=name, microbatches=2, loss_fn=functional.mse_loss)
        with pytest.raises(
            (PipelineError, ScheduleError),
            match=r"outdated.*Call the optimizer after the step\. The weights are as before the step",
        ):
            pipe.step(x, target=x)

    launch(train, 2)
    for value, other in zip(values(model), before, strict=True):
        assert_equal(value, other)


def test_hook_that_starts_to_update_later_is_refused_in_that_step() -> None:
    updating = False
    model, x = hooked(blocks(2), lambda parameter: update(parameter) if updating else None), torch.randn(4, 6)
    pipe = Pipeline(list(model), schedule=ps.schedule("interleaved-1f1b", 1, 2, chunks=2), loss_fn=functional.mse_loss)
    pipe.step(x, target=x)
    updating = True
    with pytest.raises(PipelineError, match="The weights have been changed"):
        pipe.step(x, target=x)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_one_microbatch_may_update_in_a_hook(name: str) -> None:
    model, x, y = blocks(2), torch.randn(4, 6), torch.randn(4, 6)
    again = hooked(copy.deepcopy(model), update)
    hooked(model, update)

    def train() -> None:
        pipe = Pipeline(model, schedule=name, microbatches=1, loss_fn=functional.mse_loss)
        for _ in range(2):
            pipe.step(x, target=y)

    launch(train, 2)
    for _ in range(2):
        functional.mse_loss(again(x), y).backward()
    for value, other in zip(values(model), values(again), strict=True):
        torch.testing.assert_close(value, other)


def test_hooks_that_leave_the_weights_alone_are_allowed() -> None:
    calls: list[int] = []
    model, x = hooked(blocks(2), lambda parameter: calls.append(parameter.numel())), torch.randn(4, 6)

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
        for _ in range(2):
            pipe.step(x, target=x)
        assert pipe.parity(x, target=x).loop.exact

    launch(train, 2)
    assert len(calls) == 3 * 2 * len(list(model.parameters()))
