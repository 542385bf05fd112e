"""A small GPT over bytes, as a list of layers: an embedding, blocks, a head.

penstock profile examples/gpt.py:build -o p.json
penstock plan --profile p.json --ranks 4 --batch 64
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    vocabulary: int = 256
    context: int = 128
    width: int = 128
    heads: int = 4
    blocks: int = 6


class Embedding(nn.Module):
    """Bytes and their places as vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.bytes(tokens) + self.places(places)


class Attention(nn.Module):
    """Each place looks at those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inner = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.outer = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inner(x).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.outer(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a feed-forward part, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Head(nn.Module):
    """How likely each byte is to come next."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.bytes = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bytes(self.norm(x))


def gpt(shape: Shape) -> list[nn.Module]:
    """The layers, with small weights to start from."""
    layers = [Embedding(shape), *(Block(shape) for _ in range(shape.blocks)), Head(shape)]
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
    return layers


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def build(shape: Shape | None = None, batch: int = 4) -> tuple[list[nn.Module], Tensor, object, Tensor]:
    """For `penstock profile`: layers, a microbatch, the loss function and its target."""
    shape = shape or Shape()
    text = torch.randint(shape.vocabulary, (batch, shape.context + 1), generator=torch.Generator().manual_seed(0))
    return gpt(shape), text[:, :-1], loss, text[:, 1:]
