"""Tables small enough to time on paper: the engine finds what the paper says, and so does the interpreter of the tests."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.ir.costs import Costs
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.table import Table
from penstock.simulator.gaps import Gap
from penstock.simulator.timeline import Timeline
from penstock.verifier.rules.memory import peak_memory
from simulator.interpreter import interpret
from verifier.build import program, schedule

BOTH_WAYS = Placement.custom([0, 1, 0])
"""Rank 0 sends activations of stage 0 and gradients of stage 2 to rank 1."""


def timed(table: Table, costs: Costs, *starts: list[float]) -> Timeline:
    """The timeline, once both simulators have given these starts, rank by rank."""
    timeline = ps.simulate(table, costs)
    assert interpret(table, costs).start == list(starts)
    assert timeline.start.tolist() == [start for row in starts for start in row]
    return timeline


def told(timeline: Timeline, rank: int) -> list[str]:
    return [f"{gap.start:g}-{gap.end:g} {gap.cause} {gap.action} {gap.rank}" for gap in timeline.gaps(rank)]


def path(timeline: Timeline) -> list[str]:
    return [f"{step.what} {step.action} on {step.rank}: {step.start:g}-{step.end:g}" for step in timeline.critical_path]


def test_two_ranks_with_latency_and_an_optimizer() -> None:
    costs = Costs(f=2, i=1, w=2, latency=0.5, optimizer=4, activation=3, output=1)
    table = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    timeline = timed(table, costs, [0, 2, 8, 13], [2.5, 4.5, 7.5, 9.5])
    assert timeline.makespan == 20
    assert timeline.busy.tolist() == [14, 14]
    assert timeline.finished.tolist() == [20, 16.5]
    assert timeline.bubble == 12 / 40
    assert timeline.span_bubble == 6 / 20
    assert [span.wait for span in timeline.spans(0)] == [0, 0, 4, 2]
    assert told(timeline, 0) == ["4-7.5 waiting 1B0 1", "7.5-8 communication 1B0 1", "11-12.5 waiting 1B1 1", "12.5-13 communication 1B1 1"]
    assert told(timeline, 1) == ["0-2.5 fill None None", "16.5-20 drain None None"]
    assert timeline.idle_by_cause == {"fill": 2.5, "waiting": 5, "communication": 1, "memory": 0, "drain": 3.5}
    assert timeline.peak_memory == [2 * 3 + 1, 3 + 1]  # rank 1's second input arrives at 4.5, as the first is through
    assert path(timeline) == [
        "action 0F0 on 0: 0-2",
        "message 0F0 on 1: 2-2.5",
        "action 1F0 on 1: 2.5-4.5",
        "action 1B0 on 1: 4.5-7.5",
        "action 1F1 on 1: 7.5-9.5",
        "action 1B1 on 1: 9.5-12.5",
        "message 1B1 on 0: 12.5-13",
        "action 0B1 on 0: 13-16",
        "optimizer None on 0: 16-20",
    ]


def test_a_link_carries_one_message_at_a_time() -> None:
    costs = Costs(output=[6, 0], bandwidth=2, latency=1)  # type: ignore[arg-type]
    timeline = timed(schedule("0F0 0F1", "1F0 1F1"), costs, [0, 1], [5, 9])
    assert [(t.start, t.end, t.size) for t in timeline.transfers()] == [(1, 5, 6), (5, 9, 6)]
    assert path(timeline)[1:3] == ["message 0F0 on 1: 1-5", "message 0F1 on 1: 5-9"]
    assert timeline.peak_memory == [0, 6]


@pytest.mark.parametrize(("contention", "last", "end"), [("independent", 8, 9), ("pair", 8, 9), ("duplex", 8, 9), ("rank", 9, 10)])
def test_one_link_a_rank_serves_what_comes_and_what_goes(contention: str, last: float, end: float) -> None:
    """At 4 rank 1 sends on the first microbatch while the second, sent at 2, is on its way in from 3 to 5."""
    first = last - 2
    rows = ("0F0 0F1", "1F0 1F1", "2F0 2F1")
    timeline = timed(schedule(*rows), Costs(latency=2, contention=contention), [0, 1], [3, 5], [first, last])
    assert timeline.makespan == end


@pytest.mark.parametrize("contention", ["independent", "pair", "duplex", "rank"])
@pytest.mark.parametrize(("both", "late"), [("(0F1;2B0)OVERLAP_F_B", 0), ("(2B0;0F1)OVERLAP_F_B", 1)])
def test_the_two_ways_of_a_pair_share_its_link_in_the_order_of_sending(both: str, late: float, contention: str) -> None:
    """Together they take half of 1 + 2; on a shared link the second of the two messages comes 1 later."""
    table = schedule(f"0F0 2F0 {both} 0B0 2F1 2B1 0B1", "1F0 1F1 1B0 1B1", placement=BOTH_WAYS)
    d = 0 if contention == "independent" else late
    first = [0, 4, 5, 11.5 + d, 13.5 + d, 14.5 + d, 20.5 + d]
    timed(table, Costs(latency=1, overlap=0.5, contention=contention), first, [2, 7.5 + d, 8.5 + d, 17.5 + d])


def test_each_pair_of_ranks_has_its_own_latency_and_bandwidth() -> None:
    """The way down takes 2 + 6 / 3, the way back 1."""
    costs = Costs(output=[6, 0], latency=[[0, 2], [1, 0]], bandwidth=[[None, 3], [None, None]])  # type: ignore[arg-type]
    timed(schedule("0F0 0B0", "1F0 1B0"), costs, [0, 9], [5, 6])


@pytest.mark.parametrize(("lanes", "first", "second"), [(((0, 1), (2, 3)), 4, 4), (((0, 1), (0, 3)), 4, 7), (((0, 1), (2, 1)), 4, 7)])
def test_messages_with_a_lane_in_common_go_one_after_the_other(
    lanes: tuple[tuple[int, int], tuple[int, int]], first: float, second: float
) -> None:
    """Ranks 0 and 1 both send to rank 2 at 1: on lanes of their own, out of one network card, and into one."""
    table = schedule("0F0", "1F0", "2F0", graph=StageGraph(3, ((0, 2), (1, 2))))
    own = [[(10, 10)] * 3 for _ in range(3)]
    own[0][2], own[1][2] = lanes
    timeline = timed(table, Costs(latency=3, contention="links", lanes=own), [0], [0], [second])  # type: ignore[arg-type]
    assert [(t.source, t.start, t.end) for t in timeline.transfers()] == [(0, 1, first), (1, second - 3, second)]


def test_at_the_same_time_the_lower_rank_sends_first() -> None:
    """Stages 0 and 1 both feed stage 2, on rank 2, whose one link takes the message of rank 0 first."""
    table = schedule("0F0", "1F0", "2F0", graph=StageGraph(3, ((0, 2), (1, 2))))
    timeline = timed(table, Costs(latency=3, contention="rank"), [0], [0], [7])
    assert [(t.source, t.start, t.end) for t in timeline.transfers()] == [(0, 1, 4), (1, 4, 7)]
    assert path(timeline) == ["action 0F0 on 0: 0-1", "message 0F0 on 2: 1-4", "message 1F0 on 2: 4-7", "action 2F0 on 2: 7-8"]


def test_a_send_waits_for_a_slot() -> None:
    """The third message needs the place of the second, which rank 1 takes at 6, when it is through with the first."""
    sends = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2"
    table = program(sends, "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2", channels={(0, 1, Kind.SEND_F): 1})
    timeline = timed(table, Costs(f=[1, 4], latency=1), [0, 1, 1, 2, 2, 6], [0, 2, 6, 6, 10, 10])  # type: ignore[arg-type]
    assert timeline.gaps(0) == [Gap(3, 6, "memory", table[0][5], 0), Gap(6, 14, "drain")]
    assert str(timeline.gaps(0)[0]) == "3 to 6: waits for a slot to send 0SEND_F2"


def test_a_rank_that_waits_for_a_send_that_waits_for_a_slot() -> None:
    """Stage 0 feeds stages 1 and 2; rank 1 is slow, and the send to it holds up the send to rank 2."""
    sends = " ".join(f"0F{m} 0SEND_F{m} 0SEND_F{m}>2" for m in range(3))
    slow, quick = ("1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2", "2RECV_F0<0 2F0 2RECV_F1<0 2F1 2RECV_F2<0 2F2")
    table = program(sends, slow, quick, graph=StageGraph(3, ((0, 1), (0, 2))), channels={(0, 1, Kind.SEND_F): 1})
    costs = Costs(f=[1, 10, [1, 1, 30]], latency=1)  # type: ignore[list-item]
    timeline = timed(table, costs, [0, 1, 1, 1, 2, 2, 2, 12, 12], [0, 2, 12, 12, 22, 22], [0, 2, 3, 3, 4, 13])
    assert told(timeline, 2) == ["0-2 fill None None", "4-12 memory 0SEND_F2 0", "12-13 communication 0F2 0"]
    assert path(timeline) == [
        "action 0F0 on 0: 0-1",
        "message 0SEND_F0 on 1: 1-2",
        "action 1F0 on 1: 2-12",
        "message 0SEND_F2>2 on 2: 12-13",
        "action 2F2 on 2: 13-43",
    ]


@pytest.mark.parametrize("contention", ["independent", "rank"])
def test_a_slot_is_free_when_its_message_has_arrived(contention: str) -> None:
    """All receives are posted at once; with one slot the second send waits until the first message is there."""
    table = program("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1", channels={(0, 1, Kind.SEND_F): 1})
    timeline = timed(table, Costs(latency=5, contention=contention), [0, 1, 1, 6], [0, 0, 6, 11])
    assert told(timeline, 0) == ["2-6 memory 0SEND_F1 0", "6-12 drain None None"]
    assert path(timeline) == [
        "action 0F0 on 0: 0-1",
        "message 0SEND_F0 on 1: 1-6",
        "message 0SEND_F1 on 1: 6-11",
        "action 1F1 on 1: 11-12",
    ]


def test_collectives_run_beside_and_compute_waits_for_its_parameters() -> None:
    row = "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0RESHARD 1RESHARD"
    costs = Costs(unshard=2, reduce=5, optimizer=0.5, parameters=3, shard=1)
    timeline = timed(program(row, placement=Placement.custom([0, 0])), costs, [0, 0, 2, 4, 5, 7, 7, 9, 9, 9])
    lanes = zip(timeline.collective_start.tolist(), timeline.collective_end.tolist(), strict=True)
    assert [pair for pair in lanes if pair[0] >= 0] == [(0, 2), (2, 4), (7, 12), (12, 17)]
    assert timeline.makespan == 18
    assert timeline.bubble == 11 / 18
    assert timeline.span_bubble == 9 / 16
    assert told(timeline, 0) == ["0-2 fill None None", "3-4 communication 1UNSHARD 0", "9-17 drain None None"]
    curve = timeline.memory(0)
    assert (curve.static, curve.peak, curve.peak_time) == (2, 2 + 6 + 2, 4)
    assert path(timeline)[:3] == ["collective 0UNSHARD on 0: 0-2", "collective 1UNSHARD on 0: 2-4", "action 1F0 on 0: 4-5"]
    assert path(timeline)[-2:] == ["collective 0REDUCE_GRAD on 0: 12-17", "optimizer None on 0: 17-18"]


def test_memory_of_a_split_backward() -> None:
    """Rank 0 holds its activation from 0 to 6, the gradient it receives from 5 to 6, and the stash from 6 to 7."""
    costs = Costs(activation=4, weight_stash=2, output=1, latency=1, parameters=10)
    timeline = timed(schedule("0F0 0I0 0W0", "1F0 1I0 1W0"), costs, [0, 5, 6], [2, 3, 4])
    curve = timeline.memory(0)
    assert dict(zip(curve.times.tolist(), curve.total.tolist(), strict=True)) == {0: 4, 5: 5, 6: 2, 7: 0}
    assert timeline.peak_memory == [15, 15]
    assert not timeline.memory(1).held["parameters"].any()


def test_an_action_gives_back_before_it_stashes() -> None:
    """With a stash above the activation, the end of I turns one into the other; the gradient that it used is gone by then."""
    costs = Costs(activation=0, weight_stash=5, output=1)
    assert ps.simulate(schedule("0F0 0I0 0W0", "1F0 1I0 1W0"), costs).peak_memory == [5, 5]


def test_without_a_backward_no_activation_is_held() -> None:
    assert ps.simulate(schedule("0F0 0F1", "1F0 1F1"), Costs(activation=9)).peak_memory == [0, 0]


def test_what_one_action_sends_goes_to_the_lowest_stage_first() -> None:
    """As in the lowered program: the link of rank 2 carries the gradient for stage 0 before the one for stage 1."""
    graph = StageGraph.chain(3, skips=[(0, 2)])
    table = schedule("0F0 0B0", "1F0 1B0", "2F0 2B0", graph=graph)
    for each in (table, ps.lower(table)):
        gradients = [
            t for t in ps.simulate(each, Costs(latency=1, contention="rank")).transfers() if t.kind is Kind.SEND_B and t.source == 2
        ]
        assert [t.target for t in sorted(gradients, key=lambda t: t.start)] == [0, 1]


def test_a_wait_for_a_send_lasts_until_the_message_is_taken() -> None:
    """The first message is on its way until 2; the second is there at 4, but rank 1 posts its receive at 6."""
    sends = "0F0 0SEND_F0 0WAIT_SEND_F0 0F1 0SEND_F1 0WAIT_SEND_F1"
    table = program(sends, "1RECV_F0 1F0 1RECV_F1 1F1")
    timeline = timed(table, Costs(f=[1, 4], latency=1, output=2), [0, 1, 2, 2, 3, 6], [0, 2, 6, 6])  # type: ignore[arg-type]
    assert told(timeline, 0) == ["1-2 memory 0WAIT_SEND_F0 0", "3-6 memory 0WAIT_SEND_F1 0", "6-10 drain None None"]
    assert str(timeline.gaps(0)[0]) == "1 to 2: waits in 0WAIT_SEND_F0"
    curve = timeline.memory(0)
    assert list(zip(curve.times.tolist(), curve.total.tolist(), strict=True)) == [(1, 2), (2, 0), (3, 2), (6, 0)]
    assert timeline.peak_memory[0] == peak_memory(table, timeline.costs)[0] == 2


def test_a_sender_holds_every_message_that_it_has_not_waited_for() -> None:
    late = program("0F0 0SEND_F0 0F1 0SEND_F1 0WAIT_SEND_F0 0WAIT_SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    costs = Costs(f=[1, 4], latency=1, output=2)  # type: ignore[arg-type]
    assert ps.simulate(late, costs).peak_memory[0] == peak_memory(late, costs)[0] == 4


@pytest.mark.parametrize(("wait", "start", "end"), [("after", 4, 14), ("before", 9, 16)])
def test_a_reduction_runs_beside_computation_until_it_is_waited_for(wait: str, start: float, end: float) -> None:
    rest = "1WAIT_REDUCE_GRAD 0B0" if wait == "before" else "0B0 1WAIT_REDUCE_GRAD"
    table = program(f"0F0 1F0 1B0 1REDUCE_GRAD {rest} 0REDUCE_GRAD 0WAIT_REDUCE_GRAD", placement=Placement.v(1))
    starts = [0, 1, 2, 4, 4, 9, 9, 14] if wait == "after" else [0, 1, 2, 4, 9, 9, 11, 16]
    timeline = timed(table, Costs(reduce=5), starts)
    assert timeline.makespan == end
    assert [span.start for span in timeline.spans(0) if str(span.action) == "0B0"] == [start]
    assert told(timeline, 0)[0] == ("6-9 " if wait == "after" else "4-9 ") + "communication 1REDUCE_GRAD 0"
