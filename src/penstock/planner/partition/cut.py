"""Cut the layers into stages so that the slowest rank is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import PlacementError
from penstock.ir.placement import Placement
from penstock.ir.rows import Ints
from penstock.planner.partition.any_placement import branch_and_bound, find_best, list_cuts, shift_cuts
from penstock.planner.partition.chain import cut_chain, cut_stages
from penstock.planner.partition.layer_runs import SLACK, Cutting, LayerRuns, PeakMoment
from penstock.planner.partition.nested import cut_nested, is_nested
from penstock.planner.profile import Profile


@dataclass(frozen=True)
class LayerCut:
    """Layers per stage, and the resulting load and memory of the ranks."""

    sizes: tuple[int, ...]
    load: float
    """Time of the slowest rank per microbatch."""
    exact: bool
    """Whether no cuts can have a lower load, up to the slack; if False, none that were tried have."""
    excesses: tuple[float, ...]
    """Memory of each rank over its limit, or 0."""

    @property
    def fits(self) -> bool:
        return not any(self.excesses)


def cut_layers(
    profile: Profile,
    placement: Placement,
    *,
    recompute: Sequence[bool] | bool = False,
    limits: Sequence[float] | None = None,
    moments: Sequence[PeakMoment] = (),
    slack: float = 0.0,
) -> LayerCut:
    """Cut the layers into the placement's stages: contiguous, at least one layer per stage.

    Minimise the largest load of a rank (forward and both backward halves of all its stages) among the cuts that keep every rank
    within its limit at the given moments, and with one microbatch in all of its stages; among those take the most even stages.
    This is exact if each rank holds one stage, or a stage and its mirror image, and if branch and bound finishes; else cuts are
    shifted while that helps. If nothing fits, the cuts come as near as possible. A stage with `recompute` runs its forward
    again before its backward and keeps only its input. With `slack`, the load may exceed the least one by that share if stages
    become more even.
    """
    flags = (recompute,) * placement.stages if isinstance(recompute, bool) else tuple(recompute)
    if len(profile) < placement.stages:
        raise PlacementError(f"{len(profile)} layers are too few for {placement.stages} stages: take fewer ranks or chunks")
    cutting = Cutting(LayerRuns(profile), placement, flags, None if limits is None else tuple(limits), tuple(moments), slack)
    cuts, exact = _cuts(cutting) if len(profile) > placement.stages else (np.arange(placement.stages + 1), True)
    row = cuts[None, :]
    excesses = tuple(cutting.excesses(row)[0].tolist())
    return LayerCut(tuple(np.diff(cuts).tolist()), float(cutting.loads(row).max()), exact, excesses)


def _cuts(cutting: Cutting) -> tuple[Ints, bool]:
    placement = cutting.placement
    if len(placement.copies) == 1 and placement.chunks == 1:
        return cut_chain(cutting)[0], True
    every = list_cuts(cutting)
    if every is not None:
        return every[find_best(cutting, every)], True
    cuts = shift_cuts(cutting, cut_stages(cutting))
    fits = not cutting.excesses(cuts[None, :]).any()
    if fits and float(cutting.loads(cuts[None, :]).max()) <= cutting.even_load * (1 + SLACK):
        return cuts, True  # no cuts can have a load below the mean of the ranks
    if not is_nested(placement):
        if not fits:
            return cuts, False
        least, exact = branch_and_bound(cutting, cuts)
        return shift_cuts(cutting, least), exact
    nested = cut_nested(cutting, float(cutting.loads(cuts[None, :]).max()) if fits else float("inf"))
    return (cuts, False) if nested is None else (nested, True)
