"""One communicator for a pair of ranks: exchanges meet in order."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.action import Action
from penstock.ir.kind import RECEIVES, SENDS, Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.verifier.finding import Severity
from penstock.verifier.verify import check
from verifier.build import FIRST, SECOND, only, program


def test_good_by_channel_refused_by_rendezvous() -> None:
    table = program(FIRST, SECOND)
    assert check(table) == []
    found = only(table, semantics="rendezvous")
    assert (found.rule, found.severity, found.rank, found.step, found.action) == ("deadlock", Severity.HANG, 0, 3, "0SEND_F1")
    assert (
        "rank 0 and rank 1 disagree about their 2nd exchange: rank 0 runs 0SEND_F1 (step 3), rank 1 runs 1SEND_B0 (step 3)" in found.message
    )
    assert "rank 1 waits forever in step 5 (1F1)" in found.message
    assert "paired" in found.remedy


def test_mirrored_queues_pass() -> None:
    assert check(program(FIRST, SECOND.replace("1RECV_F1 ", "").replace("1SEND_B0", "1RECV_F1 1SEND_B0")), semantics="rendezvous") == []


def test_a_queue_that_ends_early() -> None:
    mirrored = SECOND.replace("1RECV_F1 ", "").replace("1SEND_B0", "1RECV_F1 1SEND_B0")
    found = check(program(FIRST, mirrored.replace(" 1SEND_B1", "")), semantics="rendezvous")
    assert [f.rule for f in found] == ["deadlock", "complete", "deadlock"]
    assert "disagree about their 4th exchange: rank 0 runs 0RECV_B1 (step 6), rank 1 has no more" in found[0].message


def test_other_pairs_are_other_queues() -> None:
    """Rank 1's exchanges with rank 0 and with rank 2 may mix in any order."""
    rows = ["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1 1SEND_F0 1SEND_F1", "2RECV_F0 2F0 2RECV_F1 2F1"]
    assert check(program(*rows), semantics="rendezvous") == []


def test_a_pair_that_exchanges_in_both_directions() -> None:
    """Both copies of a bidirectional placement share the queue of their pair."""
    first, second = "0F0 0SEND_F0 1RECV_F1 1F1", "0F1 0SEND_F1 1RECV_F0 1F0"
    placement = Placement.bidirectional(2)
    assert check(program(first, second, placement=placement)) == []
    assert only(program(first, second, placement=placement), semantics="rendezvous").rule == "deadlock"
    assert check(program(first, "0F1 1RECV_F0 0SEND_F1 1F0", placement=placement), semantics="rendezvous") == []


# Against the two definitions, spelled out -----------------------------------------------------------------------------


@st.composite
def _moved_receives(draw: st.DrawFn) -> Program:
    """A lowered program, some of its receives moved to before where they were."""
    name = draw(st.sampled_from(["1f1b", "zb-h1", "interleaved-1f1b", "zbv", "dualpipe", "inference"]))
    receive = draw(st.sampled_from(["paired", "just-in-time"]))
    built = ps.lower(ps.schedule(name, draw(st.sampled_from([2, 4])), draw(st.integers(1, 3))), receive=receive)
    rows = [list(row) for row in built]
    for row in rows:
        for action in [a for a in row if a.kind in RECEIVES]:
            at = row.index(action)
            row.insert(max(0, at - draw(st.sampled_from([0, 0, 0, 0, 1, 3]))), row.pop(at))
    return Program.from_actions(rows, built.placement, microbatches=built.microbatches)


def _ends(table: Program, rank: int) -> list[tuple[Action, int, tuple[int, int, int | None]]]:
    """A rank's communication in order, with the other rank and the message: its two stages in the way it goes, and microbatch."""
    found = []
    for action in table[rank]:
        if action.kind.is_communication:
            other = action.stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)
            way = (action.stage, other) if action.kind in SENDS else (other, action.stage)
            found.append((action, table.placement.rank_of(other, action.microbatch or 0), (*way, action.microbatch)))
    return found


@given(_moved_receives())
def test_both_semantics_are_what_they_say(table: Program) -> None:
    channels: dict[object, list[object]] = defaultdict(list)
    queues: dict[object, list[object]] = defaultdict(list)
    for rank in range(table.ranks):
        for action, other, message in _ends(table, rank):
            sends, forward = action.kind in SENDS, action.kind in (Kind.SEND_F, Kind.RECV_F)
            channels[(rank, other, forward) if sends else (other, rank, forward), sends].append(message)
            queues[rank, other].append(message)
    in_order = all(messages == channels[channel, not sends] for (channel, sends), messages in [*channels.items()])
    mirrored = all(messages == queues[other, rank] for (rank, other), messages in [*queues.items()])
    assert (check(table) == []) == in_order
    assert (check(table, semantics="rendezvous") == []) == (in_order and mirrored)
