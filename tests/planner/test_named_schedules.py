"""Cuts that are shifted under a timed schedule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ScheduleError

BIG = ps.Profile.transformer(layers=32, hidden=4096, heads=32, sequence=4096, vocabulary=32000, flops=400e12, microbatch=4)
UNEVEN = ps.Profile([ps.Layer(f=f, i=4 - f, w=1, activation=f, output=0.2, parameters=2) for f in (1, 3, 2, 2, 3, 1) * 2], latency=0.1)


def test_more_memory_is_never_slower():
    cases = [(BIG, 8, 32, [f"{size}GiB" for size in (50, 54, 58, 62, 66, 68, 69, 70, 73, 76, 78, 80)])]
    cases += [(UNEVEN, 4, 8, [31.0, 33.0, 36.0, 40.0, 50.0, 60.0])]
    for profile, ranks, microbatches, limits in cases:
        taken = [
            ps.plan(profile, ranks=ranks, microbatches=microbatches, schedules="1f1b", memory_limit=limit, seconds=0).objective
            for limit in limits
        ]
        assert all(loose <= tight * (1 + 1e-9) for tight, loose in pairwise(taken)), taken


def test_no_single_layer_can_be_moved_to_the_next_stage_for_a_gain():
    plan = ps.plan(BIG, ranks=8, microbatches=32, schedules="1f1b", memory_limit="70GiB", seconds=0)
    for stage in range(7):
        for by in (1, -1):
            sizes = list(plan.partition)
            sizes[stage], sizes[stage + 1] = sizes[stage] + by, sizes[stage + 1] - by
            if min(sizes) > 0:
                costs = plan.problem.recut(tuple(sizes)).costs
                timeline = ps.simulate(plan.program, costs)
                fits = all(peak <= 70 * 2**30 for peak in timeline.peak_memory)
                assert not fits or timeline.makespan >= plan.objective * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_higher_limit_is_never_slower_when_stages_may_be_recomputed(seed):
    """Layers of very different times: recomputing everything, or only where a forced cut is over, is far from the best."""
    times = np.random.default_rng(seed).uniform(0.5, 4.0, 12).tolist()
    profile = ps.Profile(layers=[ps.Layer(f=t, i=t, w=t, activation=1.0, weight_stash=0.5, output=0.1, parameters=0.5) for t in times])
    reached = []
    for limit in np.linspace(6.0, 16.0, 11).tolist():
        try:
            plan = ps.plan(profile, ranks=4, microbatches=8, memory_limit=limit, recompute=True, schedules="1f1b", rounds=0)
        except ps.PlanError:
            assert not reached, f"nothing fits {limit}, but something fits less"
            continue
        reached.append(plan.predicted.makespan)
    assert len(reached) > 5
    assert reached[0] > reached[-1]
    for tighter, looser in pairwise(reached):
        assert looser <= tighter * 1.01


def test_options_in_a_name_limit_what_is_tried():
    def names(*schedules: str) -> list[str]:
        plan = ps.plan(UNEVEN, ranks=2, microbatches=8, schedules=schedules, seconds=0)
        return sorted(candidate.name for candidate in plan.candidates)

    assert names("Interleaved1F1B{chunks=3}", "1f1b") == ["1f1b", "interleaved-1f1b{chunks=3}"]
    assert names("interleaved-1f1b{group_size=4,chunks=2}") == ["interleaved-1f1b{chunks=2,group_size=4}"]
    assert names("hanayo{waves=2}", "hanayo{chunks=4}") == ["hanayo{chunks=4}"]
    every = names("interleaved-1f1b")
    assert len(every) > 1
    assert names("interleaved-1f1b", "interleaved-1f1b{chunks=2}") == every
    grouped = ps.plan(UNEVEN, ranks=2, microbatches=8, schedules="interleaved-1f1b{chunks=2,group_size=4}", seconds=0)
    built = ps.schedule(grouped.name, 2, 8)
    assert [grouped.schedule[rank] for rank in range(2)] == [built[rank] for rank in range(2)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zb-auto{memory_limit=3}", "leave out memory_limit, which the planner chooses"),
        ("interleaved-1f1b{slices=2}", "leave out slices, which the planner chooses"),
        ("interleaved-1f1b{waves=2}", "interleaved-1f1b has no option 'waves'; its options: chunks, group_size"),
        ("zvb{chunks=2}", "there is no schedule 'zvb': did you mean 'zbv'"),
    ],
)
def test_wrong_options_in_a_name_are_refused(name, said):
    with pytest.raises(ScheduleError, match=said):
        ps.plan(UNEVEN, ranks=2, microbatches=8, schedules=[name], seconds=0)
