"""Stages that pass values on, compared with the same modules called one after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.ir.table import Table
from penstock.runtime import Pipeline, StepResult, launch
from runtime.branches import branch
from runtime.models import Numbers, assert_close, assert_same, gradients

CHAINS = ["gpipe", "1f1b", "zb-h1", "zb-h2"]
"""One stage per rank, with full and with split backwards."""


def check(
    stages: Sequence[nn.Module],
    x: Any,
    y: Any = None,
    *,
    schedule: Table | str = "1f1b",
    microbatches: int = 3,
    loss_fn: Any = functional.mse_loss,
    exact: bool = True,
) -> Numbers:
    """A step of the stages on as many ranks, against the same modules called one after the other on the same slices."""
    table = ps.schedule(schedule, ranks=len(stages), microbatches=microbatches) if isinstance(schedule, str) else schedule
    model, again = copy.deepcopy(nn.ModuleList(stages)), copy.deepcopy(nn.ModuleList(stages))

    def train() -> StepResult:
        return Pipeline(model, table, loss_fn=loss_fn).step(x.clone(), target=y)

    results = launch(train, table.ranks)
    slices = zip(x.clone().tensor_split(table.microbatches), y.tensor_split(table.microbatches), strict=True)
    total = None
    losses = []
    for microbatch, (piece, yy) in enumerate(slices):
        xx = piece.detach()  # a stage may change it in place, unlike a slice
        made: dict[int, dict[int, Any]] = {}
        for number, stage in enumerate(again):
            inputs = [made[other][number] for other in sorted(table.graph.inputs_of(number), reverse=True)] or [xx]
            first = inputs[0] if type(inputs[0]) is tuple else (inputs[0],)
            output = stage(*first, *inputs[1:])
            made[number] = branch(output, table, number, microbatch)
        loss = loss_fn(output, yy)
        scale = len(xx) / len(x)
        if loss.requires_grad:
            (loss * scale).backward()
        losses.append(loss.detach())
        total = loss.detach() * scale if total is None else total + loss.detach() * scale
    found, wanted = Numbers(results[0].loss, results[0].losses, gradients(model)), Numbers(total, losses, gradients(again))
    if exact:
        assert_same(found, wanted)
    else:
        assert_close(found, wanted, 1e-5)
    return found


class Map(nn.Module):
    """A linear map from one tensor to one tensor."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x))


def data(batch: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 6), torch.randn(batch, 6)
