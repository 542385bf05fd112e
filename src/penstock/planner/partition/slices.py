"""How long each slice of a sequence should be.

Slices of equal length do not take equal times: with causal attention the later ones take longer. A pipeline of p ranks whose slices take
t_1 .. t_q on the slowest stage takes about sum t_i + (p - 1) max t_i (TeraPipe, arXiv 2102.07988), and `choose_lengths` minimises that
exactly, over all lengths that are multiples of a granularity. With the times of `penstock.planner.profile.slices` the sum is the same for
all lengths, so the longest slice alone decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.rows import Floats, Ints
from penstock.planner.profile import SliceCost

GRANULARITY = 128
"""Tokens that the length of a slice is a multiple of; the last one may have a remainder."""
MOST_EDGES = 512
"""Places to cut a sequence at; if there are more, the granularity is coarsened."""
_ROUNDING = 1e-12
"""Relative error of sums of times."""


def list_edges(tokens: int, granularity: int = GRANULARITY) -> Ints:
    """The places at which a sequence may be cut, its start and its end included: multiples of the granularity, or of a multiple of it.

    >>> list_edges(500, 128).tolist()
    [0, 128, 256, 384, 500]
    """
    step = granularity * math.ceil(tokens / granularity / MOST_EDGES)
    return np.append(np.arange(0, tokens, step, dtype=np.int64), tokens)


def tabulate(time: SliceCost, edges: Ints) -> Floats:
    """The time of each slice by its first edge (row) and its last (column); infinite if that is not a slice."""
    first, last = edges[:, None].astype(np.float64), edges[None, :].astype(np.float64)
    length = np.maximum(last - first, 0.0)
    return np.where(last > first, time.at(length, first), np.inf)


def minimise(table: Floats, slices: int, ranks: int) -> tuple[int, ...]:
    """The edges between slices, as indices, with the least sum + (ranks - 1) x longest of their times.

    If no slice may take longer than some limit, dynamic programming finds the least sum. The limit only needs to be one of the times in
    the table. Limits are tried from the least possible one upwards, until the limit and the least sum without one exceed the best.
    """
    limit, cuts = _minimise(table, slices, np.maximum)
    if not math.isfinite(limit):
        raise ScheduleError(f"a sequence with {len(table) - 1} places to end a slice cannot be cut into {slices} slices")
    least, _ = _minimise(table, slices, np.add)
    best = math.inf
    best_cuts = cuts
    for most in np.unique(table[np.isfinite(table) & (table >= limit)]).tolist():
        if least + (ranks - 1) * most >= best * (1 - _ROUNDING):
            break
        total, cuts = _minimise(np.where(table <= most, table, np.inf), slices, np.add)
        value = total + (ranks - 1) * _find_longest(table, cuts)
        if value < best:
            best, best_cuts = value, cuts
    return best_cuts


def _minimise(table: Floats, slices: int, combine: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least total of so many slices, joined by `combine`, and their edges."""
    edges = len(table)
    total = np.full(edges, np.inf)
    total[0] = 0.0
    starts: list[Ints] = []
    for _ in range(slices):
        joined = combine(total[:, None], table)
        starts.append(np.argmin(joined, axis=0))
        total = joined[starts[-1], np.arange(edges)]
    cuts = [edges - 1]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return float(total[-1]), tuple(cuts[::-1])


def _find_longest(table: Floats, cuts: Sequence[int]) -> float:
    return max(float(table[first, last]) for first, last in pairwise(cuts))


def count_pipeline_time(time: SliceCost, lengths: Sequence[int], ranks: int) -> float:
    """The time that `choose_lengths` minimises.

    >>> count_pipeline_time(SliceCost(token=1.0), [2, 4], ranks=3)
    14.0
    """
    prefixes = np.concatenate(([0], np.cumsum(lengths[:-1])))
    times = time.at(np.array(lengths, dtype=np.float64), prefixes)
    return float(times.sum() + (ranks - 1) * times.max())


# Three ways to cut ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def choose_lengths(time: SliceCost, tokens: int, slices: int, ranks: int, granularity: int = GRANULARITY) -> tuple[int, ...]:
    """The lengths with the least pipeline time.

    >>> choose_lengths(SliceCost(pair=1.0), 1024, slices=2, ranks=4, granularity=64)
    (704, 320)
    """
    edges = list_edges(tokens, granularity)
    return tuple(np.diff(edges[list(minimise(tabulate(time, edges), slices, ranks))]).tolist())


def split_equal_time(time: SliceCost, tokens: int, slices: int, granularity: int = GRANULARITY) -> tuple[int, ...]:
    """Lengths of about equal times: the places where equal shares of the tokens' and pairs' time have passed, rounded to the granularity.

    >>> split_equal_time(SliceCost(pair=1.0), 1000, slices=4, granularity=100)
    (500, 200, 200, 100)
    """
    edges = list_edges(tokens, granularity)
    passed = time.token * edges + time.pair * edges.astype(np.float64) ** 2 / 2
    targets = passed[-1] * np.arange(1, slices) / slices
    return _round_cuts(edges, np.searchsorted(passed, targets), slices, lambda at: passed[at], targets)


def split_equally(tokens: int, slices: int, granularity: int = GRANULARITY) -> tuple[int, ...]:
    """Equal lengths, up to the granularity.

    >>> split_equally(1024, slices=4, granularity=64)
    (256, 256, 256, 256)
    """
    edges = list_edges(tokens, granularity)
    targets = tokens * np.arange(1, slices) / slices
    return _round_cuts(edges, np.searchsorted(edges, targets), slices, lambda at: edges[at], targets)


def _round_cuts(edges: Ints, above: Ints, slices: int, value: Callable[[int], float], targets: Floats) -> tuple[int, ...]:
    """The lengths if each cut takes the nearer of the two edges around its wanted value, and no slice is empty."""
    if len(edges) - 1 < slices:
        raise ScheduleError(f"a sequence with {len(edges) - 1} places to end a slice cannot be cut into {slices} slices")
    cuts = [0]
    for place, (high, goal) in enumerate(zip(above.tolist(), targets.tolist(), strict=True)):
        nearest = high - 1 if high and goal - value(high - 1) <= value(high) - goal else high
        cuts.append(min(max(nearest, cuts[-1] + 1), len(edges) - (slices - place)))
    return tuple(np.diff(edges[[*cuts, len(edges) - 1]]).tolist())
