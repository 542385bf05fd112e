"""Results of a step on processes other than gradients, and inputs other than the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, StageOutput, StepResult, add_loss, add_metric, rank
from penstock.runtime.launch.workers import Workers
from runtime.distributed import Grads, Stage, local_grads, together
from runtime.models import assert_equal, assert_same_results

COUNT = 3


class Named(NamedTuple):
    """A class that workers know by value only, as they do those of a script or notebook."""

    value: Tensor
    note: Any


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("zbv", 2), ("chimera", 4)])
def test_metrics_and_side_losses(workers: Workers, name: str, ranks: int) -> None:
    """Of every stage, on every rank, in the order of microbatches; side losses count in the loss and in the gradients."""

    def body(linear: nn.Linear, x: Tensor) -> Any:
        add_metric("mean", x.detach().mean())
        add_loss(linear.weight.square().sum() * 0.1)
        return StageOutput(torch.tanh(linear(x)), side_loss=x.square().mean(), metrics={"rows": float(len(x))})

    stages = nn.ModuleList(Stage(body) for _ in range(4)).double()
    x, y = torch.randn(7, 6).double(), torch.randn(7, 6).double()
    schedule = ps.schedule(name, ranks=ranks, microbatches=COUNT)

    def train() -> tuple[StepResult, Grads]:
        pipe = Pipeline(stages, schedule, loss_fn=functional.mse_loss)
        return pipe.step(x, target=y), local_grads(pipe)

    found = workers.run(train, ranks=ranks)
    assert_same_results([result for result, _ in found])
    total, means = torch.zeros(()).double(), []
    for piece, target in zip(x.tensor_split(COUNT), y.tensor_split(COUNT), strict=True):
        made, loss = piece, torch.zeros(()).double()
        for stage in stages:
            means.append(made.detach().mean())
            loss = loss + made.square().mean() + stage.map.weight.square().sum() * 0.1
            made = torch.tanh(stage.map(made))
        loss = (loss + functional.mse_loss(made, target)) * (len(piece) / 7)
        loss.backward()
        total += loss.detach()
    result = found[0][0]
    torch.testing.assert_close(result.loss, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.stack(result.metrics["mean"]), torch.stack(means), rtol=1e-12, atol=1e-15)
    assert [float(rows) for rows in result.metrics["rows"]] == [3.0] * 4 + [2.0] * 8
    for name_, grad in together([grads for _, grads in found], [key for key, _ in stages.named_parameters()]).items():
        torch.testing.assert_close(grad, stages.get_parameter(name_).grad, rtol=1e-11, atol=1e-13)


def test_outputs_and_targets_are_trees(workers: Workers) -> None:
    """The last stage's outputs come to every rank as they were made, also where they are no tensors; targets may be anything."""

    def end(linear: nn.Linear, x: Tensor) -> Any:
        made = linear(x)
        return {"made": made, "named": Named(made.sum(), "note"), "rows": len(x), "half": made.bfloat16()}

    stages = nn.ModuleList([Stage(lambda linear, x: linear(x)), Stage(end)])
    x = torch.randn(7, 6)

    def loss_fn(out: dict[str, Any], target: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(out["made"], target["y"])

    def train() -> Any:
        pipe = Pipeline(stages, schedule="1f1b", microbatches=3, loss_fn=loss_fn)
        return pipe.step(x, target={"y": x}, outputs=True).outputs

    for outputs in workers.run(train, ranks=2):
        wanted = [end(stages[1].map, stages[0](piece)) for piece in x.tensor_split(3)]
        assert_equal(outputs["made"], torch.cat([each["made"] for each in wanted]).detach())
        assert_equal(outputs["half"], torch.cat([each["half"] for each in wanted]).detach())
        assert outputs["rows"] == [3, 2, 2]
        assert_equal(outputs["named"].value, torch.stack([each["named"].value for each in wanted]).detach())
        assert outputs["named"].note == ["note"] * 3


def test_keyword_arguments_of_a_stage(workers: Workers) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
            return self.map(x) * gate

    stages = nn.ModuleList([nn.Linear(6, 6), Gated()])
    x, gate = torch.randn(7, 6), torch.rand(7, 6)

    def train() -> tuple[StepResult, Grads]:
        pipe = Pipeline(stages, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
        return pipe.step(x, target=x, stage_kwargs={1: {"gate": gate}}), local_grads(pipe)

    found = workers.run(train, ranks=2)
    for piece, part in zip(x.tensor_split(3), gate.tensor_split(3), strict=True):
        (functional.mse_loss(stages[1](stages[0](piece), gate=part), piece) * (len(piece) / 7)).backward()
    for name, grad in together([grads for _, grads in found], [key for key, _ in stages.named_parameters()]).items():
        assert_equal(grad, stages.get_parameter(name).grad, name)


def test_mapping_with_only_this_rank_s_stages(workers: Workers) -> None:
    """A rank that builds only its own stage, as for a model that does not fit on one rank."""
    x = torch.randn(6, 6)

    def stage(number: int) -> nn.Module:
        torch.manual_seed(number)
        return nn.Linear(6, 6)

    def train() -> Grads:
        pipe = Pipeline({rank(): stage(rank())}, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
        pipe.step(x, target=x)
        return local_grads(pipe)

    found = workers.run(train)
    whole = nn.Sequential(*map(stage, range(4)))
    for piece in x.tensor_split(3):
        (functional.mse_loss(whole(piece), piece) / 3).backward()
    for name, grad in together(found, [name for name, _ in whole.named_parameters()]).items():
        assert_equal(grad, whole.get_parameter(name).grad, name)


def test_a_missing_stage_is_reported_on_every_rank(workers: Workers) -> None:
    def train() -> None:
        Pipeline({0: nn.Linear(6, 6)}, schedule="1f1b", microbatches=1, deadline=20.0)

    with pytest.raises(ScheduleError, match="rank 1 holds stage 1, but the mapping of modules has none for it"):
        workers.run(train, ranks=2)
