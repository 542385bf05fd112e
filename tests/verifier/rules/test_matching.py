"""The order of sends and receives on a channel."""

from __future__ import annotations

from penstock.ir.placement import Placement
from penstock.verifier.verify import check
from verifier.build import only, program


def test_received_in_another_order() -> None:
    found = only(program("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2", "1RECV_F0 1RECV_F2 1RECV_F1 1F0 1F1 1F2"))
    assert (found.rule, found.rank, found.step, found.action) == ("matching", 1, 1, "1RECV_F2")
    assert "rank 0 -> rank 1 (activations)" in found.message
    assert "the 2nd message is sent as 0SEND_F1 (step 3 of rank 0) but received as 1RECV_F2 (step 1 of rank 1)" in found.message
    assert "2 messages are out of order" in found.message
    assert "1RECV_F1" in found.remedy


def test_one_finding_for_each_channel() -> None:
    crossed = program("0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B1 0RECV_B0 0B0 0B1", "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1")
    assert [(f.rule, "gradients" in f.message) for f in check(crossed)] == [("matching", False), ("matching", True)]


def test_activations_and_gradients_do_not_share_a_channel() -> None:
    assert (
        check(program("0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1", "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1")) == []
    )


def test_stages_of_one_pair_of_ranks_share_a_channel() -> None:
    """Looped over two ranks, stages 0 -> 1 and 2 -> 3 are both rank 0 -> rank 1."""
    first = "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1"
    second = "1RECV_F0 1F0 1SEND_F0 {} 1F1 1SEND_F1 3F0 3RECV_F1 3F1"
    placement = Placement.looped(2, 2)
    assert check(program(first, second.format("1RECV_F1 3RECV_F0"), placement=placement)) == []
    found = only(program(first, second.format("3RECV_F0 1RECV_F1"), placement=placement))
    assert (found.rule, found.action) == ("matching", "3RECV_F0")
