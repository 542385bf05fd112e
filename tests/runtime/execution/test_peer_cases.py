"""Cases that torch.distributed.pipelining gets wrong, one test per case, and what must happen here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError
from penstock.runtime import Pipeline, StepResult, launch
from runtime.models import assert_all_equal, assert_equal, blocks, gradients, loop_step

SPLIT = ["zb-h1", "zb-h2", "interleaved-zb", "zbv", "v-half", "v-min", "zb-auto"]
"""Schedules that split the backward."""


def _loop(model: nn.Module, x: Tensor, y: Tensor, count: int) -> Any:
    """The microbatch loop on the model itself."""
    pieces = list(zip(x.tensor_split(count), y.tensor_split(count), strict=True))
    return loop_step(model, pieces, [len(piece) / len(x) for piece, _ in pieces], functional.mse_loss)


def _compare(model: nn.Module, again: nn.Module) -> None:
    wanted = gradients(again)
    for name, grad in gradients(model).items():
        assert_equal(grad, wanted[name], name)


@pytest.mark.parametrize("name", SPLIT)
def test_row_1_frozen_first_stage_with_a_zero_bubble_schedule(name: str) -> None:
    """In torch, every gradient of the stage after a frozen one is None."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model = blocks(schedule.stages)
    model[0].requires_grad_(False)
    again = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x, target=y), 2)
    _loop(again, x, y, 4)
    _compare(model, again)
    assert all(p.grad is not None for p in model[1].parameters())


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.map(a)) + b


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-auto"])
def test_row_1_parameter_that_feeds_only_a_second_output(name: str) -> None:
    """In torch, it loses its gradient under I and W."""
    stages = nn.ModuleList([TwoOutputs(), TwoInputs()])
    again = copy.deepcopy(stages)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    launch(lambda: Pipeline(stages, schedule=name, microbatches=4, loss_fn=functional.mse_loss).step(x, target=y), 2)
    for xx, yy in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (functional.mse_loss(again[1](*again[0](xx)), yy) / 4).backward()
    _compare(stages, again)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv"])
def test_row_3_evaluation_after_a_step(name: str) -> None:
    """In torch, the gradients are divided by the number of microbatches once more."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model = blocks(schedule.stages)
    again = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        pipe.eval_step(x, target=y)

    launch(train, 2)
    _loop(again, x, y, 4)
    _compare(model, again)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_row_4_two_steps_before_the_optimizer(name: str) -> None:
    """In torch, with 4 microbatches, the gradient is 1.25 times that of one step instead of twice."""
    model = blocks(2)
    again = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train() -> None:
        pipe = Pipeline(model, schedule=name, microbatches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        pipe.step(x, target=y)

    launch(train, 2)
    _loop(again, x, y, 4)
    _loop(again, x, y, 4)
    _compare(model, again)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_row_5_first_step_of_a_model_with_batch_statistics(name: str) -> None:
    """In torch, an extra forward on uninitialized memory counts as a batch, and can make the mean NaN."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)))
    again = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    launch(lambda: Pipeline(model, schedule=name, microbatches=4, loss_fn=functional.mse_loss).step(x, target=y), 2)
    _loop(again, x, y, 4)
    for layer, other in zip(model, again, strict=True):
        assert int(layer[1].num_batches_tracked) == 4
        assert_equal(layer[1].running_mean, other[1].running_mean)
        assert_equal(layer[1].running_var, other[1].running_var)


@pytest.mark.parametrize("name", ["looped-bfs", "zbv", "dualpipe-v", "dualpipe", "chimera"])
def test_row_6_order_of_outputs_and_losses(name: str) -> None:
    """In torch, they come in the order of execution."""
    schedule = ps.schedule(name, ranks=2, microbatches=6)
    model, x, y = blocks(schedule.stages), torch.randn(12, 6), torch.randn(12, 6)

    def train() -> StepResult:
        return Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x, target=y, outputs=True)

    wanted = [model(piece).detach() for piece in x.tensor_split(6)]
    for result in launch(train, 2):
        assert_equal(result.outputs, torch.cat(wanted))
        assert_all_equal(result.losses, [functional.mse_loss(out, piece) for out, piece in zip(wanted, y.tensor_split(6), strict=True)])


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v", "1f1b-v"])
def test_row_7_evaluation_if_a_rank_holds_adjacent_stages(name: str) -> None:
    """In torch, it fails, and the other rank hangs."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model, x = blocks(4), torch.randn(8, 6)
    found = launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss).eval_step(x, target=x).loss, 2)
    for loss in found:
        torch.testing.assert_close(loss, functional.mse_loss(model(x), x).detach())


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe-v"])
def test_row_8_step_after_an_exception(name: str) -> None:
    """In torch, later steps fail too."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    calls = 0

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("once")
        return functional.mse_loss(out, target)

    model = blocks(schedule.stages)
    again = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=loss_fn)
        with pytest.raises(PipelineError, match="ValueError: once"):
            pipe.step(x, target=y)
        pipe.step(x, target=y)

    launch(train, 2)
    _loop(again, x, y, 4)
    _compare(model, again)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_row_9_batch_of_10_in_4_microbatches_and_a_batch_that_changes(name: str) -> None:
    """In torch, it crashes."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model = blocks(schedule.stages)
    again = copy.deepcopy(model)
    batches = [(torch.randn(size, 6), torch.randn(size, 6)) for size in (10, 7, 12, 4)]

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        for x, y in batches:
            pipe.step(x, target=y)

    launch(train, 2)
    for x, y in batches:
        _loop(again, x, y, 4)
    _compare(model, again)


@pytest.mark.parametrize("kind", ["tuple", "dict", "none"])
def test_row_10_targets_that_are_not_tensors(kind: str) -> None:
    """In torch, it fails."""
    model = blocks(2)
    again = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    target: Any = {"tuple": (y, y), "dict": {"a": y, "b": y}, "none": None}[kind]

    def loss_fn(out: Tensor, given: Any) -> Tensor:
        if given is None:
            return out.square().mean()
        a, b = given.values() if isinstance(given, dict) else given
        return functional.mse_loss(out, (a + b) / 2)

    launch(lambda: Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=loss_fn).step(x, target=target), 2)
    _loop(again, x, torch.zeros_like(y) if kind == "none" else y, 4)
    wanted = gradients(again)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted[name])


class Reshapes(nn.Module):
    def __init__(self, back: bool) -> None:
        super().__init__()
        self.map, self.back = nn.Linear(6, 6), back

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.reshape(-1, 6)) if self.back else self.map(x).view(-1, 3, 2)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-auto"])
def test_row_13_view_as_the_output_of_a_stage(name: str) -> None:
    """In torch, the split backward crashes."""
    model = nn.Sequential(Reshapes(back=False), Reshapes(back=True))
    again = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    launch(lambda: Pipeline(model, schedule=name, microbatches=4, loss_fn=functional.mse_loss).step(x, target=y), 2)
    _loop(again, x, y, 4)
    _compare(model, again)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_row_19_evaluation_builds_no_graph(name: str) -> None:
    """In torch, graphs are built, and every output is kept."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    graphs: list[bool] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out = self.map(x)
            graphs.append(out.grad_fn is not None)
            return out

    model, x = nn.Sequential(*(Looks() for _ in range(schedule.stages))), torch.randn(8, 6)
    result = launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss).eval_step(x, target=x), 2)[0]
    assert graphs == [False] * (4 * schedule.stages)
    assert result.outputs is None
