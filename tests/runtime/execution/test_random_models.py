"""Any small model on any schedule equals the unpipelined one."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.graph import StageGraph
from penstock.ir.schedule import Schedule
from penstock.runtime import Pipeline, StepResult, launch
from penstock.schedules.registry import algorithms
from runtime.branches import branch
from runtime.models import Numbers, assert_close, assert_same, gradients, sums_in_order

WIDTH = 5
ACTIVATIONS = [nn.Identity, nn.Tanh, nn.GELU, nn.Sigmoid, lambda: nn.ReLU(inplace=True)]


class Layer(nn.Module):
    """One stage: some maps of random widths, an activation, and perhaps trees at its ends."""

    def __init__(self, widths: list[int], activation: int, inputs: int, takes_dict: bool, gives_dict: bool) -> None:
        super().__init__()
        sizes = [WIDTH, *widths, WIDTH]
        self.maps = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
        self.activation = ACTIVATIONS[activation]()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs, self.takes_dict, self.gives_dict = inputs, takes_dict, gives_dict

    def forward(self, *inputs: Any) -> Any:
        assert len(inputs) == self.inputs
        tensors = [_value(each) for each in inputs]
        out = self.activation(self.maps(self.norm(sum(tensors[1:], tensors[0]))))
        return {"value": out, "mask": out > 0, "name": "layer"} if self.gives_dict else out


def _value(given: Any) -> Tensor:
    return given["value"] * given["mask"] if isinstance(given, dict) else given


RUN = [name for name, each in algorithms().items() if name not in ("inference", "data-parallel") and not each.is_sliced]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(RUN))
    ranks, microbatches = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 7))
    chunks = draw(st.integers(1, 2)) if "chunks" in algorithms()[name].layout.counts and name != "hanayo" else None
    try:
        schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    except ScheduleError:
        schedule = ps.schedule("1f1b", ranks=ranks, microbatches=microbatches)
    pairs = [(a, b) for a in range(schedule.stages) for b in range(a + 2, schedule.stages)]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=4, unique=True)) if pairs else []
    return schedule.with_graph(StageGraph.chain(schedule.stages, skips)) if skips else schedule


@st.composite
def models(draw: st.DrawFn, schedule: Schedule) -> nn.ModuleList:
    stages = schedule.stages
    dicts = [draw(st.booleans()) for _ in range(stages - 1)] + [False]
    layers = []
    for stage in range(stages):
        widths = draw(st.lists(st.integers(1, 7), max_size=2))
        inputs = max(1, len(schedule.graph.inputs_of(stage)))
        layer = Layer(widths, draw(st.integers(0, len(ACTIVATIONS) - 1)), inputs, stage > 0 and dicts[stage - 1], dicts[stage])
        for part in (layer.maps, layer.norm):
            if draw(st.integers(0, 4)) == 0:
                part.requires_grad_(False)
        layers.append(layer)
    return nn.ModuleList(layers)


def _unpipelined(model: nn.ModuleList, schedule: Schedule, x: Tensor, y: Tensor) -> Numbers:
    total: Any = None
    losses = []
    slices = zip(x.tensor_split(schedule.microbatches), y.tensor_split(schedule.microbatches), strict=True)
    for microbatch, (xx, yy) in enumerate(slices):
        made: dict[int, dict[int, Any]] = {}
        for stage, layer in enumerate(model):
            inputs = [made[other][stage] for other in sorted(schedule.graph.inputs_of(stage), reverse=True)] or [xx]
            output = layer(*inputs)
            made[stage] = branch(output, schedule, stage, microbatch)
        loss = functional.mse_loss(output, yy)
        scale = len(xx) / len(x)
        if loss.requires_grad:
            (loss * scale).backward()
        losses.append(loss.detach())
        total = loss.detach() * scale if total is None else total + loss.detach() * scale
    return Numbers(total, losses, gradients(model))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_random_model_and_schedule(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = data.draw(models(schedule))
    again = copy.deepcopy(model)
    batch = schedule.microbatches + data.draw(st.integers(0, 5))
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)

    def train() -> StepResult:
        return Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x, target=y)

    result = launch(train, schedule.ranks)[0]
    found, wanted = Numbers(result.loss, result.losses, gradients(model)), _unpipelined(again, schedule, x, y)
    if any(grad is not None for grad in wanted.grads.values()):
        if sums_in_order(schedule):
            assert_same(found, wanted)
        else:
            assert_close(found, wanted, 1e-3)
    else:
        assert all(grad is None for grad in found.grads.values())
