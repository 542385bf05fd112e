"""Our lowered CSV files run in torch's own runtime, with the gradients that they have here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, rank
from penstock.runtime.launch.workers import Workers
from runtime.distributed import Grads, local_grads, together
from runtime.models import assert_all_equal, blocks, by_loop

SCHEDULES = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb", "looped-bfs", "zbv", "dualpipe-v", "v-half", "hanayo"]
COUNT = 6


def in_torch(model: nn.Sequential, file: str, form: str, x: Tensor, y: Tensor) -> tuple[list[Tensor], Grads]:
    """A step of torch's runtime by the file: the losses, on the rank that has them, and the gradients of this rank's stages."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    placement = ps.load(file).placement
    mine = sorted(placement.stages_of(rank()))
    made = [PipelineStage(model[stage], stage, placement.stages, torch.device("cpu")) for stage in mine]
    schedule = _PipelineScheduleRuntime(made, COUNT, loss_fn=functional.mse_loss)
    schedule._load_csv(file, format=form)
    losses: list[Tensor] = []
    inputs: tuple[Any, ...] = (x,) if 0 in mine else ()
    if placement.stages - 1 in mine:
        schedule.step(*inputs, target=y, losses=losses)
    else:
        schedule.step(*inputs)
    grads = {f"{stage}.{name}": parameter.grad for stage in mine for name, parameter in model[stage].named_parameters()}
    return [loss.detach() for loss in losses], grads


def here(model: nn.Sequential, file: str, x: Tensor, y: Tensor) -> tuple[list[Tensor], Grads]:
    pipe = Pipeline(model, ps.load(file), loss_fn=functional.mse_loss)
    return pipe.step(x, target=y).losses, local_grads(pipe)


@pytest.mark.parametrize("name", SCHEDULES)
def test_program_runs_in_torch(workers: Workers, name: str, tmp_path: Path) -> None:
    """With our sends, receives and reductions, in our order."""
    schedule = ps.schedule(name, ranks=2, microbatches=COUNT)
    ps.lower(schedule).to_csv(tmp_path / "program.csv")
    assert_same_numbers(workers, str(tmp_path / "program.csv"), "compute_comms")


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipe-v"])
def test_schedule_runs_in_torch(workers: Workers, name: str, tmp_path: Path) -> None:
    """Which adds its own sends and receives."""
    ps.schedule(name, ranks=2, microbatches=COUNT).to_csv(tmp_path / "schedule.csv")
    assert_same_numbers(workers, str(tmp_path / "schedule.csv"), "compute_only")


def assert_same_numbers(workers: Workers, file: str, form: str) -> None:
    """One file, there and here: both have the loop's losses and gradients."""
    model, x, y = blocks(ps.load(file).stages), torch.randn(12, 6), torch.randn(12, 6)
    names = [key for key, _ in model.named_parameters()]
    wanted = by_loop(model, x, y, COUNT)
    theirs = workers.run(in_torch, (model, file, form, x, y), ranks=2)
    ours = workers.run(here, (model, file, x, y), ranks=2)
    losses = torch.stack(next(found for found, _ in theirs if found))
    assert_all_equal(ours[0][0], wanted.losses)
    torch.testing.assert_close(losses.sort().values, torch.stack(wanted.losses).sort().values)  # there in the order in which they ran
    for found in (theirs, ours):
        whole = together([grads for _, grads in found], names)
        for key, grad in wanted.grads.items():
            torch.testing.assert_close(whole[key], grad, rtol=1e-5, atol=1e-6, msg=key)
