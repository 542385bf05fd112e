"""Waits for sends and reductions: each finding with its words and its place."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.ir.placement import Placement
from penstock.verifier.finding import Severity
from penstock.verifier.verify import check, verify
from verifier.build import only, program, rules

FIRST = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0B1 0WAIT_SEND_F1"
SECOND = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1"


def test_waits_are_part_of_the_proof() -> None:
    proof = verify(program(FIRST, SECOND), max_outstanding_sends=2)
    assert proof.rules["retired"] == "every send is waited for once"
    assert "outstanding" in proof.rules
    assert "retired" not in verify(program("0F0 0SEND_F0", "1RECV_F0 1F0")).rules


def test_a_send_without_a_wait() -> None:
    finding = only(program(FIRST.replace(" 0WAIT_SEND_F1", ""), SECOND))
    assert (finding.rule, finding.rank, finding.action) == ("retired", 0, "0WAIT_SEND_F1")
    assert "never waits for 0SEND_F1" in finding.message
    assert "step 3 of rank 0" in finding.remedy


def test_a_second_wait() -> None:
    finding = only(program(FIRST + " 0WAIT_SEND_F0", SECOND))
    assert (finding.rule, finding.step) == ("retired", 10)
    assert "has retired in step 6 of rank 0" in finding.message


def test_a_wait_before_its_send() -> None:
    finding = only(program("0F0 0WAIT_SEND_F0 0SEND_F0", "1RECV_F0 1F0"))
    assert (finding.rule, finding.step) == ("order", 1)
    assert "0WAIT_SEND_F0 needs 0SEND_F0" in finding.message


def test_a_wait_for_no_send_of_the_rank() -> None:
    assert rules(program("0F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1F0 1WAIT_SEND_B0")) == ["retired"]
    assert rules(program("0F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1F0 1WAIT_SEND_F0")) == ["known"]  # along no edge


def test_ranks_that_wait_for_each_others_receives() -> None:
    table = program(
        "0F0 0SEND_F0 0WAIT_SEND_F0 1RECV_F1 1F1",
        "0F1 0SEND_F1 0WAIT_SEND_F1 1RECV_F0 1F0",
        placement=Placement.bidirectional(2),
    )
    (finding,) = (each for each in check(table) if each.rule == "deadlock")
    assert finding.severity is Severity.HANG
    assert "rank 0 waits in step 2 (0WAIT_SEND_F0) for 1RECV_F0, which is step 3 of rank 1" in finding.message
    assert "Let rank 1 run 1RECV_F0 before its step 2" in finding.remedy


def test_more_sends_outstanding_than_allowed() -> None:
    table = program(FIRST, SECOND)
    found = check(table, max_outstanding_sends=1)
    assert [(each.rule, each.rank, each.step) for each in found] == [("outstanding", 0, 3), ("outstanding", 1, 7)]
    assert "up to 2 sends outstanding, but at most 1 may be; 0SEND_F1 is the first" in found[0].message
    assert not check(table, max_outstanding_sends=2)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ScheduleError, match="max_outstanding_sends"):
            check(table, max_outstanding_sends=wrong)  # type: ignore[arg-type]


def test_reductions_and_their_waits() -> None:
    table = "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    chunks = Placement.v(1)
    assert not check(program(table, placement=chunks))
    finding = only(program(f"{table} 0WAIT_REDUCE_GRAD", placement=chunks))
    assert (finding.rule, finding.action) == ("reduction", "1WAIT_REDUCE_GRAD")
    both = f"{table} 0WAIT_REDUCE_GRAD 1WAIT_REDUCE_GRAD"
    assert not check(program(both, placement=chunks))
    assert "waits again" in only(program(f"{both} 1WAIT_REDUCE_GRAD", placement=chunks)).message
    finding = only(program("0F0 0WAIT_REDUCE_GRAD"))
    assert finding.message == "0WAIT_REDUCE_GRAD waits for a reduction that rank 0 never begins"
    assert "0REDUCE_GRAD before it" in finding.remedy
