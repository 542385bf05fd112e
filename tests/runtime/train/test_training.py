"""Long trainings follow the microbatch loop exactly."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime import Layers, Pipeline, launch
from runtime.models import GPT, assert_equal, token_loss

LAYERS = Layers("blocks", head=["embed"], tail=["norm", "head"])
STEPS = 120


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards from a random start, with one of two strides."""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(11, (5, 1), generator=generator), torch.randint(1, 3, (5, 1), generator=generator)
    tokens = (start + stride * torch.arange(9)) % 11
    return tokens[:, :-1], tokens[:, 1:]


def reference(model: nn.Module, microbatches: int, steps: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        total: Any = 0
        for xx, yy in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            loss = token_loss(model(xx), yy) * (len(xx) / len(x))
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def pipelined(model: nn.Module, schedule: ps.Schedule, steps: int) -> list[Tensor]:
    pipe = Pipeline(model, schedule, loss_fn=token_loss, split=LAYERS)
    optimizer = torch.optim.AdamW(pipe.parameters(), 3e-3)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = pipe.step(x, target=y).loss
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss is not None
        losses.append(loss)
    return losses


@cache
def trained(depth: int, steps: int) -> tuple[list[Tensor], GPT]:
    """Return the losses of the unpipelined model, and the trained model."""
    torch.manual_seed(0)
    model = GPT(depth=depth)
    return reference(model, 4, steps), model


def _follows(name: str, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    schedule = ps.schedule(name, ranks=4, microbatches=4)
    model = GPT(depth=schedule.stages - 2)
    wanted, again = trained(schedule.stages - 2, steps)
    for losses in launch(pipelined, 4, args=(model, schedule, steps)):
        for found, other in zip(losses, wanted, strict=True):
            assert_equal(found, other)
    for (key, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert_equal(parameter.detach(), other.detach(), key)
    return wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_120_steps_of_a_small_gpt_follow_the_loop_exactly(name: str) -> None:
    """All losses and final parameters are bitwise equal, with clipping and AdamW, and the loss falls."""
    losses = _follows(name, STEPS)
    assert float(losses[0]) > 2.2
    assert float(losses[-1]) < 0.8


@pytest.mark.parametrize(("name", "steps"), [("1f1b", 10), ("zbv", 10), ("interleaved-1f1b", 30), ("dualpipe-v", 30)])
def test_some_steps_of_a_small_gpt(name: str, steps: int) -> None:
    _follows(name, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_tied_training_on_separate_copies_stays_close(name: str) -> None:
    """50 steps with a tied head in float64: the losses equal the loop's to 9 digits."""
    torch.manual_seed(0)
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model = GPT(depth=2, tied=True).double()
    wanted = reference(copy.deepcopy(model), 4, 50)
    for losses in launch(lambda: pipelined(copy.deepcopy(model), schedule, 50), 2):
        torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=1e-9, atol=0)
