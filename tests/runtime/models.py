"""Small models, and the unpipelined runs that a pipeline is compared with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.ir.kind import Kind
from penstock.ir.table import Table
from penstock.runtime import Pipeline, StepResult, launch


class Block(nn.Module):
    """A layer with parameters of all sorts: a linear map, a normalisation, and a factor of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.map = nn.Linear(width, width)
        self.factor = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(self.norm(x)) * self.factor)


def count_forwards(layers: nn.Sequential) -> list[int]:
    """How many forwards of each layer begin from here on; kept apart from the layers, whose state a recomputed forward leaves alone."""
    runs = [0] * len(layers)

    def counting(number: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            runs[number] += 1

        return count

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(counting(number))
    return runs


def blocks(count: int, width: int = 6, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(count))).to(dtype)


@dataclass
class Numbers:
    """What one step gives: the loss, each microbatch's loss, and every gradient by name."""

    loss: Tensor | None
    losses: list[Tensor]
    grads: dict[str, Tensor | None]

    @property
    def norm(self) -> Tensor:
        grads = [grad for grad in self.grads.values() if grad is not None]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))


LossFn = Callable[[Any, Any], Tensor]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def loop_step(model: nn.Module, batches: Sequence[tuple[Any, Any]], scales: Sequence[float], loss_fn: LossFn) -> Numbers:
    """The microbatch loop: the unpipelined model over the same slices; gradients are added to the model's."""
    total: Tensor | None = None
    losses = []
    for (x, y), scale in zip(batches, scales, strict=True):
        loss = loss_fn(model(x), y)
        (loss * scale).backward()
        losses.append(loss.detach())
        total = loss.detach() * scale if total is None else total + loss.detach() * scale
    return Numbers(total, losses, gradients(model))


def by_loop(model: nn.Module, x: Tensor, y: Tensor, microbatches: int, loss_fn: LossFn = functional.mse_loss) -> Numbers:
    """The microbatch loop on a copy, for a loss that is a mean over the batch."""
    model = copy.deepcopy(model)
    model.zero_grad()
    pieces = list(zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True))
    return loop_step(model, pieces, [len(piece) / len(x) for piece, _ in pieces], loss_fn)


def by_batch(model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFn = functional.mse_loss) -> Numbers:
    """The whole batch at once on a copy."""
    return by_loop(model, x, y, 1, loss_fn)


def by_pipeline(
    model: nn.Module,
    schedule: Table,
    x: Any,
    y: Any,
    loss_fn: Any = functional.mse_loss,
    step: dict[str, Any] | None = None,
    **options: Any,
) -> Numbers:
    """One step on virtual ranks that share a copy of the model; every rank must have the same result."""
    model = copy.deepcopy(model)
    model.zero_grad()

    def train() -> StepResult:
        return Pipeline(model, schedule, loss_fn=loss_fn, **options).step(x, target=y, **(step or {}))

    results = launch(train, ranks=schedule.ranks)
    assert_same_results(results)
    return Numbers(results[0].loss, results[0].losses, gradients(model))


def assert_same_results(results: Sequence[StepResult]) -> None:
    """The same loss, losses and metrics on every rank, to the last bit."""
    first = results[0]
    for other in results[1:]:
        assert_equal(other.loss, first.loss)
        assert_all_equal(other.losses, first.losses)
        assert other.metrics.keys() == first.metrics.keys()
        for name, values in first.metrics.items():
            assert_all_equal(other.metrics[name], values)


def assert_equal(found: Tensor | None, wanted: Tensor | None, name: str = "") -> None:
    if found is None or wanted is None:
        assert found is wanted, name
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}")


def assert_all_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)


def assert_same(found: Numbers, wanted: Numbers) -> None:
    """The same numbers to the last bit."""
    assert_equal(found.loss, wanted.loss, "loss")
    assert_all_equal(found.losses, wanted.losses)
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert_equal(found.grads[name], grad, name)


def assert_close(found: Numbers, wanted: Numbers, tolerance: float) -> None:
    """The loss, every gradient and the norm, each relative to its largest value."""
    pairs = {"loss": (found.loss, wanted.loss), "norm": (found.norm, wanted.norm)}
    for name, (one, other) in (pairs | {name: (found.grads[name], wanted.grads[name]) for name in wanted.grads}).items():
        if one is None or other is None:
            assert one is other, name
        else:
            assert float((one - other).abs().max()) <= tolerance * max(float(other.abs().max()), 1e-30), name


def sums_in_order(table: Table) -> bool:
    """Whether each stage's gradients are summed in the order of microbatches: its backwards, and those for the weights, both."""
    if len(table.placement.copies) > 1:
        return False
    for row in table:
        for kinds in ((Kind.B, Kind.I), (Kind.B, Kind.W)):
            seen: dict[int, int] = {}
            for part in (part for action in row for part in action.parts if part.kind in kinds):
                assert part.microbatch is not None
                if part.microbatch < seen.get(part.stage, -1):
                    return False
                seen[part.stage] = part.microbatch
    return True


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.inner(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~mask, -1e9).softmax(-1) @ v
        return self.outer(mixed.transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Embed(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))


class GPT(nn.Module):
    """A small language model; `Layers("blocks", head=["embed"], tail=["norm", "head"])` cuts it."""

    def __init__(
        self,
        depth: int = 6,
        width: int = 16,
        vocabulary: int = 11,
        length: int = 8,
        *,
        heads: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, width, length)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
