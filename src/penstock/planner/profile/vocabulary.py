"""The profile of a model whose vocabulary is spread over the ranks of a pipeline, and how many of its rows each device takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import CostsError
from penstock.ir.cluster import Cluster, share_rows
from penstock.ir.costs import Costs
from penstock.planner.profile.profile import PER_MICROBATCH, Layer, Profile
from penstock.text.units import check_count

_SHARED = (*PER_MICROBATCH, "parameters", "gradients", "optimizer", "reduction", "update")
"""The fields of which each rank has its share."""
_DIGITS = 9
"""Parts of the rows that are equal to so many digits count as the same."""


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


def list_rank_shares(profile: Profile, ranks: int, cluster: Cluster | None = None, rows: Sequence[float] = ()) -> list[Sequence[Layer]]:
    """The share of the embedding and of the head of every rank, on its device.

    `rows` is the part of all rows that each rank has, equal parts by default.
    """
    shares = [(profile if cluster is None else profile.on(cluster.devices[rank])).shares for rank in range(ranks)]
    return [[_multiply(layer, ranks * part) for layer in own] for own, part in zip(shares, rows, strict=True)] if rows else shares


def _multiply(share: Layer, factor: float) -> Layer:
    """The share with so many times the rows."""
    return replace(share, **{name: getattr(share, name) * factor for name in _SHARED})


def list_row_parts(profile: Profile, cluster: Cluster, limits: Sequence[float] | None) -> list[tuple[float, ...]]:
    """Ways to share the rows out over the devices, the part of each: by speed, and within memory. Equal parts are an empty tuple.

    With memory limits there may be three: as much as each device is fast, as far as the rows alone fit; the same parts of rows and
    layers, within each device's part of the memory; and the rows in the memory that is left if the layers are shared out by speed.
    """
    ranks = len(cluster)
    own = [profile.on(device) for device in cluster.devices]
    times = [sum(layer.time for layer in one.shares) for one in own]
    ways = [share_rows(times)]
    if limits is not None:
        layers, rows = (sum(layer.static for layer in listed) for listed in (profile.layers, profile.shares))
        held = ranks * (rows + sum(layer.activation for layer in profile.shares))
        everything = [one.time + ranks * time for one, time in zip(own, times, strict=True)]
        blocks = share_rows([one.time for one in own], [_divide(limit, layers) for limit in limits])
        left = [limit - part * layers for limit, part in zip(limits, blocks, strict=True)] if blocks else list(limits)
        ways = [
            share_rows(times, [_divide(limit, held) for limit in limits]),
            share_rows(everything, [_divide(limit, layers + ranks * rows) for limit in limits]),
            share_rows(times, [_divide(size, held) for size in left]),
        ]
    distinct: dict[tuple[float, ...], tuple[float, ...]] = {}
    for way in filter(None, ways):
        distinct.setdefault(tuple(round(part, _DIGITS) for part in way), way)
    return [() if len(set(rounded)) == 1 else way for rounded, way in distinct.items()]


def _divide(room: float, size: float) -> float:
    """The part of something of this size that there is room for."""
    return max(room, 0.0) / size if size else math.inf


def time_broadcast(links: Costs, size: float, ranks: int) -> float:
    """Time to bring a tensor from one rank to all, or to sum a tensor of all ranks on one: in a chain, piece by piece.

    If links differ, the slowest of them counts, which is more than it takes where the chain can avoid that link.
    """
    slowest = links.with_slowest_link()
    assert isinstance(slowest.latency, float)
    assert not isinstance(slowest.bandwidth, tuple)
    return 0.0 if ranks == 1 else _count_hops(ranks) * slowest.latency + (0.0 if slowest.bandwidth is None else size / slowest.bandwidth)


def _count_hops(ranks: int) -> int:
    """Messages one after the other of a small collective."""
    return math.ceil(math.log2(ranks))
