"""Cut layers for any placement: try every cut if there are few, else shift cuts while that helps, or branch and bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from math import comb

import numpy as np

from penstock.ir.rows import Ints
from penstock.planner.partition.layer_runs import SLACK, Cutting

FEW = 20_000
"""Up to this many cuts, all are tried."""
_MOST_ROUNDS = 60
_MANY, _SHORT = 128, 4
"""With more cuts than the first, only runs shorter than the second are shifted together."""
_MOST_NODES = 10_000
"""Nodes of branch and bound; beyond that the best known cuts are kept."""


def list_cuts(cutting: Cutting) -> Ints | None:
    """Every way to cut, one per row; None if there are too many."""
    layers, stages = cutting.runs.layers, cutting.stages
    if comb(layers - 1, stages - 1) > FEW:
        return None
    inner = np.array(list(combinations(range(1, layers), stages - 1)), dtype=np.int64).reshape(-1, stages - 1)
    return np.hstack([np.zeros((len(inner), 1), dtype=np.int64), inner, np.full((len(inner), 1), layers)])


def find_best(cutting: Cutting, cuts: Ints) -> int:
    """The row with the least excess, then the least load, then the most even stages."""
    excess, load = cutting.excesses(cuts).max(axis=1), cutting.loads(cuts).max(axis=1)
    excess = np.where(excess <= excess.min() * (1 + SLACK), 0, 1)  # equal up to rounding is equal
    least = load[excess == 0].min()
    over = np.where(load <= cutting.allow(least), least, load)
    return int(np.lexsort((cutting.squares(cuts), over, excess))[0])


def shift_cuts(cutting: Cutting, cuts: Ints) -> Ints:
    """Shift neighbouring cuts together, by one layer or a few, until nothing gets better."""
    for _ in range(_MOST_ROUNDS):
        tried = np.vstack([cuts[None, :], list_neighbours(cuts)])
        place = find_best(cutting, tried)
        if place == 0:
            break
        cuts = tried[place]
    return cuts


def list_neighbours(cuts: Ints) -> Ints:
    """Each run of cuts moved by one layer and each single cut by up to four; with many cuts, only short runs."""
    inner = len(cuts) - 2
    first, last = np.triu_indices(inner)
    if inner > _MANY:
        short = last - first < _SHORT
        first, last = first[short], last[short]
    places = np.arange(inner)
    runs = ((places >= first[:, None]) & (places <= last[:, None])).astype(np.int64)
    single = np.eye(inner, dtype=np.int64)
    moves = np.vstack([runs, -runs, *(by * single for by in (2, -2, 3, -3, 4, -4))])
    moved = np.tile(cuts, (len(moves), 1))
    moved[:, 1:-1] += moves
    return np.asarray(moved[(np.diff(moved, axis=1) > 0).all(axis=1)])


def branch_and_bound(cutting: Cutting, cuts: Ints) -> tuple[Ints, bool]:
    """The cuts with the least largest load that fit, starting from cuts that fit; and whether that is proved."""
    search = _Branching(cutting, cuts, float(cutting.loads(cuts[None, :]).max()))
    search.descend([0], [0.0] * cutting.placement.ranks)
    return search.best, search.nodes < _MOST_NODES


@dataclass
class _Branching:
    cutting: Cutting
    best: Ints
    load: float
    nodes: int = 0
    _times: list[list[list[float]]] = field(init=False)

    def __post_init__(self) -> None:
        cutting, placement = self.cutting, self.cutting.placement
        tables = {flag: cutting.times(cutting.recompute.index(flag)).tolist() for flag in set(cutting.recompute)}
        self._times = [tables[flag] for flag in cutting.recompute]
        self._ranks = [[copy[stage] for copy in placement.copies] for stage in range(cutting.stages)]
        self._least_times = cutting.share * cutting.runs.time(False)

    def descend(self, cuts: list[int], loads: list[float]) -> None:
        """Try every end of the next stage that keeps all ranks below the best load."""
        self.nodes += 1
        stage, layers, first = len(cuts) - 1, self.cutting.runs.layers, cuts[-1]
        left = self.cutting.stages - stage - 1
        if self.nodes >= _MOST_NODES or not self._can_win(first, loads, len(self._ranks[stage])):
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
        """Whether the remaining layers fit below the best load on all ranks together."""
        room = sum(self.load - load for load in loads)
        return copies * float(self._least_times[first, -1]) < room * (1 + SLACK)

    def _keep(self, cuts: list[int], load: float) -> None:
        row = np.array(cuts, dtype=np.int64)
        if not self.cutting.excesses(row[None, :]).any():
            self.best, self.load = row, load
