"""Share unequal layers out among the ranks of a schedule, and recompute as many as memory asks for.

Which layers a rank must recompute depends on the cuts, and the best cuts on what is recomputed. The two are found in turns, beginning with
nothing and with everything recomputed: layers are cut as evenly as they can be with the present choice, and then each rank recomputes the
layers that save the most bytes per second until it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.candidate import Candidate
from penstock.planner.job.block_shares import Shares
from penstock.planner.job.profile_costs import ProfileCosts
from penstock.planner.partition.cut import cut_layers
from penstock.planner.partition.layer_runs import SLACK, PeakMoment

_TURNS = 4
"""How often layers are cut anew for the layers that are recomputed."""


@dataclass(frozen=True)
class LayerShares:
    """Shares layers and recomputed layers out among the ranks of an order."""

    costs: ProfileCosts
    order: Candidate
    moments: Sequence[PeakMoment]
    """The memory of each rank at its peak."""
    limits: tuple[float, ...]
    recompute: bool

    def run(self) -> Shares | float:
        """The shares with the fastest slowest rank of those that were tried, or the bytes over the limit if nothing fits."""
        fitting, nearest = [], float("inf")
        for shares in self._list_shares():
            if isinstance(shares, Shares):
                fitting.append(shares)
            else:
                nearest = min(nearest, shares)
        return min(fitting, key=lambda shares: (shares.load, sum(shares.recomputed))) if fitting else max(nearest, 1.0)

    def _list_shares(self) -> Iterator[Shares | float]:
        """What each cut leads to, or the bytes over the limit."""
        none = (False,) * len(self.costs.layers)
        first = self._cut(none, within=False)
        shares = self._fit(first)
        yield shares
        if isinstance(shares, Shares) and not any(shares.recomputed):
            return
        every, tried = tuple(not flag for flag in none), {first}
        starts = [shares.recomputed if isinstance(shares, Shares) else none, every] if self.recompute else [none]
        for start in starts:
            flags = start
            for _ in range(_TURNS):
                sizes = self._cut(flags, within=True)
                if sizes in tried:
                    break
                tried.add(sizes)
                shares = self._fit(sizes)
                yield shares
                flags = shares.recomputed if isinstance(shares, Shares) else every if self.recompute else none

    def _cut(self, flags: tuple[bool, ...], within: bool) -> tuple[int, ...]:
        """Layers per stage if these layers are recomputed, within the limits or without regard to them."""
        memory = {"limits": self.limits, "moments": self.moments} if within else {}
        return cut_layers(self.costs.profile(flags), self.order.problem.placement, **memory).sizes  # type: ignore[arg-type]

    # Recompute --------------------------------------------------------------------------------------------------------

    def _fit(self, sizes: tuple[int, ...]) -> Shares | float:
        """The cheapest recomputed layers with which every rank fits, or the bytes over the limit with all that helps."""
        placement, ends = self.order.problem.placement, [0, *accumulate(sizes)]
        flags, excess = np.zeros(ends[-1], dtype=bool), 0.0
        for rank in range(placement.ranks):
            runs = [range(ends[stage], ends[stage + 1]) for stage in placement.stages_of(rank)]
            excess = max(excess, self._fit_rank(rank, runs, flags))
        if excess:
            return excess
        times = self.costs.list_times(flags.tolist()).sum(axis=0)
        stages = np.add.reduceat(times, ends[:-1])
        loads = [float(stages[list(placement.stages_of(rank))].sum()) for rank in range(placement.ranks)]
        return Shares(sizes, tuple(flags.tolist()), max(loads))

    def _fit_rank(self, rank: int, runs: Sequence[range], flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
        """Choose recomputed layers of a rank, whose stages have these layers, until it fits; returns the bytes over its limit."""
        moment, limit = self.moments[rank], self.limits[rank] * (1 + SLACK)
        layers = np.concatenate([np.array(run) for run in runs])
        counts = np.concatenate([np.full(len(run), held) for run, held in zip(runs, moment.activations, strict=True)])
        stashes = np.concatenate([np.full(len(run), held) for run, held in zip(runs, moment.stashes, strict=True)])
        sizes = self._sizes[:, layers]
        fixed = moment.other + float((sizes[0] + stashes * sizes[1]).sum()) + self._sum_kept_outputs(runs, moment)
        saving, chosen = counts * (sizes[2] - sizes[3]), np.zeros(len(layers), dtype=bool)

        def count_over() -> float:
            held = np.where(chosen, sizes[3], sizes[2]) * counts
            return fixed + float(held.sum()) + float(np.where(chosen, sizes[5], sizes[4]).max()) - limit

        over = count_over()
        if over > 0 and self.recompute:
            for place in np.argsort(-saving / np.maximum(sizes[6], np.finfo(float).tiny), kind="stable"):
                if over <= 0 or saving[place] <= 0:
                    break
                chosen[place] = True
                over = count_over()
            for place in np.argsort(-sizes[6], kind="stable"):  # the last one may have made an earlier one needless
                if over <= 0 and chosen[place]:
                    chosen[place] = False
                    chosen[place] = count_over() > 0
        flags[layers] = chosen
        return max(over, 0.0)

    def _sum_kept_outputs(self, runs: Sequence[range], moment: PeakMoment) -> float:
        """Bytes of the outputs that stages hold beside their activations."""
        layers = self.costs.layers
        if not self.costs.keeps_output:
            return 0.0
        held = zip(runs, moment.activations, strict=True)
        return sum(count * layers[run[-1]].output for run, count in held if run[-1] < len(layers) - 1)

    @cached_property
    def _sizes(self) -> Floats:
        """By layer: what it always holds, its stash, its activation and that if it is recomputed, both workspaces, and its forward."""
        pairs = zip(self.costs.layers, self.costs.recomputed_layers, strict=True)
        rows = [
            (kept.static, kept.weight_stash, kept.activation, again.activation, kept.workspace, again.workspace, again.time - kept.time)
            for kept, again in pairs
        ]
        return np.array(rows).T
