"""Stages that ask autograd for gradients of their own inside a split forward or loss: they run their backward whole."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError, WholeBackwardNeeded
from penstock.ir.kind import Kind
from penstock.runtime import Pipeline, launch
from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral
from penstock.schedules.registry import algorithms
from runtime.models import Numbers, assert_close, assert_same, gradients, loop_step, sums_in_order
from runtime.splitting import Half, check, wants

WIDTH = 6
LossFn = Callable[[Tensor, Tensor], Tensor]


def split_schedules() -> list[str]:
    found = []
    for name in (name for name, each in algorithms().items() if not each.is_sliced):
        try:
            schedule = ps.schedule(name, ranks=2, microbatches=4)
        except ScheduleError:
            continue
        if any(part.kind is Kind.I for row in schedule for action in row for part in action.parts):
            found.append(name)
    return found


SCHEDULES = split_schedules()


def test_schedules_with_a_split_backward_are_tested() -> None:
    assert {"zb-h1", "zb-h2", "zbv", "interleaved-zb", "dualpipe-v", "dualpipe"} <= set(SCHEDULES)


# What stages and losses do --------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(self.norm(x)))


class WeightSlope(Plain):
    """Scales its output by the gradient of its own weight, and asks for that of an unused weight too."""

    def __init__(self, edge: bool = False) -> None:
        super().__init__()
        self.unused, self.edge = nn.Linear(WIDTH, WIDTH), edge

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        asked = [get_gradient_edge(self.map.weight)] if self.edge else [self.map.weight, self.unused.weight]
        slope, *rest = torch.autograd.grad(out.square().sum(), asked, retain_graph=True, allow_unused=True)
        assert rest == ([] if self.edge else [None])
        return out * (1 + slope.norm())


class BiasSlope(Plain):
    """Asks for a bias's gradient, without `allow_unused`."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.sum(), self.map.bias, retain_graph=True)
        return out + slope


class Penalty(Plain):
    """A gradient penalty, which differentiates the output's gradient again."""

    def forward(self, x: Tensor) -> Tensor:
        given = x if x.requires_grad else x.detach().requires_grad_()
        out = super().forward(given)
        (slope,) = torch.autograd.grad(out.sum(), given, create_graph=True)
        return out + slope.square().mean()


class Adapting(Plain):
    """One inner step of MAML: the output is computed with weights updated on the input."""

    def forward(self, x: Tensor) -> Tensor:
        names, weights = zip(*self.map.named_parameters(), strict=True)
        inner = (self.map(self.norm(x)) - x).square().mean()
        slopes = torch.autograd.grad(inner, weights, create_graph=True)
        fast = {name: weight - 0.1 * slope for name, weight, slope in zip(names, weights, slopes, strict=True)}
        return torch.tanh(torch.func.functional_call(self.map, fast, (self.norm(x),)))


class OwnBackward(Plain):
    """Runs a backward inside its forward, which adds to its gradients."""

    def forward(self, x: Tensor) -> Tensor:
        self.map(x.detach()).square().mean().backward()
        return super().forward(x)


class Handling(WeightSlope):
    """Catches every exception inside its forward."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:
            return x


class Stateful(WeightSlope):
    """Changes all kinds of state before it asks for its weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.runs, self.seen = 0, [0.0]
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.seen.append(float(x.detach().sum()))
        self.total += x.detach().sum()
        x = self.dropout(self.batch_norm(x)) * (1 + random.random() + float(np.random.rand()))
        return super().forward(x)


class InPlace(WeightSlope):
    """Changes its input in place before it asks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


STAGES: dict[str, Callable[[], nn.Module]] = {
    "weight's gradient": WeightSlope,
    "weight's gradient, by its place in the graph": lambda: WeightSlope(edge=True),
    "bias's gradient": BiasSlope,
    "gradient penalty": Penalty,
    "inner step": Adapting,
    "backward of its own": OwnBackward,
    "handler": Handling,
    "state": Stateful,
    "input changed in place": InPlace,
}


def adaptive(model: nn.Sequential) -> LossFn:
    """VQGAN's adaptive loss: the second term is weighted so that both have equal gradient norms at the last weight."""

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        first, second = (out - y).square().mean(), out.abs().mean()
        slopes = [torch.autograd.grad(each, last_weight(model), retain_graph=True)[0] for each in (first, second)]
        weight = (slopes[0].norm() / (slopes[1].norm() + 1e-4)).clamp(0, 1e4).detach()
        return first + weight * second

    return loss_fn


def balanced(model: nn.Sequential) -> LossFn:
    """GradNorm's loss: the difference of the gradient norms at the last weight is part of it."""

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        losses = [(out - y).square().mean(), out.abs().mean()]
        norms = [torch.autograd.grad(each, last_weight(model), create_graph=True)[0].norm() for each in losses]
        return sum(losses) + 0.1 * (norms[0] - norms[1]).abs()  # type: ignore[return-value]

    return loss_fn


def unused(model: nn.Sequential) -> LossFn:
    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        loss = functional.mse_loss(out, y)
        (slope,) = torch.autograd.grad(loss, last_weight(model), retain_graph=True, allow_unused=True)
        return loss if slope is None else loss * slope.norm().detach()

    return loss_fn


LOSSES: dict[str, Callable[[nn.Sequential], LossFn]] = {"adaptive weight": adaptive, "GradNorm": balanced, "unused": unused}


def last_weight(model: nn.Sequential) -> Tensor:
    return model[-1].map.weight  # type: ignore[union-attr, no-any-return]


def plain_loss(model: nn.Sequential) -> LossFn:
    return functional.mse_loss


# The numbers of the unpipelined model ---------------------------------------------------------------------------------


def build(count: int, at: int, make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(make() if place == at else Plain() for place in range(count)))


def seed_all() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def state_of(model: nn.Module) -> list[Any]:
    buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    return [buffers, [(part.runs, part.seen) for part in model.modules() if isinstance(part, Stateful)]]


def compare(
    name: str, at: int, make: Callable[[], nn.Module] = Plain, loss: Callable[[nn.Sequential], LossFn] = plain_loss, **options: Any
) -> list[Pipeline]:
    """Compare two steps with the microbatch loop: gradients, losses, buffers and attributes."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model, plain = (build(schedule.stages, at % schedule.stages, make) for _ in range(2))
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

    def train() -> tuple[Pipeline, list[Any]]:
        pipe = Pipeline(model, schedule, loss_fn=loss(model), **options)
        return pipe, [pipe.step(x.clone(), target=y) for _ in range(2)]

    seed_all()
    results = launch(train, 2)
    seed_all()
    wanted = []
    for _ in range(2):
        pieces = list(zip(x.clone().tensor_split(4), y.tensor_split(4), strict=True))
        wanted.append(loop_step(plain, pieces, [0.25] * 4, loss(plain)))
    found = results[0][1]
    exact = sums_in_order(schedule) and make is not OwnBackward  # which adds to gradients as soon as a forward runs
    for step, numbers in zip(found, wanted, strict=True):
        for one, other in zip(step.losses, numbers.losses, strict=True):
            torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if exact else {}))
    last = Numbers(found[1].loss, found[1].losses, gradients(model))
    if exact:
        assert_same(last, wanted[1])
        if not options:
            assert state_of(model) == state_of(plain)
    else:
        assert_close(last, wanted[1], 1e-5)
    return [pipe for pipe, _ in results]


def _has_copies(schedule: str) -> bool:
    return len(ps.schedule(schedule, ranks=2, microbatches=4).placement.copies) > 1


@pytest.mark.parametrize(
    # Copies of a stage must not keep state of their own, which is refused.
    ("name", "schedule"),
    [(name, schedule) for name in STAGES for schedule in SCHEDULES if name != "state" or not _has_copies(schedule)],
)
def test_a_stage_that_asks_for_gradients(name: str, schedule: str) -> None:
    for at in (1, -1):
        pipes = compare(schedule, at, STAGES[name])
        assert_whole(pipes, at)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_asks_for_gradients(name: str, schedule: str) -> None:
    pipes = compare(schedule, 0, loss=LOSSES[name])
    assert_whole(pipes, -1)


def assert_whole(pipes: list[Pipeline], at: int) -> None:
    """Check that every rank reports the stage at `place` as running its backward whole, if the schedule splits it."""
    table = pipes[0].table
    at %= table.stages
    split = any(part.kind is Kind.I and part.stage == at for row in table for action in row for part in action.parts)
    for pipe in pipes:
        assert (() if pipe.merged is None else pipe.merged.stages) == ((at,) if split else ())


# What is kept, and what is refused ------------------------------------------------------------------------------------


class Later(Plain):
    """Asks for its weight's gradient from a certain forward on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out = super().forward(x)
        if self.runs > self.start:
            (slope,) = torch.autograd.grad(out.sum(), self.map.weight, retain_graph=True)
            out = out * (1 + slope.norm())
        return out


@pytest.mark.parametrize("start", [2, 4, 7])
def test_a_later_forward_fails_its_step_and_the_next_step_is_correct(start: int, caplog: pytest.LogCaptureFixture) -> None:
    schedule = ps.schedule("zb-h1", ranks=2, microbatches=4)
    model, plain = (build(2, 1, lambda: Later(start)) for _ in range(2))
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

    def train() -> tuple[list[int], Pipeline]:
        pipe, failed = Pipeline(model, schedule, loss_fn=functional.mse_loss), []
        for step in range(3):
            try:
                pipe.step(x, target=y)
            except PipelineError as error:
                failed.append(step)
                text = str(error)
                assert "stage 1 asks autograd for a weight's gradient in its forward or loss" in text
                assert "run this step again" in text
                pipe.step(x, target=y)
        return failed, pipe

    with caplog.at_level(logging.WARNING, "penstock"):
        results = launch(train, 2)
    assert [failed for failed, _ in results] == [[start // 4]] * 2
    for _ in range(3):
        wanted = loop_step(plain, list(zip(x.tensor_split(4), y.tensor_split(4), strict=True)), [0.25] * 4, functional.mse_loss)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted.grads[name], rtol=0, atol=0)
    said = [record.getMessage() for record in caplog.records if "cannot split" in record.getMessage()]
    assert said == [str(results[0][1].merged)]


def test_the_cost_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The reported cost is that of zb-h1 with the last stage's backward merged."""
    with caplog.at_level(logging.WARNING, "penstock"):
        pipes = compare("zb-h1", 1, WeightSlope)
    said = [record.getMessage() for record in caplog.records if "cannot split" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        "stages [1] cannot split their backward (stage 1 asks autograd for a weight's gradient in its forward or loss): they run I and W "
        "as one B. With F = I = W = 1 a step takes "
    )
    merged = ps.PassList.parse("merge-backward{stages=1,apart=true}").apply(ps.schedule("zb-h1", ranks=2, microbatches=4))
    assert pipes[1].merged is not None
    assert pipes[1].merged.after.makespan == ps.simulate(merged).makespan


class Scaling(WeightSlope):
    """Changes a parameter in place before it asks."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.map.weight.mul_(0.9)
        return super().forward(x)


def test_a_forward_that_changes_its_parameters_is_not_run_again() -> None:
    model = build(2, 1, Scaling)
    schedule, x = ps.schedule("zb-h1", ranks=2, microbatches=4), torch.randn(8, WIDTH)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        with pytest.raises(PipelineError, match="a forward that changes its parameters in place cannot be run again"):
            pipe.step(x, target=x)
        pipe.step(x, target=x)

    launch(train, 2)


@pytest.mark.parametrize("name", ["weight's gradient", "gradient penalty", "inner step"])
@pytest.mark.parametrize("recompute", [True, [False, True]], ids=str)
def test_recomputed_stages(name: str, recompute: Any) -> None:
    pipes = compare("zb-h1", 1, STAGES[name], recompute=recompute)
    assert pipes[0].merged is not None


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_a_recomputed_stage(name: str) -> None:
    compare("zb-h1", 0, loss=LOSSES[name], recompute=True)


@pytest.mark.parametrize(
    "options", [{"accumulate": "fused"}, {"accumulate_dtype": torch.float64}, {"overlap": "streams"}, {"seed": 3}], ids=str
)
def test_options(options: dict[str, Any]) -> None:
    model = build(4, 1, WeightSlope)
    x, schedule = torch.randn(8, WIDTH), ps.schedule("zbv", ranks=2, microbatches=4)
    launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss, **options).step(x, target=x.sin()), 2)
    plain = build(4, 1, WeightSlope)
    wanted = loop_step(plain, [(piece, piece.sin()) for piece in x.tensor_split(4)], [0.25] * 4, functional.mse_loss)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted.grads[name])


def test_parity_of_such_a_stage() -> None:
    model, x = build(2, 1, WeightSlope), torch.randn(8, WIDTH)

    def look() -> bool:
        pipe = Pipeline(model, "zb-h1", microbatches=4, loss_fn=functional.mse_loss, seed=2)
        return pipe.parity(x, target=x).loop.exact

    assert launch(look, 2) == [True, True]


class Hooked(WeightSlope):
    """Runs another stage's backward inside its forward, with torch's own function."""

    def overlapped_forward_backward(self, args: Any, kwargs: Any, backward: Any) -> Tensor:
        torch.autograd.backward(backward.outputs, backward.grads)
        out: Tensor = self(*args, **kwargs)
        return out


class HookedOnly(Plain):
    def overlapped_forward_backward(self, args: Any, kwargs: Any, backward: Any) -> Tensor:
        torch.autograd.backward(backward.outputs, backward.grads)
        out: Tensor = self(*args, **kwargs)
        return out


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("make", [Hooked, HookedOnly])
def test_forwards_that_run_a_backward_by_a_hook(make: Callable[[], nn.Module], at: int) -> None:
    compare("dualpipe-v", at, make)


# Below the pipeline ---------------------------------------------------------------------------------------------------


def ask(create_graph: bool = False, of: str = "weight") -> Callable[[nn.Module, Tensor], Any]:
    def forward(model: nn.Linear, x: Tensor) -> Any:
        out = model(x)
        torch.autograd.grad(out.sum(), x if of == "input" else model.weight, retain_graph=True, create_graph=create_graph)
        return out

    return forward  # type: ignore[return-value]


def test_a_gradient_of_only_the_input_keeps_the_split() -> None:
    model = nn.Linear(5, 5)
    assert check(model, (wants(4, 5),), forward=ask(of="input")) == {"weight", "bias"}


@pytest.mark.parametrize("function", [torch.autograd.grad, torch.autograd.backward])
def test_every_form_of_inputs_is_checked(function: Callable[..., Any]) -> None:
    model, x = nn.Linear(5, 5), wants(4, 5)
    with Deferrable(model).forward(Deferral()):
        out = model(x).sum()
        function(out, inputs=[x], retain_graph=True)
        for inputs in (model.weight, [x, model.bias], get_gradient_edge(model.weight)):
            with pytest.raises(WholeBackwardNeeded, match="weight's gradient"):
                function(out, inputs=inputs, retain_graph=True)
        with pytest.raises(WholeBackwardNeeded, match="create_graph"):
            function(out, inputs=x, create_graph=True)
        with pytest.raises(WholeBackwardNeeded, match="backward of its own"):
            torch.autograd.backward(out)


def test_nothing_stays_in_place() -> None:
    before = dict(vars(torch.autograd))
    half = Half(nn.Linear(5, 5))
    half.forward(wants(4, 5))
    assert vars(torch.autograd) == before


def test_nested_tensors_are_left_to_autograd() -> None:
    model = nn.Linear(5, 3)

    def forward(inner: nn.Module, x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        made: Tensor = inner(nested).values()
        return made

    assert check(model, (torch.randn(5, 5),), forward=forward) == set()


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipe-v"])
def test_a_loss_that_applies_a_weight_of_the_last_stage(name: str) -> None:
    """The gradient of a weight that the loss uses is deferred with the stage's."""

    def applied(model: nn.Sequential) -> LossFn:
        return lambda out, y: functional.mse_loss(functional.linear(out, last_weight(model)), y)

    pipes = compare(name, 0, loss=applied)
    assert pipes[0].merged is None
