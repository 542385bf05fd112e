"""Work and messages that are missing, repeated or needless."""

from __future__ import annotations

import pytest

from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.verifier.verify import check
from verifier.build import FIRST, SECOND, only, program, rules, schedule


def test_a_missing_forward() -> None:
    found = only(schedule("0F0 0F1", microbatches=3))
    assert (found.rule, found.rank, found.action) == ("complete", 0, "0F2")
    assert "no F for microbatch 2 of 0..2" in found.message


@pytest.mark.parametrize(
    ("row", "absent"),
    [("0F0 0B0 0F1", "0B1"), ("0F0 0B0 0F1 0I1", "0W1")],
)
def test_a_missing_backward(row: str, absent: str) -> None:
    found = only(schedule(row))
    assert (found.rule, found.action) == ("complete", absent)


def test_a_weight_gradient_without_its_input_gradient() -> None:
    found = only(schedule("0F0 0W0"))
    assert (found.rule, found.action) == ("complete", "0I0")


@pytest.mark.parametrize("row", ["0F0 0B0 0W0", "0F0 0B0 0I0", "0F0 0B0 0I0 0W0", "0F0 0I0 0W0 0B0"])
def test_a_whole_backward_and_a_part(row: str) -> None:
    found = only(schedule(row))
    assert found.rule == "complete"
    assert "0B0" in found.message
    assert "not both" in found.remedy


@pytest.mark.parametrize(
    ("row", "again"), [("0F0 0F0", "0F0"), ("0F0 0B0 0B0", "0B0"), ("0F0 0I0 0I0 0W0", "0I0"), ("0F0 0I0 0W0 0W0", "0W0")]
)
def test_compute_twice(row: str, again: str) -> None:
    found = only(schedule(row))
    assert (found.rule, found.action) == ("complete", again)
    assert "runs twice: it is also step" in found.message


def test_three_times_is_two_findings() -> None:
    assert rules(schedule("0F0 0F0 0F0")) == ["complete", "complete"]


def test_forwards_alone_need_no_backward() -> None:
    assert check(program("0F0 0SEND_F0", "1RECV_F0 1F0")) == []
    assert check(schedule("0F0", "1F0")) == []


def test_a_dropped_receive() -> None:
    found = only(program(FIRST, SECOND.replace("1RECV_F1 ", "")))
    assert (found.rule, found.rank, found.action) == ("complete", 1, "1RECV_F1")
    assert "rank 1 never receives the activations of microbatch 1 from stage 0 to stage 1" in found.message
    assert "0SEND_F1 on rank 0" in found.remedy


def test_a_dropped_send_comes_before_who_waits_for_it() -> None:
    found = check(program(FIRST, SECOND.replace("1SEND_B0 ", "")))
    assert [(f.rule, f.rank) for f in found] == [("complete", 1), ("deadlock", 0)]
    assert "rank 1 never sends the gradients of microbatch 0 from stage 1 to stage 0" in found[0].message
    assert found[1].message == "rank 0 waits in step 5 (0B0) for 1SEND_B0, which nobody runs"


def test_a_message_twice() -> None:
    found = only(program(FIRST.replace("0SEND_F1", "0SEND_F1 0SEND_F1"), SECOND))
    assert (found.rule, found.rank, found.step) == ("complete", 0, 4)
    named = only(program(FIRST.replace("0SEND_F1", "0SEND_F1 0SEND_F1>1"), SECOND))
    assert (named.action, named.step) == ("0SEND_F1>1", 4)  # the same message, however its peer is written


def test_gradients_where_nothing_trains() -> None:
    found = check(program("0F0 0SEND_F0 0RECV_B0", "1RECV_F0 1F0 1SEND_B0"))
    assert {(f.rule, f.action) for f in found} == {("complete", "0RECV_B0"), ("complete", "1SEND_B0")}
    assert all("nothing here trains" in f.message for f in found)


def test_messages_within_a_rank() -> None:
    """In a V the turning point is one rank's own."""
    rows = ["0F0 0SEND_F0 3RECV_F0 3F0", "1RECV_F0 1F0 2F0 2SEND_F0"]
    assert check(program(*rows, placement=Placement.v(2))) == []
    found = check(program(rows[0], "1RECV_F0 1F0 1SEND_F0 2RECV_F0 2F0 2SEND_F0", placement=Placement.v(2)))
    assert [f.action for f in found] == ["1SEND_F0", "2RECV_F0"]
    assert all("both ends are on rank 1" in f.message for f in found)


def test_edges_that_skip_stages_need_messages_too() -> None:
    graph = StageGraph.chain(3, skips=[(0, 2)])
    rows = [
        "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0<2 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0 2SEND_B0>0",
    ]
    assert check(program(*rows, graph=graph)) == []
    for rank, row in enumerate(rows):
        for action in row.split():
            if "<" in action or ">" in action:
                broken = [*rows]
                broken[rank] = " ".join(a for a in row.split() if a != action)
                found = check(program(*broken, graph=graph))
                assert (found[0].rule, found[0].rank, found[0].action) == ("complete", rank, action)
