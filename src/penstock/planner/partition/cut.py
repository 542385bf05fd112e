"""Cut the layers into stages so that the slowest rank is as fast as possible.

One stage per rank is cut by the classical dynamic programme, a stage and its mirror image (as in a V) by one from the outside in,
and any other placement by trying every cut if there are few, else by shifting cuts and branch and bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlacementError
from penstock.ir.cluster import Cluster
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.planner.partition.layer_runs import SLACK, Cutting, LayerRuns, PeakMoment, memory_over
from penstock.planner.profile import Profile
from penstock.text.numbers import format_count

MOST_CELLS = 2e8
"""Stages times pairs of layers in the dynamic programme; beyond that the load is bisected."""
FEW = 20_000
"""Up to this many cuts, all are tried."""
_MOST_ROUNDS = 60
_MANY, _SHORT = 128, 4
"""With more cuts than the first, only runs shorter than the second are shifted together."""
_MOST_NODES = 10_000
"""Nodes of branch and bound; beyond that the best known cuts are kept."""
_MOST_WORK = 2e7
"""Cells of the dynamic programme from the outside in; beyond that, the cuts found by other means are kept."""
_NEAR = (1.02, 1.1, 1.3)
"""Loads to try before the known one, as multiples of the mean: a lower load needs fewer cells."""


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
    lengths: Sequence[int] = (),
    moves: bool = False,
    cluster: Cluster | None = None,
    always: Sequence[float] = (),
) -> LayerCut:
    """Cut the layers into the placement's stages: contiguous, at least one layer per stage besides a spread embedding or head.

    Minimise the largest load of a rank (forward and both backward halves of all its stages) among the cuts that keep every rank
    within its limit at the given moments, and with one microbatch in all of its stages; among those take the most even stages.
    This is exact if each rank holds one stage, or a stage and its mirror image, and if branch and bound finishes; else cuts are
    shifted while that helps. If nothing fits, the cuts come as near as possible. A stage with `recompute` runs its forward
    again before its backward and keeps only its input. With `slack`, the load may exceed the least one by that share if stages
    become more even. With `lengths`, sequences are cut into slices of so many tokens. With `moves`, activations may be moved to the host:
    a rank then need not hold a microbatch in all of its stages. With a `cluster`, its devices are those of the ranks: a faster one gets
    more layers. `always` is the time that each rank takes per microbatch besides.
    """
    if cluster is not None:
        cluster.check_ranks(placement.ranks)
    flags = (recompute,) * placement.stages if isinstance(recompute, bool) else tuple(recompute)
    layers = count_stage_layers(profile)
    if layers < placement.stages:
        between = " between the spread ends" if profile.shares else ""
        have, need = format_count(layers, "layer"), format_count(placement.stages, "stage")
        raise PlacementError(f"{have}{between} are too few for {need}: take fewer ranks or chunks")
    within = None if limits is None else tuple(limits)
    cutting = Cutting(LayerRuns(profile, tuple(lengths)), placement, flags, within, tuple(moments), slack, moves, cluster, tuple(always))
    cuts, exact = _choose_cuts(cutting) if len(profile) > placement.stages else (np.arange(placement.stages + 1), True)
    row = cuts[None, :]
    excesses = tuple(cutting.excesses(row)[0].tolist())
    return LayerCut(tuple(np.diff(cuts).tolist()), float(cutting.loads(row).max()), exact, excesses)


def count_stage_layers(profile: Profile) -> int:
    """How many stages there may be: each needs a layer, other than an embedding or head that is spread over the ranks."""
    return len(profile) - len(profile.shares)


def _choose_cuts(cutting: Cutting) -> tuple[Ints, bool]:
    placement = cutting.placement
    if len(placement.copies) == 1 and placement.chunks == 1:
        return _cut_chain(cutting), True
    every = _list_cuts(cutting)
    if every is not None:
        return every[_find_best(cutting, every)], True
    cuts = _shift_cuts(cutting, _minimise([cutting.slowest_times(stage) for stage in range(cutting.stages)], np.maximum)[0])
    fits = not cutting.excesses(cuts[None, :]).any()
    if fits and float(cutting.loads(cuts[None, :]).max()) <= cutting.even_load * (1 + SLACK):
        return cuts, True
    if not _is_nested(placement):
        if not fits:
            return cuts, False
        least, exact = _branch_and_bound(cutting, cuts)
        return _shift_cuts(cutting, least), exact
    nested = _cut_nested(cutting, float(cutting.loads(cuts[None, :]).max()) if fits else float("inf"))
    return (cuts, False) if nested is None else (nested, True)


# One stage per rank ---------------------------------------------------------------------------------------------------


def _cut_chain(cutting: Cutting) -> Ints:
    """The cuts with the least largest load that fit, or with the least largest excess if none fit."""
    excesses, fitting = zip(*_build_stage_tables(cutting), strict=True)
    if cutting.stages * cutting.runs.layers**2 > MOST_CELLS:
        cuts = _bisect_load(fitting)
        if cuts is not None:
            return cuts
    _, load = _minimise(fitting, np.maximum)
    if not np.isfinite(load):
        return _minimise(excesses, np.maximum)[0]
    # Of all cuts with an acceptable load, take the most even stages.
    squares = {id(time): np.where(time <= cutting.allow(load), time**2, np.inf) for time in fitting}
    return _minimise([squares[id(time)] for time in fitting], np.add)[0]


def _build_stage_tables(cutting: Cutting) -> Iterator[tuple[Floats, Floats]]:
    """Per stage, the memory of each run of layers over the limit, and its time if it fits; alike stages share their tables."""
    known: dict[object, tuple[Floats, Floats]] = {}
    for stage, recompute in enumerate(cutting.recompute):
        rank = cutting.placement.rank_of(stage)
        limit, moments = math.inf, []
        if cutting.limits is not None:
            limit, moments = cutting.limits[rank], [replace(moment, rank=0) for moment in cutting.moments_of(rank)]
        times = cutting.times(rank, stage)
        key = recompute, limit, tuple(moments), id(times)
        if key not in known:
            excess = np.zeros_like(times)
            for moment in moments:
                held = cutting.runs.sum_held(recompute, moment.by_stage[0]) + cutting.runs.reserves[recompute]
                excess = np.maximum(excess, memory_over(held + moment.other, limit))
            known[key] = excess, np.where(excess > 0, np.inf, times)
        yield known[key]


def _bisect_load(costs: Sequence[Floats]) -> Ints | None:
    """Cuts whose largest cost is the least, up to rounding, if longer runs cost more: each stage takes as many layers as it can."""
    low, high = 0.0, float(max(table[np.isfinite(table)].max() for table in {id(cost): cost for cost in costs}.values()))
    best = _reach(costs, high)
    while best is not None and high - low > SLACK * high:
        middle = (low + high) / 2
        cuts = _reach(costs, middle)
        low, high, best = (middle, high, best) if cuts is None else (low, middle, cuts)
    return best


def _reach(costs: Sequence[Floats], most: float) -> Ints | None:
    """The cuts if every stage is as long as the cost allows, with one layer left per later stage; None if they do not reach the end."""
    layers, cuts = len(costs[0]) - 1, [0]
    for stage, cost in enumerate(costs):
        last = layers - (len(costs) - stage - 1)
        ends = np.flatnonzero(cost[cuts[-1], cuts[-1] + 1 : last + 1] <= most)
        if not len(ends):
            return None
        cuts.append(cuts[-1] + 1 + int(ends[-1]))
    return np.array(cuts, dtype=np.int64) if cuts[-1] == layers else None


def _minimise(costs: Sequence[Floats], combine: np.ufunc) -> tuple[Ints, float]:
    """The cuts with the least total cost, as `combine` joins the costs of the runs; each run has at least one layer."""
    ends = len(costs[0])
    empty = np.tril(np.ones((ends, ends), dtype=np.bool_))
    total = np.full(ends, np.inf)
    total[0] = 0.0
    starts = []
    for cost in costs:
        table = np.where(empty, np.inf, combine(total[:, None], cost))
        starts.append(np.argmin(table, axis=0))
        total = table[starts[-1], np.arange(ends)]
    cuts = [ends - 1]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return np.array(cuts[::-1], dtype=np.int64), float(total[-1])


# Any placement --------------------------------------------------------------------------------------------------------


def _list_cuts(cutting: Cutting) -> Ints | None:
    """Every way to cut, one per row; None if there are too many."""
    layers, stages = cutting.runs.layers, cutting.stages
    if math.comb(layers - 1, stages - 1) > FEW:
        return None
    inner = np.array(list(combinations(range(1, layers), stages - 1)), dtype=np.int64).reshape(-1, stages - 1)
    return np.hstack([np.zeros((len(inner), 1), dtype=np.int64), inner, np.full((len(inner), 1), layers)])


def _find_best(cutting: Cutting, cuts: Ints) -> int:
    """The row with the least excess, then the least load, then the most even stages."""
    excess, load = cutting.excesses(cuts).max(axis=1), cutting.loads(cuts).max(axis=1)
    excess = np.where(excess <= excess.min() * (1 + SLACK), 0, 1)  # equal up to rounding is equal
    least = load[excess == 0].min()
    over = np.where(load <= cutting.allow(least), least, load)
    return int(np.lexsort((cutting.squares(cuts), over, excess))[0])


def _shift_cuts(cutting: Cutting, cuts: Ints) -> Ints:
    """Shift neighbouring cuts together, by one layer or a few, until nothing gets better."""
    for _ in range(_MOST_ROUNDS):
        tried = np.vstack([cuts[None, :], list_neighbours(cuts)])
        place = _find_best(cutting, tried)
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


def _branch_and_bound(cutting: Cutting, cuts: Ints) -> tuple[Ints, bool]:
    """The cuts with the least largest load that fit, starting from cuts that fit; and whether that is proved.

    It walks depth first over the ends of one stage after the other that keep all ranks below the best load.
    """
    layers, copies = cutting.runs.layers, cutting.placement.copies
    arrays = [[cutting.times(rank, stage) for rank in ranks] for stage, ranks in enumerate(zip(*copies, strict=True))]
    lists = {key: array.tolist() for key, array in {id(array): array for of_stage in arrays for array in of_stage}.items()}
    tables = [[lists[id(array)] for array in of_stage] for of_stage in arrays]
    work, speeds = cutting.runs.times[False][:, -1].tolist(), cutting.speeds.tolist()
    best, load, nodes = cuts, float(cutting.loads(cuts[None, :]).max()), 1

    def list_ends(cuts: list[int], loads: list[float]) -> Iterator[int]:
        """The ends of the next stage; none if the remaining layers do not fit below the best load on all ranks together."""
        left, first = cutting.stages - len(cuts), cuts[-1]
        if work[first] >= sum((load - taken) * speed for taken, speed in zip(loads, speeds, strict=True)) * (1 + SLACK):
            return iter(())
        return iter(range(first + 1, layers - left + 1) if left else [layers])

    none = [0.0] * cutting.placement.ranks
    path = [([0], none, list_ends([0], none))]
    while path and nodes < _MOST_NODES:
        before, loads, ends = path[-1]
        stage, end = len(before) - 1, next(ends, None)
        if end is not None:
            loads = list(loads)
            for copy, table in zip(copies, tables[stage], strict=True):
                loads[copy[stage]] += table[before[-1]][end]
        if end is None or max(loads) >= load * (1 - SLACK):
            path.pop()
        elif end < layers:
            nodes += 1
            path.append(([*before, end], loads, list_ends([*before, end], loads)))
        else:
            row = np.array([*before, end], dtype=np.int64)
            if not cutting.excesses(row[None, :]).any():
                best, load = row, max(loads)
    return best, nodes < _MOST_NODES


# A stage and its mirror image -----------------------------------------------------------------------------------------


def _is_nested(placement: Placement) -> bool:
    """Whether every rank runs two stages, one as far from the start as the other from the end, for one copy each."""
    last = placement.stages - 1
    once = 2 * placement.ranks == placement.stages * len(placement.copies)
    return (
        last % 2 == 1
        and once
        and all(len(placement.stages_of(rank)) == 2 and sum(placement.stages_of(rank)) == last for rank in range(placement.ranks))
    )


def _cut_nested(cutting: Cutting, load: float) -> Ints | None:
    """The cuts with the least largest load that fit, given that `load` is possible (or infinite).

    None if there are none, or if finding them would take too long.
    """
    search = _Nested(cutting)
    for most in (*(near for near in (share * cutting.even_load for share in _NEAR) if near < load), load):
        if search.work(most) > _MOST_WORK:
            return None
        cuts = search.run(most, squares=False)
        if cuts is not None:
            return search.run(cutting.allow(float(cutting.loads(cuts[None, :]).max())), squares=True)
    return None


@dataclass(frozen=True, eq=False)
class _Nested:
    """After each pair of stages, outermost first, `total[x, y]` is the best cost with the layers before x and from y on placed."""

    cutting: Cutting

    @property
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
        return sum(len(self._find_lengths(pair, load)) for pair in range(self.pairs)) * (self.layers + 1.0) ** 2

    def _find_lengths(self, pair: int, load: float) -> list[tuple[int, int]]:
        """Possible numbers of layers of the two stages of a pair."""
        stages, size = (pair, self.cutting.stages - 1 - pair), self._longest
        fits, floor = np.ones((size, size), dtype=np.bool_), np.zeros((size, size), dtype=np.bool_)
        for rank in self._ranks[pair]:
            (least, most), (other_least, other_most) = (self._find_extremes(rank, stage) for stage in stages)
            fits &= least[:, None] + other_least[None, :] <= load * (1 + SLACK)
            floor |= most[:, None] + other_most[None, :] >= self._find_floor(pair, load)
        fits &= floor
        one, other = np.nonzero(fits)
        return [(int(a) + 1, int(b) + 1) for a, b in zip(one, other, strict=True) if a + b + 2 <= self._longest + 1]

    def _find_floor(self, pair: int, load: float) -> float:
        """The least load of the ranks of a pair if none is above `load`: the others cannot take more of the total."""
        speeds = self.cutting.speeds
        own = float(speeds[self._ranks[pair]].max())
        return (self.cutting.work * (1 - SLACK) - (float(speeds.sum()) - own) * load * (1 + SLACK)) / own

    def _find_extremes(self, rank: int, stage: int) -> tuple[Floats, Floats]:
        """The least and the most time of n layers in a row as this stage of a rank, for each n from 1."""
        times = self.cutting.times(rank, stage)
        if id(times) not in self._known_extremes:
            runs = [np.diagonal(times, length) for length in range(1, self._longest + 1)]
            self._known_extremes[id(times)] = np.array([run.min() for run in runs]), np.array([run.max() for run in runs])
        return self._known_extremes[id(times)]

    @cached_property
    def _known_extremes(self) -> dict[int, tuple[Floats, Floats]]:
        return {}

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
        for one, other in self._find_lengths(pair, load):
            cost = self._find_cost(pair, one, other, load, squares)
            if cost is None:
                continue
            before = total[: size - one, other:]
            reached = before + cost if squares else np.maximum(before, cost)
            place = after[one:, : size - other]
            better = reached < place
            place[better] = reached[better]
            choice[one:, : size - other][better] = one * size + other
        return after, choice

    def _find_cost(self, pair: int, one: int, other: int, load: float, squares: bool) -> Floats | None:
        """Cost by the first layers of both stages; None if nothing fits."""
        lengths = {pair: one, self.cutting.stages - 1 - pair: other}
        times = []
        for rank in self._ranks[pair]:
            first, second = (np.diagonal(self.cutting.times(rank, stage), length) for stage, length in lengths.items())
            times.append(first[:, None] + second[None, :])
        time = np.maximum.reduce(times)
        fits = (time <= load * (1 + SLACK)) & (time >= self._find_floor(pair, load))
        for rank in self._ranks[pair] if self.cutting.limits is not None else ():
            fits &= self._fits_memory(rank, lengths)
        if not fits.any():
            return None
        if not squares:
            return np.where(fits, time, np.inf)
        first, second = (np.diagonal(self.cutting.slowest_times(stage), length) ** 2 for stage, length in lengths.items())
        return np.where(fits, first[:, None] + second[None, :], np.inf)

    def _fits_memory(self, rank: int, lengths: dict[int, int]) -> NDArray[np.bool_]:
        cutting, runs = self.cutting, self.cutting.runs
        stages = cutting.placement.stages_of(rank)
        limit = (cutting.limits or ())[rank]
        reserves = {stage: np.diagonal(runs.reserves[cutting.recompute[stage]], length) for stage, length in lengths.items()}
        first, second = reserves.values()
        reserve = np.maximum(first[:, None], second[None, :])
        fits = np.ones(reserve.shape, dtype=np.bool_)
        for moment in cutting.moments_of(rank):
            counts = dict(zip(stages, moment.by_stage, strict=True))
            held = {stage: np.diagonal(runs.sum_held(cutting.recompute[stage], counts[stage]), n) for stage, n in lengths.items()}
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
