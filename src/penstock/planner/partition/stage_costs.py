"""Costs and memory of the stages of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from penstock.ir.cluster import Cluster
from penstock.ir.costs import Costs, PerAction
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats
from penstock.planner.profile import Layer, Profile
from penstock.planner.profile.vocabulary import list_rank_shares, time_broadcast


def split_layers(profile: Profile, sizes: Sequence[int]) -> list[tuple[Layer, ...]]:
    """The layers of each stage."""
    ends = [0, *accumulate(sizes)]
    return [tuple(profile.layers[first:last]) for first, last in pairwise(ends)]


def reserves(
    profile: Profile, sizes: Sequence[int], placement: Placement, recompute: Sequence[bool], lengths: Sequence[int] = ()
) -> list[float]:
    """Memory that each rank keeps free for running actions: the most that one of its stages needs beyond what it holds.

    That is the workspace of a layer, and for a recomputed stage its activations beyond its input. If the sequence is cut into slices of
    these lengths, it is the most of any slice.
    """
    if lengths:
        most = _tabulate_reserves(profile, sizes, recompute, lengths).max(axis=1)
        return [float(max(most[stage] for stage in placement.stages_of(rank))) for rank in range(placement.ranks)]
    inputs = _list_inputs(profile, sizes)
    beyond = [
        max(layer.workspace for layer in run) + (max(sum(layer.activation for layer in run) - kept_input, 0.0) if again else 0.0)
        for run, kept_input, again in zip(split_layers(profile, sizes), inputs, recompute, strict=True)
    ]
    return [max(beyond[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]


def _list_profiles(profile: Profile, placement: Placement, cluster: Cluster | None) -> list[list[Profile]]:
    """For each copy of the model, the profile on the device of each stage."""
    if cluster is None:
        return [[profile] * placement.stages for _ in placement.copies]
    cluster.check_ranks(placement.ranks)
    of_devices = {device.speeds: profile.on(device) for device in cluster.devices}
    return [[of_devices[cluster.devices[rank].speeds] for rank in ranks] for ranks in placement.copies]


def sliced_stage_costs(  # noqa: PLR0917
    profile: Profile,
    sizes: Sequence[int],
    placement: Placement,
    recompute: Sequence[bool],
    lengths: Sequence[int],
    microbatches: int,
    cluster: Cluster | None = None,
) -> Costs:
    """The costs of the placement's stages if every sequence is cut into slices of these lengths: one value per stage and slice."""
    once = stage_costs(profile.cut_sequence(lengths)[0], sizes, placement, recompute, cluster)
    profiles = _list_profiles(profile, placement, cluster)[0]
    own = {id(one): {name: _sum_slices(one, sizes, lengths, name) for name in ("f", "i", "w")} for one in profiles}
    sums = {name: np.vstack([own[id(one)][name][stage] for stage, one in enumerate(profiles)]) for name in ("f", "i", "w")}
    sums |= {name: _sum_slices(profile, sizes, lengths, name) for name in ("activation", "weight_stash", "kept", "kept_gradients")}
    again, last = np.array(recompute)[:, None], np.cumsum(sizes) - 1
    output = profile.tabulate_slices("output", lengths)[last]
    held = np.where(again, _tabulate_inputs(profile, sizes, lengths), sums["activation"])
    if profile.keeps_output:
        held[:-1] += output[:-1]
    values = {**sums, "i": sums["i"] + again * sums["f"], "activation": held, "output": output}
    static = _add_reserves(profile, sizes, placement, reserves(profile, sizes, placement, recompute, lengths), [])
    every: dict[str, Any] = {name: np.tile(table, microbatches) if table.any() else 0.0 for name, table in values.items()}
    return replace(once, **every, parameters=static)


def _sum_slices(profile: Profile, sizes: Sequence[int], lengths: Sequence[int], name: str) -> Floats:
    """A field of every stage (row) on every slice (column)."""
    return np.asarray(np.add.reduceat(profile.tabulate_slices(name, lengths), _find_first_layers(sizes)))


def _find_first_layers(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes[:-1])]


def _tabulate_inputs(profile: Profile, sizes: Sequence[int], lengths: Sequence[int]) -> Floats:
    """The input of each stage (row) in each slice (column), which is its activation if it is recomputed."""
    assert profile.tokens is not None
    first = profile.input * np.array(lengths) / profile.tokens
    return np.vstack([first[None, :], profile.tabulate_slices("output", lengths)[np.cumsum(sizes)[:-1] - 1]])


def _tabulate_reserves(profile: Profile, sizes: Sequence[int], recompute: Sequence[bool], lengths: Sequence[int]) -> Floats:
    """The memory that each stage needs beyond what it holds while it runs each slice."""
    workspace = np.maximum.reduceat(profile.tabulate_slices("workspace", lengths), _find_first_layers(sizes))
    again = np.maximum(_sum_slices(profile, sizes, lengths, "activation") - _tabulate_inputs(profile, sizes, lengths), 0.0)
    return np.asarray(workspace + np.where(np.array(recompute)[:, None], again, 0.0))


def stage_costs(  # noqa: PLR0917
    profile: Profile,
    sizes: Sequence[int],
    placement: Placement,
    recompute: Sequence[bool],
    cluster: Cluster | None = None,
    rows: Sequence[float] = (),
    microbatches: int = 1,
) -> Costs:
    """The costs of the placement's stages; with a `cluster`, those on its devices, which are the ranks, and over its links.

    If copies of the model are on devices of different speeds, times are per stage and microbatch, of which there are so many. `rows` is the
    part of a spread vocabulary's rows that each rank has, equal parts by default.

    A recomputed stage runs its forward again before its backward for the input, and keeps its input in place of its
    activations; the memory of that second forward is counted with the parameters of the rank's first stage. Two copies of the
    model exchange their gradients at the end, before the reduction over data-parallel replicas and the optimizer step, which takes as long
    as on the slower of their devices.
    """
    profiles = _list_profiles(profile, placement, cluster)
    runs = {id(one): split_layers(one, sizes) for of_copy in profiles for one in of_copy}
    cuts = [[runs[id(one)][stage] for stage, one in enumerate(of_copy)] for of_copy in profiles]
    cut, inputs = cuts[0], _list_inputs(profile, sizes)
    f, i, w = ([tuple(sum(getattr(layer, name) for layer in run) for run in of_copy) for of_copy in cuts] for name in ("f", "i", "w"))
    i = [tuple(back + again * ahead for back, ahead, again in zip(*times, recompute, strict=True)) for times in zip(i, f, strict=True)]
    by_profile = {"latency": profile.latency, "bandwidth": profile.bandwidth, "contention": profile.contention}
    links = Costs(**by_profile if cluster is None else cluster.link_fields)

    def sum_layers(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(layer, name) for layer in run) for run in cut)

    held = sum_layers("activation")
    shares = list_rank_shares(profile, placement.ranks, cluster, rows)
    reduction = _add_shares(shares, placement, "reduction", sum_layers("reduction"))
    updates = ([sum(layer.update for layer in run) for run in of_copy] for of_copy in cuts)
    update = _add_shares(shares, placement, "update", tuple(map(max, zip(*updates, strict=True))))
    kept_output = [*(run[-1].output * profile.keeps_output for run in cut[:-1]), 0.0]
    return replace(
        links,
        f=_join_copies(f, microbatches),
        i=_join_copies(i, microbatches),
        w=_join_copies(w, microbatches),
        activation=tuple(
            (kept_input if again else whole) + output
            for whole, kept_input, again, output in zip(held, inputs, recompute, kept_output, strict=True)
        ),
        weight_stash=sum_layers("weight_stash"),
        kept=sum_layers("kept") if any(sum_layers("kept")) else 0.0,
        output=tuple(run[-1].output for run in cut),
        parameters=_add_reserves(profile, sizes, placement, reserves(profile, sizes, placement, recompute), shares),
        reduce=_time_reduction(links, placement, sum_layers("gradients"), reduction),
        optimizer=update if any(update) else 0.0,
        overlap=profile.overlap,
        host_latency=profile.host_latency,
        host_bandwidth=profile.host_bandwidth,
        host_link_shared=profile.host_link_shared,
        **_list_share_costs(profile, placement, links),
        **_list_multiples(profile, shares),
    )


def _join_copies(times: Sequence[tuple[float, ...]], microbatches: int) -> PerAction:
    """Times of the stages of each copy of the model: one per stage, or if copies differ, one per stage and microbatch."""
    if all(of_copy == times[0] for of_copy in times):
        return times[0]
    return tuple(tuple(of_stage[place % len(times)] for place in range(microbatches)) for of_stage in zip(*times, strict=True))


def _list_share_costs(profile: Profile, placement: Placement, links: Costs) -> dict[str, Any]:
    """The costs of each rank's share of a spread vocabulary, at the first stage those of the embedding and at the last of the head.

    S makes the logits and the gradient of the head's input, so it takes a forward and a backward for the input. That gradient is summed on
    one rank, after two sums of single numbers; the sum of the embeddings is there at once.
    """
    if not profile.shares:
        return {}
    (embedding, head), ranks, between = profile.shares, placement.ranks, (0.0,) * (placement.stages - 2)
    ends = profile.layers[0].output, profile.layers[-1].output
    brought = [time_broadcast(links, size, ranks) for size in ends]
    pairs = {
        **_list_share_pairs(profile, (embedding, head)),
        "broadcast": brought,
        "combine": (brought[0], brought[1] + 2 * time_broadcast(links, 0.0, ranks)),
    }
    return {name: (first, *between, last) for name, (first, last) in pairs.items()}


def _list_share_pairs(profile: Profile, shares: Sequence[Layer]) -> dict[str, tuple[float, float]]:
    """What S and T of a share take and what it holds between them, of the embedding and of the head."""
    embedding, head = shares
    return {
        "s": (embedding.f + embedding.i, head.f + head.i),
        "t": (embedding.w, head.w),
        "logits": list_logits(profile, shares),
    }


def list_logits(profile: Profile, shares: Sequence[Layer]) -> tuple[float, float]:
    """What a rank holds of one microbatch from S to T: of the share of the embedding, and of that of the head with its input."""
    embedding, head = shares
    return embedding.activation, max(head.activation, head.weight_stash) + profile.layers[-1].output


def _list_multiples(profile: Profile, shares: Sequence[Sequence[Layer]]) -> dict[str, Any]:
    """How many times the mean share each rank's takes and holds, if they differ: of the embedding and of the head."""
    if not profile.shares or all(own == profile.shares for own in shares):
        return {}
    mean = _list_share_pairs(profile, profile.shares)
    ranks = [_list_share_pairs(profile, own) for own in shares]
    return {
        f"rank_{name}": tuple(tuple(part / whole if whole else 1.0 for part, whole in zip(own[name], wholes, strict=True)) for own in ranks)
        for name, wholes in mean.items()
    }


def _add_shares(shares: Sequence[Sequence[Layer]], placement: Placement, name: str, of_stages: tuple[float, ...]) -> tuple[float, ...]:
    """A field of every stage; that of each rank's share of a spread vocabulary is added to its first stage."""
    total = list(of_stages)
    for rank, own in enumerate(shares):
        total[placement.stages_of(rank)[0]] += sum(getattr(layer, name) for layer in own)
    return tuple(total)


def _time_reduction(
    links: Costs, placement: Placement, gradients: Sequence[float], over_replicas: Sequence[float]
) -> float | tuple[float, ...]:
    """Time of the reduction over replicas, after the exchange between the two copies of the model in one pipeline."""
    if len(placement.copies) == 1:
        return tuple(over_replicas) if any(over_replicas) else 0.0
    one, other = (np.array(ranks) for ranks in placement.copies[:2])
    within = np.maximum(links.travel(gradients, one, other), links.travel(gradients, other, one)).tolist()
    return tuple(own + over for own, over in zip(within, over_replicas, strict=True))


def _add_reserves(
    profile: Profile, sizes: Sequence[int], placement: Placement, reserve: Sequence[float], shares: Sequence[Sequence[Layer]]
) -> tuple[float, ...]:
    """Memory that each stage holds all the time, with the reserve of each rank and its share of a vocabulary added to its first stage."""
    static = [sum(layer.static for layer in run) for run in split_layers(profile, sizes)]
    for rank, size in enumerate(reserve):
        static[placement.stages_of(rank)[0]] += size
    for rank, own in enumerate(shares):
        static[placement.stages_of(rank)[0]] += sum(layer.static for layer in own) + max((layer.workspace for layer in own), default=0.0)
    return tuple(static)


def _list_inputs(profile: Profile, sizes: Sequence[int]) -> list[float]:
    """The input of each stage, which is its activation if it is recomputed."""
    return [profile.input, *(run[-1].output for run in split_layers(profile, sizes)[:-1])]
