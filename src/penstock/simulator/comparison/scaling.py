"""A timeline in another unit of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.ir.costs import Costs
from penstock.simulator.timeline import Timeline

_TIMES = ("f", "i", "w", "b", "latency", "unshard", "reduce", "optimizer")


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """The same timeline with every time multiplied."""
    if factor == 1.0:
        return timeline
    columns: dict[str, Any] = {name: getattr(timeline, name) * factor for name in ("start", "end", "depart", "arrive")}
    for name in ("collective_start", "collective_end"):
        times = getattr(timeline, name)
        columns[name] = np.where(times < 0, times, times * factor)  # -1 stands for no time
    result = replace(timeline, costs=_scaled_costs(timeline.costs, factor), **columns)
    result.__dict__["flat"] = timeline.flat
    return result


def _scaled_costs(costs: Costs, factor: float) -> Costs:
    times = {name: _multiplied(getattr(costs, name), factor) for name in _TIMES}
    return replace(costs, **times, bandwidth=None if costs.bandwidth is None else costs.bandwidth / factor)


def _multiplied(value: Any, factor: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_multiplied(item, factor) for item in value)
    return None if value is None else value * factor
