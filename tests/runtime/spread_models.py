"""Models whose vocabulary is spread over ranks, and the plain loop that their pipelines are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.ir.schedule import Schedule
from penstock.runtime import Pipeline, TokenCrossEntropy

VOCABULARY, HIDDEN, TOKENS = 11, 6, 5
STEPS, RATE, NORM = 2, 0.5, 0.3
"""Training steps, learning rate, and the largest norm of gradients."""


def build_model(blocks: int, *, bias: bool = False, padding: int | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(blocks)]
    ends = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=padding), nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    return nn.Sequential(ends[0], *middle, ends[1]).double()


def spread(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    return ps.spread_vocabulary(ps.schedule(name, ranks=ranks, microbatches=microbatches), vocabulary=ps.Vocabulary(**options))


def plan_for_cluster(*devices: int, shares: tuple[float, ...] = ()) -> ps.Plan:
    """A plan that spreads the vocabulary, with two blocks per rank, and these devices of a cluster as its ranks.

    `shares` is the part of the rows that each rank has, equal parts by default.
    """
    sizes = {"layers": 2 * len(devices), "hidden": 512, "heads": 4, "sequence": 512, "vocabulary": 262144}
    profile = ps.Profile.transformer(**sizes, flops=400e12, latency=1e-5, bandwidth="50GB")
    plan = ps.plan(profile, ranks=len(devices), microbatches=4, seconds=0, schedules=["1f1b"], vocabulary=True)
    assert plan.vocabulary
    return replace(plan, devices=devices, row_shares=shares)


def draw_batch(*shape: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets; by default of 9 sequences, so that microbatches differ in size."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(VOCABULARY, shape or (9, TOKENS), generator=generator) for _ in range(2))
    return tokens, targets


def train_pipeline(pipe: Pipeline, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """What a rank knows after some steps; the last gradients are those that were clipped."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    losses, norms, by_microbatch = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = pipe.step(tokens, target=targets)
        norms.append(pipe.clip_grad_norm_(NORM))
        optimizer.step()
        losses.append(result.loss)
        by_microbatch.append(result.losses)
    named = {name: (parameter.detach(), parameter.grad) for name, parameter in pipe.named_parameters()}
    return {"losses": losses, "norms": norms, "by_microbatch": by_microbatch, "named": named, "whole": pipe.gather_vocabulary()}


def compare_with_plain_loop(
    found: Sequence[dict[str, Any]],
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    microbatches: int | tuple[int, ...],
    loss_fn: Any = None,
) -> None:
    """Losses, norms, gradients and weights of all ranks equal those of the unpipelined model, and every element is on one rank.

    `microbatches` is their number, or the rows that they begin with after the first.
    """
    loss_fn = TokenCrossEntropy() if loss_fn is None else loss_fn
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        parts = [loss_fn(model(x), y) for x, y in zip(tokens.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True)]
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        for of_rank in found:
            assert_equal(of_rank["losses"][step], loss)
            assert_equal(of_rank["norms"][step], norm)
            assert_equal(torch.stack(of_rank["by_microbatch"][step]), torch.stack(parts))
    counts = dict.fromkeys(dict(model.named_parameters()), 0)
    for of_rank in found:
        for key, (value, gradient) in of_rank["named"].items():
            name, _, rows = key.partition("[")
            own = slice(*map(int, rows[:-1].split(":"))) if rows else slice(None)
            parameter = model.get_parameter(name)
            assert_equal(value, parameter[own])
            if parameter.grad is None:
                assert gradient is None
            else:
                assert_equal(gradient, parameter.grad[own])
            counts[name] += value.numel()
        for name, value in of_rank["whole"].items():
            assert_equal(value, model.get_parameter(name))
    assert counts == {name: parameter.numel() for name, parameter in model.named_parameters()}


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)
