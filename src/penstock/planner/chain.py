"""Cut layers for ranks with one stage each: the classical dynamic programme."""

from __future__ import annotations

import numpy as np

from penstock.planner.spans import Cutting, Floats, Ints, over


def cut_chain(cutting: Cutting) -> tuple[Ints, bool]:
    """The cuts with the least largest load that fit, and whether any do; where none do, those with the least largest excess."""
    times = [cutting.times(stage) for stage in range(cutting.stages)]
    excesses = [_excess(cutting, stage) for stage in range(cutting.stages)]
    fitting = [np.where(excess > 0, np.inf, time) for time, excess in zip(times, excesses, strict=True)]
    _, load = _best(fitting, np.maximum)
    if not np.isfinite(load):
        return _best(excesses, np.maximum)[0], False
    # Of all cuts with a load that will do, the ones whose stages are most even.
    even = [np.where(time <= cutting.allowed(load), time**2, np.inf) for time in fitting]
    return _best(even, np.add)[0], True


def cut_stages(cutting: Cutting) -> Ints:
    """The cuts with the least largest stage, whatever the ranks and their memory."""
    return _best([cutting.times(stage) for stage in range(cutting.stages)], np.maximum)[0]


def _excess(cutting: Cutting, stage: int) -> Floats:
    rank = cutting.placement.rank_of(stage)
    spans, recompute = cutting.spans, cutting.recompute[stage]
    worst = np.zeros_like(spans.time(recompute))
    if cutting.limits is None:
        return worst
    for moment in cutting.moments_of(rank):
        held = spans.held(recompute, *moment.activations, *moment.stashes) + spans.reserve(recompute) + moment.other
        worst = np.maximum(worst, over(held, cutting.limits[rank]))
    return worst


def _best(costs: list[Floats], combine: np.ufunc) -> tuple[Ints, float]:
    """The cuts with the least total, where `combine` joins the costs of the runs; each run has at least one layer."""
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
