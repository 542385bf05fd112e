"""Cut layers for ranks that hold a stage and its mirror image, as in a V: dynamic programming from the outside in."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.planner.partition.layer_runs import SLACK, Cutting, memory_over

_MOST_WORK = 2e7
"""Cells of the dynamic programme; beyond that, the cuts found by other means are kept."""
_NEAR = (1.02, 1.1, 1.3)
"""Loads to try before the known one, as multiples of the mean: a lower load needs fewer cells."""


def is_nested(placement: Placement) -> bool:
    """Whether every rank holds two stages, one as far from the start as the other from the end."""
    last = placement.stages - 1
    return last % 2 == 1 and all(
        len(placement.stages_of(rank)) == 2 and sum(placement.stages_of(rank)) == last for rank in range(placement.ranks)
    )


def cut_nested(cutting: Cutting, load: float) -> Ints | None:
    """The cuts with the least largest load that fit, given that `load` is possible (or infinite).

    None if there are none, or if finding them would take too long.
    """
    search = _Nested(cutting)
    cuts = None
    for most in (*(near for near in (share * cutting.even_load for share in _NEAR) if near < load), load):
        if search.work(most) > _MOST_WORK:
            return None
        cuts = search.run(most, squares=False)
        if cuts is not None:
            break
    if cuts is None:
        return None
    best = float(cutting.loads(cuts[None, :]).max())
    return search.run(cutting.allow(best), squares=True)


@dataclass(frozen=True, eq=False)
class _Nested:
    """After each pair of stages, outermost first, `total[x, y]` is the best cost with the layers before x and from y on placed."""

    cutting: Cutting
    _known_extremes: dict[bool, tuple[Floats, Floats]] = field(default_factory=dict)

    @cached_property
    def layers(self) -> int:
        return self.cutting.runs.layers

    @property
    def pairs(self) -> int:
        return self.cutting.stages // 2

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """The ranks that hold each pair."""
        placement = self.cutting.placement
        return [[rank for rank in range(placement.ranks) if pair in placement.stages_of(rank)] for pair in range(self.pairs)]

    @cached_property
    def _longest(self) -> int:
        return self.layers - self.cutting.stages + 1

    def work(self, load: float) -> float:
        """About how many cells `run` looks at."""
        fitting = sum(len(self._lengths(pair, load)) for pair in range(self.pairs))
        return 2.0 * fitting * (self.layers + 1) ** 2 / 2

    def _lengths(self, pair: int, load: float) -> list[tuple[int, int]]:
        """Possible numbers of layers of the two stages of a pair."""
        stages = (pair, self.cutting.stages - 1 - pair)
        least, most = ([self._extremes(stage)[side] for stage in stages] for side in (0, 1))
        fits = least[0][:, None] + least[1][None, :] <= load * (1 + SLACK)
        fits &= most[0][:, None] + most[1][None, :] >= self._floor(load)
        one, other = np.nonzero(fits)
        return [(int(a) + 1, int(b) + 1) for a, b in zip(one, other, strict=True) if a + b + 2 <= self._longest + 1]

    def _floor(self, load: float) -> float:
        """The least load of any rank if none is above `load`: the others cannot take more of the total."""
        ranks = self.cutting.placement.ranks
        return ranks * self.cutting.even_load * (1 - SLACK) - (ranks - 1) * load * (1 + SLACK)

    def _extremes(self, stage: int) -> tuple[Floats, Floats]:
        """The least and the most time of n layers in a row, for each n from 1."""
        again = self.cutting.recompute[stage]
        if again not in self._known_extremes:
            times = self.cutting.times(stage)
            runs = [np.diagonal(times, length) for length in range(1, self._longest + 1)]
            self._known_extremes[again] = np.array([run.min() for run in runs]), np.array([run.max() for run in runs])
        return self._known_extremes[again]

    def run(self, load: float, squares: bool) -> Ints | None:
        """The cuts that fit with the least largest load; with `squares`, those with the most even stages and no load above `load`."""
        size = self.layers + 1
        total = np.full((size, size), np.inf)
        total[0, -1] = 0.0
        choices = []
        for pair in range(self.pairs):
            total, choice = self._step(pair, total, load, squares)
            choices.append(choice)
        ends = np.diagonal(total)
        middle = int(np.argmin(ends))
        return self._trace(choices, middle) if np.isfinite(ends[middle]) else None

    def _step(self, pair: int, total: Floats, load: float, squares: bool) -> tuple[Floats, NDArray[np.int32]]:
        size = self.layers + 1
        after, choice = np.full_like(total, np.inf), np.zeros(total.shape, dtype=np.int32)
        for one, other in self._lengths(pair, load):
            cost = self._cost(pair, one, other, load, squares)
            if cost is None:
                continue
            before = total[: size - one, other:]
            reached = before + cost if squares else np.maximum(before, cost)
            place = after[one:, : size - other]
            better = reached < place
            place[better] = reached[better]
            choice[one:, : size - other][better] = one * size + other
        return after, choice

    def _cost(self, pair: int, one: int, other: int, load: float, squares: bool) -> Floats | None:
        """Cost by the first layers of both stages; None if nothing fits."""
        lengths = {pair: one, self.cutting.stages - 1 - pair: other}
        first, second = (np.diagonal(self.cutting.times(stage), length) for stage, length in lengths.items())
        time = first[:, None] + second[None, :]
        fits = (time <= load * (1 + SLACK)) & (time >= self._floor(load))
        for rank in self._ranks[pair] if self.cutting.limits is not None else ():
            fits &= self._fits_memory(rank, lengths)
        if not fits.any():
            return None
        return np.where(fits, first[:, None] ** 2 + second[None, :] ** 2 if squares else time, np.inf)

    def _fits_memory(self, rank: int, lengths: dict[int, int]) -> NDArray[np.bool_]:
        cutting, runs = self.cutting, self.cutting.runs
        stages = cutting.placement.stages_of(rank)
        limit = (cutting.limits or ())[rank]
        reserves = {stage: np.diagonal(runs.reserve(cutting.recompute[stage]), length) for stage, length in lengths.items()}
        first, second = reserves.values()
        reserve = np.maximum(first[:, None], second[None, :])
        fits = np.ones(reserve.shape, dtype=np.bool_)
        for moment in cutting.moments_of(rank):
            counts = dict(zip(stages, zip(moment.activations, moment.stashes, strict=True), strict=True))
            held = {stage: np.diagonal(runs.held(cutting.recompute[stage], *counts[stage]), n) for stage, n in lengths.items()}
            first, second = held.values()
            fits &= memory_over(first[:, None] + second[None, :] + reserve + moment.other, limit) <= 0
        return fits

    def _trace(self, choices: list[NDArray[np.int32]], middle: int) -> Ints:
        low = high = middle
        firsts, seconds = [middle], []
        for choice in reversed(choices):
            one, other = divmod(int(choice[low, high]), self.layers + 1)
            low, high = low - one, high + other
            firsts.append(low)
            seconds.append(high)
        return np.array(firsts[::-1] + seconds, dtype=np.int64)
