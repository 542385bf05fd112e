"""Recomputed stages: as often as the simulator counts them, holding what it says, with the same numbers."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.ir.kind import Kind
from penstock.planner.stage_costs import stage_costs
from penstock.runtime import Pipeline, StageOutput, add_loss, add_metric, launch
from penstock.runtime.profile import profile
from runtime.live import Live
from runtime.models import Block, Counting, Numbers, assert_same, blocks, gradients

FLAGS = {"1f1b": (True, False), "gpipe": (True, True), "zb-h1": (False, True), "zbv": (True, False, False, True), "dualpipe-v": (True,) * 4}
COUNT = 4


@pytest.mark.parametrize("name", FLAGS)
def test_forwards_are_as_many_as_the_simulator_counts(name):
    """With a forward that takes 1 and backwards that take nothing, what a rank is busy for is how many it runs."""
    schedule, flags = ps.schedule(name, ranks=2, microbatches=COUNT), FLAGS[name]
    per_stage = 2
    profiled = ps.Profile([ps.Layer(f=1, i=0, w=0)] * (per_stage * schedule.stages))
    costs = stage_costs(profiled, [per_stage] * schedule.stages, schedule.placement, flags)
    timeline = ps.simulate(ps.lower(schedule), costs)
    model = nn.Sequential(*(Counting(layer) for layer in blocks(per_stage * schedule.stages)))
    x = torch.randn(8, 6)

    def train() -> list[Any]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, recompute=flags)
        pipe.step(x, target=x)
        return [layer.runs for stage in pipe.stages for layer in model[per_stage * stage : per_stage * (stage + 1)]]

    for of, runs in enumerate(launch(train, 2)):
        busy = sum(
            span.end - span.start
            for span in timeline.spans(of)
            if span.action.kind not in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
        )
        assert sum(runs) == pytest.approx(busy)


@pytest.mark.parametrize("name", FLAGS)
def test_the_numbers_are_those_without(name):
    schedule, x = ps.schedule(name, ranks=2, microbatches=COUNT), torch.randn(8, 6)
    model = nn.Sequential(*(nn.Sequential(Block(6), nn.Dropout(0.4)) for _ in range(2 * schedule.stages)))
    found = [step(model, schedule, x, seed=7, recompute=flags) for flags in (False, FLAGS[name], True)]
    for other in found[1:]:
        assert_same(other, found[0])


def step(model: nn.Module, schedule: Any, x: Tensor, **options: Any) -> Numbers:
    model = copy.deepcopy(model)
    results = launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss, **options).step(x, target=x.sin()), schedule.ranks)
    return Numbers(results[0].loss, results[0].losses, gradients(model))


class Aside(nn.Module):
    """A layer that gives a loss and a figure on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        made = self.map(x)
        add_loss(made.square().mean())
        add_metric("largest", made.abs().max())
        return StageOutput(made, side_loss=made.abs().mean())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_what_is_made_on_the_side_counts_once(name):
    schedule, x = ps.schedule(name, ranks=2, microbatches=COUNT), torch.randn(8, 6)
    parts = [Aside(), Aside()]

    def numbers(again: bool) -> tuple[Numbers, Any]:
        model = copy.deepcopy(nn.ModuleList(parts))
        results = launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss, recompute=again).step(x, target=x), 2)
        return Numbers(results[0].loss, results[0].losses, gradients(model)), results[0].metrics

    (found, metrics), (wanted, figures) = numbers(True), numbers(False)
    assert_same(found, wanted)
    assert metrics == figures
    assert len(metrics["largest"]) == 2 * COUNT


def test_outputs_and_evaluation_are_those_without():
    model, x = blocks(4), torch.randn(8, 6)

    def run() -> Any:
        pipe = Pipeline(model, schedule="1f1b", microbatches=COUNT, loss_fn=functional.mse_loss, recompute=True)
        return pipe.step(x, target=x, outputs=True).outputs, pipe.eval_step(x, target=x).loss, pipe.infer(x)

    wanted = torch.cat([model(piece) for piece in x.chunk(COUNT)])
    for outputs, loss, inferred in launch(run, 2):
        torch.testing.assert_close(outputs, wanted.detach())
        torch.testing.assert_close(inferred, wanted.detach())
        torch.testing.assert_close(loss, functional.mse_loss(wanted, x).detach())


SCALARS = 16
"""The loss and what its backward starts with, two numbers of 4 bytes each, and their room."""


def product(output: Tensor, target: Tensor) -> Tensor:
    """A loss that holds both; torch's own gives a number in the room of all that it is the mean of."""
    return (output * target).mean()


@pytest.mark.parametrize("flags", [(False, False, False), (True, True, True), (True, False, True), (False, True, False)])
def test_what_a_forward_keeps_is_what_the_plan_says(flags):
    """Measured by watching every tensor: the profile's activations, or of a recomputed stage its input and output."""
    wide, rows = 64, 16
    model = nn.Sequential(*(nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)) for _ in range(6)))
    x, y = torch.randn(rows * COUNT, wide), torch.randn(rows * COUNT, wide)
    schedule = ps.schedule("gpipe", ranks=3, microbatches=COUNT)
    measured = profile(model, x[:rows], loss_fn=product, target=y[:rows], warmup=0, repeats=1, optimizer=None)
    costs = stage_costs(measured, [2, 2, 2], schedule.placement, flags)

    def train() -> list[int]:
        pipe = Pipeline(model, schedule, loss_fn=product, recompute=flags)
        executor = pipe._executor(COUNT, True)
        run, held = executor.run, [0]
        pipe.step(x, target=y)  # the first one also looks whether stages change their inputs
        for parameter in pipe.parameters():
            parameter.grad = None
        with Live() as live:
            pieces = [piece.clone() for piece in x.chunk(COUNT)]
            targets = [piece.clone() for piece in y.chunk(COUNT)]
            live.forget(*pieces, *targets, *model.parameters())

            def look(at: int) -> None:
                if executor.actions[at].kind is Kind.F:
                    held.append(live.bytes)

            executor.run = lambda feed: run(feed, look)  # type: ignore[method-assign]
            pipe.step_list(pieces, targets)
        return [after - before for before, after in pairwise(held)]

    size = rows * wide * 4
    for stage, kept in enumerate(launch(train, 3)):
        # What a stage is given was made elsewhere, and a loss that is not recomputed holds a target that was there before.
        elsewhere = size + (size if stage == 2 and not flags[stage] else 0)
        wanted = costs.of_stage("activation", stage) - elsewhere
        for each in kept:
            assert abs(each - wanted) <= SCALARS, (stage, each, wanted)
    held = [costs.of_stage("activation", stage) for stage in range(3)]
    assert all(held[stage] <= 2 * size for stage in range(3) if flags[stage])
    assert all(held[stage] > 10 * size for stage in range(3) if not flags[stage])


def test_flags_must_fit():
    with pytest.raises((ScheduleError, PipelineError), match="for 2 stages: give True, False"):
        step(blocks(4), ps.schedule("1f1b", 2, 2), torch.randn(4, 6), recompute=[True])
