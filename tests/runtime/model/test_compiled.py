"""Compiled stages: every schedule, the numbers of the eager model, and the cost of a whole backward."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.ir.kind import Kind
from penstock.runtime import Pipeline, launch
from penstock.runtime.torch_internals.modules import is_compiled
from penstock.schedules.registry import algorithms
from runtime.models import Numbers, assert_close, blocks, by_loop, gradients

EAGER, COMPILED = {"backend": "eager"}, {"backend": "aot_eager"}
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counted:
    """A compiler backend that counts its graphs."""

    def __init__(self, name: str) -> None:
        self.compile, self.graphs = lookup_backend(name), 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.compile(graph, inputs)


def build(name: str, ranks: int = 2, microbatches: int = 4) -> ps.Schedule | None:
    try:
        found = ps.schedule(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError:
        return None
    return found if found.training and found.slices == 1 else None


NAMES = [name for name in algorithms() if build(name) is not None]


def step(model: nn.Module, schedule: Any, x: torch.Tensor, **options: Any) -> tuple[Numbers, list[Pipeline]]:
    model = copy.deepcopy(model)

    def train() -> tuple[Any, Pipeline]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, **options)
        return pipe.step(x, target=x.sin()), pipe

    results = launch(train, schedule.placement.ranks)
    return Numbers(results[0][0].loss, results[0][0].losses, gradients(model)), [pipe for _, pipe in results]


def check(name: str, backend: str) -> None:
    schedule = build(name)
    assert schedule is not None
    model, x = blocks(schedule.stages), torch.randn(8, 6)
    counted = Counted(backend)
    found, _ = step(model, schedule, x, compile={"backend": counted, "fullgraph": True})
    assert counted.graphs
    assert_close(found, by_loop(model, x, x.sin(), 4), TOLERANCE)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipe-v", "chimera"])
def test_compiled_stages_have_the_numbers_of_the_eager_model(name):
    check(name, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_runs_compiled_stages(name):
    """With a compiler that uses AOTAutograd, a stage's backward is one compiled operation."""
    check(name, "aot_eager")


def test_stages_are_compiled_one_by_one():
    schedule = ps.schedule("zbv", ranks=2, microbatches=4)
    model, x = blocks(4), torch.randn(8, 6)
    found, pipes = step(model, schedule, x, compile=[None, COMPILED, False, lambda module: torch.compile(module, backend="eager")])
    assert_close(found, by_loop(model, x, x.sin(), 4), TOLERANCE)
    assert pipes[0].unsplit == (1, 3)
    kinds = {
        (part.stage, part.kind) for row in pipes[0].program() for action in row for part in action.parts if part.kind in (Kind.B, Kind.I)
    }
    assert kinds == {(0, Kind.I), (1, Kind.B), (2, Kind.I), (3, Kind.B)}


def test_the_cost_is_reported(caplog):
    """zb-h1 with every backward merged is 1f1b: its idle time grows from (p-1)(F+I-W) to (p-1)(F+B)."""
    ranks, count = 2, 4
    schedule = ps.schedule("zb-h1", ranks=ranks, microbatches=count)
    with caplog.at_level(logging.WARNING, "penstock"):
        _, pipes = step(blocks(2), schedule, torch.randn(8, 6), compile=EAGER)
    lost = pipes[0].merged
    assert lost is not None
    assert lost.stages == (0, 1)
    assert lost.before.makespan == pytest.approx(3 * count + (ranks - 1) * (1 + 1 - 1))
    assert lost.after.makespan == pytest.approx(3 * count + (ranks - 1) * (1 + 2))
    assert lost.cost == pytest.approx(15 / 13 - 1)
    said = {record.getMessage() for record in caplog.records if "cannot split" in record.getMessage()}
    assert said == {str(lost)}
    assert "With F = I = W = 1 a step takes 15 in place of 13 (+15.4%)" in str(lost)


def test_a_plan_is_timed_again_on_its_own_costs():
    profile = ps.Profile([ps.Layer(f=2, i=3, w=2, activation=1, output=1)] * 4, input=1)
    plan = ps.plan(profile, ranks=2, microbatches=4, schedules="zb-h1", seconds=0)
    _, pipes = step(blocks(4), plan, torch.randn(8, 6), compile=EAGER)
    lost = pipes[0].merged
    assert lost is not None
    assert lost.before.makespan == pytest.approx(plan.predicted.makespan)
    assert lost.after.makespan == pytest.approx(ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), plan.costs).makespan)
    assert "the plan's costs" in str(lost)


def test_nothing_is_lost_if_nothing_is_split(caplog):
    with caplog.at_level(logging.WARNING, "penstock"):
        _, pipes = step(blocks(2), ps.schedule("1f1b", 2, 4), torch.randn(8, 6), compile=EAGER)
    assert pipes[0].merged is None
    assert not caplog.records


def test_compiled_stages_are_recomputed_and_draw_from_their_streams():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)))
    x, schedule = torch.randn(8, 6), ps.schedule("zbv", ranks=2, microbatches=4)
    wanted, _ = step(model, schedule, x, seed=3)
    found, _ = step(model, schedule, x, seed=3, compile=EAGER, recompute=True)
    assert_close(found, wanted, TOLERANCE)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own, of the inputs of layers
def test_layers_of_a_compiled_stage_are_compiled_and_recomputed_by_themselves():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(8)))
    x, schedule, flags = (
        torch.randn(8, 6),
        ps.schedule("zbv", ranks=2, microbatches=4),
        [True, False, False, True, False, False, True, True],
    )
    wanted, _ = step(model, schedule, x, seed=3)
    found, pipes = step(model, schedule, x, seed=3, compile=EAGER, recompute=flags)
    assert_close(found, wanted, TOLERANCE)
    compiled = [part for pipe in pipes for stage in pipe.stages.values() for part in stage.module.modules() if is_compiled(part)]
    assert len(compiled) == 2 + 1 + 2 + 2  # the stage without recompute is one


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x.mul_(2)).tanh()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own, of what it is then given
def test_a_compiled_stage_that_changes_its_input_is_detected():
    """The first step fails and leaves nothing behind; later steps allow it."""
    parts, x = [nn.Linear(6, 6), InPlace()], torch.randn(8, 6)
    model = nn.ModuleList(copy.deepcopy(parts))

    def train() -> Any:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, compile=COMPILED)
        with pytest.raises(PipelineError, match="in-place"):
            pipe.step(x, target=x)
        return pipe.step(x, target=x)

    result = launch(train, 2)[0]
    wanted = by_loop(nn.Sequential(*parts), x, x, 4)
    names = ["0.weight", "0.bias", "1.map.weight", "1.map.bias"]
    assert_close(
        Numbers(result.loss, result.losses, gradients(model)), Numbers(wanted.loss, [], {k: wanted.grads[k] for k in names}), TOLERANCE
    )


def test_the_user_s_modules_are_not_changed():
    model = blocks(2)
    names = [name for name, _ in model.named_parameters()]

    def own() -> list[str]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, compile=EAGER)
        return [name for name, _ in pipe.named_parameters()]

    found = launch(own, 2)
    assert sorted(found[0] + found[1]) == sorted(names)
    assert not any(module._compiled_call_impl is not None for module in model.modules())


@pytest.mark.parametrize("wrong", ["inductor", [True], [True, "eager"], 3])
def test_invalid_options_are_refused(wrong):
    with pytest.raises((ScheduleError, PipelineError), match="for 2 stages: give True, options"):
        step(blocks(2), ps.schedule("1f1b", 2, 4), torch.randn(8, 6), compile=wrong)
    with pytest.raises((ScheduleError, PipelineError), match="it must return a module"):
        step(blocks(2), ps.schedule("1f1b", 2, 4), torch.randn(8, 6), compile=lambda module: module.forward)
