"""Layers that draw from random streams of their own, so that what they draw does not depend on where the model is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from penstock.runtime.partition import Part, Partition, Run
from penstock.runtime.randomness import draw_from


class Streamed(Run):
    """A run of layers, each of which draws from a stream of the one that it begins with and the layer's name.

    What the run begins with is part of torch's random state, so that a checkpointed run that is recomputed draws the same again.
    """

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str]) -> None:
        super().__init__(layers)
        self.names = tuple(names)

    def each(self) -> Iterator[nn.Module]:
        begun = torch.initial_seed()
        for name, layer in zip(self.names, self.layers, strict=True):
            draw_from(begun, name)
            yield layer


def streamed(partition: Partition) -> Partition:
    """The partition with a stream for each layer; modules that were written as stages have one a stage already."""
    return Partition(tuple(part if part is None or part.unpack else _streamed(part) for part in partition.parts))


def _streamed(part: Part) -> Part:
    own = getattr(part.module, "streamed", None)
    return replace(part, module=Streamed(part.modules, part.layers) if own is None else own())


def draws_by_layer(module: nn.Module) -> bool:
    """Whether a stage's module takes care of its streams."""
    return any(isinstance(each, Streamed) or getattr(each, "draws", False) is True for each in module.modules())
