"""The profile of a model whose vocabulary is spread over the ranks of a pipeline."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.errors import CostsError
from penstock.planner.profile.profile import PER_MICROBATCH, Layer, Profile
from penstock.text.units import check_count

_SHARED = (*PER_MICROBATCH, "parameters", "gradients", "optimizer", "reduction", "update")
"""The fields of which each rank has its share."""


def spread_ends(profile: Profile, ranks: int) -> Profile:
    """The profile with its first layer, the embedding, and its last, the head with the loss, spread over the ranks.

    The two layers stay as the ends of the model, but have no work and no parameters of their own: `Profile.shares` has what each rank
    takes and holds for them.

    >>> whole = Profile([Layer(f=0, i=0, w=0, output=1), Layer(f=2, i=2, w=2, output=1), Layer(f=4, i=4, w=4, output=50)])
    >>> spread = spread_ends(whole, 4)
    >>> spread.layers[-1].f, spread.layers[-1].output, spread.shares[1].f
    (0.0, 1.0, 1.0)
    """
    check_count("ranks", ranks, error=CostsError)
    if profile.shares:
        raise CostsError("the vocabulary of this profile is spread over the ranks already")
    if len(profile) < 3:
        raise CostsError(f"a vocabulary is spread over the ranks from an embedding and a head, but there are {len(profile)} layers")
    embedding, *between, head = profile.layers
    hidden = between[-1].output
    ends = [Layer(name=layer.name, f=0.0, i=0.0, w=0.0, output=size) for layer, size in ((embedding, embedding.output), (head, hidden))]
    shares = [cut_share(embedding, ranks), cut_share(head, ranks)]
    layers = [replace(layer, slices=None) for layer in (ends[0], *between, ends[1])]
    return replace(profile, layers=layers, shares=shares, tokens=None, variants=())


def cut_share(layer: Layer, ranks: int) -> Layer:
    """A rank's share of a layer that is spread over so many."""
    return replace(layer, **{name: getattr(layer, name) / ranks for name in _SHARED}, slices=None)


def time_broadcast(profile: Profile, size: float, ranks: int) -> float:
    """Time to bring a tensor from one rank to all, or to sum a tensor of all ranks on one: in a chain, piece by piece."""
    return 0.0 if ranks == 1 else count_hops(ranks) * profile.latency + (0.0 if profile.bandwidth is None else size / profile.bandwidth)


def count_hops(ranks: int) -> int:
    """Messages one after the other of a small collective."""
    return math.ceil(math.log2(ranks))
