"""What the schedules of building blocks hold and wait: v-half, v-min and 1f1b-v."""

from __future__ import annotations

from itertools import pairwise

import pytest

import penstock as ps
from penstock.ir.kind import Kind
from penstock.schedules._blocks import PERIOD, Cycle, Squeeze
from schedules.test_formulas import EQUAL, TO_WEIGHTS, bubble, makespan, peak, run

pytestmark = pytest.mark.slow

RANKS = [*range(1, 13), 16]


def held(name: str, ranks: int, microbatches: int) -> int:
    """The most chunk activations that any rank holds, counted to the end of the backward for the weights."""
    schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches)
    return max(peak(schedule, rank, TO_WEIGHTS) for rank in range(ranks))


# Half-operations: the time of one chunk's F, I or W. A rank's share is two chunks.


@pytest.mark.parametrize("p", RANKS)
def test_v_half(p: int) -> None:
    for m in range(2 * p, 4 * p + 1, p):
        assert held("v-half", p, m) == 2 * ((p + 2) // 2)
    for m in (p, 2 * p + 1, 4 * p):
        idle = bubble("v-half", p, m, EQUAL)
        if p >= 3:
            assert idle == (3 * p - 4 if p % 2 else 3 * p - 7)


@pytest.mark.parametrize("p", RANKS)
def test_v_min(p: int) -> None:
    for m in range(2 * p, 4 * p + 1, p):
        assert held("v-min", p, m) == 2 * ((p + 4) // 3)
    for m in (p, 2 * p + 1, 4 * p):
        idle = bubble("v-min", p, m, EQUAL)
        if p >= 2:
            assert idle == (4 * p - 5 if p % 3 == 1 else 4 * p - 7)


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_v(p: int) -> None:
    for m in range(2 * p, 4 * p + 1, p):
        assert held("1f1b-v", p, m) == 2 * (2 * p // 3 + 1)
    for m in range(1, 4 * p, max(1, p // 2)):  # no longer than 1f1b, whose share of F and B takes six half-operations
        assert bubble("1f1b-v", p, m, EQUAL) <= 6 * (p - 1) == 2 * bubble("1f1b", p, m, EQUAL)


@pytest.mark.parametrize("name", ["v-half", "v-min", "1f1b-v"])
def test_small_batches_hold_and_take_no_more(name: str) -> None:
    for p in range(1, 7):
        walls = [makespan(run(ps.schedule(name, ranks=p, microbatches=m), *EQUAL)) for m in range(1, 2 * p + 2)]
        assert all(one < other for one, other in pairwise(walls))
        most = held(name, p, 2 * p)
        assert all(held(name, p, m) <= most for m in range(1, 2 * p))


def test_less_memory_costs_time() -> None:
    for p in range(4, 10):
        m = 2 * p
        order = ["zbv", "v-half", "v-min"]
        assert sorted(order, key=lambda name: -held(name, p, m)) == order
        assert sorted(order, key=lambda name: bubble(name, p, m, EQUAL)) == order


@pytest.mark.parametrize("name", ["v-half", "v-min", "1f1b-v"])
def test_whole_rounds_leave_no_slot_empty(name: str) -> None:
    """In the middle a rank works without a gap: a longer batch takes the time of its work more."""
    for p in range(1, 8):
        short, long = (makespan(run(ps.schedule(name, ranks=p, microbatches=m), *EQUAL)) for m in (3 * p, 5 * p))
        assert long - short == PERIOD * 2 * p


def test_a_cycle_takes_the_first_slots_that_are_free_in_every_round() -> None:
    cycle = Cycle()
    assert cycle.put(Kind.F, 0, 4) == 5
    assert cycle.put(Kind.F, 1, 4 + PERIOD) == 6 + PERIOD  # the slot of the next round is taken as well
    assert cycle.put(Kind.B, 1, 3 + 2 * PERIOD) == 3 * PERIOD + 2  # 3 is free but 4 is not: the first two together are 0 and 1
    assert cycle.put(Kind.B, 0, 1) == 4
    # Slots 2, 4, 11 and 18, and the same six later.
    row = [f"{chunk}{kind.name}{i}" for kind, chunk, i in cycle.row(ps.Shape(1, 2, 2))]
    assert row == ["0B0", "0F0", "0B1", "0F1", "1F0", "1F1", "1B0", "1B1"]


def test_only_what_fits_a_slot_comes_before_its_turn() -> None:
    """One rank, a plan that could be shuffled: it is kept, since the rank never waits."""
    cycle = Cycle()
    end = 0
    for kind, chunk in ((Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0)):
        end = cycle.put(kind, chunk, end)
    done = Squeeze([cycle], ps.Shape(1, 2, 2))
    assert done.makespan == 2 * PERIOD
    assert len(done.rows[0]) == 8
