"""Costs and memory of the stages of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.profile import Layer, Profile


@dataclass(frozen=True)
class StaticMemory:
    """Memory that one stage holds all the time."""

    parameters: float
    gradients: float
    optimizer: float


def split_layers(profile: Profile, sizes: Sequence[int]) -> list[tuple[Layer, ...]]:
    """The layers of each stage."""
    ends = [0, *accumulate(sizes)]
    return [tuple(profile.layers[first:last]) for first, last in pairwise(ends)]


def static_memory(profile: Profile, sizes: Sequence[int]) -> list[StaticMemory]:
    """Memory that each stage holds all the time."""
    names = ("parameters", "gradients", "optimizer")
    return [StaticMemory(*(sum(getattr(layer, name) for layer in run) for name in names)) for run in split_layers(profile, sizes)]


def reserves(profile: Profile, sizes: Sequence[int], placement: Placement, recompute: Sequence[bool]) -> list[float]:
    """Memory that each rank keeps free for running actions: the most that one of its stages needs beyond what it holds.

    That is the workspace of a layer, and for a recomputed stage its activations beyond the kept input.
    """
    inputs = _inputs(profile, sizes)
    beyond = [
        max(layer.workspace for layer in run) + (max(sum(layer.activation for layer in run) - kept_input, 0.0) if again else 0.0)
        for run, kept_input, again in zip(split_layers(profile, sizes), inputs, recompute, strict=True)
    ]
    return [max(beyond[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]


def stage_costs(profile: Profile, sizes: Sequence[int], placement: Placement, recompute: Sequence[bool]) -> Costs:
    """The costs of the placement's stages.

    A recomputed stage runs its forward again before its backward for the input, and keeps its input in place of its
    activations; the memory of that second forward is counted with the parameters of the rank's first stage. Two copies of the
    model exchange their gradients at the end, before the reduction over data-parallel replicas and the optimizer step.
    """
    cut, inputs = split_layers(profile, sizes), _inputs(profile, sizes)

    def summed(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(layer, name) for layer in run) for run in cut)

    f, i, held = summed("f"), summed("i"), summed("activation")
    kept_output = [*(run[-1].output * profile.keeps_output for run in cut[:-1]), 0.0]
    kept = list(summed("static"))
    for rank, reserve in enumerate(reserves(profile, sizes, placement, recompute)):
        kept[placement.stages_of(rank)[0]] += reserve
    return Costs(
        f=f,
        i=tuple(back + again * ahead for back, ahead, again in zip(i, f, recompute, strict=True)),
        w=summed("w"),
        activation=tuple(
            (kept_input if again else whole) + output
            for whole, kept_input, again, output in zip(held, inputs, recompute, kept_output, strict=True)
        ),
        weight_stash=summed("weight_stash"),
        output=tuple(run[-1].output for run in cut),
        parameters=tuple(kept),
        reduce=_reduction(profile, summed("gradients"), summed("reduction"), len(placement.copies)),
        optimizer=summed("update") if any(summed("update")) else 0.0,
        overlap=profile.overlap,
        contention=profile.contention,
        latency=profile.latency,
        bandwidth=profile.bandwidth,
    )


def _reduction(profile: Profile, gradients: Sequence[float], over_replicas: Sequence[float], copies: int) -> float | tuple[float, ...]:
    """Time of the reduction over replicas, after the exchange between the two copies of the model in one pipeline."""
    if copies == 1:
        return tuple(over_replicas) if any(over_replicas) else 0.0
    within = [profile.latency + (0.0 if profile.bandwidth is None else size / profile.bandwidth) for size in gradients]
    return tuple(own + over for own, over in zip(within, over_replicas, strict=True))


def _inputs(profile: Profile, sizes: Sequence[int]) -> list[float]:
    """Input size of each stage per microbatch."""
    return [profile.input, *(run[-1].output for run in split_layers(profile, sizes)[:-1])]
