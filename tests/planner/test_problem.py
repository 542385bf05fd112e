"""A problem, and how it judges a schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CostsError
from penstock.ir.placement import Placement
from penstock.planner.partition.assignment import Assignment
from penstock.planner.problem import Problem
from planner.sliced_models import random_model

COSTS = ps.Costs(f=2.0, i=3.0, w=1.0, latency=0.5, activation=1.0, weight_stash=0.5, parameters=4.0)


def one_f_one_b(**options: object) -> Problem:
    return Problem(Placement.linear(4), 8, COSTS, **options)  # type: ignore[arg-type]


def test_a_schedule_is_evaluated_by_the_simulator() -> None:
    schedule = ps.schedule("zb-h1", 4, 8)
    timeline = one_f_one_b().evaluate(schedule)
    expected = ps.simulate(ps.lower(schedule), COSTS)
    assert timeline.makespan == expected.makespan
    assert timeline.peak_memory == expected.peak_memory


def test_with_a_barrier_the_makespan_counts_and_without_it_the_longest_span() -> None:
    """Rank r of 1f1b begins after r forwards and messages; the first rank's span is the whole makespan."""
    schedule = ps.schedule("1f1b", 4, 8)
    timeline = one_f_one_b().evaluate(schedule)
    assert one_f_one_b().objective(timeline) == timeline.makespan
    spans = [rank[-1].end - rank[0].start for rank in (timeline.spans(r) for r in range(4))]
    assert one_f_one_b(barrier=False).objective(timeline) == max(spans)


def test_a_schedule_fits_up_to_the_limit_of_each_rank() -> None:
    """Rank r of 1f1b holds 4 - r activations, and its parameters."""
    timeline = one_f_one_b().evaluate(ps.schedule("1f1b", 4, 8))
    peaks = tuple(4.0 + 4 - rank for rank in range(4))
    assert one_f_one_b(memory_limit=peaks).fits(timeline)
    for rank in range(4):
        less = tuple(peak - (1e-6 if rank == r else 0.0) for r, peak in enumerate(peaks))
        assert not one_f_one_b(memory_limit=less).fits(timeline)
    assert one_f_one_b().fits(timeline)
    assert one_f_one_b().limits == (math.inf,) * 4


def test_a_rank_always_holds_the_parameters_of_its_stages() -> None:
    costs = ps.Costs(parameters=[1.0, 2.0, 4.0, 8.0])
    assert Problem(Placement.v(2), 1, costs).static_memory == (9.0, 6.0)


@pytest.mark.parametrize("lengths", [(), (64, 32)])
def test_fewer_microbatches_are_as_those_of_the_whole(lengths: tuple[int, ...]) -> None:
    """On the same devices and links of a cluster."""
    cluster = ps.Cluster([ps.Device(), ps.Device(speed=0.5)], latency=0.25)
    shape = random_model(np.random.default_rng(0), layers=4), Placement.linear(2)
    whole, short = (
        Problem.cut(*shape, count, (2, 2), (False, False), lengths=lengths, assignment=Assignment(cluster, (1, 0))) for count in (8, 3)
    )
    assert whole.shorten(3) == short
    assert whole.shorten(3).assignment == short.assignment


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"microbatches": 0}, "0 microbatches"),
        ({"memory_limit": (1.0, 2.0)}, "each of the 4 ranks"),
        ({"memory_limit": (1.0, 2.0, -1.0, 1.0)}, "at least 0"),
        ({"memory_limit": (1.0, 2.0, math.nan, 1.0)}, "at least 0"),
        ({"costs": ps.Costs(f=[1.0, 2.0])}, "2 values for 4 stages"),
    ],
)
def test_invalid_problems_are_refused(changes: dict[str, object], said: str) -> None:
    arguments: dict[str, object] = {"placement": Placement.linear(4), "microbatches": 8, "costs": COSTS, **changes}
    with pytest.raises(CostsError, match=said):
        Problem(**arguments)  # type: ignore[arg-type]
