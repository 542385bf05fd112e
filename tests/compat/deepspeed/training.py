"""A model, its data, and the results of training it without a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat.deepspeed import PipelineEngine
from penstock.runtime import launch

WIDTH = 6
Batch = tuple[Any, Any]
loss_fn = nn.functional.mse_loss


def model(layers: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))).to(dtype)


class Block(nn.Module):
    """A layer whose first values come from its seed alone, wherever it is built."""

    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, WIDTH, dtype=torch.float64, generator=values) / 3)
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.float64, generator=values) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))


def data(count: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    return [(torch.randn(3, WIDTH, dtype=dtype), torch.randn(3, WIDTH, dtype=dtype)) for _ in range(count)]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_loop(whole: nn.Module, batches: list[Batch], micro_batches: int, loss: Callable[[Any, Any], Tensor] = loss_fn) -> list[Tensor]:
    """The unpipelined model over the same microbatches; it is trained by this."""
    optimizer, losses = sgd(whole.parameters()), []
    for start in range(0, len(batches), micro_batches):
        each = []
        for inputs, labels in batches[start : start + micro_batches]:
            one = loss(whole(inputs), labels)
            (one / micro_batches).backward()
            each.append(one.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each[1:], start=each[0]) / micro_batches)
    return losses


def by_engine(whole: Any, batches: list[Batch], micro_batches: int, stages: int, **options: Any) -> list[list[Tensor]]:
    """The losses on every rank; the model is trained by this."""
    options = {"loss_fn": loss_fn, "optimizer": sgd, "deadline": 20.0, **options}

    def train() -> list[Tensor]:
        engine = PipelineEngine(whole, micro_batches=micro_batches, **options)
        source = iter(batches)
        return [engine.train_batch(source) for _ in range(len(batches) // micro_batches)]

    return launch(train, ranks=stages)


def assert_trained_alike(whole: nn.Module, batches: list[Batch], micro_batches: int, stages: int, **options: Any) -> None:
    """The losses and the parameters afterwards, bit by bit."""
    alone = copy.deepcopy(whole)
    wanted = by_loop(alone, batches, micro_batches)
    found = by_engine(whole, batches, micro_batches, stages, **options)
    for rank in found:
        assert [loss.item() for loss in rank] == [loss.item() for loss in wanted]
    for (name, mine), theirs in zip(whole.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
