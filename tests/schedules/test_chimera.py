"""Two opposite pipelines in each other's gaps."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import ScheduleError
from schedules.test_formulas import TO_INPUT, makespan, peak, run

RANKS = range(2, 13, 2)


@pytest.mark.parametrize("p", RANKS)
def test_bubble_with_equal_forward_and_backward(p: int) -> None:
    """(p-2)/(2m+p-2) of the time for every multiple of p, in units of F = B = 2."""
    for m in range(p, 5 * p, p):
        spans = run(ps.schedule("chimera", ranks=p, microbatches=m), 2, 1, 1)
        assert makespan(spans) == 2 * (2 * m + p - 2)
        assert all(sum(end - begin for begin, end in row) == 2 * 2 * m for row in spans)


@pytest.mark.parametrize("p", RANKS)
def test_any_count_takes_no_longer_than_the_next_multiple(p: int) -> None:
    for m in range(1, 3 * p):
        whole = -(-m // p) * p
        assert makespan(run(ps.schedule("chimera", ranks=p, microbatches=m), 2, 1, 1)) <= 2 * (2 * whole + p - 2)


@pytest.mark.parametrize("p", RANKS)
def test_peak(p: int) -> None:
    """From p/2+1 on the outer ranks to p on the inner ones."""
    for m in (p, 2 * p, 3 * p):
        schedule = ps.schedule("chimera", ranks=p, microbatches=m)
        peaks = [peak(schedule, rank, TO_INPUT) for rank in range(p)]
        assert peaks == peaks[::-1]
        assert (min(peaks), peaks[0]) == (p // 2 + 1, p // 2 + 1)
        assert max(peaks) <= p


def test_each_way_is_1f1b() -> None:
    """The even microbatches alone are 1f1b of half the batch, the odd ones the same from the other end."""
    p = 6
    both, one = ps.schedule("chimera", ranks=p, microbatches=p), ps.schedule("1f1b", ranks=p, microbatches=p // 2)
    for rank in range(p):
        for way, stage in ((0, rank), (1, p - 1 - rank)):
            mine = [(a.kind, a.stage, a.microbatch // 2) for a in both[rank] if a.microbatch % 2 == way]
            assert mine == [(a.kind, a.stage, a.microbatch) for a in one[stage]]


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_odd_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ScheduleError, match=f"even number of ranks, got {ranks}: take {ranks + 1}, or 1f1b"):
        ps.schedule("chimera", ranks=ranks, microbatches=4)
