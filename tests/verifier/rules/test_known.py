"""Stages, microbatches, peers and codes that do not exist."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ir import codes
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.verifier.finding import Finding
from penstock.verifier.verify import check
from verifier.build import FIRST, SECOND, only, program, rules, schedule


def test_a_good_program_has_no_findings() -> None:
    assert check(program(FIRST, SECOND)) == []


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("7F0", "stage 7 of 0..1"),
        ("0F9", "microbatch 9 of 0..1"),
        ("7F9", "stage 7 of 0..1 and microbatch 9 of 0..1"),
        ("5UNSHARD", "stage 5 of 0..1"),
    ],
)
def test_outside_the_counts(extra: str, said: str) -> None:
    found = [f for f in check(program(f"{FIRST} {extra}", SECOND, microbatches=2)) if f.rule == "known"]
    assert [(f.rank, f.step, f.action) for f in found] == [(0, 8, extra)]
    assert said in found[0].message


@pytest.mark.parametrize(("extra", "edge"), [("1SEND_F0", "stage 1 to stage 2"), ("1SEND_B0>7", "stage 7 to stage 1")])
def test_messages_without_an_edge(extra: str, edge: str) -> None:
    found = only(program(FIRST, f"{SECOND} {extra}"))
    assert (found.rule, found.rank, found.step, found.action) == ("known", 1, 8, extra)
    assert f"an edge from {edge}, but there is none" in found.message


def test_a_message_against_its_edge() -> None:
    """Activations only go from the source of an edge to its target, whatever the peer says."""
    graph = StageGraph.chain(3, skips=[(0, 2)])
    rows = ["0F0 0SEND_F0 0SEND_F0>2", "1RECV_F0 1F0 1SEND_F0", "2RECV_F0 2RECV_F0<0 2F0"]
    assert check(program(*rows, graph=graph)) == []
    found = only(program(rows[0], rows[1], f"{rows[2]} 2SEND_F0>0", graph=graph))
    assert (found.rule, found.action) == ("known", "2SEND_F0>0")


def test_the_neighbour_may_be_named_as_the_peer() -> None:
    assert check(program(FIRST.replace("0SEND_F0", "0SEND_F0>1"), SECOND)) == []


def test_messages_in_a_schedule() -> None:
    found = only(schedule("0F0 0SEND_F0", "1F0"))
    assert (found.rule, found.action) == ("known", "0SEND_F0")


def test_no_slots() -> None:
    found = check(program(FIRST, SECOND, channels={(0, 1, Kind.SEND_F): 0}))
    assert found[-1].rule == "known"
    assert "rank 0 to rank 1 for SEND_F has 0 slots" in found[-1].message


# Rows that cannot be read as actions ----------------------------------------------------------------------------------


def _raw(*rows: list[int], ranks: int | None = None) -> list[Finding]:
    packed = Rows.join([np.array(row, dtype=np.int64) for row in rows])
    return check(Program(packed, Placement.linear(ranks or len(rows)), 2))


def test_too_few_rows() -> None:
    (found,) = _raw([codes.F(0, 0)], ranks=2)
    assert "1 rows for 2 ranks" in found.message
    assert not found.excerpt


@pytest.mark.parametrize(
    "code",
    [codes.pack(0, int(Kind.OVERLAP_F_B)), codes.pack(0, 31), 1 << 62, -1, codes.pack(0, int(Kind.F), 0, peer=1)],
)
def test_codes_of_no_action(code: int) -> None:
    (found,) = _raw([codes.F(0, 0), code])
    assert (found.rule, found.rank, found.step) == ("known", 0, 1)
    assert "not the code of an action" in found.message


def test_an_overlap_across_ranks_or_with_a_message() -> None:
    joined = codes.F(0, 0) | codes.JOIN
    assert [(f.rank, f.step) for f in _raw([joined], [codes.F(1, 0)])] == [(0, 0)]
    assert [(f.rank, f.step) for f in _raw([joined, codes.pack(0, int(Kind.SEND_F))], [])] == [(0, 0)]


def test_no_rows_at_all() -> None:
    assert rules(program("", "", microbatches=1))[:2] == ["complete", "complete"]
