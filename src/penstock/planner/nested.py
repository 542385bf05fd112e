"""Cut layers for ranks that hold a stage and its mirror image, as in a V: a dynamic programme from the outside in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir.placement import Placement
from penstock.planner.spans import SLACK, Cutting, Floats, Ints, over

_MOST_WORK = 2e7
"""Cells to look at; more takes too long, and what was found by other means is kept."""


def is_nested(placement: Placement) -> bool:
    """Whether every rank holds two stages, as far from the start as from the end."""
    last = placement.stages - 1
    return last % 2 == 1 and all(
        len(placement.stages_of(rank)) == 2 and sum(placement.stages_of(rank)) == last for rank in range(placement.ranks)
    )


def cut_nested(cutting: Cutting, load: float) -> Ints | None:
    """The cuts with the least largest load that fit, given that `load` can be had (or infinity); None where there are none.

    None also where that would take too long: `load` stands then.
    """
    search = _Nested(cutting)
    if search.work(load) > _MOST_WORK:
        return None
    found = search.run(load, squares=False)
    if found is None:
        return None
    best = float(cutting.loads(found[None, :]).max())
    return search.run(cutting.allowed(best), squares=True)


@dataclass(frozen=True, eq=False)
class _Nested:
    """After each pair of stages, outermost first, `total[x, y]` is the best with the layers before x and from y on placed."""

    cutting: Cutting

    @cached_property
    def layers(self) -> int:
        return self.cutting.spans.layers

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
        """How many layers the two stages of a pair can have."""
        first, second = (self._least(stage) for stage in (pair, self.cutting.stages - 1 - pair))
        fits = first[:, None] + second[None, :] <= load * (1 + SLACK)
        one, other = np.nonzero(fits)
        return [(int(a) + 1, int(b) + 1) for a, b in zip(one, other, strict=True) if a + b + 2 <= self._longest + 1]

    def _least(self, stage: int) -> Floats:
        """The least time that so many layers in a row take, for each number from 1."""
        times = self.cutting.times(stage)
        return np.array([np.diagonal(times, length).min() for length in range(1, self._longest + 1)])

    def run(self, load: float, squares: bool) -> Ints | None:
        """The cuts that fit with the least largest load, or with the most even stages where none takes more than `load`."""
        size = self.layers + 1
        total = np.full((size, size), np.inf)
        total[0, -1] = 0.0
        choices = []
        for pair in range(self.pairs):
            total, choice = self._step(pair, total, load, squares)
            choices.append(choice)
        ends = np.diagonal(total)
        middle = int(np.argmin(ends))
        return self._traced(choices, middle) if np.isfinite(ends[middle]) else None

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
        """By the starts of the two stages' runs; None where none fits."""
        lengths = {pair: one, self.cutting.stages - 1 - pair: other}
        first, second = (np.diagonal(self.cutting.times(stage), length) for stage, length in lengths.items())
        time = first[:, None] + second[None, :]
        fits = time <= load * (1 + SLACK)
        for rank in self._ranks[pair] if self.cutting.limits is not None else ():
            fits &= self._fitting(rank, pair, lengths)
        if not fits.any():
            return None
        return np.where(fits, first[:, None] ** 2 + second[None, :] ** 2 if squares else time, np.inf)

    def _fitting(self, rank: int, pair: int, lengths: dict[int, int]) -> NDArray[np.bool_]:
        cutting, spans = self.cutting, self.cutting.spans
        stages = cutting.placement.stages_of(rank)
        limit = (cutting.limits or ())[rank]
        reserves = {stage: np.diagonal(spans.reserve(cutting.recompute[stage]), length) for stage, length in lengths.items()}
        first, second = reserves.values()
        reserve = np.maximum(first[:, None], second[None, :])
        fits = np.ones(reserve.shape, dtype=np.bool_)
        for moment in cutting.moments_of(rank):
            counts = dict(zip(stages, zip(moment.activations, moment.stashes, strict=True), strict=True))
            held = {stage: np.diagonal(spans.held(cutting.recompute[stage], *counts[stage]), n) for stage, n in lengths.items()}
            first, second = held.values()
            fits &= over(first[:, None] + second[None, :] + reserve + moment.other, limit) <= 0
        return fits

    def _traced(self, choices: list[NDArray[np.int32]], middle: int) -> Ints:
        low = high = middle
        firsts, seconds = [middle], []
        for choice in reversed(choices):
            one, other = divmod(int(choice[low, high]), self.layers + 1)
            low, high = low - one, high + other
            firsts.append(low)
            seconds.append(high)
        return np.array(firsts[::-1] + seconds, dtype=np.int64)
