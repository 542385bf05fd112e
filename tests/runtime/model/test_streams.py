"""Random streams per layer: neither the cuts nor recompute change the numbers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.runtime import Pipeline, launch
from runtime.models import GPT, GPTBlock, assert_equal, loop_step, token_loss
from runtime.resuming import MICROBATCHES, SEED, SPLIT, drawing, model, texts

make = partial(model, dropout=0.4)
WAYS = [("1f1b", 1, 1), ("1f1b", 4, 4), ("zbv", 2, 4), ("interleaved-1f1b", 3, 6)]


class Recomputing(GPTBlock):
    """A block under torch's activation checkpoint, which keeps only its input."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def step(plan: Any, ranks: int, recompute: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses of the second step, and the gradients of both."""
    made, tokens = make(), texts()[:8]
    if recompute:
        for block in made.blocks:
            block.__class__ = Recomputing

    def train() -> list[Tensor]:
        pipe = Pipeline(made, plan, loss_fn=token_loss, split=SPLIT, seed=SEED)
        pipe.step(tokens, target=tokens)
        return pipe.step(tokens, target=tokens).losses

    losses = launch(train, ranks)[0]
    return losses, {name: parameter.grad for name, parameter in made.named_parameters()}


def wanted() -> tuple[list[Tensor], dict[str, Tensor | None]]:
    made, pieces = make(), texts()[:8].tensor_split(MICROBATCHES)
    for number in range(2):
        with drawing(made, number):
            numbers = loop_step(made, [(each, each) for each in pieces], [0.25] * 4, token_loss)
    return numbers.losses, numbers.grads


def check(found: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    losses, grads = wanted()
    for one, other in zip(found[0], losses, strict=True):
        assert_equal(one, other)
    for name, grad in grads.items():
        assert_equal(found[1][name], grad, name)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_layers_draw_the_same_wherever_the_model_is_cut(way: tuple[str, int, int]) -> None:
    name, ranks, stages = way
    schedule = ps.schedule(name, ranks=ranks, microbatches=MICROBATCHES)
    assert schedule.stages == stages
    check(step(schedule, ranks))


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_recomputed_stages_draw_the_same(way: tuple[str, int, int]) -> None:
    name, ranks, stages = way
    schedule = ps.schedule(name, ranks=ranks, microbatches=MICROBATCHES)
    check(step(SimpleNamespace(schedule=schedule, recompute=[True] * stages), ranks))
    check(step(schedule, ranks, recompute=True))


def test_modules_that_were_given_as_stages_have_a_stream_each() -> None:
    """In a list of modules every module is a stage, so there is one stream per stage."""

    def train() -> Tensor:
        pipe = Pipeline([torch.nn.Dropout(0.5)], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, seed=3)
        return pipe.step(torch.ones(4, 6), target=torch.ones(4, 6), outputs=True).outputs

    from runtime.resuming import number

    torch.manual_seed(number("3/0", 0, 1))
    expected = functional.dropout(torch.ones(2, 6), 0.5)
    assert torch.equal(train()[2:], expected)


def test_the_reference_draws_at_all() -> None:
    tokens = texts()[:8]
    made: GPT = make()
    with drawing(made, 0):
        one = made(tokens)
    with drawing(made, 1):
        other = made(tokens)
    assert not torch.equal(one, other)
