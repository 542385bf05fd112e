"""Small models over sequences whose layers use the prefix of their slice, and steps of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, StepResult, launch, prefix_of

WORDS, WIDTH = 11, 8


class CausalBlock(nn.Module):
    """Attention to this token and earlier ones, and a perceptron."""

    sliceable = True

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm, self.out = heads, nn.LayerNorm(width), nn.Linear(width, width)
        self.joint = nn.Linear(width, 3 * width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        queries, keys, values = self.joint(self.norm(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keys, values = prefix_of(self).extend(keys, values, dim=2)
        mask = causal_mask(tokens, keys.shape[2])
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.perceptron(x)


def causal_mask(queries: int, keys: int) -> Tensor:
    """Each query sees the keys up to its own, which are the last ones."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def decoder(depth: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """An embedding, so many blocks less two, and a head."""
    blocks = [CausalBlock() for _ in range(depth - 2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)).to(dtype)


def mean_loss(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def words(rows: int, tokens: int) -> Tensor:
    return torch.randint(WORDS, (rows, tokens))


def sliced_step(
    model: Any, schedule: ps.Schedule, x: Any, y: Tensor | None, loss_fn: Callable[..., Any] | None = mean_loss, **options: Any
) -> tuple[list[Any], nn.Module]:
    """The result of a step on virtual ranks, and a copy of the model with its gradients."""
    model = copy.deepcopy(model)

    def train() -> StepResult:
        return Pipeline(model, schedule, loss_fn=loss_fn, **options).step(x, **({} if y is None else {"target": y}))

    return launch(train, schedule.ranks), model


def assert_within(model: nn.Module, wanted: nn.Module | Mapping[str, Tensor | None], tolerance: float) -> None:
    """Every gradient is that of the other model, within a tolerance relative to its largest value."""
    others = {name: p.grad for name, p in wanted.named_parameters()} if isinstance(wanted, nn.Module) else wanted
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, others[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            scale = float(other.abs().max())
            assert float((grad - other).abs().max()) <= tolerance * max(scale, 1e-30), name
