"""Bounds against searched orders on problems too large to be solved."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.order_search.search import search
from penstock.planner.problem import Problem
from planner.solver_extra import needs_solver

EQUAL = {"f": 1.0, "i": 1.0, "w": 1.0}
SKEWED = {"f": 1.0, "i": 1.4, "w": 0.6, "latency": 0.05}
SLOW = {"f": 1.0, "i": 1.4, "w": 0.6, "latency": 0.4}
GRID = [
    (Placement.linear(8), 16, EQUAL, 4.0),
    (Placement.linear(8), 24, SKEWED, 8.0),
    (Placement.linear(8), 16, SLOW, 8.0),
    (Placement.v(6), 12, EQUAL, 3.0),
    (Placement.v(8), 16, SKEWED, 6.0),
]


def problem_of(placement: Placement, microbatches: int, times: dict[str, float], limit: float, uneven: bool) -> Problem:
    """The times of a rank's share over its stages; uneven, every third stage takes and holds half as much again."""
    share = 1 / placement.chunks
    size = [share * (1.5 if uneven and stage % 3 == 1 else 1.0) for stage in range(placement.stages)]
    fields: dict[str, Any] = {name: [times[name] * each for each in size] for name in ("f", "i", "w")}
    fields |= {"activation": size, "weight_stash": [each / 2 for each in size], "latency": times.get("latency", 0.0)}
    return Problem(placement, microbatches, Costs(**fields), (limit * (1.25 if uneven else 1.0),) * placement.ranks)


@pytest.mark.slow
@needs_solver
def test_the_gap_to_searched_orders_is_small() -> None:
    gaps = []
    for index, (placement, microbatches, times, limit) in enumerate(GRID):
        problem = problem_of(placement, microbatches, times, limit, uneven=index % 3 == 2)
        found, bound = search(problem, seconds=0.7), lower_bound(problem, seconds=0.7)
        assert found.schedule is not None
        assert bound.value <= found.objective * (1 + 1e-9)
        closed = found.objective <= bound.all["work"] * (1 + 1e-9)
        assert bound.value > bound.all["work"] or closed
        gaps.append(found.objective / bound.value - 1)
    assert median(gaps) <= 0.05
