"""Small models whose sequences can be cut into slices, and schedules that take slices."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.planner.partition.slices import list_edges
from penstock.planner.profile import SliceCost, SliceCosts
from penstock.schedules.registry import algorithms

SLICED = [name for name, entry in algorithms().items() if entry.slices is not None and name != "inference"]
GRANULARITY = 8


def random_model(chance: np.random.Generator, layers: int, tokens: int = 96) -> ps.Profile:
    """Layers with and without attention, fixed costs and memory for the prefix."""

    def draw(pair: bool = True) -> SliceCost:
        fixed, token, attention = chance.uniform(0, 1, 3) * (chance.uniform(0, 1, 3) < 0.7)
        return SliceCost(fixed=fixed, token=0.01 + token / 20, pair=pair * attention / 500)

    def draw_layer() -> ps.Layer:
        activation = SliceCost(token=float(chance.uniform(0, 0.2)), prefix=float(chance.uniform(0, 0.02)))
        sizes: dict[str, Any] = {"activation": activation, "weight_stash": SliceCost(token=activation.token / 2)}
        sizes |= {"workspace": SliceCost(token=0.01), "keys": activation.token / 4, "key_gradients": activation.token / 3}
        slices = SliceCosts(f=draw(), i=draw(), w=draw(pair=False), **sizes)
        whole = {name: getattr(slices, name).at(tokens, 0) for name in ("f", "i", "w", "activation", "weight_stash")}
        whole["activation"] += slices.keys * tokens
        return ps.Layer(**whole, output=float(chance.uniform(0, 2)), parameters=1.0, slices=slices)

    links = {
        "latency": float(chance.uniform(0, 0.5)),
        "bandwidth": float(chance.choice([1.0, 10.0])),
        "keeps_output": bool(chance.integers(2)),
    }
    return ps.Profile([draw_layer() for _ in range(layers)], tokens=tokens, input=3.0, **links)


def random_lengths(chance: np.random.Generator, tokens: int, slices: int) -> tuple[int, ...]:
    edges = list_edges(tokens, GRANULARITY)
    inner = np.sort(chance.choice(edges[1:-1], slices - 1, replace=False))
    return tuple(np.diff(np.concatenate(([0], inner, [tokens]))).tolist())
