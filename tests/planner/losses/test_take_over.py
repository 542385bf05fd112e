"""Joint schedules after losses: proved, complete, on the right ranks, near the time that the busiest rank needs, within the memory."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, PlanError, ScheduleError
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.program import Program
from penstock.passes.vocabulary import Vocabulary

FAMILIES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv", "dualpipe-v", "chimera", "dualpipe")
COSTS = ps.Costs(f=1.0, i=1.1, w=0.8, latency=0.1, output=0.2, bandwidth=4.0, weight_stash=0.5, parameters=2.0)


@st.composite
def losses(draw: st.DrawFn) -> tuple[ps.Schedule, ps.Survivors]:
    """A schedule, and a mesh of its pipelines that has lost up to three ranks but no whole column."""
    name, ranks, data = draw(st.sampled_from(FAMILIES)), draw(st.sampled_from((2, 4))), draw(st.integers(2, 4))
    schedule = ps.schedule(name, ranks, draw(st.integers(1, 3)) * ranks)
    places = [(rank, replica) for rank in range(ranks) for replica in range(data)]
    lost = draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True))
    kept = {rank: [place for place in places if place[0] == rank and place not in lost] for rank in range(ranks)}
    gone = [place for place in lost if kept[place[0]] or place[1] > 0]  # the first of each column stays
    return schedule, ps.Survivors.after(ranks, data, gone)


@settings(max_examples=25)
@given(losses(), st.sampled_from((ps.Costs(), COSTS)))
def test_the_joint_schedule_is_proved_and_keeps_every_action_on_its_column(case: tuple[ps.Schedule, ps.Survivors], costs: ps.Costs) -> None:
    schedule, survivors = case
    after = ps.take_over(schedule, survivors, costs=costs)
    program = ps.lower(after.schedule)
    for semantics in ("channels", "rendezvous"):
        ps.verify(program, semantics=semantics)
    assert after.proof.actions == int(program.rows.group_offsets[-1])
    rows, single = after.schedule.rows, schedule.rows
    places = np.array(survivors.places)
    number, replica = np.divmod(rows.microbatch, survivors.data)
    # Every stage and microbatch of every replica runs once, on a rank that held the stage for that microbatch before.
    holder = schedule.placement.ranks_of(rows.stage, number)
    assert (places[rows.rank, 0] == holder).all()
    whole = Counter(zip(single.stage[single.is_kind(Kind.F)].tolist(), single.microbatch[single.is_kind(Kind.F)].tolist(), strict=True))
    forwards = rows.is_kind(Kind.F)
    for one in range(survivors.data):
        mine = forwards & (replica == one)
        assert Counter(zip(rows.stage[mine].tolist(), number[mine].tolist(), strict=True)) == whole
    # A rank that lives runs all microbatches of its own replica.
    own = [(rank, replica) in survivors.ranks for rank, replica in zip(holder.tolist(), replica.tolist(), strict=True)]
    assert (places[rows.rank, 1] == replica)[own].all()
    # Each rank holds the stages that it held before, each once.
    for rank, (pipeline_rank, _) in enumerate(survivors.places):
        assert set(after.schedule.placement.stages_of(rank)) == set(schedule.placement.stages_of(pipeline_rank))
    assert after.timeline.makespan >= max(after.timeline.busy) * (1 - 1e-9)


@given(losses())
def test_the_work_of_lost_ranks_is_spread_evenly(case: tuple[ps.Schedule, ps.Survivors]) -> None:
    schedule, survivors = case
    for rank in range(survivors.pipeline):
        taken = Counter(dict.fromkeys(survivors.list_peers(rank), 0))
        for place in survivors.lost:
            if place[0] == rank:
                taken.update(survivors.find_taker(place, k) for k in range(schedule.microbatches))
        assert max(taken.values()) - min(taken.values()) <= 1


@pytest.mark.parametrize("lost", [[(0, 1)], [(3, 2)], [(1, 0), (2, 3)], [(1, 0), (1, 3)]])
@pytest.mark.parametrize("split", [False, True])
def test_a_step_takes_little_more_than_the_busiest_rank_needs(lost: list[tuple[int, int]], split: bool) -> None:
    """No joint schedule can beat the work of the rank that runs most, plus the way of one microbatch to it and back."""
    schedule = ps.schedule("1f1b", 4, 16)
    after = ps.take_over(schedule, ps.Survivors.after(4, 4, lost), split=split)
    work = 3 * np.bincount(after.schedule.rows.rank[after.schedule.rows.is_kind(Kind.F)])
    ends = np.array([3 * rank for rank, _ in after.survivors.places])  # F of the stages before, and their backwards
    least = max(after.before.makespan if not split else 0.0, float((work + (ends if not split else 0)).max()))
    assert after.timeline.makespan >= least - 1e-9
    assert after.timeline.makespan <= 1.07 * least
    assert after.throughput == pytest.approx(after.before.makespan / after.timeline.makespan)


def test_splitting_backwards_is_left_out_where_it_is_not_allowed() -> None:
    schedule, survivors = ps.schedule("1f1b", 4, 8), ps.Survivors.after(4, 2, [(2, 0)])
    kinds = {split: set(ps.take_over(schedule, survivors, split=split).schedule.rows.kind.tolist()) for split in (False, True)}
    assert kinds[False] == {Kind.F, Kind.B}
    assert kinds[True] == {Kind.F, Kind.I, Kind.W}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv"])
@pytest.mark.parametrize("lost", [[(0, 1)], [(2, 0)]])
def test_the_memory_of_before_is_enough(name: str, lost: list[tuple[int, int]]) -> None:
    """With the limits that the schedule needed before, takers hold no more: they run in another order, and somewhat slower."""
    schedule, survivors = ps.schedule(name, 4, 8), ps.Survivors.after(4, 2, lost)
    costs = ps.Costs(weight_stash=0.5, parameters=2.0)
    limits = ps.simulate(ps.lower(schedule), costs).peak_memory
    free = ps.take_over(schedule, survivors, costs=costs)
    after = ps.take_over(schedule, survivors, costs=costs, memory_limit=limits)
    for rank, (pipeline_rank, _) in enumerate(survivors.places):
        assert after.timeline.peak_memory[rank] <= limits[pipeline_rank] * (1 + 1e-9)
    assert "memory" in after.proof.rules
    assert free.throughput * 0.6 <= after.throughput <= free.throughput + 1e-9


@pytest.mark.parametrize(
    ("name", "microbatches", "lost"),
    [("looped-bfs", 6, [(1, 1)]), ("v-half", 4, [(0, 1), (1, 0)]), ("v-min", 4, [(1, 1), (0, 0)]), ("1f1b-v", 7, [(0, 0), (1, 1)])],
)
def test_ranks_that_would_wait_for_each_other_run_their_microbatches_in_turn(
    name: str, microbatches: int, lost: list[tuple[int, int]]
) -> None:
    """The limits of before are enough for one microbatch after the other, so there is an order whatever microbatches need."""
    schedule, survivors = ps.schedule(name, 3, microbatches), ps.Survivors.after(3, 2, lost)
    sizes = [[1.0 + (3 * stage + 5 * number) % 4 for number in range(microbatches)] for stage in range(schedule.stages)]
    costs = ps.Costs(activation=sizes, weight_stash=0.3, latency=0.5)
    limits = ps.simulate(ps.lower(schedule), costs).peak_memory
    after = ps.take_over(schedule, survivors, costs=costs, memory_limit=limits)
    for rank, (pipeline_rank, _) in enumerate(survivors.places):
        held = peak = 0.0  # as the order of the rank's actions says, without the simulator
        for action in after.schedule[rank]:
            size = sizes[action.stage][action.microbatch // 2]
            held += {Kind.F: size, Kind.B: -size, Kind.I: 0.3 - size, Kind.W: -0.3}[action.kind]
            peak = max(peak, held)
        assert peak <= limits[pipeline_rank] * (1 + 1e-9)
        assert abs(held) < 1e-9


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_copies_without_microbatches_keep_their_places(name: str) -> None:
    schedule, survivors = ps.schedule(name, 2, 1), ps.Survivors.after(2, 3, [(0, 1)])
    placement = ps.take_over(schedule, survivors).schedule.placement
    for rank, (pipeline_rank, _) in enumerate(survivors.places):
        assert set(placement.stages_of(rank)) == set(schedule.placement.stages_of(pipeline_rank))


def test_a_limit_that_no_order_keeps_is_refused_with_the_numbers() -> None:
    schedule, survivors = ps.schedule("1f1b", 2, 4), ps.Survivors.after(2, 2, [(1, 1)])
    with pytest.raises(PlanError, match=r"rank 2 \(pp 1, dp 0\) would hold 1\.[0-9]+ of at most 1\.1 when peers run"):
        ps.take_over(schedule, survivors, costs=ps.Costs(output=0.1), memory_limit=[2.2, 1.1])
    with pytest.raises(PlanError, match=r"at most 0\.5"):
        ps.take_over(schedule, survivors, memory_limit=0.5)


def test_costs_by_microbatch_follow_their_microbatches() -> None:
    """A microbatch that takes longer does so on whichever rank runs it."""
    schedule, survivors = ps.schedule("1f1b", 2, 4), ps.Survivors.after(2, 2, [(1, 1)])
    costs = ps.Costs(f=[[1.0, 2.0, 3.0, 4.0]] * 2, i=[[1.0, 2.0, 3.0, 4.0]] * 2, w=1.0)
    after = ps.take_over(schedule, survivors, costs=costs)
    assert after.timeline.busy.tolist() == [24.0, 24.0, 48.0]  # f and i of 10 each, w of 4; twice on the rank that took over


def test_the_result_is_the_same_every_time() -> None:
    schedule, survivors = ps.schedule("zbv", 4, 8), ps.Survivors.after(4, 3, [(1, 1), (2, 0)])
    one, other = (ps.take_over(schedule, survivors, costs=COSTS).schedule for _ in range(2))
    assert one == other


def test_programs_and_schedules_without_backward_are_taken_over_too() -> None:
    program = ps.lower(ps.schedule("1f1b", 4, 8), offload=50)
    after = ps.take_over(program, ps.Survivors.after(4, 2, [(0, 1)]))
    assert after.schedule.rows.is_kind(Kind.OFFLOAD).sum() == 2 * program.rows.is_kind(Kind.OFFLOAD).sum() > 0
    forward = ps.take_over(ps.schedule("inference", 2, 4), ps.Survivors.after(2, 2, [(0, 1)]))
    assert set(forward.schedule.rows.kind.tolist()) == {Kind.F}
    assert forward.schedule.rows.is_kind(*COMPUTE).sum() == 16


def test_survivors_keep_the_order_of_their_mesh() -> None:
    places = ((0, 1), (1, 0), (0, 0))  # any order, as in a mesh of dp x pp
    after = ps.take_over(ps.schedule("1f1b", 2, 4), ps.Survivors(2, 2, places))
    assert after.survivors.lost == ((1, 1),)
    assert [set(after.schedule.placement.stages_of(rank)) for rank in range(3)] == [{0}, {1}, {0}]
    assert after.count_taken((1, 1)) == {1: 4}
    assert after.describe().startswith("(pp 1, dp 1) is lost, and its microbatches run elsewhere: 4 on (pp 1, dp 0); predicted step 1.")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ps.Survivors.after(2, 2, [(1, 0), (1, 1)]), "all 2 replicas of pipeline rank 1 are lost, so no rank holds its stages"),
        (lambda: ps.Survivors.after(2, 1, [(0, 0)]), "the only replica of pipeline rank 0 is lost"),
        (lambda: ps.Survivors.after(2, 2, [(2, 0)]), "place (2, 0) in a mesh of 2 pipeline ranks x 2 replicas: ranks run from 0 to 1"),
        (lambda: ps.Survivors.after(2, 2, [3]), "3 is no place of a mesh"),  # type: ignore[list-item]
        (lambda: ps.Survivors.after(2, 2, [(1, 0, 1)]), "(1, 0, 1) is no place of a mesh"),  # type: ignore[list-item]
        (lambda: ps.Survivors.after(2, 2, 3), "lost must be a list of the places of lost ranks, like [(1, 0)], got 3"),  # type: ignore[arg-type]
        (lambda: ps.Survivors.after(0, 2, []), "pipeline must be a whole number of at least 1, got 0"),
        (lambda: ps.Survivors.after(2, "2", []), "data must be a whole number of at least 1, got '2'"),  # type: ignore[arg-type]
        (lambda: ps.Survivors(2, 0, ()), "data must be a whole number of at least 1, got 0"),
        (lambda: ps.take_over(None, ps.Survivors.after(2, 2, [])), "take_over takes a Schedule or a Program, got NoneType"),  # type: ignore[arg-type]
        (lambda: ps.take_over(ps.schedule("1f1b", 2, 4), [(1, 1)]), "survivors must be penstock.Survivors, like"),  # type: ignore[arg-type]
        (
            lambda: ps.take_over(ps.schedule("1f1b", 2, 4), ps.Survivors.after(2, 2, []), split="no"),  # type: ignore[arg-type]
            "split must be True or False, got 'no'",
        ),
        (lambda: ps.Survivors(1, 2, ((0, 0), (0, 0))), "have one twice"),
        (
            lambda: ps.take_over(ps.schedule("1f1b", 4, 8), ps.Survivors.after(2, 2, [(1, 1)])),
            "the schedule is for 4 ranks, but the pipelines of the mesh have 2",
        ),
        (
            lambda: ps.take_over(Vocabulary().apply(Program.start(ps.schedule("1f1b", 2, 4))), ps.Survivors.after(2, 2, [(1, 1)])),
            "spreads the vocabulary over its ranks, and the share of a lost rank is needed for every microbatch",
        ),
        (
            lambda: ps.take_over(ps.schedule("seq1f1b", 2, 4), ps.Survivors.after(2, 2, [(1, 1)])),
            "slices, which must stay on one rank: peers can take over only whole microbatches",
        ),
    ],
)
def test_meshes_and_schedules_that_cannot_go_on_are_refused(make: object, said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)):
        make()  # type: ignore[operator]


def test_costs_of_another_type_are_refused() -> None:
    with pytest.raises(CostsError, match=r"costs must be a penstock\.Costs, got int"):
        ps.take_over(ps.schedule("1f1b", 2, 4), ps.Survivors.after(2, 2, [(1, 1)]), costs=3)  # type: ignore[arg-type]
