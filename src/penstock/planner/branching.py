"""Cut layers for any placement: branch and bound over the stages, from cuts that are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.planner.spans import SLACK, Cutting, Ints

MOST_NODES = 10_000
"""Beginnings of cuts that are looked at; more takes too long, and what is known is kept."""


def cut_branching(cutting: Cutting, known: Ints) -> tuple[Ints, bool]:
    """The cuts with the least largest load that fit, from some that do; and whether that is proved."""
    search = _Branching(cutting, known, float(cutting.loads(known[None, :]).max()))
    search.descend([0], [0.0] * cutting.placement.ranks)
    return search.best, search.nodes < MOST_NODES


@dataclass
class _Branching:
    cutting: Cutting
    best: Ints
    load: float
    nodes: int = 0
    _times: list[list[list[float]]] = field(init=False)

    def __post_init__(self) -> None:
        cutting = self.cutting
        tables = {again: cutting.times(cutting.recompute.index(again)).tolist() for again in set(cutting.recompute)}
        self._times = [tables[again] for again in cutting.recompute]
        placement = cutting.placement
        self._ranks = [[copy[stage] for copy in placement.copies] for stage in range(cutting.stages)]
        """The ranks that run each stage."""
        self._shared = cutting.share * cutting.spans.time(False)
        """What a run takes at least."""

    def descend(self, cuts: list[int], loads: list[float]) -> None:
        """Try every end of the next stage with which all ranks stay below the best."""
        self.nodes += 1
        stage, layers, first = len(cuts) - 1, self.cutting.spans.layers, cuts[-1]
        left = self.cutting.stages - stage - 1
        if self.nodes >= MOST_NODES or not self._can_win(first, loads, len(self._ranks[stage])):
            return
        for end in range(first + 1, layers - left + 1) if left else [layers]:
            more = list(loads)
            for rank in self._ranks[stage]:
                more[rank] += self._times[stage][first][end]
            if max(more) >= self.load * (1 - SLACK):
                break
            if left:
                self.descend([*cuts, end], more)
            else:
                self._keep([*cuts, end], max(more))

    def _can_win(self, first: int, loads: list[float], copies: int) -> bool:
        """Whether what is left has room under the best on all ranks together."""
        room = sum(self.load - load for load in loads)
        return copies * float(self._shared[first, -1]) < room * (1 + SLACK)

    def _keep(self, cuts: list[int], load: float) -> None:
        row = np.array(cuts, dtype=np.int64)
        if not self.cutting.excesses(row[None, :]).any():
            self.best, self.load = row, load
