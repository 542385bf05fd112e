"""Inputs and results of a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PenstockError, ScheduleError
from penstock.runtime import Pipeline, StepResult, launch
from runtime.models import (
    Numbers,
    assert_all_equal,
    assert_close,
    assert_equal,
    assert_same,
    assert_same_results,
    blocks,
    by_batch,
    by_loop,
    by_pipeline,
    gradients,
    loop_step,
)

OUT_OF_ORDER = ["looped-bfs", "zbv", "dualpipe", "dualpipe-v", "interleaved-1f1b"]


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_losses_and_outputs_are_in_microbatch_order_on_every_rank(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=5)
    model, x, y = blocks(schedule.stages), torch.randn(13, 6), torch.randn(13, 6)

    def train() -> StepResult:
        return Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x, target=y, outputs=True)

    results = launch(train, 2)
    assert_same_results(results)
    outputs = [model(piece).detach() for piece in x.tensor_split(5)]
    losses = [functional.mse_loss(out, piece) for out, piece in zip(outputs, y.tensor_split(5), strict=True)]
    for result in results:
        assert_all_equal(result.losses, losses)
        assert_equal(result.outputs, torch.cat(outputs))
        assert not result.outputs.requires_grad


def test_outputs_are_kept_only_on_request() -> None:
    model, x = blocks(2), torch.randn(4, 6)
    assert Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss).step(x, target=x).outputs is None


def test_outputs_that_cannot_be_joined_are_listed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"rows": x * self.factor, "square": x @ x.t(), "count": len(x), "sum": x.sum() * self.factor}

    pipe = Pipeline([Odd()], schedule="1f1b", microbatches=2, loss_fn=lambda out, _: out["sum"], loss_reduction="sum")
    x = torch.randn(5, 3)
    out = pipe.step(x, target=None, outputs=True).outputs
    assert_equal(out["rows"], x)
    assert out["count"] == [3, 2]
    assert_equal(out["sum"], torch.stack([x[:3].sum(), x[3:].sum()]))
    assert_all_equal(out["square"], [x[:3] @ x[:3].t(), x[3:] @ x[3:].t()])


# The count ------------------------------------------------------------------------------------------------------------


def test_count_changes_every_step() -> None:
    """Gradients accumulate over steps of 1, 7, 3, 2 and 7 microbatches as in the loop."""
    model = blocks(4)
    again = copy.deepcopy(model)
    batches = [(torch.randn(9 + k, 6), torch.randn(9 + k, 6), count) for k, count in enumerate((1, 7, 3, 2, 7))]

    def train() -> list[Tensor | None]:
        pipe = Pipeline(model, schedule="interleaved-zb", microbatches=4, loss_fn=functional.mse_loss)
        losses = [pipe.step(x, target=y, microbatches=count).loss for x, y, count in batches]
        assert pipe.program(7) is pipe.program(7)  # made once
        return losses

    found = launch(train, 2)
    wanted = []
    for x, y, count in batches:
        pieces = list(zip(x.tensor_split(count), y.tensor_split(count), strict=True))
        wanted.append(loop_step(again, pieces, [len(piece) / len(x) for piece, _ in pieces], functional.mse_loss).loss)
    for losses in found:
        for one, other in zip(losses, wanted, strict=True):
            assert_equal(one, other)
    for name, grad in gradients(again).items():
        assert_equal(gradients(model)[name], grad, name)


def test_batch_that_does_not_divide() -> None:
    model, x, y = blocks(4).double(), torch.randn(10, 6).double(), torch.randn(10, 6).double()
    found = by_pipeline(model, ps.schedule("1f1b", ranks=4, microbatches=4), x, y)
    assert len(found.losses) == 4
    assert_close(found, by_batch(model, x, y), 1e-12)


def test_batch_smaller_than_the_count_is_refused() -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
    x = torch.randn(3, 6)
    with pytest.raises(ScheduleError, match="a batch of 3 cannot be split into 4 microbatches: ask for at most 3"):
        pipe.step(x, target=x)
    with pytest.raises(ScheduleError, match="0 microbatches: at least 1"):
        pipe.step(x, target=x, microbatches=0)
    assert pipe.step(x, target=x, microbatches=3).loss is not None


def test_sizes_that_differ_are_refused() -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
    with pytest.raises(ScheduleError, match="3 along dimension 0, 4 along dimension 0; say with batch_dims"):
        pipe.step(torch.randn(4, 6), target=torch.randn(3, 6))


# Ready microbatches ---------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Takes any length and returns one row per element."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).mean(1)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_step_list_with_different_shapes(name: str) -> None:
    """Microbatches of different lengths and sizes; the mean is over batch elements."""
    model = nn.Sequential(*blocks(3), Pooled())
    again = copy.deepcopy(model)
    shapes = [(2, 3), (1, 7), (4, 2), (3, 5), (2, 9)]
    inputs = [torch.randn(*shape, 6) for shape in shapes]
    targets = [torch.randn(shape[0], 6) for shape in shapes]

    def train() -> list[StepResult]:
        pipe = Pipeline(model, schedule=name, microbatches=2, loss_fn=functional.mse_loss)
        return [pipe.step_list(inputs, targets), pipe.step_list(inputs[::-1][:3], targets[::-1][:3])]

    results = launch(train, 4)
    for number, (xs, ys) in enumerate([(inputs, targets), (inputs[::-1][:3], targets[::-1][:3])]):
        total = sum(map(len, xs))
        wanted = loop_step(again, list(zip(xs, ys, strict=True)), [len(x) / total for x in xs], functional.mse_loss)
        for each in results:
            assert_equal(each[number].loss, wanted.loss)
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert_equal(parameter.grad, other.grad)


def test_step_list_refuses_lists_that_do_not_match() -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
    x = torch.randn(2, 6)
    with pytest.raises(ScheduleError, match="as many of each"):
        pipe.step_list([x, x], [x])
    with pytest.raises(ScheduleError, match="at least one"):
        pipe.step_list([])
    with pytest.raises(ScheduleError, match="as many of each"):
        pipe.step_list([x, x], [x, x], stage_kwargs={0: [{}]})


def test_step_list_takes_several_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.map(x) - y

    model = Two()
    pairs = [(torch.randn(k, 6), torch.randn(k, 6)) for k in (2, 3)]
    loss = Pipeline([model], schedule="1f1b", microbatches=2, loss_fn=lambda out: out.square().mean()).step_list(pairs).loss
    wanted = sum(model(*pair).square().mean() * (len(pair[0]) / 5) for pair in pairs)
    torch.testing.assert_close(loss, wanted.detach())


# Batch dimensions -----------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.map(x) * table


def test_batch_in_dimension_one() -> None:
    model = nn.Sequential(Block1(), Block1()).double()
    x, y = torch.randn(4, 7, 6).double(), torch.randn(4, 7, 6).double()
    found = by_pipeline(model, ps.schedule("1f1b", ranks=2, microbatches=3), x, y, batch_dims=1, target_dims=1, step={"outputs": True})
    assert_close(found, by_batch(model, x, y), 1e-12)

    pipe = Pipeline(model, schedule="1f1b-v", microbatches=3, batch_dims=1)
    torch.testing.assert_close(pipe.infer(x), model(x).detach(), rtol=1e-12, atol=1e-12)


class Block1(nn.Module):
    """Batch in dimension 1; mixes along dimension 0, so that a wrong split changes the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x)).cumsum(0)


def test_whole_tensors_are_not_split() -> None:
    """A table as long as the batch is not sliced when it was declared whole."""
    model, x, table, y = Scaled(), torch.randn(6, 6), torch.randn(6), torch.randn(6, 6)
    pipe = Pipeline([model], schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss, batch_dims=(0, None))
    loss = pipe.step(x, table, target=y).loss
    torch.testing.assert_close(loss, functional.mse_loss(model(x, table), y).detach())


class FromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.map(batch["x"]) * batch["table"] + batch["shift"]
        return x + batch["nested"][0].t()


def test_dict_of_dimensions() -> None:
    model = FromDict()
    batch = {"x": torch.randn(6, 6), "table": torch.randn(6), "shift": 0.5, "nested": (torch.randn(6, 6),)}
    dims = {"table": None, "nested": (1,)}
    pipe = Pipeline([model], schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, batch_dims=dims)
    y = torch.randn(6, 6)
    torch.testing.assert_close(pipe.step(batch, target=y).loss, functional.mse_loss(model(batch), y).detach())


def test_dimensions_that_do_not_fit() -> None:
    pipe = Pipeline([Scaled()], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, batch_dims=(0,))
    x = torch.randn(4, 6)
    with pytest.raises(ScheduleError, match=r"batch_dims \(0,\) do not fit"):
        pipe.step(x, x, target=x)
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, batch_dims=3)
    with pytest.raises(ScheduleError, match=r"shape \[4, 6\] has no dimension 3"):
        pipe.step(x, target=x)


@pytest.mark.parametrize("kind", ["tuple", "dict", "nested"])
def test_target_trees(kind: str) -> None:
    """A target may be any tree; each microbatch's loss sees its slice of it."""
    model, x, a, b = blocks(2).double(), torch.randn(7, 6).double(), torch.randn(7, 6).double(), torch.rand(7).double()
    target: Any = {"tuple": (a, b), "dict": {"a": a, "b": b}, "nested": {"both": [a, (b,)], "note": "same for all"}}[kind]

    def loss_fn(out: Tensor, given: Any) -> Tensor:
        if kind == "nested":
            assert given["note"] == "same for all"
            one, (two,) = given["both"]
        else:
            one, two = given.values() if kind == "dict" else given
        return ((out - one).square().mean(1) * two).mean()

    found = by_pipeline(model, ps.schedule("zb-h1", ranks=2, microbatches=3), x, target, loss_fn)
    again = copy.deepcopy(model)
    loss = ((again(x) - a).square().mean(1) * b).mean()
    loss.backward()
    assert_close(found, Numbers(loss.detach(), [], gradients(again)), 1e-12)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_input_that_requires_a_gradient_gets_it(name: str) -> None:
    model, x, y = blocks(2).double(), torch.randn(7, 6).double().requires_grad_(), torch.randn(7, 6).double()
    launch(lambda: Pipeline(model, schedule=name, microbatches=3, loss_fn=functional.mse_loss).step(x, target=y), 2)
    found, x.grad = x.grad, None
    functional.mse_loss(model(x), y).backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-15)


# Keyword arguments ----------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, gate: Tensor | None = None, scale: float = 1.0) -> Tensor:
        out = torch.tanh(self.map(x)) * scale
        return out if gate is None else out * gate


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_keyword_arguments_local_to_a_stage(name: str) -> None:
    stages = [Gated() for _ in range(3)]
    x, y, gate, table = torch.randn(7, 6), torch.randn(7, 6), torch.rand(7, 6), torch.rand(6)

    def train() -> StepResult:
        pipe = Pipeline(stages, schedule=name, microbatches=3, loss_fn=functional.mse_loss, kwarg_dims={"gate": 0})
        return pipe.step(x, target=y, stage_kwargs={1: {"gate": gate}, 2: {"scale": 0.5}})

    result = launch(train, 3)[0]
    wanted = functional.mse_loss(stages[2](stages[1](stages[0](x), gate=gate), scale=0.5), y)
    torch.testing.assert_close(result.loss, wanted.detach())
    grads = [stage.map.weight.grad.clone() for stage in stages]
    for stage in stages:
        stage.zero_grad()
    wanted.backward()
    for grad, stage in zip(grads, stages, strict=True):
        torch.testing.assert_close(grad, stage.map.weight.grad)

    def whole() -> StepResult:
        pipe = Pipeline(stages, schedule=name, microbatches=3, loss_fn=functional.mse_loss, kwarg_dims={"gate": None})
        return pipe.step(x, target=y, stage_kwargs={0: {"gate": table}})

    wanted = functional.mse_loss(stages[2](stages[1](stages[0](x, gate=table))), y)
    torch.testing.assert_close(launch(whole, 3)[0].loss, wanted.detach())


def test_keyword_arguments_by_microbatch() -> None:
    stage = Gated()
    xs, gates = [torch.randn(k, 6) for k in (2, 3)], [torch.rand(k, 6) for k in (2, 3)]
    pipe = Pipeline([stage], schedule="1f1b", microbatches=2, loss_fn=lambda out: out.square().mean())
    found = pipe.step_list(xs, stage_kwargs={0: [{"gate": gate} for gate in gates]})
    assert_all_equal(found.losses, [stage(x, gate=gate).square().mean().detach() for x, gate in zip(xs, gates, strict=True)])


def test_keyword_arguments_of_an_unknown_stage() -> None:
    pipe = Pipeline([Gated()], schedule="1f1b", microbatches=1, loss_fn=functional.mse_loss)
    x = torch.randn(2, 6)
    with pytest.raises(ScheduleError, match="stage_kwargs for stage 4: there are stages 0 to 0"):
        pipe.step(x, target=x, stage_kwargs={4: {}})
    with pytest.raises(ScheduleError, match="tensors of different batch sizes"):
        pipe.step(x, target=x, stage_kwargs={0: {"gate": torch.rand(5, 6)}})


# Building -------------------------------------------------------------------------------------------------------------


def test_arguments_that_a_pipeline_refuses() -> None:
    model = blocks(1)
    with pytest.raises(ScheduleError, match="needs microbatches="):
        Pipeline(model, schedule="1f1b")
    with pytest.raises(ScheduleError, match="a pipeline needs a plan, a schedule or a program, got NoneType"):
        Pipeline(model)
    with pytest.raises(ScheduleError, match="the schedule is for 2 ranks, but there are 1"):
        Pipeline(model, ps.schedule("1f1b", ranks=2, microbatches=1))
    with pytest.raises(ScheduleError, match="accumulate must be 'autograd' or 'fused'"):
        Pipeline(model, schedule="1f1b", microbatches=1, accumulate="sum")
    with pytest.raises(PenstockError, match="did you mean"):
        Pipeline(model, schedule="1f1f", microbatches=1)
    graph = ps.StageGraph(3, ((0, 1), (0, 2)))
    with pytest.raises(ScheduleError, match=r"no stage reads stages \[1, 2\]"):
        Pipeline(model, ps.schedule("interleaved-1f1b", ranks=1, microbatches=1, chunks=3, graph=graph))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": "mse"}, r"loss_fn must be a function, which is called as loss_fn\(output, target\), got 'mse'"),
        ({"weight": 3}, r"weight must be a function, which is called as weight\(target\), got 3"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"accumulate_dtype": "float32"}, r"accumulate_dtype must be a torch\.dtype, like torch\.float32, got 'float32'"),
        ({"weights": 3}, r"weights must be a source, such as Safetensors\(path\), or a list of them, got 3"),
        ({"microbatches": "2"}, "microbatches must be a whole number of at least 1, got '2'"),
        ({"schedule": "plan.json"}, r"'plan.json' is a file, not the name of a schedule: load it, with penstock\.Plan\.load"),
    ],
)
def test_options_of_another_type_are_refused_when_a_pipeline_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        Pipeline(blocks(1), **{"schedule": "1f1b", "microbatches": 2, **options})


def test_microbatches_given_with_a_schedule() -> None:
    pipe = Pipeline(blocks(1), ps.schedule("1f1b", ranks=1, microbatches=2), microbatches=5, loss_fn=functional.mse_loss)
    x = torch.randn(5, 6)
    assert len(pipe.step(x, target=x).losses) == 5


def test_fused_accumulation_is_close() -> None:
    model, x, y = blocks(2), torch.randn(8, 6), torch.randn(8, 6)
    schedule = ps.schedule("zb-h1", ranks=2, microbatches=8)
    found = by_pipeline(model, schedule, x, y, accumulate="fused")
    assert_close(found, by_loop(model, x, y, 8), 1e-5)
    assert_same(by_pipeline(model, schedule, x, y), by_loop(model, x, y, 8))
