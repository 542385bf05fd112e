"""Messages: what crosses ranks, where receives stand, and equality with the peer's lowering."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_send_recv

import penstock as ps
from ir.naive import numbered, one_message_per_edge
from penstock.errors import PassError, VerifyError
from penstock.ir.formats import json_form
from penstock.ir.formats.files import save
from penstock.ir.program import Program
from penstock.passes.lower import lower_rank
from penstock.passes.receive import Receive
from penstock.passes.send_receive import SendReceive
from simulator.draws import orders, zoo
from verifier.interpreter import interpret

K = ps.Kind
SHAPES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("gpipe", 3, 4, {}),
    ("1f1b", 4, 7, {}),
    ("eager-1f1b", 3, 6, {}),
    ("interleaved-1f1b", 2, 5, {"chunks": 3}),
    ("looped-bfs", 3, 4, {"chunks": 2}),
    ("interleaved-zb", 2, 6, {"chunks": 2}),
    ("zb-h1", 3, 5, {}),
    ("zb-h2", 4, 9, {}),
    ("zbv", 3, 7, {}),
    ("dualpipe-v", 3, 8, {}),
    ("dualpipe", 4, 9, {}),
    ("inference", 3, 4, {}),
    ("data-parallel", 1, 3, {}),
]


def _wanted_messages(schedule: ps.Schedule) -> set[tuple[int, int, K, int, int, int]]:
    """(from rank, to rank, kind, from stage, to stage, microbatch) of everything that crosses ranks.

    An output goes once to each rank that reads it, in a message to the farthest of its readers there.
    """
    wanted = set()
    for a in range(schedule.stages):
        for m in range(schedule.units):
            low = schedule.placement.rank_of(a, m)
            farthest = {schedule.placement.rank_of(b, m): b for _, b in sorted(e for e in schedule.graph.edges if e[0] == a)}
            for high, b in farthest.items():
                if low != high:
                    wanted.add((low, high, K.SEND_F, a, b, m))
                    if schedule.training:
                        wanted.add((high, low, K.SEND_B, b, a, m))
    return wanted


def _end(action: ps.Action) -> tuple[int, int]:
    """A communication's own stage and its peer's."""
    step = 1 if action.kind in (K.SEND_F, K.RECV_B) else -1
    return action.stage, action.stage + step if action.peer is None else action.peer


def _messages(program: Program) -> tuple[list[Any], list[Any]]:
    sent, received = [], []
    for rank, row in enumerate(numbered(program)):
        for action in row:
            if action.kind.is_communication:
                stage, peer = _end(action)
                other = program.placement.rank_of(peer, action.microbatch or 0)
                if action.kind in (K.SEND_F, K.SEND_B):
                    sent.append((rank, other, action.kind, stage, peer, action.microbatch))
                else:
                    kind = K.SEND_F if action.kind is K.RECV_F else K.SEND_B
                    received.append((other, rank, kind, peer, stage, action.microbatch))
    return sent, received


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SHAPES)
@pytest.mark.parametrize("receive", ["paired", "just-in-time", 0, 1, 3, 1000])
def test_one_send_and_one_receive_for_all_that_crosses(
    name: str, ranks: int, microbatches: int, options: dict[str, Any], receive: str | int
) -> None:
    schedule = ps.schedule(name, ranks, microbatches, **options)
    program = ps.lower(schedule, receive=receive)
    sent, received = _messages(program)
    assert sorted(sent) == sorted(received) == sorted(_wanted_messages(schedule))
    assert program.schedule() == schedule
    order: dict[Any, list[Any]] = defaultdict(list)
    for message in sent:
        order[message[:3]].append(message)
    taken: dict[Any, list[Any]] = defaultdict(list)
    for message in received:
        taken[message[:3]].append(message)
    assert order == taken  # first in, first out


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SHAPES)
def test_rendezvous_holds_for_paired(name: str, ranks: int, microbatches: int, options: dict[str, Any]) -> None:
    program = ps.lower(ps.schedule(name, ranks, microbatches, **options), fsdp=True)
    ps.verify(program, semantics="channels")
    ps.verify(program, semantics="rendezvous")


def test_just_in_time_is_refused_under_rendezvous_where_it_would_hang() -> None:
    program = ps.lower(ps.schedule("1f1b", 3, 6), receive="just-in-time")
    ps.verify(program)
    with pytest.raises(VerifyError):
        ps.verify(program, semantics="rendezvous")


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "options"), [shape for shape in SHAPES if shape[0] not in ("dualpipe", "inference")]
)
def test_paired_equals_the_peers_lowering(name: str, ranks: int, microbatches: int, options: dict[str, Any]) -> None:
    schedule = ps.schedule(name, ranks, microbatches, **options)
    reduced = {r: _add_reduce_grad([_Action.from_str(str(a)) for a in schedule[r]], microbatches) for r in range(ranks)}
    rows = {r: [action for action in row if "WAIT" not in str(action)] for r, row in reduced.items()}  # since 2.15 there are waits
    peer = _add_send_recv(rows, schedule.placement.rank_of, schedule.stages)  # type: ignore[arg-type]
    ours = ps.lower(schedule)
    for rank in range(ranks):
        assert [str(a) for a in ours[rank]] == [str(a) for a in peer[rank]]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.data())
def test_skip_edges_have_messages_of_their_own(stages: int, microbatches: int, data: st.DataObject) -> None:
    pairs = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    skips = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3)) if pairs else []
    receive = data.draw(st.sampled_from(["paired", "just-in-time", 2]))
    schedule = ps.schedule("1f1b", stages, microbatches, graph=ps.StageGraph.chain(stages, skips))
    program = ps.lower(schedule, receive=receive)
    sent, received = _messages(program)
    assert sorted(sent) == sorted(received) == sorted(_wanted_messages(schedule))
    ps.verify(program, semantics="rendezvous" if receive == "paired" else "channels")


RECEIVES = ["paired", "just-in-time", 0, 2]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(RECEIVES))
def test_any_graph_on_any_placement_in_any_order(data: st.DataObject, receive: str | int) -> None:
    """One message per output and reading rank, and one back; the proof holds under the semantics that the receives are placed for."""
    schedule = data.draw(st.one_of(orders(), zoo()))
    program = ps.lower(schedule, receive=receive)
    sent, received = _messages(program)
    assert sorted(sent) == sorted(received) == sorted(_wanted_messages(schedule))
    assert program.schedule() == schedule
    for semantics in ("channels", "rendezvous") if receive == "paired" else ("channels",):
        ps.verify(program, semantics=semantics)
        assert interpret(program, semantics) is None
    for rank, row in enumerate(numbered(program)):
        parts = [part for action in row for part in action.parts]
        for place, action in enumerate(parts):
            m = action.microbatch
            if action.kind not in (K.SEND_B, K.RECV_F):
                continue
            stage, source = _end(action)
            readers = [b for a, b in schedule.graph.edges if a == source and schedule.placement.rank_of(b, m or 0) == rank]
            assert stage == max(readers)
            if action.kind is K.SEND_B:
                done = {part.stage for part in parts[:place] if part.kind in (K.B, K.I) and part.microbatch == m}
                assert done >= set(readers)
            else:
                assert not any(part.kind is K.F and part.microbatch == m and part.stage in readers for part in parts[:place])


@pytest.mark.parametrize("receive", RECEIVES)
def test_counts_per_pair_of_ranks(receive: str | int) -> None:
    """Looped over 2 ranks, stage 0 is read by 1, 2, 3, 4 and 5: once by rank 1, for stages 1, 3 and 5; 2 and 4 are on its own rank."""
    graph = ps.StageGraph.chain(6, [(0, 2), (0, 3), (0, 4), (0, 5)])
    schedule = ps.schedule("interleaved-1f1b", 2, 4, chunks=3, graph=graph)
    program = ps.lower(schedule, receive=receive)
    counts = Counter((rank, action.kind) for rank, row in enumerate(program) for action in row if action.kind.is_communication)
    # From rank 0 go the outputs of stages 0, 2 and 4, from rank 1 those of 1 and 3; what goes one way comes back the other.
    ways = {(0, K.SEND_F): 3, (1, K.RECV_F): 3, (1, K.SEND_F): 2, (0, K.RECV_F): 2}
    back = {(1, K.SEND_B): 3, (0, K.RECV_B): 3, (0, K.SEND_B): 2, (1, K.RECV_B): 2}
    assert counts == {key: 4 * count for key, count in (ways | back).items()}
    row = [str(action) for action in program[1] if action.microbatch == 0]
    order = [row.index(text) for text in ("5RECV_F0<0", "1F0", "3F0", "5F0", "5B0", "3B0", "1B0", "5SEND_B0>0")]
    assert order == sorted(order)


def test_the_sum_is_sent_after_the_last_of_its_backwards_whatever_their_order() -> None:
    """Stages 1 and 2 do not read each other, so that either may run first."""
    graph = ps.StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    placement = ps.Placement.custom([0, 1, 1, 0])
    for first, second in (("1", "2"), ("2", "1")):
        rows = [["0F0", "3F0", "3B0", "0B0"], [f"{s}F0" for s in (second, first)] + [f"{s}B0" for s in (first, second)]]
        program = ps.lower(ps.Schedule.from_actions(rows, placement, graph=graph), receive="just-in-time")
        row = [str(action) for action in program[1]]
        assert row.index("2RECV_F0<0") < row.index(f"{second}F0") < row.index(f"{first}F0")
        assert row.index(f"{first}B0") < row.index(f"{second}B0") < row.index("2SEND_B0>0")


# Programs of older versions -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.one_of(orders(), zoo()), st.sampled_from(["paired", "just-in-time", 1]), st.sampled_from(["paired", "just-in-time", 1]))
def test_a_message_for_each_reader_stays_right(schedule: ps.Schedule, before: str | int, after: str | int) -> None:
    """It is proved, written, read and given other receives as it is."""
    program = one_message_per_edge(schedule, before)
    sent, received = _messages(program)
    each = []
    for a, b in schedule.graph.edges:
        for m in range(schedule.units):
            low, high = schedule.placement.rank_of(a, m), schedule.placement.rank_of(b, m)
            if low != high:
                each += [(low, high, K.SEND_F, a, b, m), *([(high, low, K.SEND_B, b, a, m)] if schedule.training else [])]
    assert sorted(sent) == sorted(received) == sorted(each)
    again = Receive(after).apply(program)
    assert sorted(_messages(again)[0]) == sorted(each)
    assert json_form.decode(json.loads(json.dumps(program.to_json()))) == program
    for table, place in ((program, before), (again, after)):
        for semantics in ("channels", "rendezvous") if place == "paired" else ("channels",):
            assert interpret(table, semantics) is None
            ps.verify(table, semantics=semantics)


OLD = """\
0F0,0SEND_F0,0SEND_F0>3,2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0,0RECV_B0<3,0RECV_B0,0B0
1RECV_F0,1F0,1SEND_F0,3RECV_F0<0,3RECV_F0,3F0,3B0,3SEND_B0,3SEND_B0>0,1RECV_B0,1B0,1SEND_B0
"""


def test_an_old_csv_file_is_read_and_proved(tmp_path: Path) -> None:
    """Stages 1 and 3 are on rank 1 and read stage 0, by a message each."""
    (tmp_path / "old.csv").write_text(OLD)
    program = ps.load(tmp_path / "old.csv")
    assert isinstance(program, Program)
    assert program.graph == ps.StageGraph.chain(4, [(0, 3)])
    assert program.placement == ps.Placement.looped(2, 2)
    ps.verify(program)
    assert [",".join(map(str, row)) for row in program] == OLD.splitlines()
    lacking = OLD.replace(",0SEND_F0>3", "")
    (tmp_path / "lacking.csv").write_text(lacking)
    with pytest.raises(VerifyError, match="rank 0 never sends the activations of microbatch 0 from stage 0 to stage 3"):
        ps.verify(ps.load(tmp_path / "lacking.csv"))


def test_a_new_file_is_read_and_proved(tmp_path: Path) -> None:
    schedule = ps.schedule("interleaved-1f1b", 2, 3, chunks=2, graph=ps.StageGraph.chain(4, [(0, 3)]))
    program = ps.lower(schedule)
    for name in ("new.csv", "new.json"):
        save(program, tmp_path / name)
        back = ps.load(tmp_path / name)
        assert back == program
        ps.verify(back, semantics="rendezvous")


def test_a_depth_posts_that_many_compute_actions_ahead() -> None:
    """Every receive stands as many compute actions before its use as asked, or at the row's start (in one channel order)."""
    schedule = ps.schedule("gpipe", 3, 6)
    for depth in (0, 1, 2, 4):
        row = ps.lower(schedule, receive=depth)[1]
        for place, action in enumerate(row):
            if action.kind in (K.RECV_F, K.RECV_B):
                use = K.F if action.kind is K.RECV_F else K.B
                at = row.index(ps.Action(1, use, action.microbatch))
                before = sum(a.is_compute for a in row[:at])
                assert sum(a.is_compute for a in row[place:at]) == min(depth, before)


@pytest.mark.parametrize("receive", ["just-in-time", 2])
def test_receives_follow_the_channel_where_the_receiver_uses_them_out_of_order(receive: str | int) -> None:
    rows = [["0F0", "0F1", "0F2"], ["1F2", "1F0", "1F1"]]
    schedule = ps.Schedule.from_actions(rows, ps.Placement.linear(2))
    program = ps.lower(schedule, receive=receive)
    assert [str(a) for a in program[1] if a.kind is K.RECV_F] == ["1RECV_F0", "1RECV_F1", "1RECV_F2"]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SHAPES)
@pytest.mark.parametrize("receive", ["paired", "just-in-time", 2])
def test_placing_receives_anew_gives_the_same_as_at_once(
    name: str, ranks: int, microbatches: int, options: dict[str, Any], receive: str | int
) -> None:
    schedule = ps.schedule(name, ranks, microbatches, **options)
    at_once = SendReceive(receive).apply(Program.start(schedule))
    for before in ("paired", 3):
        moved = Receive(receive).apply(SendReceive(before).apply(Program.start(schedule)))
        assert moved.rows == at_once.rows


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SHAPES)
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("receive", ["paired", "just-in-time", 2])
def test_one_rank_alone(name: str, ranks: int, microbatches: int, options: dict[str, Any], fsdp: bool, receive: str | int) -> None:
    schedule = ps.schedule(name, ranks, microbatches, **options)
    whole = ps.lower(schedule, fsdp=fsdp, receive=receive)
    for rank in range(ranks):
        assert lower_rank(schedule, rank, fsdp=fsdp, receive=receive) == whole[rank]


def test_one_rank_alone_builds_only_its_neighbours() -> None:
    asked = []
    schedule = ps.schedule("1f1b", 64, 16)
    source = schedule._source
    schedule._source = lambda rank: (asked.append(rank), source(rank))[1]  # type: ignore[assignment,func-returns-value]
    lower_rank(schedule, 20)
    assert sorted(asked) == [19, 20, 21]


def test_refusals() -> None:
    schedule = ps.schedule("1f1b", 2, 2)
    with pytest.raises(PassError, match="sends or receives already"):
        SendReceive().apply(ps.lower(schedule))
    with pytest.raises(PassError, match="no messages yet"):
        Receive("paired").apply(Program.start(schedule))
    with pytest.raises(PassError, match="receive=late of pass send-receive: it must be paired or just-in-time, or a depth"):
        ps.lower(schedule, receive="late")
    stuck = ps.Schedule.from_actions([["0B0", "0F0"], ["1F0", "1B0"]], ps.Placement.linear(2))
    with pytest.raises(PassError, match="no valid program"):
        ps.lower(stuck, receive="just-in-time")


@pytest.mark.parametrize(
    ("rows", "rules"),
    [
        ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]], {"deadlock"}),
        ([["0B0", "0F0"], ["1F0", "1B0"]], {"deadlock", "order"}),
        ([["0F0", "0F0", "0B0"], ["1F0", "1B0"]], {"complete"}),
        ([["0F0", "0B0"], ["1F0"]], {"complete"}),
        ([["0F0", "1F0", "0B0"], ["1B0"]], {"placed"}),
        ([["0F0", "0B0"], ["1F0", "1B0", "5F0"]], {"known"}),
        ([["0F0", "0B0"]], {"known"}),
        ([[], []], {"complete"}),
    ],
)
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_schedule_that_cannot_be_lowered_is_refused_with_its_findings(rows: list[list[str]], rules: set[str], fsdp: bool) -> None:
    bad = ps.Schedule.from_actions(rows, ps.Placement.linear(2))
    with pytest.raises(ps.LoweringError, match="the schedule cannot be lowered: ") as caught:
        ps.lower(bad, fsdp=fsdp)
    assert {finding.rule for finding in caught.value.findings} == rules
    assert all(finding.message in str(caught.value) for finding in caught.value.findings)
    for kind in (PassError, ps.VerifyError):
        assert isinstance(caught.value, kind)
    with pytest.raises(ps.LoweringError) as caught:
        ps.lower(bad, receive="just-in-time", fsdp=fsdp)
    assert caught.value.findings
