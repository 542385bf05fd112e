"""Random numbers that do not depend on who draws them when.

The random streams of this process, as they stand.

Layers that draw from random streams of their own, so that what they draw does not depend on where the model is cut.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.runtime.device import device
from penstock.runtime.model.partition import LayerSequence, Part, Partition


def draw_from(*key: object) -> None:
    """Draw from the stream of this key from here on: a seed, a stage and a microbatch, say."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    device.seed(number)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Leave torch's random state as it was."""
    state = device.random_state()
    try:
        yield
    finally:
        device.set_random_state(state)


def capture_random_state() -> dict[str, Any]:
    """The states of torch's, NumPy's and Python's streams."""
    host, on_device = device.random_state()
    return {"torch": host, "cuda": on_device, "numpy": np.random.get_state(), "python": random.getstate()}


def set_random_state(state: dict[str, Any]) -> None:
    device.set_random_state((state["torch"], state["cuda"]))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


class StreamedLayers(LayerSequence):
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


def add_layer_streams(partition: Partition) -> Partition:
    """The partition with a stream for each layer; modules that were written as stages have one a stage already."""
    return Partition(tuple(part if part is None or part.unpack else _streamed(part) for part in partition.parts))


def _streamed(part: Part) -> Part:
    own = getattr(part.module, "use_layer_streams", None)
    return replace(part, module=StreamedLayers(part.modules, part.layers) if own is None else own())


def draws_by_layer(module: nn.Module) -> bool:
    """Whether a stage's module takes care of its streams."""
    return any(isinstance(each, StreamedLayers) or getattr(each, "draws", False) is True for each in module.modules())
