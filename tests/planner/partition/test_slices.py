"""Lengths of slices: dynamic programming against every way to cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.planner.partition.slices import (
    MOST_EDGES,
    choose_lengths,
    count_pipeline_time,
    list_edges,
    minimise,
    split_equal_time,
    split_equally,
    tabulate,
)
from penstock.planner.profile import SliceCost


def best_of_all(table: np.ndarray, slices: int, ranks: int) -> float:
    """The least sum + (ranks - 1) x longest over all ways to cut, tried one by one."""
    last = len(table) - 1
    ways = [(0, *inner, last) for inner in combinations(range(1, last), slices - 1)]
    return min(value_of(table, cuts, ranks) for cuts in ways)


def value_of(table: np.ndarray, cuts: tuple[int, ...], ranks: int) -> float:
    times = [float(table[first, end]) for first, end in pairwise(cuts)]
    return sum(times) + (ranks - 1) * max(times)


@pytest.mark.parametrize("seed", range(300))
def test_no_way_to_cut_takes_less(seed):
    """Any times of slices, not only those of the model: with them, a longer slice may be worth a smaller sum."""
    chance = np.random.default_rng(seed)
    count, ranks = int(chance.integers(2, 10)), int(chance.integers(1, 9))
    slices = int(chance.integers(1, count + 1))
    times = chance.integers(1, 20, (count + 1, count + 1)).astype(float) if seed % 2 else chance.uniform(0.1, 5, (count + 1, count + 1))
    table = np.where(np.triu(np.ones_like(times), 1) > 0, times, np.inf)
    cuts = minimise(table, slices, ranks)
    assert len(cuts) == slices + 1
    assert (cuts[0], cuts[-1]) == (0, count)
    assert all(first < last for first, last in pairwise(cuts))
    assert value_of(table, cuts, ranks) == pytest.approx(best_of_all(table, slices, ranks), rel=1e-12)


def random_cost(chance: np.random.Generator) -> SliceCost:
    terms = chance.uniform(0, 1, 3) * (chance.uniform(0, 1, 3) < 0.8)
    return SliceCost(fixed=terms[0], token=terms[1] / 100, pair=terms[2] / 1e5)


@pytest.mark.parametrize("seed", range(200))
def test_never_worse_than_equal_lengths_or_equal_times(seed):
    chance = np.random.default_rng(seed)
    cost, ranks, slices = random_cost(chance), int(chance.integers(1, 17)), int(chance.integers(1, 9))
    tokens, granularity = int(chance.integers(600, 5000)), int(chance.choice([16, 50, 64]))
    chosen = choose_lengths(cost, tokens, slices, ranks, granularity)
    assert sum(chosen) == tokens
    assert len(chosen) == slices
    assert all(length % granularity == 0 for length in chosen[:-1])
    for other in (split_equally(tokens, slices, granularity), split_equal_time(cost, tokens, slices, granularity)):
        assert sum(other) == tokens
        assert len(other) == slices
        assert min(other) > 0
        assert all(length % granularity == 0 for length in other[:-1])
        assert count_pipeline_time(cost, chosen, ranks) <= count_pipeline_time(cost, other, ranks) * (1 + 1e-12)


def test_equal_times_are_equal_up_to_the_granularity():
    cost = SliceCost(token=1.0, pair=0.01)
    lengths = split_equal_time(cost, 100_000, slices=4, granularity=1)
    whole = cost.at(100_000, 0)
    prefix = 0
    for length in lengths:
        share = cost.at(length, prefix) / whole
        prefix += length
        assert share == pytest.approx(0.25, abs=2 * cost.at(200, 100_000) / whole)  # a step is 196 tokens: at most 512 places to cut


def test_long_sequences_are_cut_at_coarser_places():
    edges = list_edges(1_000_000, 128)
    assert len(edges) <= MOST_EDGES + 1
    assert (edges[0], edges[-1]) == (0, 1_000_000)
    assert all(edge % 128 == 0 for edge in edges[:-1].tolist())


@pytest.mark.parametrize("cut", [lambda: choose_lengths(SliceCost(token=1.0), 200, 5, 2, 64), lambda: split_equally(200, 5, 64)])
def test_more_slices_than_places_are_refused(cut):
    with pytest.raises(ScheduleError, match="4 places to end a slice cannot be cut into 5 slices"):
        cut()


def test_a_table_has_times_for_slices_only():
    table = tabulate(SliceCost(fixed=1.0, pair=0.5), np.array([0, 2, 5]))
    assert table.tolist() == [[np.inf, 2.0, 7.25], [np.inf, np.inf, 6.25], [np.inf] * 3]
