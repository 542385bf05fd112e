"""Stages as recorded work. Without a GPU a recording is the work itself, on the same memory in the same order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError
from penstock.ir.kind import Kind
from penstock.runtime import Pipeline, StageOutput, launch
from penstock.runtime.execution.cuda_graphs import Graphs, _number_workspaces
from runtime.models import Block, assert_same, blocks, by_loop, by_pipeline, sums_in_order

NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "interleaved-zb", "dualpipe-v"]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps_equal_the_loop(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=6)
    assert sums_in_order(schedule)
    model, x, y = blocks(schedule.stages), torch.randn(12, 6), torch.randn(12, 6)
    assert_same(by_pipeline(model, schedule, x, y, graphs=True), by_loop(model, x, y, 6))


@pytest.mark.parametrize("name", NAMES)
def test_no_workspace_is_used_twice_at_a_time(name: str) -> None:
    """And there are no more workspaces than microbatches in flight."""
    program = ps.lower(ps.schedule(name, ranks=2, microbatches=8))
    for row in program:
        parts = [part for action in row for part in action.parts if part.kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
        numbers = _number_workspaces(row)
        left = {(p.stage, p.microbatch): sum((q.stage, q.microbatch) == (p.stage, p.microbatch) for q in parts) for p in parts}
        busy: dict[int, set[int]] = {}
        most: dict[int, int] = {}
        for part in parts:
            key = part.stage, part.microbatch
            here = busy.setdefault(part.stage, set())
            if part.kind is Kind.F:
                assert numbers[key] not in here
                here.add(numbers[key])
                most[part.stage] = max(most.get(part.stage, 0), len(here))
            left[key] -= 1
            if not left[key]:
                here.remove(numbers[key])
        for stage, count in most.items():
            assert max(n for (s, _), n in numbers.items() if s == stage) == count - 1


def step_twice(schedule: ps.Schedule, model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Two steps of an optimizer, with gradients dropped in between, and a third whose gradients are added up with a fourth."""

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            pipe.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()
        pipe.step(x, target=x)
        pipe.step(x, target=x)

    launch(train, schedule.ranks)
    return [*(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_training_continues_from_step_to_step(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model, x = blocks(schedule.stages), torch.randn(8, 6)
    found = step_twice(schedule, copy.deepcopy(model), x, graphs=True)
    wanted = step_twice(schedule, copy.deepcopy(model), x)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_microbatches_of_another_shape_run_without_graphs() -> None:
    schedule = ps.schedule("1f1b", ranks=1, microbatches=3)
    model = blocks(1)
    inputs = [torch.randn(2, 6), torch.randn(3, 6), torch.randn(2, 6)]
    wanted = copy.deepcopy(model)
    Pipeline([wanted], schedule, loss_fn=functional.mse_loss).step_list(inputs, inputs)
    Pipeline([model], schedule, loss_fn=functional.mse_loss, graphs=True).step_list(inputs, inputs)
    for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_recorded_work_runs_in_the_same_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work that is recorded is what runs: recorded once per workspace and kind, then launched again and again."""
    made: list[Any] = []
    place = Graphs.find_workspace
    monkeypatch.setattr(Graphs, "find_workspace", lambda *args: made.append(place(*args)) or made[-1])
    pipe = Pipeline(list(blocks(2)), schedule=ps.schedule("interleaved-zb", 1, 4, chunks=2), loss_fn=functional.mse_loss, graphs=True)
    for _ in range(2):
        pipe.step(torch.randn(8, 6), target=torch.randn(8, 6))
    assert len(made) == 16
    assert None not in made
    assert [id(each) for each in made[:8]] == [id(each) for each in made[8:]]


def test_a_microbatch_with_zero_weight() -> None:
    schedule = ps.schedule("zb-h1", ranks=2, microbatches=3)
    model, x = blocks(2), torch.randn(6, 6)
    given = {"weight": lambda target: float(target[0, 0] < 100)}
    y = torch.randn(6, 6)
    y[2:4] = 200.0
    assert_same(
        by_pipeline(model, schedule, x, y, graphs=True, **given),
        by_pipeline(model, schedule, x, y, **given),
    )


def test_stages_that_share_a_parameter() -> None:
    """Its gradient is summed in one place, whichever stage's work adds to it."""
    first, second = blocks(2)
    second.map.weight = first.map.weight
    x = torch.randn(8, 6)
    wanted = copy.deepcopy(nn.ModuleList([first, second]))
    schedule = ps.schedule("interleaved-zb", 1, 4, chunks=2)
    for stages, graphs in ((wanted, False), ([first, second], True)):
        pipe = Pipeline(list(stages), schedule, loss_fn=functional.mse_loss, graphs=graphs)
        pipe.step(x, target=x)
        pipe.step(x, target=x)
    for one, other in zip((*first.parameters(), *second.parameters()), (*wanted[0].parameters(), *wanted[1].parameters()), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_ranks_that_share_parameters_are_refused() -> None:
    schedule = ps.schedule("chimera", ranks=2, microbatches=4)
    model = blocks(2)
    with pytest.raises(ps.PenstockError, match="build a model on each"):
        launch(lambda: Pipeline(model, schedule, graphs=True), 2)


def test_replaced_parameters_are_recorded_again() -> None:
    schedule = ps.schedule("gpipe", ranks=1, microbatches=2)
    model, x = blocks(1), torch.randn(4, 6)
    pipe = Pipeline([model], schedule, loss_fn=functional.mse_loss, graphs=True)
    pipe.step(x, target=x)
    model[0].map.weight = nn.Parameter(torch.randn(6, 6))
    model.zero_grad()
    pipe.step(x, target=x)
    for (name, found), wanted in zip(model.named_parameters(), by_loop(model, x, x, 2).grads.values(), strict=True):
        torch.testing.assert_close(found.grad, wanted, rtol=0, atol=0, msg=name)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb"])
def test_the_trial_run_leaves_no_trace(name: str) -> None:
    """Running means, batch counts and random numbers equal those of a run without graphs."""
    x, model, found = torch.randn(16, 6), normed(), []
    for graphs in (False, True):
        own = copy.deepcopy(model)
        pipe = Pipeline(own, schedule=name, microbatches=4, loss_fn=functional.mse_loss, graphs=graphs)
        torch.manual_seed(5)
        losses = [pipe.step(x, target=x).loss for _ in range(2)]
        found.append([*losses, *own.state_dict().values(), *(p.grad for p in own.parameters()), torch.get_rng_state()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", ["data", "buffer", "mode", "frozen"])
def test_changes_between_steps_are_recorded_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded work is tied to the memory and the modes it was recorded with, so others need another recording."""
    made: list[Any] = []
    place = Graphs.find_workspace
    monkeypatch.setattr(Graphs, "find_workspace", lambda *args: made.append(place(*args)) or made[-1])
    model, x = normed(), torch.randn(16, 6)
    pipe = Pipeline(model, schedule="gpipe", microbatches=1, loss_fn=functional.mse_loss, graphs=True)
    pipe.step(x, target=x)
    pipe.step(x, target=x)
    assert made[1] is made[0]
    linear, norm = model.get_submodule("0.0"), model.get_submodule("0.1")
    if change == "data":
        linear.weight.data = linear.weight.data.clone()
    elif change == "buffer":
        norm.running_mean = norm.running_mean.clone()
    elif change == "mode":
        norm.eval()
    else:
        linear.weight.requires_grad_(False)
    pipe.step(x, target=x)
    pipe.step(x, target=x)
    assert made[2] is not made[1]
    assert made[3] is made[2]


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.block(x)


def test_a_replaced_buffer_is_refused_and_restored() -> None:
    module, x = Replacing(), torch.randn(4, 6)
    pipe = Pipeline([module], schedule="gpipe", microbatches=2, loss_fn=functional.mse_loss, graphs=True)
    with pytest.raises(ps.PenstockError, match="stage 0 replaces its buffer count"):
        pipe.step(x, target=x)
    assert module.count == 0


class Sided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)

    def forward(self, x: Tensor) -> StageOutput:
        return StageOutput(self.block(x), side_loss=x.sum())


def test_stages_that_cannot_be_recorded_are_refused() -> None:
    x = torch.randn(4, 6)
    sided = Pipeline([Sided()], schedule="gpipe", microbatches=2, loss_fn=functional.mse_loss, graphs=True)
    with pytest.raises(ps.PenstockError, match="stage 0 returns side losses or metrics"):
        sided.step(x, target=x)
    hooked = Block(6)
    hooked.map.weight.register_post_accumulate_grad_hook(lambda p: None)
    pipe = Pipeline([hooked], schedule="gpipe", microbatches=2, loss_fn=functional.mse_loss, graphs=True)
    with pytest.raises(ps.PenstockError, match=r"map.weight of stage 0 has hooks"):
        pipe.step(x, target=x)
    with pytest.raises(ps.PenstockError, match="seed="):
        Pipeline([Block(6)], schedule="gpipe", microbatches=2, graphs=True, seed=1)
    with pytest.raises(ps.PenstockError, match="turn recompute off"):
        Pipeline([Block(6)], schedule="gpipe", microbatches=2, graphs=True, recompute=True)
    with pytest.raises(ps.PenstockError, match="accumulate_dtype="):
        Pipeline([Block(6)], schedule="gpipe", microbatches=2, graphs=True, accumulate_dtype=torch.float64)
    pipe = Pipeline([Block(6)], schedule="gpipe", microbatches=2, loss_fn=functional.mse_loss, graphs=True)
    with pytest.raises(ps.PenstockError, match="under autocast"), torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, target=x)
    assert pipe.step(x, target=x).loss is not None


class Asking(nn.Module):
    """Scales its output by the gradient of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.map(x))
        (slope,) = torch.autograd.grad(out.sum(), self.map.weight, retain_graph=True, allow_unused=True)
        return out * slope.norm()


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipe-v"])
def test_a_stage_that_needs_a_whole_backward(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=6)
    model, x, y = nn.Sequential(*(Asking() for _ in range(schedule.stages))), torch.randn(12, 6), torch.randn(12, 6)
    assert_same(by_pipeline(model, schedule, x, y, graphs=True), by_loop(model, x, y, 6))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_loss_that_asks_for_a_gradient_of_the_recorded_stage_is_refused(name: str) -> None:
    model, x = blocks(2), torch.randn(12, 6)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        made = functional.mse_loss(out, y)
        (slope,) = torch.autograd.grad(made, model[1].map.weight, retain_graph=True, allow_unused=True)  # type: ignore[union-attr, arg-type]
        return made if slope is None else made * slope.norm()

    with pytest.raises(PipelineError, match="graphs=True, but the loss function asks autograd for a weight's gradient"):
        launch(lambda: Pipeline(model, name, microbatches=6, loss_fn=loss, graphs=True).step(x, target=x), 2)
