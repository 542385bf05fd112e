"""Running statistics equal those of the microbatch loop, also with two copies of a stage or reordered microbatches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, launch, rank
from runtime.models import gradients, loop_step

BIDIRECTIONAL = ["chimera", "dualpipe"]


class Twice(nn.Module):
    """Calls its norm layer twice per forward."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.map(self.norm(x))))


class Instance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(6, 6), nn.InstanceNorm1d(6, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(self.norm(x[:, :, None] * torch.arange(1.0, 4, dtype=x.dtype)).mean(2) + x)


LAYERS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "cumulative": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
    "twice": lambda: Twice(0.3),
    "cumulative twice": lambda: Twice(None),
    "instance norm": Instance,
    "without statistics": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)),
    "frozen": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval()),
}
COUNTS = (4, 1, 3)
"""Number of microbatches per step."""


def data(rows: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6).double() * 2 + 1, torch.randn(rows, 6).double()


def loop(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    model = copy.deepcopy(model)
    for count in COUNTS:
        loop_step(model, list(zip(x.chunk(count), y.chunk(count), strict=True)), [1 / count] * count, functional.mse_loss)
    return model


def assert_same_buffers(found: dict[str, Tensor], wanted: nn.Module) -> None:
    buffers = dict(wanted.named_buffers())
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, buffers[name], rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("one_object", [True, False])
@pytest.mark.parametrize("name", BIDIRECTIONAL)
@pytest.mark.parametrize("kind", LAYERS)
def test_statistics_equal_the_loop_s(kind: str, name: str, one_object: bool, recompute: bool) -> None:
    """After steps with several microbatch counts, each rank evaluates like the plain model."""
    model, (x, y) = nn.Sequential(*(LAYERS[kind]() for _ in range(2))).double(), data()
    again = loop(model, x, y)
    schedule = ps.schedule(name, ranks=2, microbatches=4)

    def train() -> tuple[dict[str, Tensor], list[Any]]:
        mine = model if one_object else copy.deepcopy(model)
        modes = [part.training for part in mine.modules()]
        pipe = Pipeline(mine, schedule, loss_fn=functional.mse_loss, recompute=recompute)
        for count in COUNTS:
            pipe.step(x, target=y, microbatches=count)
        assert [part.training for part in mine.modules()] == modes
        outputs = [pipe.infer(x, microbatches=count) for count in (1, 2, 6)]
        held = {f"{index}.{key}": value for index in pipe.stages for key, value in mine[index].named_buffers()}
        return {key: value.clone() for key, value in held.items()}, outputs

    results = launch(train, 2)
    wanted = again.eval()(x)
    for buffers, outputs in results:
        if kind != "without statistics":
            assert_same_buffers(buffers, again)
            for output in outputs:
                torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-12)
    if one_object:
        for key, grad in gradients(again).items():
            torch.testing.assert_close(gradients(model)[key], grad, rtol=1e-9, atol=1e-12)


def test_another_order_of_microbatches() -> None:
    """A custom schedule may permute microbatches on one rank."""
    rows = [["0F2", "0F0", "0F1", "0B2", "0B0", "0B1"], ["1F2", "1F0", "1F1", "1B2", "1B0", "1B1"]]
    schedule = ps.Schedule.from_actions(rows, ps.Placement.custom([0, 1]))
    model, (x, y) = nn.Sequential(*(LAYERS["batch norm"]() for _ in range(2))).double(), data()
    again = copy.deepcopy(model)
    for _ in range(2):
        loop_step(again, list(zip(x.chunk(3), y.chunk(3), strict=True)), [1 / 3] * 3, functional.mse_loss)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        for _ in range(2):
            pipe.step(x, target=y)

    launch(train, 2)
    assert_same_buffers(dict(model.named_buffers()), again)


@pytest.mark.parametrize("one_object", [True, False])
def test_failed_step_leaves_the_statistics_unchanged(one_object: bool) -> None:
    model, (x, y) = nn.Sequential(*(LAYERS["batch norm"]() for _ in range(2))).double(), data()
    broken = False

    def loss(out: Tensor, target: Tensor) -> Tensor:
        if broken and target is not None and rank() == 1:
            raise ValueError("no loss today")
        return functional.mse_loss(out, target)

    def train() -> None:
        nonlocal broken
        mine = model if one_object else copy.deepcopy(model)
        pipe = Pipeline(mine, schedule="dualpipe", microbatches=4, loss_fn=loss)
        pipe.step(x, target=y)
        pipe.gather("once", None)
        before = {key: value.clone() for key, value in mine.named_buffers()}
        broken = True
        with pytest.raises(PipelineError, match="no loss today"):
            pipe.step(x, target=y)
        pipe.gather("failed", None)
        broken = False
        for key, value in mine.named_buffers():
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)
        pipe.gather("looked", None)
        pipe.step(x, target=y)
        pipe.gather("twice", None)
        assert int(mine[0][1].num_batches_tracked) == 8

    launch(train, 2)


def test_buffers_of_copies_start_equal() -> None:
    model, (x, y) = nn.Sequential(*(LAYERS["batch norm"]() for _ in range(2))).double(), data()

    def train() -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        for buffer in mine.buffers():
            buffer.add_(rank())
        pipe = Pipeline(mine, schedule="chimera", microbatches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        return dict(mine.named_buffers())

    first, second = launch(train, 2)
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=0, atol=0)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.runs = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.map(x)


class Total(nn.Module):
    """Counts its forwards in a buffer, starting at a given forward."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.map, self.late = nn.Linear(6, 6), late
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.late or float(x.detach().mean()) > 50:
            self.total += 1
        return self.map(x)


class Cached(nn.Module):
    """Caches a value that it computes in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.table = nn.Linear(6, 6), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6, dtype=x.dtype)
        return self.map(x) + self.table


OTHER = {
    "runs": Counter,
    "total": lambda: Total(late=False),
    "parametrizations.weight.0._u": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", BIDIRECTIONAL)
@pytest.mark.parametrize("kind", OTHER)
def test_other_state_is_refused(kind: str, name: str, recompute: bool) -> None:
    """The first step refuses the change and restores the state."""
    model, (x, y) = nn.Sequential(nn.Linear(6, 6), OTHER[kind]()).double(), data()
    before = copy.deepcopy(model)

    def train() -> None:
        pipe = Pipeline(model, schedule=name, microbatches=4, loss_fn=functional.mse_loss, recompute=recompute)
        with pytest.raises((PipelineError, ScheduleError), match=rf"the forward of stage 1 changes '{kind}'.*such as 1f1b or zbv"):
            pipe.step(x, target=y)

    launch(train, 2)
    assert getattr(model[1], "runs", 0) == 0
    for (key, value), other in zip(model.named_buffers(), before.buffers(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0, msg=key)


def test_other_state_that_changes_later_is_refused_in_that_step() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(6, 6), Total(late=True)).double(), data()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))

    def train() -> None:
        pipe = Pipeline(copy.deepcopy(model), schedule="chimera", microbatches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        with pytest.raises((PipelineError, ScheduleError), match="the forward of stage 1 changes 'total'"):
            pipe.step(x + 100, target=y)

    launch(train, 2)


def test_a_value_that_is_computed_once_is_not_state() -> None:
    model, (x, y) = nn.Sequential(Cached(), Cached()).double(), data()

    def train() -> None:
        pipe = Pipeline(copy.deepcopy(model), schedule="chimera", microbatches=4, loss_fn=functional.mse_loss)
        assert pipe.parity(x, target=y).loop.close
        pipe.step(x, target=y)

    launch(train, 2)


def test_graphs_are_refused() -> None:
    def train() -> None:
        mine = nn.Sequential(*(LAYERS["batch norm"]() for _ in range(2)))
        with pytest.raises(ScheduleError, match="graphs=True, but the running statistics of norm layers"):
            Pipeline(mine, schedule="chimera", microbatches=4, loss_fn=functional.mse_loss, graphs=True)

    launch(train, 2)
