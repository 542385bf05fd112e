"""Packing samples into microbatches, against every packing of few samples and the bound of many."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, PlanError
from penstock.planner.batches.lengths import LengthCosts

some = settings(deadline=None, max_examples=60)


def best_by_trying(lengths: list[int], count: int, capacity: int | None, model: LengthCosts) -> float | None:
    """The least largest cost of any packing, None if there is none."""
    best = None
    for places in product(range(count), repeat=len(lengths)):
        groups = [[length for length, place in zip(lengths, places, strict=True) if place == group] for group in range(count)]
        if all(groups) and (capacity is None or max(map(sum, groups)) <= capacity):
            largest = max(sum(model.of([length]) for length in group) for group in groups)
            best = largest if best is None else min(best, largest)
    return best


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.integers(1, 3),
    st.sampled_from([None, 40, 60, 90]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
@some
def test_few_samples_are_packed_as_well_as_possible(lengths: list[int], count: int, capacity: int | None, quadratic: float) -> None:
    count = min(count, len(lengths))
    best = best_by_trying(lengths, count, capacity, LengthCosts(10, quadratic))
    if best is None:
        with pytest.raises(PlanError, match="tokens"):
            ps.pack(lengths, count, capacity=capacity, sequence=10, quadratic=quadratic)
        return
    packing = ps.pack(lengths, count, capacity=capacity, sequence=10, quadratic=quadratic)
    assert packing.largest <= best * (1 + 1.01e-4)  # within 0.01 % of the bound nothing better is looked for
    assert packing.bound <= best * (1 + 1e-12)
    assert capacity is None or max(packing.tokens) <= capacity
    assert sorted(sample for group in packing.groups for sample in group) == list(range(len(lengths)))
    assert packing.lengths == tuple(tuple(lengths[sample] for sample in group) for group in packing.groups)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [None, 1.02])
def test_many_samples_come_close_to_the_bound(seed: int, capacity: float | None) -> None:
    """A largest-first packing alone is further away."""
    lengths = np.random.default_rng(seed).lognormal(6, 0.8, 300).astype(int) + 1
    room = None if capacity is None else int(lengths.sum() / 16 * capacity)
    packing = ps.pack(lengths, 16, capacity=room)
    assert packing.gap <= 1e-3
    assert room is None or max(packing.tokens) <= room


def test_long_samples_share_a_microbatch_with_fewer_others_if_attention_counts() -> None:
    """Two samples of 100 cost as much as one of 200 by length alone; with attention the long one costs twice as much."""
    lengths = [200, 100, 100, 100, 100]
    assert ps.pack(lengths, 3).tokens == (200, 200, 200)
    packing = ps.pack(lengths, 2, sequence=100, quadratic=1.0)
    assert packing.lengths == ((200,), (100, 100, 100, 100))
    assert packing.costs == (4.0, 4.0)
    assert packing.gap == 0.0


@pytest.mark.parametrize(
    ("lengths", "count", "options", "error", "message"),
    [
        ([5, 9, 3], 2, {"capacity": 8}, PlanError, "sample 1 has 9 tokens, more than the capacity of 8 per microbatch"),
        ([5, 5, 5], 2, {"capacity": 7}, PlanError, "15 tokens do not fit into 2 microbatches of at most 7: use at least 3 microbatches"),
        ([5, 5, 5], 2, {"capacity": 8}, PlanError, "no packing of 3 samples, 15 tokens, into 2 microbatches of at most 8 exists"),
        ([5, 5], 3, {}, PlanError, "2 samples cannot fill 3 microbatches: ask for at most 2"),
        ([5, 5], 0, {}, CostsError, "microbatches must be a whole number of at least 1, got 0"),
        ([5, [2, 3]], 1, {}, CostsError, r"lengths\[1\] has 2 values"),
        ([5, 5], 1, {"quadratic": 0.5}, CostsError, "give that length as sequence="),
        ([5, 5], 1, {"capacity": 2.5}, CostsError, "capacity must be a whole number of tokens"),
    ],
)
def test_refusals_have_the_numbers(lengths: list, count: int, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ps.pack(lengths, count, **options)
