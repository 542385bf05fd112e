"""Which layers make up which stage, so that the slowest rank is as quick as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import PlacementError
from penstock.ir.placement import Placement
from penstock.planner.branching import cut_branching
from penstock.planner.chain import cut_chain, cut_stages
from penstock.planner.nested import cut_nested, is_nested
from penstock.planner.profile import Profile
from penstock.planner.shifting import all_cuts, best_of, shifted
from penstock.planner.spans import SLACK, Cutting, Ints, Moment, Spans


@dataclass(frozen=True)
class Partition:
    """How many layers each stage gets, and what follows for the ranks."""

    sizes: tuple[int, ...]
    load: float
    """What the slowest rank spends on a microbatch."""
    exact: bool
    """Whether it is proved that no cuts give a lower load, up to the slack; where not, none that were tried do."""
    excesses: tuple[float, ...]
    """How much each rank is over its limit, 0 where it is not."""

    @property
    def fits(self) -> bool:
        return not any(self.excesses)


def partition(
    profile: Profile,
    placement: Placement,
    *,
    recompute: Sequence[bool] | bool = False,
    limits: Sequence[float] | None = None,
    moments: Sequence[Moment] = (),
    slack: float = 0.0,
) -> Partition:
    """Cut the layers into the placement's stages: contiguous, each layer once, at least one a stage.

    The largest load of a rank (forward and both backwards of all its stages) is the least possible among the cuts that keep
    every rank within its limit at the given moments, and in any case with one microbatch in all of its stages; of these cuts
    the one with the most even stages is taken. That is exact where each rank holds one stage or a stage and its mirror image,
    and where few ways to cut are left by branch and bound; else cuts are shifted while that helps. Where nothing fits, the cuts come
    nearest to it. A stage with `recompute` runs its forward again before its backward and keeps its input alone. With `slack`
    the load may be that share more than the least, where stages become more even by it.
    """
    flags = (recompute,) * placement.stages if isinstance(recompute, bool) else tuple(recompute)
    if len(profile) < placement.stages:
        raise PlacementError(f"{len(profile)} layers are too few for {placement.stages} stages: take fewer ranks or chunks")
    cutting = Cutting(Spans(profile), placement, flags, None if limits is None else tuple(limits), tuple(moments), slack)
    cuts, exact = _cuts(cutting) if len(profile) > placement.stages else (np.arange(placement.stages + 1), True)
    row = cuts[None, :]
    excesses = tuple(cutting.excesses(row)[0].tolist())
    return Partition(tuple(np.diff(cuts).tolist()), float(cutting.loads(row).max()), exact, excesses)


def _cuts(cutting: Cutting) -> tuple[Ints, bool]:
    placement = cutting.placement
    if len(placement.copies) == 1 and placement.chunks == 1:
        return cut_chain(cutting)[0], True
    every = all_cuts(cutting)
    if every is not None:
        return every[best_of(cutting, every)], True
    cuts = shifted(cutting, cut_stages(cutting))
    fits = not cutting.excesses(cuts[None, :]).any()
    if fits and float(cutting.loads(cuts[None, :]).max()) <= cutting.even_load * (1 + SLACK):
        return cuts, True  # no cuts can have a lower load than all ranks in the mean
    if not is_nested(placement):
        if not fits:
            return cuts, False
        least, exact = cut_branching(cutting, cuts)
        return shifted(cutting, least), exact
    nested = cut_nested(cutting, float(cutting.loads(cuts[None, :]).max()) if fits else float("inf"))
    return (cuts, False) if nested is None else (nested, True)
