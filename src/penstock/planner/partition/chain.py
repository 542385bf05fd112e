"""Cut layers for ranks with one stage each, by the classical dynamic programme."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.ir.rows import Floats, Ints
from penstock.planner.partition.layer_runs import SLACK, Cutting, PeakMoment, memory_over

MOST_CELLS = 2e8
"""Stages times pairs of layers in the dynamic programme; beyond that the load is bisected."""


def cut_chain(cutting: Cutting) -> tuple[Ints, bool]:
    """The cuts with the least largest load that fit, or with the least largest excess if none fit; and whether they fit."""
    times, excesses = [cutting.times(stage) for stage in range(cutting.stages)], _excesses(cutting)
    fitting = _per_table(lambda time, excess: np.where(excess > 0, np.inf, time), times, excesses)
    if cutting.stages * cutting.runs.layers**2 > MOST_CELLS:
        cuts = _bisect_load(fitting)
        if cuts is not None:
            return cuts, True
    _, load = _minimise(fitting, np.maximum)
    if not np.isfinite(load):
        return _minimise(excesses, np.maximum)[0], False
    # Of all cuts with an acceptable load, take the most even stages.
    even = _per_table(lambda time: np.where(time <= cutting.allow(load), time**2, np.inf), fitting)
    return _minimise(even, np.add)[0], True


def _per_table(make: Callable[..., Floats], *tables: list[Floats]) -> list[Floats]:
    """Map over the tables of each stage; stages with the same tables share the result."""
    results: dict[tuple[int, ...], Floats] = {}
    for of_stage in zip(*tables, strict=True):
        key = tuple(map(id, of_stage))
        if key not in results:
            results[key] = make(*of_stage)
    return [results[tuple(map(id, of_stage))] for of_stage in zip(*tables, strict=True)]


def _bisect_load(costs: list[Floats]) -> Ints | None:
    """Cuts whose largest cost is the least, up to rounding, if longer runs cost more: each stage takes as many layers as it can."""
    low, high = 0.0, float(max(table[np.isfinite(table)].max() for table in {id(cost): cost for cost in costs}.values()))
    best = _reach(costs, high)
    while best is not None and high - low > SLACK * high:
        middle = (low + high) / 2
        cuts = _reach(costs, middle)
        low, high, best = (middle, high, best) if cuts is None else (low, middle, cuts)
    return best


def _reach(costs: list[Floats], most: float) -> Ints | None:
    """The cuts if every stage is as long as the cost allows, with one layer left per later stage; None if they do not reach the end."""
    layers, cuts = len(costs[0]) - 1, [0]
    for stage, cost in enumerate(costs):
        last = layers - (len(costs) - stage - 1)
        ends = np.flatnonzero(cost[cuts[-1], cuts[-1] + 1 : last + 1] <= most)
        if not len(ends):
            return None
        cuts.append(cuts[-1] + 1 + int(ends[-1]))
    return np.array(cuts, dtype=np.int64) if cuts[-1] == layers else None


def cut_stages(cutting: Cutting) -> Ints:
    """The cuts with the least largest stage, ignoring ranks and memory."""
    return _minimise([cutting.times(stage) for stage in range(cutting.stages)], np.maximum)[0]


def _excesses(cutting: Cutting) -> list[Floats]:
    """Memory of each run of layers over the limit, per stage; stages that hold the same under equal limits share a table."""
    known: dict[object, Floats] = {}
    tables = []
    for stage, recompute in enumerate(cutting.recompute):
        rank = cutting.placement.rank_of(stage)
        moments = [] if cutting.limits is None else cutting.moments_of(rank)
        limit = None if cutting.limits is None else cutting.limits[rank]
        key = recompute, limit, tuple(replace(moment, rank=0) for moment in moments)
        if key not in known:
            known[key] = _excess(cutting, recompute, moments, limit)
        tables.append(known[key])
    return tables


def _excess(cutting: Cutting, recompute: bool, moments: list[PeakMoment], limit: float | None) -> Floats:
    runs = cutting.runs
    worst = np.zeros_like(runs.time(recompute))
    for moment in moments:
        held = runs.held(recompute, *moment.activations, *moment.stashes) + runs.reserve(recompute) + moment.other
        worst = np.maximum(worst, memory_over(held, math.inf if limit is None else limit))
    return worst


def _minimise(costs: list[Floats], combine: np.ufunc) -> tuple[Ints, float]:
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
