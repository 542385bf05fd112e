"""A small GPT over bytes, as a list of layers: an embedding, blocks, a head. It learns to write Python from Python's own library.

penstock train examples/gpt.py --ranks 4 --schedule auto
penstock train examples/gpt.py --ranks 4 --schedule "seq1f1b{slices=4}" -m 2 --check
penstock profile examples/gpt.py:build -o p.json
penstock plan --profile p.json --ranks 4 --batch 64
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime import prefix_of


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    vocabulary: int = 256
    context: int = 256
    width: int = 192
    heads: int = 4
    blocks: int = 16


class Embedding(nn.Module):
    """Bytes and their places as vectors."""

    sliceable = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        start = prefix_of(self).advance(length)  # 0, unless the sequence is cut into slices
        return self.bytes(tokens) + self.places(torch.arange(start, start + length, device=tokens.device))


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
        keys, values = prefix_of(self).extend(keys, values, dim=2)  # behind those of earlier slices, if there are any
        before = keys.shape[2] - length
        mask = torch.ones(length, before + length, dtype=torch.bool, device=x.device).tril(before) if before else None
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        return self.outer(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a feed-forward part, each added to what came in."""

    sliceable = True

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

    sliceable = True

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
                nn.init.normal_(module.weight, std=0.06)
    return layers


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def build(shape: Shape | None = None, batch: int = 4) -> tuple[list[nn.Module], Tensor, object, Tensor]:
    """For `penstock profile`: layers, a microbatch, the loss function and its target."""
    shape = shape or Shape()
    text = torch.randint(shape.vocabulary, (batch, shape.context + 1), generator=torch.Generator().manual_seed(0))
    return gpt(shape), text[:, :-1], loss, text[:, 1:]


class Text:
    """Pieces of a text, each with the bytes that come next."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        places = numbers[:, None] * self.context + torch.arange(self.context + 1)
        pieces = self.bytes[places].long()
        return pieces[:, :-1], pieces[:, 1:]


def library(most: int) -> bytes:
    """The sources of Python's standard library, as every installation has them, up to so many bytes."""
    found = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= most:
            break
    return bytes(found[:most])


def data(shape: Shape | None = None, most: int = 1_000_000) -> Text:
    """For `penstock train`: the samples."""
    return Text(library(most), (shape or Shape()).context)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For `penstock train`."""
    return torch.optim.AdamW(parameters, lr=1e-3)
