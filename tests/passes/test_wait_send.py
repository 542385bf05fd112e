"""Waits for sends: their places, PyTorch's own, and how many sends are outstanding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

import penstock as ps
from ir.peers import lowered, runtime, texts
from penstock.errors import PassError, VerifyError
from penstock.ir.action import Action
from penstock.ir.graph import StageGraph
from penstock.ir.kind import RECEIVES, SEND_WAITS, SENDS, Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.passes.pass_list import PassList
from penstock.passes.wait_send import WaitSend

NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v", "dualpipe", "inference"]
WAIT_OF = dict(zip(SENDS, SEND_WAITS, strict=True))


def wait_of(send: Action) -> Action:
    return Action(send.stage, WAIT_OF[send.kind], send.microbatch, peer=send.peer)


def most_outstanding(row: tuple[Action, ...]) -> int:
    level = most = 0
    for action in row:
        level += (action.kind in SENDS) - (action.kind in SEND_WAITS)
        most = max(most, level)
    return most


def even(name: str, ranks: int) -> int:
    return ranks + ranks % 2 if name == "dualpipe" else ranks


def naive(row: tuple[Action, ...]) -> list[Action]:
    """One action at a time: behind the backward of the same stage and microbatch, the rest at the end in the order of the sends."""
    pending: list[Action] = []
    placed: list[Action] = []
    for action in row:
        placed.append(action)
        if action.kind in SENDS:
            pending.append(action)
        backwards = [(part.stage, part.microbatch) for part in action.parts if part.kind in (Kind.B, Kind.I)]
        done = [send for send in pending if send.kind is Kind.SEND_F and (send.stage, send.microbatch) in backwards]
        placed += map(wait_of, done)
        pending = [send for send in pending if send not in done]
    return placed + list(map(wait_of, pending))


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6), st.sampled_from(("paired", "just-in-time", 2)), st.booleans())
def test_each_send_is_waited_for_behind_its_backward_or_at_the_end(
    name: str, ranks: int, microbatches: int, receive: str | int, skips: bool
) -> None:
    schedule = ps.schedule(name, even(name, ranks), microbatches)
    if skips and schedule.stages > 2:
        schedule = schedule.with_graph(StageGraph.chain(schedule.stages, [(0, 2)]))
    program = ps.lower(schedule, receive=receive)
    waiting = WaitSend().apply(program)
    assert [list(row) for row in waiting] == [naive(row) for row in program]
    assert WaitSend().apply(waiting).rows == waiting.rows


@pytest.mark.skipif(not hasattr(schedules, "_add_wait_send"), reason="PyTorch knows waits for sends since 2.15")
@pytest.mark.parametrize(
    ("name", "chunks"), [("Interleaved1F1B", 2), ("LoopedBFS", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)]
)
def test_the_places_are_pytorchs(name: str, chunks: int) -> None:
    theirs = lowered(name, 2, 6, chunks).pipeline_order_with_comms
    placement = Placement.v(2) if name in ("ZBVZeroBubble", "DualPipeV") else Placement.looped(2, chunks)
    rows = texts(theirs)
    program = Program.from_actions(rows, placement)
    assert [list(map(str, row)) for row in WaitSend().apply(program)] == rows
    with_messages = [[text for text in row if "WAIT_SEND" not in text] for row in rows]
    bare = Program.from_actions(with_messages, placement)
    assert [list(map(str, row)) for row in WaitSend().apply(bare)] == rows


def progress(program: Program, limit: int) -> bool:
    """Whether every rank gets to its end if it sends only while fewer than `limit` of its messages lack their receive.

    Any placement of waits allows at most this: a wait for a message ends no earlier than its receive is posted.
    """
    rows, at = list(program), [0] * program.ranks
    sent: list[set[tuple[bool, int, int, int]]] = [set() for _ in rows]
    posted: set[tuple[bool, int, int, int]] = set()
    everything: set[tuple[bool, int, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind in SENDS:
                    if len(sent[rank] - posted) >= limit:
                        break
                    sent[rank].add(message(action))
                    everything.add(message(action))
                elif action.kind in RECEIVES:
                    posted.add(message(action))
                elif not all(has_inputs(program, rank, part, everything) for part in action.parts):
                    break
                at[rank] += 1
                moved = True
    return all(place == len(row) for place, row in zip(at, rows, strict=True))


def message(action: Action) -> tuple[bool, int, int, int]:
    """Forward, lower stage, higher stage, microbatch."""
    other = action.stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)
    return action.kind in (Kind.SEND_F, Kind.RECV_F), min(action.stage, other), max(action.stage, other), action.microbatch or 0


def has_inputs(program: Program, rank: int, part: Action, sent: set[tuple[bool, int, int, int]]) -> bool:
    forward, other = part.kind is Kind.F, part.stage - 1 if part.kind is Kind.F else part.stage + 1
    if part.kind not in (Kind.F, Kind.B, Kind.I) or not 0 <= other < program.stages:
        return True
    if program.placement.rank_of(other, part.microbatch or 0) == rank:
        return True
    return (forward, min(part.stage, other), max(part.stage, other), part.microbatch or 0) in sent


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6), st.sampled_from(("paired", "just-in-time")), st.integers(1, 4))
def test_a_budget_is_kept_wherever_it_can_be(name: str, ranks: int, microbatches: int, receive: str, limit: int) -> None:
    program = ps.lower(ps.schedule(name, even(name, ranks), microbatches), receive=receive)
    if not progress(program, limit):
        with pytest.raises(PassError, match=f"outstanding={limit}"):
            WaitSend(outstanding=limit).apply(program)
        return
    waiting = WaitSend(outstanding=limit).apply(program)
    assert max(map(most_outstanding, waiting)) <= limit
    ps.verify(waiting, max_outstanding_sends=limit)
    for row, bare in zip(waiting, program, strict=True):
        assert [action for action in row if action.kind not in SEND_WAITS] == list(bare)
        assert sorted(map(str, (wait_of(a) for a in row if a.kind in SENDS))) == sorted(str(a) for a in row if a.kind in SEND_WAITS)


def test_a_budget_bounds_what_the_sender_holds() -> None:
    """GPipe sends all activations before the first backward: without a budget the first rank holds all of them, with one that many."""
    program = ps.lower(ps.schedule("gpipe", 2, 8))
    costs = ps.Costs(activation=0.0, output=1.0)
    for limit, held in ((None, 8.0), (3, 3.0), (1, 1.0)):
        waiting = WaitSend(limit).apply(program)
        assert ps.simulate(waiting, costs).peak_memory[0] >= held
        assert most_outstanding(waiting[0]) == held
        receives = 1.0  # a gradient that is waited for or used
        assert ps.simulate(waiting, costs).peak_memory[0] <= held + receives


def test_a_program_goes_through_the_passes_by_name() -> None:
    text = "reduce-grad{wait=deferred},send-receive,wait-send{outstanding=2},buffers"
    passes = PassList.parse(text)
    assert str(passes) == text
    program = passes.apply(ps.schedule("1f1b", 3, 5))
    assert program.passes == text
    assert max(map(most_outstanding, program)) <= 2
    assert str(PassList.parse("wait-send{outstanding=all}")) == "wait-send"


def test_what_cannot_be_waited_for_is_refused() -> None:
    with pytest.raises(PassError, match="run the pass 'send-receive' first"):
        WaitSend().apply(Program.start(ps.schedule("1f1b", 2, 2)))
    with pytest.raises(PassError, match="at least 1"):
        WaitSend(outstanding=0)
    crossing = [["0F0", "0SEND_F0", "0F2", "0SEND_F2", "1RECV_F1", "1F1", "1RECV_F3", "1F3"]]
    crossing += [["0F1", "0SEND_F1", "0F3", "0SEND_F3", "1RECV_F0", "1F0", "1RECV_F2", "1F2"]]
    program = Program.from_actions(crossing, Placement.bidirectional(2))
    assert WaitSend(outstanding=2).apply(program)
    with pytest.raises(PassError, match="0SEND_F0 outstanding"):
        WaitSend(outstanding=1).apply(program)


def test_receives_placed_behind_a_wait_are_refused() -> None:
    """`just-in-time` would post a receive only after what the sender makes behind its wait."""
    rows = [["0F0", "0SEND_F0", "0WAIT_SEND_F0", "0F1", "0SEND_F1", "0WAIT_SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F1", "1F0"]]
    program = Program.from_actions(rows, Placement.linear(2))
    ps.verify(program)
    late = [rows[0], ["1RECV_F1", "1F1", "1RECV_F0", "1F0"]]
    with pytest.raises(VerifyError, match="0WAIT_SEND_F0"):
        ps.verify(Program.from_actions(late, Placement.linear(2)))


@pytest.mark.skipif(not hasattr(schedules, "_add_wait_send"), reason="PyTorch knows waits for sends since 2.15")
@pytest.mark.parametrize("limit", [1, 2, 8])
def test_pytorch_finds_our_waits_right(limit: int) -> None:
    """PyTorch's own check of the waits, if it has one, and its reader."""
    program = PassList.parse(f"reduce-grad{{wait=now}},send-receive,wait-send{{outstanding={limit}}}").apply(ps.schedule("1f1b", 2, 6))
    theirs = {rank: [schedules._Action.from_str(str(action)) for action in row] for rank, row in enumerate(program)}
    schedules._validate_send_waits(theirs)
    made = runtime(2, 6)
    made._prepare_schedule_with_comms(theirs, format="compute_comms")


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, "reduce-grad,send-receive,buffers"),
        ({"waits": True}, "reduce-grad{wait=now},send-receive,wait-send,buffers"),
        ({"max_outstanding_sends": 2}, "reduce-grad{wait=now},send-receive,wait-send{outstanding=2},buffers"),
        ({"defer_reduce_grad_wait": True}, "reduce-grad{wait=deferred},send-receive,wait-send,buffers"),
        ({"fsdp": True, "waits": True}, "shard,reduce-grad{wait=now},send-receive,wait-send,buffers"),
    ],
)
def test_options_of_lower_are_passes(options: dict[str, Any], passes: str) -> None:
    schedule = ps.schedule("interleaved-1f1b", ranks=3, microbatches=6, chunks=2)
    assert ps.lower(schedule, **options) == ps.PassList.parse(passes).apply(schedule)


def test_a_limit_that_no_rank_could_send_under() -> None:
    with pytest.raises(PassError, match=r"outstanding of pass wait-send must be .*, got 0"):
        ps.lower(ps.schedule("1f1b", ranks=2, microbatches=2), max_outstanding_sends=0)
