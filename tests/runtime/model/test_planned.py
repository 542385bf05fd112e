"""Running a plan: the model is cut and recomputed as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, PlacementError
from penstock.runtime import Layers, Pipeline, launch
from runtime.models import Block, blocks, count_forwards

LAYER = ps.Layer(f=1, i=1, w=1, activation=4, weight_stash=1, output=1)
UNEVEN = ps.Profile([ps.Layer(f=3, i=3, w=3, activation=4), *[LAYER] * 6], input=1)
"""A profile whose first layer takes as long as three others."""


def made(**given: Any) -> ps.Plan:
    return ps.plan(UNEVEN, **{"ranks": 2, "microbatches": 4, "seconds": 0, **given})


def run(model: Any, plan: Any, **given: Any) -> list[tuple[list[int], bool, Any]]:
    """Return the layers per stage on each rank, and whether the numbers equal the unpipelined model's."""
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train() -> tuple[list[int], bool, Any]:
        pipe = Pipeline(model, plan, loss_fn=functional.mse_loss, **given)
        parity = pipe.parity(x, target=y)
        cut = [len(part.layers) for part in pipe.partition.parts if part is not None]
        return cut, parity.loop.exact, str(parity)

    return launch(train, 2)


@pytest.mark.parametrize(
    "form", [nn.Sequential, lambda *layers: list(layers), lambda *layers: nn.ModuleList(layers)], ids=["sequential", "list", "modules"]
)
@pytest.mark.parametrize("schedules", ["1f1b", "zbv", "zb-h1"])
def test_the_model_is_cut_as_planned(form, schedules):
    plan = made(schedules=schedules)
    assert len(set(plan.partition)) > 1
    for cut, ok, said in run(form(*blocks(7)), plan):
        assert tuple(cut) == plan.partition
        assert ok, said


def test_a_plan_from_a_file(tmp_path):
    plan = made()
    plan.save(tmp_path / "plan.json")
    assert [cut for cut, *_ in run(blocks(7), ps.Plan.load(tmp_path / "plan.json"))] == [list(plan.partition)] * 2


def test_a_given_split_overrides_the_plan():
    plan = made(schedules="1f1b")
    for cut, ok, said in run(blocks(7), plan, split=[6, 1]):
        assert cut == [6, 1] != list(plan.partition)
        assert ok, said


def test_modules_given_as_stages_are_not_cut_again():
    plan = made(schedules="1f1b")
    for cut, ok, said in run([blocks(2), blocks(3)], plan):
        assert cut == [1, 1]
        assert ok, said


def test_layers_by_name_are_cut_as_planned():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = Block(6)
            self.blocks = blocks(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.front(x))

    plan = made(schedules="1f1b")
    for cut, ok, said in run(Model(), plan, split=Layers("blocks", head=["front"])):
        assert tuple(cut) == plan.partition
        assert ok, said


def test_a_plan_for_another_model_is_refused():
    with pytest.raises((PlacementError, PipelineError), match="of 5 layers"):
        run(blocks(5), made(schedules="1f1b"))


# Recompute ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedules", "limit"), [("gpipe", 28.0), ("zb-h1", 20.0), ("zbv", 24.0)])
def test_recomputed_stages_run_again_with_the_same_numbers(schedules, limit):
    plan = made(schedules=schedules, memory_limit=limit, recompute=True)
    assert any(plan.recompute)
    model = blocks(7)
    begun = count_forwards(model)
    names = [name for name, _ in model.named_parameters()]
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train() -> Any:
        pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        runs = list(begun)
        pipe.gather("counted", None)
        parity = pipe.parity(x, target=y)
        return runs, parity.loop.exact, str(parity), [name for name, _ in pipe.local_parameters()]

    results = launch(train, 2)
    again = [4 * (2 if flag else 1) for flag, size in zip(plan.recompute, plan.partition, strict=True) for _ in range(size)]
    for runs, ok, said, _ in results:
        assert runs == again
        assert ok, said
    assert sorted(name for *_, own in results for name in own) == sorted(names)
