"""Timelines on fewer cores than ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import UsageError
from penstock.simulator.shared_cores import share_cores


def timeline(name: str = "1f1b", ranks: int = 4, microbatches: int = 8, **costs: float) -> ps.Timeline:
    return ps.simulate(ps.lower(ps.schedule(name, ranks=ranks, microbatches=microbatches)), ps.Costs(**costs))


def test_one_core_does_all_the_work_one_after_the_other():
    """Without latency, one core is never idle: the makespan is the work of all ranks."""
    before = timeline("zbv", f=2.0, i=1.0, w=0.5)
    after = share_cores(before, 1)
    assert after.makespan == pytest.approx(before.busy.sum())


def test_two_ranks_of_gpipe_by_hand():
    """With one microbatch nothing overlaps, so sharing changes nothing. With two, 0F1 and 1F0 share the core and take twice as long."""
    one = timeline("gpipe", 2, 1)
    assert share_cores(one, 1).makespan == one.makespan
    two = share_cores(timeline("gpipe", 2, 2, f=1.0, b=1.0), 1)
    spans = {str(span.action): (span.start, span.end) for rank in range(2) for span in two.spans(rank)}
    assert spans["0F0"] == (0.0, 1.0)
    assert spans["0F1"] == (1.0, 3.0)
    assert spans["1F0"] == (1.0, 3.0)
    assert spans["1F1"] == (3.0, 4.0)


def test_a_core_for_every_rank_changes_nothing():
    before = timeline()
    assert share_cores(before, 4) is before
    with pytest.raises(UsageError, match="at least 1"):
        share_cores(before, 0)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zbv", "interleaved-1f1b", "dualpipe-v"]),
    ranks=st.integers(2, 5),
    cores=st.integers(1, 4),
    latency=st.sampled_from([0.0, 0.3]),
)
def test_no_order_changes_and_no_core_works_faster(name, ranks, cores, latency):
    before = timeline(name, ranks, 2 * ranks, f=1.0, i=0.7, w=0.4, latency=latency)
    after = share_cores(before, cores)
    work = before.busy.sum()
    assert after.makespan >= max(before.makespan, work / cores) - 1e-9
    if latency == 0.0:
        assert after.makespan <= before.makespan * ranks + 1e-9
    ends = after.end[after.computes]
    starts = after.start[after.computes]
    assert (ends - starts >= (before.end - before.start)[before.computes] - 1e-9).all()
    # Up to any moment, the cores have not done more work than they can.
    for moment in np.linspace(0.0, after.makespan, 9)[1:]:
        length = np.where(ends > starts, ends - starts, 1.0)
        done = ((np.minimum(ends, moment) - starts).clip(0) / length * (before.end - before.start)[before.computes])[ends <= moment].sum()
        assert done <= cores * moment + 1e-9
    for rank in range(ranks):
        spans = after.spans(rank)
        assert [str(span.action) for span in spans] == [str(span.action) for span in before.spans(rank)]
        assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(spans))
    for transfer in after.transfers():
        assert transfer.end - transfer.start == pytest.approx(latency, abs=1e-9)
