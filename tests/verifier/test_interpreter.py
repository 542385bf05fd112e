"""The interpreter itself, on programs small enough to check by eye."""

from __future__ import annotations

from random import Random

import pytest

from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import BufferCounts, Program
from penstock.ir.rows import pack_rows
from penstock.ir.schedule import Schedule
from penstock.verifier.verify import check
from verifier.interpreter import explore, interpret

BOTH = ("channels", "rendezvous")


def made(
    *rows: str,
    placement: Placement | None = None,
    microbatches: int = 1,
    skips: tuple[tuple[int, int], ...] = (),
    slots: dict[tuple[int, int, Kind], int] | None = None,
) -> Program:
    """A program from rows of actions parted by spaces; stage s on rank s unless told."""
    placement = placement or Placement.linear(len(rows))
    graph = StageGraph.chain(placement.stages, skips)
    buffers = None if slots is None else BufferCounts(channels=slots)
    return Program(pack_rows([row.split() for row in rows]), placement, microbatches, graph=graph, buffers=buffers)


def outcome(program: Program, semantics: str) -> str | None:
    """The verdict, which every interleaving must share."""
    found = interpret(program, semantics)
    everywhere = explore(program, semantics)
    assert (found is None) == (everywhere == {None})
    assert (found is not None) == (None not in everywhere)
    for seed in range(3):
        assert (interpret(program, semantics, Random(seed)) is None) == (found is None)
    return found


TRAIN = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
SPLIT = ("0F0 0SEND_F0 0RECV_B0 0I0 0W0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
V = Placement.v(1)
TWO = Placement.bidirectional(2)
SHARING = Placement.custom([0, 1, 1])

RIGHT = {
    "training": made(*TRAIN),
    "split": made(*SPLIT),
    "inference": made("0F0 0SEND_F0", "1RECV_F0 1F0"),
    "one rank": made("0F0 0F1 0B0 0B1", microbatches=2),
    "no messages on a rank": made("0F0 1F0 1B0 0B0", placement=V),
    "overlap": made("0F0 0F1 (0B0;0F2)OVERLAP_F_B 0B1 0B2", microbatches=3),
    "receives early": made("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1", microbatches=2),
    "both directions": made("0F0 0SEND_F0 1RECV_F1 1F1", "1RECV_F0 0F1 0SEND_F1 1F0", placement=TWO, microbatches=2),
    "skip edge": made(
        "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0<2 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0 2SEND_B0>0",
        skips=((0, 2),),
    ),
    "two readers on a rank": made(
        "0F0 0SEND_F0>2 0RECV_B0<2 0B0", "2RECV_F0<0 1F0 2F0 2B0 1B0 2SEND_B0>0", placement=SHARING, skips=((0, 2),)
    ),
    "two readers on a rank, a message each": made(
        "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0<2 0RECV_B0 0B0",
        "1RECV_F0 1F0 2RECV_F0<0 2F0 2B0 2SEND_B0>0 1B0 1SEND_B0",
        placement=SHARING,
        skips=((0, 2),),
    ),
    "two readers on a rank, a gradient each": made(
        "0F0 0SEND_F0>2 0RECV_B0<2 0RECV_B0 0B0", "2RECV_F0<0 1F0 2F0 2B0 2SEND_B0>0 1B0 1SEND_B0", placement=SHARING, skips=((0, 2),)
    ),
    "sharded": made("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD"),
    "reduced": made("0F0 0F1 0B1 0B0 0REDUCE_GRAD", microbatches=2),
    "reduced by copy": made(
        "0F0 0SEND_F0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 0RECV_B0 0B0 0REDUCE_GRAD",
        "1RECV_F0 0F1 0SEND_F1 1F0 1B0 0RECV_B1 1SEND_B0 1REDUCE_GRAD 0B1 0REDUCE_GRAD",
        placement=TWO,
        microbatches=2,
    ),
    "waited for": made(f"{TRAIN[0]} 0WAIT_SEND_F0", f"{TRAIN[1]} 1WAIT_SEND_B0"),
    "waited for at once": made("0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0B0", f"{TRAIN[1]} 1WAIT_SEND_B0"),
    "waited for along a skip edge": made(
        "0F0 0SEND_F0 0SEND_F0>2 0WAIT_SEND_F0>2 0WAIT_SEND_F0",
        "1RECV_F0 1F0 1SEND_F0 1WAIT_SEND_F0",
        "2RECV_F0<0 2RECV_F0 2F0",
        skips=((0, 2),),
    ),
    "reductions waited for": made("0F0 1F0 1B0 1REDUCE_GRAD 0B0 1WAIT_REDUCE_GRAD 0REDUCE_GRAD 0WAIT_REDUCE_GRAD", placement=V),
    "all slots taken for a while": made(
        "0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1", microbatches=2, slots={(0, 1, Kind.SEND_F): 1}
    ),
}

WRONG = {
    "missing forward": (made("0F0 0SEND_F0 0F1", "1RECV_F0 1F0", microbatches=2), "posted|receive|never made"),
    "missing backward": (made("0F0 0SEND_F0", "1RECV_F0 1F0 1B0"), "never made"),
    "missing weights": (made(SPLIT[0].replace(" 0W0", ""), SPLIT[1]), "W of stage 0, microbatch 0 was never made"),
    "twice": (made("0F0 0F0"), "made before"),
    "twice backward": (made("0F0 0I0 0W0 0B0"), "after another backward"),
    "weights after a full backward": (made("0F0 0B0 0W0"), "without an I"),
    "weights before": (made("0F0 0W0 0I0"), "without an I"),
    "backward before": (made("0B0 0F0"), "without an F"),
    "wrong rank": (made("0F0", "0F0"), "runs on rank 1"),
    "no such microbatch": (made("0F0 0F1"), "no such stage or microbatch"),
    "no such stage": (made("0F0 1F0"), "no such stage or microbatch"),
    "own order": (made("1F0 0F0", placement=V), "before its own rank made"),
    "parts feed each other": (made("(0F0;1F0)OVERLAP_F_B", placement=V), "before its own rank made"),
    "a part needs its own group": (made("0F0 (0I0;0W0)OVERLAP_F_B"), "without an I"),
    "same part twice": (made("(0F0;0F0)OVERLAP_F_B"), "made before"),
    "no receive": (made("0F0 0SEND_F0", "1F0"), "before its receive"),
    "late receive": (made("0F0 0SEND_F0", "1F0 1RECV_F0"), "before its receive"),
    "no send": (made("0F0", "1RECV_F0 1F0"), "hangs at 1F0"),
    "early send": (made("0SEND_F0 0F0", "1RECV_F0 1F0"), "sends what is not there"),
    "double send": (made("0F0 0SEND_F0 0SEND_F0", "1RECV_F0 1F0"), "sends again|left over"),
    "double receive": (made("0F0 0SEND_F0", "1RECV_F0 1RECV_F0 1F0"), "receives again"),
    "a sum that lacks a part": (
        made("0F0 0SEND_F0>2 0RECV_B0<2 0B0", "2RECV_F0<0 1F0 2F0 2B0 2SEND_B0>0 1B0", placement=SHARING, skips=((0, 2),)),
        "sends what is not there",
    ),
    "named after the nearest of two readers": (
        made("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 2F0 2B0 1B0 1SEND_B0", placement=SHARING, skips=((0, 2),)),
        "before its receive",
    ),
    "received for the second reader": (
        made("0F0 0SEND_F0>2 0RECV_B0<2 0B0", "1F0 2RECV_F0<0 2F0 2B0 1B0 2SEND_B0>0", placement=SHARING, skips=((0, 2),)),
        "before its receive",
    ),
    "message on one rank": (made("0F0 0SEND_F0 1RECV_F0 1F0", placement=V), "stays on its rank"),
    "message along no edge": (made("0F0 0SEND_F0>2", "1F0", "2RECV_F0<0 2F0"), "no edge|before its receive"),
    "message the wrong way": (made("0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_F0>0"), "no edge"),
    "each waits for the other": (
        made("0F0 1RECV_F1 1F1 0SEND_F0", "0F1 1RECV_F0 1F0 0SEND_F1", placement=TWO, microbatches=2),
        "hangs at 1F1|hangs at 1F0",
    ),
    "compute on a sharded stage": (made("0UNSHARD 0F0 0RESHARD 0B0"), "sharded stage"),
    "unshard twice": (made("0UNSHARD 0UNSHARD 0F0 0RESHARD"), "already is"),
    "reshard first": (made("0RESHARD 0UNSHARD 0F0 0RESHARD"), "already is"),
    "unsharded at the end": (made("0UNSHARD 0F0"), "unsharded at the end"),
    "unshard elsewhere": (made("0UNSHARD 0F0 0SEND_F0 0RESHARD", "1UNSHARD 1RECV_F0 1F0 1RESHARD 0UNSHARD 0RESHARD"), "does not hold"),
    "reduced too early": (made("0F0 0F1 0B0 0REDUCE_GRAD 0B1", microbatches=2), "before all weight gradients"),
    "reduced twice": (made("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD"), "reduces again"),
    "one stage not reduced": (made("0F0 1F0 1B0 0B0 0REDUCE_GRAD", placement=V), "never reduced"),
    "a send that is not waited for": (made(TRAIN[0], f"{TRAIN[1]} 1WAIT_SEND_B0"), "never retired"),
    "waited for twice": (made(f"{TRAIN[0]} 0WAIT_SEND_F0 0WAIT_SEND_F0", f"{TRAIN[1]} 1WAIT_SEND_B0"), "waits again"),
    "waited for before it is sent": (made("0F0 0WAIT_SEND_F0 0SEND_F0", "1RECV_F0 1F0"), "not sent"),
    "waited for though never sent": (made("0F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1F0 1WAIT_SEND_B0"), "not sent"),
    "waited for the other kind": (made("0F0 0SEND_F0 0WAIT_SEND_F0 0WAIT_SEND_B0", "1RECV_F0 1F0"), "not sent"),
    "waited for on another rank": (made("0F0 0SEND_F0", "1RECV_F0 1F0 0WAIT_SEND_F0"), "runs on rank 1"),
    "a wait that the receive comes behind": (
        made("0F0 0SEND_F0 0WAIT_SEND_F0 1RECV_F1 1F1", "0F1 0SEND_F1 0WAIT_SEND_F1 1RECV_F0 1F0", placement=TWO, microbatches=2),
        "hangs at 0WAIT_SEND_F",
    ),
    "a reduction that is not waited for": (
        made("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0WAIT_REDUCE_GRAD", placement=V),
        "never waited for",
    ),
    "a reduction waited for twice": (made("0F0 0B0 0REDUCE_GRAD 0WAIT_REDUCE_GRAD 0WAIT_REDUCE_GRAD"), "no reduction"),
    "a reduction waited for before": (made("0F0 0B0 0WAIT_REDUCE_GRAD 0REDUCE_GRAD"), "no reduction"),
    "nothing to reduce": (made("0F0 0REDUCE_GRAD"), "reduces nothing"),
}


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_right(name: str, semantics: str) -> None:
    assert outcome(RIGHT[name], semantics) is None


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_the_verifier_agrees(name: str, semantics: str) -> None:
    program, right = (RIGHT[name], True) if name in RIGHT else (WRONG[name][0], False)
    assert (not check(program, semantics=semantics)) == right


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_wrong_for_the_reason(name: str, semantics: str) -> None:
    program, reasons = WRONG[name]
    found = outcome(program, semantics)
    assert found is not None
    assert any(reason in found for reason in reasons.split("|")), found


def test_receives_in_another_order_get_each_others_data() -> None:
    """In a channel the second message meets the second receive; in a rendezvous the two heads never match."""
    program = made("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1", microbatches=2)
    assert "is received, but" in str(outcome(program, "channels"))
    assert "hangs at 1F0" in str(outcome(program, "rendezvous"))


def test_crossing_sends_hang_only_in_a_rendezvous() -> None:
    """Both ranks send before they receive: fine if a send returns, a hang if both heads are sends."""
    program = made("0F0 0SEND_F0 1RECV_F1 1F1", "0F1 0SEND_F1 1RECV_F0 1F0", placement=TWO, microbatches=2)
    assert outcome(program, "channels") is None
    assert "hangs at 1F" in str(outcome(program, "rendezvous"))


def test_a_receive_before_the_send_that_leads_to_it_hangs_only_in_a_rendezvous() -> None:
    program = made("0RECV_B0 0F0 0SEND_F0 0B0", TRAIN[1])
    assert outcome(program, "channels") is None
    assert outcome(program, "rendezvous") is not None


def test_two_senders_that_wait_for_each_others_slots_hang() -> None:
    """Each sends two messages before it takes the first of the other's; with two slots there is room."""
    rows = ("0F0 0SEND_F0 0F2 0SEND_F2 1RECV_F1 1F1 1RECV_F3 1F3", "0F1 0SEND_F1 0F3 0SEND_F3 1RECV_F0 1F0 1RECV_F2 1F2")
    for slots in (1, 2):
        held = {(0, 1, Kind.SEND_F): slots, (1, 0, Kind.SEND_F): slots}
        found = outcome(made(*rows, placement=TWO, microbatches=4, slots=held), "channels")
        assert (found is None) == (slots == 2), found
        assert found is None or "hangs at 0SEND_F" in found


def test_a_slot_is_free_again_once_its_receive_is_posted() -> None:
    """The receive of the first message is posted before the sender needs the slot for the second."""
    rows = ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")
    one = {(0, 1, Kind.SEND_F): 1, (1, 0, Kind.SEND_B): 1}
    assert outcome(made(*rows, microbatches=2, slots=one), "channels") is None


@pytest.mark.parametrize(
    ("rows", "right"),
    [
        ((["0F0", "0B0"], ["1F0", "1B0"]), True),
        ((["0F0", "0F1", "0B1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]), True),
        ((["0B0", "0F0"], ["1F0", "1B0"]), False),
        ((["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]), False),
        ((["0F0", "0B0"], ["1F0"]), False),
    ],
)
def test_a_schedule_runs_without_messages(rows: tuple[list[str], ...], right: bool) -> None:
    schedule = Schedule.from_actions(rows, Placement.linear(2))
    assert (interpret(schedule) is None) == right
    assert (explore(schedule) == {None}) == right
