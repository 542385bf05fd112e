"""Microbatches in another order: the numbers of the unpipelined model, results in the caller's order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, StepResult, add_metric, launch, rank
from penstock.verifier.verify import verify
from runtime.models import Numbers, assert_all_equal, assert_close, assert_equal, assert_same_results, blocks, gradients, loop_step

SHAPES = [(2, 3), (1, 7), (4, 2), (3, 5), (2, 9), (1, 1)]
ORDER = [4, 0, 5, 2, 1, 3]


class Pooled(nn.Module):
    """The mean over the tokens of each sample; reports their number."""

    def forward(self, x: Tensor) -> Tensor:
        add_metric("tokens", float(x.shape[1]))
        return x.mean(1)


def batch(shapes: list[tuple[int, int]] = SHAPES) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.randn(*shape, 6) for shape in shapes], [torch.randn(shape[0], 6) for shape in shapes]


def run_loop(model: nn.Module, inputs: list[Tensor], targets: list[Tensor], order: list[int]) -> Any:
    """The unpipelined model over the microbatches in this order."""
    total = sum(map(len, inputs))
    return loop_step(model, [(inputs[k], targets[k]) for k in order], [len(inputs[k]) / total for k in order], functional.mse_loss)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_gradients_are_those_of_the_loop_in_that_order_and_results_in_the_callers(name: str) -> None:
    model = nn.Sequential(*blocks(3), Pooled())
    again, plain = copy.deepcopy(model), copy.deepcopy(model)
    inputs, targets = batch()

    def train() -> StepResult:
        pipe = Pipeline(model, schedule=name, microbatches=6, loss_fn=functional.mse_loss)
        return pipe.step_list(inputs, targets, order=ORDER, outputs=True)

    results = launch(train, 2)
    assert_same_results(results)
    run_loop(again, inputs, targets, ORDER)
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert_equal(parameter.grad, other.grad)
    unordered = run_loop(plain, inputs, targets, list(range(6)))
    assert_all_equal(results[0].losses, unordered.losses)
    assert_equal(results[0].loss, unordered.loss)
    assert_equal(results[0].outputs, torch.cat([plain(x).detach() for x in inputs]))
    assert [int(value) for value in results[0].metrics["tokens"]] == [length for _, length in SHAPES]
    assert_close(Numbers(results[0].loss, results[0].losses, gradients(model)), unordered, 1e-6)  # a sum in another order


def test_random_numbers_do_not_depend_on_the_order() -> None:
    """With a seed each microbatch draws the same numbers wherever it runs, so the losses are equal to the last bit."""
    inputs, targets = batch()
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), Pooled()]

    def train(order: list[int] | None) -> StepResult:
        pipe = Pipeline(copy.deepcopy(layers), schedule="1f1b", microbatches=6, loss_fn=functional.mse_loss, seed=3)
        return pipe.step_list(inputs, targets, order=order)

    first, other = (launch(train, 2, args=(order,))[0] for order in (None, ORDER))
    assert_all_equal(first.losses, other.losses)
    assert len({float(loss) for loss in first.losses}) == 6


def lengths_of(inputs: list[Tensor]) -> list[list[int]]:
    return [[x.shape[1]] * x.shape[0] for x in inputs]


def test_a_planned_order_with_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each schedule is proved once, however many steps run under it; the timeline has the planned actions."""
    proofs: list[str] = []
    monkeypatch.setattr(
        "penstock.runtime.execution.programs.verify", lambda program, **options: proofs.append(program.name) or verify(program, **options)
    )
    model = nn.Sequential(*blocks(3), Pooled())
    again = copy.deepcopy(model)
    schedule = ps.schedule("1f1b", 4, 6)
    planner = ps.BatchPlanner(schedule, ps.Costs(), sequence=4)
    batches = [batch(), batch(SHAPES[::-1]), batch([(1, 9), (2, 2), (2, 3), (1, 8), (5, 1), (1, 2)])]
    orders = [planner.order(lengths_of(inputs)) for inputs, _ in batches]
    assert any(order.schedule.name != "1f1b" for order in orders)
    assert any(order.microbatches != tuple(range(6)) for order in orders)

    def train() -> list[StepResult]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, record=True)
        return [
            pipe.step_list(inputs, targets, order=order) for _ in range(2) for (inputs, targets), order in zip(batches, orders, strict=True)
        ]

    results = launch(train, 4)[0]
    used = {order.schedule.name for order in orders}
    assert len(proofs) == 4 * len(used)
    for number, result in enumerate(results):
        (inputs, targets), order = batches[number % 3], orders[number % 3]
        wanted = run_loop(again, inputs, targets, list(order.microbatches))
        assert_all_equal(result.losses, [wanted.losses[order.microbatches.index(k)] for k in range(6)])
        assert result.timeline is not None
        for place in range(4):
            ran = [
                str(span.action)
                for span in result.timeline.spans(place)
                if span.action.kind in (ps.Kind.F, ps.Kind.B, ps.Kind.I, ps.Kind.W)
            ]
            assert ran == [str(action) for action in order.schedule[place]]
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert_equal(parameter.grad, other.grad)


class Vision(nn.Module):
    """Adds what it sees in images to the text; passes on a microbatch without images unchanged."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.see, self.first = nn.Linear(6, 6), first

    def forward(self, text: Tensor, images: Tensor | None = None) -> Any:
        if images is None:
            return text, None
        seen = torch.tanh(self.see(images))
        return (text, seen) if self.first else (text + seen.mean(1, keepdim=True), None)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = blocks(1)

    def forward(self, text: Tensor, _: None = None) -> Tensor:
        return self.block(text)


class Whole(nn.Module):
    """The same stages without a pipeline."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, values: tuple[Any, ...]) -> Tensor:
        for stage in self.stages:
            values = stage(*values) if isinstance(values, tuple) else stage(values)
        return values  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_stages_that_a_microbatch_skips(name: str) -> None:
    """A text-only microbatch passes the vision stages unchanged: the numbers are those of the whole model."""
    stages = [Vision(first=True), Vision(first=False), Text(), nn.Sequential(Text(), Pooled())]
    whole = Whole(copy.deepcopy(stages))
    texts, targets = batch()
    inputs: list[Any] = [(text, torch.randn(len(text), 4, 6) if k % 2 else None) for k, text in enumerate(texts)]
    planner = ps.BatchPlanner(ps.schedule(name, 4, 6), ps.Costs(), sequence=4)
    order = planner.order(lengths_of(texts), skips=dict.fromkeys(range(0, 6, 2), (0, 1)))
    assert order.makespan < planner.order(lengths_of(texts)).makespan

    def train() -> StepResult:
        return Pipeline(stages, schedule=name, microbatches=6, loss_fn=functional.mse_loss).step_list(inputs, targets, order=order)

    result = launch(train, 4)[0]
    total = sum(map(len, texts))
    pieces = [(inputs[k], targets[k]) for k in order.microbatches]
    wanted = loop_step(whole, pieces, [len(targets[k]) / total for k in order.microbatches], functional.mse_loss)
    assert_all_equal(result.losses, [wanted.losses[order.microbatches.index(k)] for k in range(6)])
    for parameter, other in zip(nn.ModuleList(stages).parameters(), whole.parameters(), strict=True):
        assert_equal(parameter.grad, other.grad)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3], "012", 5, [0.5, 1, 2], [0.0, 1.0, 2.0], [None, 0, 1]])
def test_orders_that_are_none_are_refused(order: Any) -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
    x = [torch.randn(2, 6)] * 3
    with pytest.raises(ScheduleError, match="3 microbatches of the step: it must have each number from 0 to 2 once"):
        pipe.step_list(x, x, order=order)


def test_an_order_of_another_batch_or_placement_is_refused() -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
    x = [torch.randn(2, 6)] * 3
    with pytest.raises(ScheduleError, match="is not one of the 3 microbatches"):
        pipe.step_list(x, x, order=ps.BatchPlanner(ps.schedule("1f1b", 1, 4), ps.Costs(), sequence=4).order([4] * 4))
    with pytest.raises(ScheduleError, match="plan batches from the pipeline's own plan or schedule"):
        pipe.step_list(x, x, order=ps.BatchPlanner(ps.schedule("1f1b", 2, 3), ps.Costs(), sequence=4).order([4] * 3))


def test_ranks_with_different_orders_are_refused() -> None:
    inputs, targets = batch([(2, 3)] * 6)

    def train() -> StepResult:
        pipe = Pipeline(nn.Sequential(*blocks(3), Pooled()), schedule="1f1b", microbatches=6, loss_fn=functional.mse_loss)
        return pipe.step_list(inputs, targets, order=ORDER if rank() else None)

    with pytest.raises(PipelineError, match="ran its microbatches in the order of the batch, but rank 1 ran its microbatches in the order"):
        launch(train, 2)
