"""Cut layers for any placement: every way where there are few, else by shifting cuts while that helps."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np

from penstock.planner.spans import SLACK, Cutting, Ints

FEW = 20_000
"""Ways that are all tried."""
_MOST_ROUNDS = 60
_MANY, _SHORT = 128, 4
"""Cuts from which on only runs of so few are moved together."""


def all_cuts(cutting: Cutting) -> Ints | None:
    """Every way to cut, a row each; None where there are too many."""
    layers, stages = cutting.spans.layers, cutting.stages
    if comb(layers - 1, stages - 1) > FEW:
        return None
    inner = np.array(list(combinations(range(1, layers), stages - 1)), dtype=np.int64).reshape(-1, stages - 1)
    return np.hstack([np.zeros((len(inner), 1), dtype=np.int64), inner, np.full((len(inner), 1), layers)])


def best_of(cutting: Cutting, cuts: Ints) -> int:
    """The row with the least excess, then the least load, then the most even stages."""
    excess, load = cutting.excesses(cuts).max(axis=1), cutting.loads(cuts).max(axis=1)
    # Equal but for rounding is equal.
    excess = np.where(excess <= excess.min() * (1 + SLACK), 0, 1)
    least = load[excess == 0].min()
    over = np.where(load <= cutting.allowed(least), least, load)
    return int(np.lexsort((cutting.squares(cuts), over, excess))[0])


def shifted(cutting: Cutting, start: Ints) -> Ints:
    """The cuts after shifting neighbouring ones together, by a layer or a few, as long as that makes them better."""
    cuts = start
    for _ in range(_MOST_ROUNDS):
        tried = np.vstack([cuts[None, :], neighbours(cuts)])
        place = best_of(cutting, tried)
        if place == 0:
            break
        cuts = tried[place]
    return cuts


def neighbours(cuts: Ints) -> Ints:
    """Each run of cuts moved by a layer, each single cut by up to four; of many cuts, only short runs."""
    inner = len(cuts) - 2
    first, last = np.triu_indices(inner)
    if inner > _MANY:
        short = last - first < _SHORT
        first, last = first[short], last[short]
    places = np.arange(inner)
    runs = ((places >= first[:, None]) & (places <= last[:, None])).astype(np.int64)
    single = np.eye(inner, dtype=np.int64)
    moves = np.vstack([runs, -runs, *(by * single for by in (2, -2, 3, -3, 4, -4))])
    made = np.tile(cuts, (len(moves), 1))
    made[:, 1:-1] += moves
    return np.asarray(made[(np.diff(made, axis=1) > 0).all(axis=1)])
