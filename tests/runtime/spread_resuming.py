"""A training run whose vocabulary is spread over ranks, to be interrupted, and the losses that it must have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import Checkpoints, Pipeline, TokenCrossEntropy, device_mesh
from runtime.spread_models import build_model, draw_batch

BLOCKS = 4
"""How many layers there are between the ends."""


def build(*, tied: bool = False) -> nn.Sequential:
    model = build_model(BLOCKS, bias=True)
    if tied:
        model[-1].weight = model[0].weight
    return model


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def step_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    tokens, targets = draw_batch()
    optimizer.zero_grad()
    loss = TokenCrossEntropy()(model(tokens), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def follow_plain_loop(steps: int, *, tied: bool = False) -> list[float]:
    """The losses of a run without a pipeline, uninterrupted."""
    model = build(tied=tied)
    optimizer = make_optimizer(model)
    return [step_plain(model, optimizer) for _ in range(steps)]


def go_on(model: nn.Module, schedule: ps.Schedule | ps.Plan, folder: Path, steps: int, **mesh: int) -> list[float]:
    """Continue from the latest checkpoint for some steps, save in the background, and make one step more."""
    tokens, targets = draw_batch()
    pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), mesh=device_mesh(**mesh) if mesh else None, deadline=60)
    optimizer = make_optimizer(pipe)
    losses = []
    with Checkpoints(folder, keep=None) as checkpoints:
        found = checkpoints.load_latest(pipe, optimizer)
        for number in range(steps + 1):
            if number == steps:
                checkpoints.save_async(pipe, optimizer, step=(found.step if found else 0) + steps)
            optimizer.zero_grad()
            loss = pipe.step(tokens, target=targets).loss
            assert loss is not None
            losses.append(float(loss))
            optimizer.step()
    return losses


def build_empty(folder: Path, *, tied: bool = False) -> nn.Sequential:
    """A model to continue with: if there is a checkpoint, all values must come from it."""
    model = build(tied=tied)
    if any(folder.glob("step-*")):
        for parameter in model.parameters():
            parameter.data.zero_()
    return model


def compare(losses: list[float], first: int, *, tied: bool = False) -> None:
    assert losses == pytest.approx(follow_plain_loop(first + len(losses), tied=tied)[first:], rel=1e-12)
