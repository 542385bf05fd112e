"""Random numbers that depend neither on ranks and schedule nor on where the model is cut.

Each forward of a stage draws from a stream that is derived from a key (`draw_from`), and each of its layers from a stream derived from
that and the layer's name (`add_layer_streams`). The state of all of a process's streams can be captured, set and preserved.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.runtime.device.rng import get_rng_state, seed_rng, set_rng_state
from penstock.runtime.model.partition import LayerSequence, Part, Partition


def draw_from(*key: object) -> None:
    """Draw from the stream of this key from now on, such as a seed, a stage and a microbatch."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    seed_rng(number)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """A context after which torch's random state is as before."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def capture_random_state() -> dict[str, Any]:
    """Return the states of torch's, NumPy's and Python's random streams."""
    host, on_device = get_rng_state()
    return {"torch": host, "cuda": on_device, "numpy": np.random.get_state(), "python": random.getstate()}


def set_random_state(state: dict[str, Any]) -> None:
    """Set the states that `capture_random_state` has returned."""
    set_rng_state((state["torch"], state["cuda"]))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


class StreamedLayers(LayerSequence):
    """Layers one after the other, each drawing from a stream derived from the seed at the beginning and the layer's name.

    That seed is part of torch's random state, so a checkpointed run that is recomputed draws the same numbers again.
    """

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str]) -> None:
        super().__init__(layers)
        self.names = tuple(names)

    def iterate(self) -> Iterator[Callable[..., Any]]:
        seed = torch.initial_seed()
        for name, call in zip(self.names, super().iterate(), strict=True):
            draw_from(seed, name)
            yield call


def add_layer_streams(partition: Partition) -> Partition:
    """Give each layer a stream of its own. Modules that were written as stages have one stream per stage."""
    return Partition(tuple(part if part is None or part.unpack else _add_streams(part) for part in partition.parts))


def _add_streams(part: Part) -> Part:
    use_own = getattr(part.module, "use_layer_streams", None)
    return replace(part, module=StreamedLayers(part.modules, part.layers) if use_own is None else use_own())


def draws_by_layer(module: nn.Module) -> bool:
    """Whether a stage's module draws from one stream per layer."""
    return any(isinstance(part, StreamedLayers) or getattr(part, "draws", False) is True for part in module.modules())
