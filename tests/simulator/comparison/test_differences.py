"""A measured timeline over its prediction. What is measured here is simulated under other costs, so that the culprit is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import UsageError
from penstock.ir.costs import Costs
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.simulator.comparison.differences import Differences, differences, encode
from penstock.simulator.comparison.lateness import ACTION, MESSAGE, SLACK, totals
from penstock.simulator.timeline import Timeline
from penstock.text.units import Units
from simulator.draws import costs, programs, schedules_of_any_kind, tables, zoo
from simulator.runs import run

Pair = tuple[Table, Costs, Costs]


def measured(table: Table, taken: Costs) -> Timeline:
    return replace(run((table, taken)), source="measured")


def laid(table: Table, one: Costs, other: Costs, **options: float) -> Differences:
    """The program of a schedule as measured under other costs, over the prediction of the schedule."""
    program = table if isinstance(table, Program) else ps.lower(table)
    return differences(ps.simulate(table, one), measured(program, other), **options)


@st.composite
def pairs(draw: st.DrawFn, of: st.SearchStrategy[Table] = tables) -> Pair:
    """A table and two costs, as different as they can be."""
    table = draw(of)
    return table, *(draw(costs(table)) for _ in range(2))


def ends(timeline: Timeline) -> dict[tuple[int, str], float]:
    return {(rank, str(span.action)): span.end for rank in range(timeline.ranks) for span in timeline.spans(rank)}


# The arithmetic -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_lateness_is_the_difference_of_the_ends(case: Pair) -> None:
    table, one, other = case
    predicted, ran = run((table, one)), measured(table, other)
    first, second = ends(predicted), ends(ran)
    for said in encode(differences(predicted, ran, scale=1.0))["actions"]:
        key = said["rank"], said["action"]
        assert (said["predicted_end"], said["end"]) == (first[key], second[key])
        assert said["late"] == second[key] - first[key]


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_lateness_is_what_was_inherited_and_what_is_its_own(case: Pair) -> None:
    table, one, other = case
    found = differences(run((table, one)), measured(table, other), scale=1.0)
    late = found.lateness
    inherited = np.append(late.late, 0.0)[late.cause]
    np.testing.assert_allclose(inherited + late.transit + late.between - late.slack + late.own, late.late, atol=1e-9)
    assert (late.slack >= 0).all()
    for place in range(len(late.late)):
        assert sum(delay.added for delay in late.chain(place)) == pytest.approx(late.late[place], abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_the_way_to_the_end_adds_up_to_the_difference_of_the_makespans(case: Pair) -> None:
    table, one, other = case
    predicted, ran = run((table, one)), measured(table, other)
    found = differences(predicted, ran, scale=1.0)
    assert sum(delay.added for delay in found.way) == pytest.approx(ran.makespan - predicted.makespan, abs=1e-9)
    assert sum(total.added for total in totals(found.way)) == pytest.approx(ran.makespan - predicted.makespan, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(pairs(schedules_of_any_kind))
def test_what_was_waited_for_ended_last(case: Pair) -> None:
    """Without slots and gathers an action starts when its message is there or its rank is free, whichever is later."""
    table, one, other = case
    predicted, ran = run((table, one)), run((table, other))
    arrivals: dict[tuple[int, str], float] = {}
    for transfer in ran.transfers():
        key = transfer.target, str(transfer.used)
        arrivals[key] = max(arrivals.get(key, 0.0), transfer.end)
    said = {(each["rank"], each["action"]): each for each in encode(differences(predicted, ran, scale=1.0))["actions"]}
    for rank in range(table.ranks):
        free, before = 0.0, None
        for span in ran.spans(rank):
            each = said[rank, str(span.action)]
            there = max((arrivals.get((rank, str(part)), 0.0) for part in span.action.parts), default=0.0)
            assert each["between"] == 0
            if there > free:
                assert each["waited_for"]["rank"] != rank
            else:
                assert each["waited_for"] == (None if before is None else {"rank": rank, "action": before})
            free, before = span.end, str(span.action)


@settings(deadline=None, max_examples=40)
@given(pairs(), st.floats(0, 0.3))
def test_they_part_at_the_first_action_that_is_too_late(case: Pair, tolerance: float) -> None:
    table, one, other = case
    predicted, ran = run((table, one)), measured(table, other)
    found = differences(predicted, ran, tolerance=tolerance, scale=1.0)
    first, second = ends(predicted), ends(ran)
    margin = (tolerance + 1e-9) * predicted.makespan
    apart = {key: end for key, end in second.items() if abs(end - first[key]) > margin}
    if found.first is None:
        assert not apart
    else:
        assert apart[found.first.rank, str(found.first.action)] == min(apart.values())
        assert sum(delay.added for delay in found.first.way) == pytest.approx(found.first.late, abs=1e-9)


# The culprit ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(zoo(), st.data())
def test_a_slow_stage_is_named_and_nothing_else(table: Schedule, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, table.stages - 1))
    slow = data.draw(st.sampled_from(["f", "i", "w"] if table.training else ["f"]))
    usual = Costs(f=1, i=1, w=1, latency=0.125)
    unusual = replace(usual, **{slow: tuple(1.5 if each == stage else 1.0 for each in range(table.stages))})
    found = laid(table.with_graph(table.graph), usual, unusual)
    kinds = {"f": {Kind.F}, "i": {Kind.I, Kind.B}, "w": {Kind.W, Kind.B}}[slow]
    slowed = {work for each in found.lengths if each.mean.ratio != 1 for work in [each.work] for part in work}
    assert all(any(part == (stage, kind) for kind in kinds for part in work) for work in slowed)
    assert slowed == {each.work for each in found.lengths if any(part[0] == stage and part[1] in kinds for part in each.work)}
    for delay in found.way:
        if delay.added > 1e-9:
            assert delay.what == ACTION
            assert any(part.stage == stage and part.kind in kinds for part in delay.action.parts)  # type: ignore[union-attr]
    assert all(each.travel.difference == pytest.approx(0) for each in found.channels)


@settings(deadline=None, max_examples=60)
@given(zoo(), st.data())
def test_a_slow_link_is_named_and_nothing_else(table: Schedule, data: st.DataObject) -> None:
    """What one stage puts out is larger: the messages of its output, and of the gradients for it, are slow."""
    large = data.draw(st.integers(0, table.stages - 1))
    usual = Costs(f=1, i=1, w=1, output=0.125, bandwidth=1.0)
    unusual = replace(usual, output=tuple(0.75 if each == large else 0.125 for each in range(table.stages)))
    found = laid(table, usual, unusual)
    ranks = set()
    for transfer in found.measured.transfers():
        forward = transfer.kind is Kind.SEND_F
        if (transfer.sent if forward else transfer.used).stage == large:
            ranks.add((transfer.source, transfer.target, transfer.kind))
    assert {(each.source, each.target, each.kind) for each in found.channels if each.travel.difference > 1e-9} == ranks
    for delay in found.way:
        if delay.added > 1e-9:
            assert delay.what == MESSAGE
            assert (delay.source, delay.rank, delay.way) in ranks
    assert all(each.mean.ratio == pytest.approx(1) for each in found.lengths)


def test_one_slow_action_of_many() -> None:
    """1f1b, 4 ranks: on rank 1 the forward of microbatch 5 takes 4 instead of 1, once. Its rank has no slack, so all is late by 3."""
    table = ps.schedule("1f1b", ranks=4, microbatches=8)
    slow = [[1.0] * 8 for _ in range(4)]
    slow[1][5] = 4.0
    found = laid(table, Costs(), Costs(f=slow))
    assert (found.first.rank, str(found.first.action), found.first.late) == (1, "1F5", 3)
    worst = totals(found.way)[0]
    assert (worst.name, worst.added, len([each for each in worst.delays if each.added])) == ("stage 1 F", 3, 1)
    assert found.makespan.difference == sum(delay.added for delay in found.way if delay.what in (ACTION, SLACK))
    by_rank = [both.difference for both in found.busy]
    assert by_rank == [0, 3, 0, 0]


def test_a_slow_rank_of_a_looped_placement() -> None:
    table = ps.schedule("interleaved-1f1b", ranks=4, microbatches=8)
    on_rank = [1.25 if stage % 4 == 2 else 1.0 for stage in range(8)]
    found = laid(table, Costs(latency=0.1), Costs(f=on_rank, i=on_rank, w=on_rank, latency=0.1))
    assert [both.ratio for both in found.busy] == pytest.approx([1, 1, 1.25, 1])
    assert {total.name.split(" ")[1] for total in totals(found.way) if total.added > 1e-9} <= {"2", "6"}
    assert found.first.rank == 2


def test_optimizer_and_reduction_are_part_of_the_way() -> None:
    table = ps.lower(ps.schedule("1f1b", ranks=2, microbatches=4), fsdp=True)
    found = laid(table, Costs(), Costs(optimizer=[0.0, 5.0], reduce=3.0))
    added = {total.name: total.added for total in totals(found.way) if total.added}
    assert set(added) == {"the optimizer's step of rank 1", "rank 1 after its last action", "slack in the prediction"}
    assert added["the optimizer's step of rank 1"] == 5
    assert sum(added.values()) == found.makespan.difference


def test_a_faster_stage_is_early() -> None:
    found = laid(ps.schedule("gpipe", ranks=3, microbatches=4), Costs(f=2, i=2), Costs(f=[2, 1, 2], i=2))
    assert found.first.late < 0
    assert found.makespan.difference <= 0
    assert {total.name for total in totals(found.way) if total.added < -1e-9 and total.what != SLACK} <= {"stage 1 F"}


# Times as they are measured ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(programs(), st.integers(0, 2**32 - 1))
def test_clocks_that_are_a_little_apart_change_little(table: Program, seed: int) -> None:
    """Times of each rank shifted by its own microseconds: nothing breaks, and the sums still hold."""
    ran = measured(table, Costs(f=1.5, latency=0.25))
    chance = np.random.default_rng(seed)
    skew = chance.uniform(0, 1e-3, table.ranks)
    node = ran.flat.graph().rank
    source, target = ran.messages.source, ran.messages.target
    ran = replace(
        ran, start=ran.start + skew[node], end=ran.end + skew[node], depart=ran.depart + skew[source], arrive=ran.arrive + skew[target]
    )
    predicted = ps.simulate(table, Costs(latency=0.25))
    found = differences(predicted, ran)
    assert sum(delay.added for delay in found.way) == pytest.approx(ran.makespan - predicted.makespan, abs=1e-9)
    idle = sum(both.measured for both in found.idle_by_cause.values())
    assert idle == pytest.approx(ran.ranks * ran.makespan - ran.busy.sum(), abs=1e-2 * (1 + ran.ranks))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b", "dualpipe-v"])
def test_an_arrival_that_is_seen_late_is_not_blamed(name: str) -> None:
    """A message that is only looked for when it is needed seems to arrive just then, long after it did."""
    table = ps.lower(ps.schedule(name, ranks=4, microbatches=12))
    slow = [1.5 if stage == 2 else 1.0 for stage in range(table.stages)]
    ran = measured(table, Costs(f=slow, latency=0.05))
    free = np.zeros(ran.flat.num_nodes)
    free[ran.waits.node] = ran.waits.free
    seen = np.maximum(ran.arrive, free[ran.flat.graph().user] + 2e-4)
    ran = replace(ran, arrive=seen, start=ran.start + 5e-4 * ran.computes)
    found = differences(ps.simulate(table, Costs(latency=0.05)), ran)
    worst = totals(found.way)[0]
    assert "stage 2 F" in worst.name
    assert all(total.added < 0.05 * worst.added for total in totals(found.way) if "stage 2 F" not in total.name)


def test_time_between_actions_is_overhead() -> None:
    """A rank that begins everything after its first action 0.5 late hesitates once, for 0.5."""
    table = ps.lower(ps.schedule("1f1b", ranks=1, microbatches=3))
    plain = ps.simulate(table)
    second = plain.waits.node[1]
    late = np.arange(len(plain.start)) >= second
    ran = replace(plain, start=plain.start + 0.5 * late, end=plain.end + 0.5 * late, source="measured")
    found = differences(plain, ran)
    assert found.idle_by_cause["overhead"].measured == 0.5
    assert [(each.what, each.rank, each.added) for each in found.way if each.added] == [("between", 0, 0.5)]
    assert str(found.first.action) == "0B0"


# Units and other work -----------------------------------------------------------------------------------------------------


def test_scale() -> None:
    table = ps.schedule("zb-h1", ranks=3, microbatches=5)
    amounts = Costs(f=[1, 2, 1], i=1.5, w=0.5, latency=0.25, output=1, bandwidth=4.0, optimizer=0.5)
    plain, in_ms = ps.simulate(table, amounts), replace(ps.simulate(table, amounts).scaled(1e-3), source="measured")
    assert differences(plain, in_ms, scale=1.0).unlike == pytest.approx(1e-3)
    with pytest.raises(UsageError, match=r"unit of the predicted times is not known.*takes 0.001 times as long as predicted.*'auto'"):
        differences(plain, in_ms)
    known = differences(plain.in_units(Units("ms")), in_ms.in_units(Units("s")))
    assert (known.scale, known.first) == (pytest.approx(1e-3), None)
    for scale in (1e-3, "auto"):
        found = differences(plain, in_ms, scale=scale)
        assert found.scale == pytest.approx(1e-3)
        assert (found.unlike, found.first) == (None, None)
        assert found.makespan.ratio == pytest.approx(1)
        assert found.communication.ratio == pytest.approx(1)
    again = ps.simulate(table, in_ms.costs)
    np.testing.assert_allclose(again.end, in_ms.end)
    np.testing.assert_allclose(again.arrive, in_ms.arrive)
    assert again.makespan == pytest.approx(in_ms.makespan)


def test_the_scale_that_is_found_is_the_median_s() -> None:
    """One slow stage of four does not make the unit another."""
    table = ps.schedule("1f1b", ranks=4, microbatches=8)
    found = laid(table, Costs(), ps.simulate(table, Costs(f=[1, 3, 1, 1])).scaled(0.01).costs, scale="auto")
    assert found.scale == pytest.approx(0.01)
    assert found.first.rank == 1


def test_other_work_is_refused_with_the_reason() -> None:
    base = ps.simulate(ps.schedule("1f1b", ranks=4, microbatches=8))
    skipping = ps.schedule("1f1b", ranks=4, microbatches=8).with_graph(StageGraph.chain(4, skips=[(0, 3)]))
    others = [
        ("4 ranks and the other 2", ps.schedule("1f1b", ranks=2, microbatches=8)),
        ("8 microbatches and the other 4", ps.schedule("1f1b", ranks=4, microbatches=4)),
        ("4 stages and the other 8", ps.schedule("interleaved-1f1b", ranks=4, microbatches=8)),
        ("0B0 of rank 0 is in the first alone", ps.schedule("zb-h1", ranks=4, microbatches=8)),
        ("0B0 of rank 0 is in the first alone", ps.schedule("inference", ranks=4, microbatches=8)),
        ("they do not send the same", skipping),
    ]
    for reason, table in others:
        with pytest.raises(UsageError, match=reason):
            differences(base, ps.simulate(table))
    for options in ({"scale": 0.0}, {"scale": float("nan")}, {"scale": "car"}, {"tolerance": -1.0}):
        with pytest.raises(UsageError, match=next(iter(options))):
            differences(base, base, **options)


def test_another_order_is_the_same_work() -> None:
    one, other = (ps.simulate(ps.schedule(name, ranks=2, microbatches=4)) for name in ("1f1b", "gpipe"))
    found = differences(one, other)
    rank, predicted, ran = found.match.other_order
    assert (rank, str(predicted), str(ran)) == (0, "0B0", "0F2")
    assert sum(delay.added for delay in found.way) == other.makespan - one.makespan
    assert differences(one, one).match.other_order is None


def test_messages_are_matched_whatever_the_order_of_sending() -> None:
    """A rank sends in another order, and each message has a size of its own: each takes what it took."""
    sizes = Costs(output=[[float(1 + 8 * stage + microbatch) for microbatch in range(8)] for stage in range(3)], bandwidth=64.0)
    one, other = (ps.simulate(ps.schedule(name, ranks=3, microbatches=8), sizes) for name in ("gpipe", "1f1b"))
    pair = differences(one, other).match
    assert pair.message.tolist() != list(range(one.num_messages))
    np.testing.assert_allclose((one.arrive - one.depart)[pair.message], other.arrive - other.depart, atol=1e-9)
    assert [str(each.sent) for each in one.transfers()] != [str(each.sent) for each in other.transfers()]


@settings(deadline=None, max_examples=40)
@given(zoo())
def test_a_program_is_its_schedule_s_work(table: Schedule) -> None:
    """Without slots a program runs as its schedule does: nothing is apart, wherever its actions stand in the rows."""
    program = ps.lower(table).changed(buffers=None)
    found = differences(ps.simulate(table, Costs(latency=0.125)), measured(program, Costs(latency=0.125)), tolerance=0)
    assert found.first is None
    assert not any(delay.added for delay in found.way)
    assert found.match.other_order is None
    assert all(each.mean.ratio == 1 for each in found.lengths)
    assert sum(each.count for each in found.channels) == found.predicted.num_messages
