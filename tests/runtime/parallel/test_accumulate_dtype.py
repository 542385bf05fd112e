"""`accumulate_dtype` for parameters that several ranks hold, and the memory layout of the sums."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, launch
from runtime.distributed import local_grads
from runtime.models import gradients
from runtime.summing import COUNT, HALF, assert_rounded_once, model_of, terms

SCHEDULES = ["chimera", "dualpipe", "1f1b", "zbv"]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_that_share_a_model_sum_in_the_dtype(name: str, tied: bool, steps: int) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=COUNT)
    model, x, y = model_of(schedule.stages, HALF, tied), torch.randn(16, 6).to(HALF), torch.randn(16, 6).to(HALF)
    wanted = terms(model, x, y)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, accumulate_dtype=torch.float64)
        for _ in range(steps):
            pipe.step(x, target=y)

    launch(train, 2)
    for key, grad in gradients(model).items():
        assert_rounded_once(grad, wanted[key], steps, key)
    for key, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), key


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_sum_in_the_dtype(name: str, tied: bool) -> None:
    """With one model per rank, both copies end with the same sum."""
    schedule = ps.schedule(name, ranks=2, microbatches=COUNT)
    model, x, y = model_of(schedule.stages, HALF, tied), torch.randn(16, 6).to(HALF), torch.randn(16, 6).to(HALF)
    wanted = terms(model, x, y)
    last = f"{len(model) - 1}.weight"

    def train() -> dict[str, Tensor | None]:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss, accumulate_dtype=torch.float64)
        for _ in range(2):
            pipe.step(x, target=y)
        for key, parameter in pipe.local_parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride(), key
        return local_grads(pipe)

    for grads in launch(train, 2):
        for key, grad in grads.items():
            assert_rounded_once(grad, wanted["0.weight" if tied and key == last else key], 2, key)


class Sparse(nn.Module):
    """A stage with an embedding that has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).sum(1)


class Scores(nn.Module):
    """A head that uses the embedding's table and gives it dense gradients."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.weight = table

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera", "dualpipe"])
@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients_are_summed_in_the_dtype(name: str, tied: bool) -> None:
    embed = Sparse()
    model: Any = nn.Sequential(embed, Scores(embed.table.weight) if tied else nn.Linear(6, 12))
    tokens, y = torch.randint(12, (16, 3)), torch.randn(16, 12)
    again = copy.deepcopy(model).double()
    schedule = ps.schedule(name, ranks=2, microbatches=COUNT)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, accumulate_dtype=torch.float64)
        for _ in range(2):
            pipe.step(tokens, target=y)

    launch(train, 2)
    for _ in range(2):
        functional.mse_loss(again(tokens), y.double()).backward()
    for (key, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert parameter.grad.is_sparse == other.grad.is_sparse, key
        assert parameter.grad.dtype is parameter.dtype
        torch.testing.assert_close(parameter.grad.to_dense().double(), other.grad.to_dense(), rtol=1e-5, atol=1e-7)
