"""Parameters gathered and freed."""

from __future__ import annotations

import pytest

from penstock.ir.placement import Placement
from penstock.verifier.finding import Severity
from penstock.verifier.verify import check
from verifier.build import only, program, rules


@pytest.mark.parametrize(
    "row",
    [
        "0UNSHARD 0F0 0B0 0RESHARD",
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD",
        "0UNSHARD 0F0 0I0 0W0 0RESHARD",
        "0UNSHARD 0RESHARD 0UNSHARD 0F0 0RESHARD",
        "0F0 0B0",
    ],
)
def test_kept_in_the_right_state(row: str) -> None:
    assert check(program(row)) == []


@pytest.mark.parametrize(
    ("row", "step", "said"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD", 0, "0F0 uses the parameters of stage 0, which rank 0 holds sharded from the start"),
        ("0UNSHARD 0F0 0RESHARD 0B0", 3, "0B0 uses the parameters of stage 0, which rank 0 holds sharded since 0RESHARD in step 2"),
        ("0UNSHARD 0F0 0I0 0RESHARD 0W0", 4, "0W0 uses the parameters"),
        ("0UNSHARD 0UNSHARD 0F0 0RESHARD", 1, "holds unsharded since 0UNSHARD in step 0"),
        ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD", 2, "holds unsharded since 0UNSHARD in step 0"),
        ("0RESHARD 0UNSHARD 0F0 0RESHARD", 0, "0RESHARD frees the parameters of stage 0, which rank 0 holds sharded from the start"),
        ("0UNSHARD 0F0 0RESHARD 0RESHARD", 3, "holds sharded since 0RESHARD in step 2"),
        ("0UNSHARD 0F0", 0, "rank 0 ends with the parameters of stage 0 unsharded: nothing reshards them after 0UNSHARD"),
    ],
)
def test_one_wrong_state(row: str, step: int, said: str) -> None:
    found = only(program(row))
    assert (found.rule, found.step) == ("sharding", step)
    assert said in found.message
    uses = "uses" in said
    assert found.severity is (Severity.WRONG if uses else Severity.UNTIDY)


def test_where_one_stage_is_sharded_all_are() -> None:
    found = only(program("0UNSHARD 0F0 0RESHARD 1F0", placement=Placement.custom([0, 0])))
    assert (found.rule, found.action) == ("sharding", "1F0")


def test_overlapped_parts_use_parameters_too() -> None:
    row = "0UNSHARD 0F0 0F1 {} (0F2;0B0)OVERLAP_F_B 0B1 0B2 0RESHARD"
    assert check(program(row.format(""))) == []
    assert rules(program(row.format("0RESHARD"))) == ["sharding"] * 5  # both parts, two backwards, and the second RESHARD


def test_each_rank_of_two_copies_has_its_own_state() -> None:
    rows = ["0UNSHARD 1UNSHARD 0F0 1F1 0RESHARD 1RESHARD", "0UNSHARD 1UNSHARD 0F1 1F0 0RESHARD 1RESHARD"]
    messages = [rows[0].replace("0F0 1F1", "0F0 0SEND_F0 1RECV_F1 1F1"), rows[1].replace("0F1 1F0", "0F1 0SEND_F1 1RECV_F0 1F0")]
    assert check(program(*messages, placement=Placement.bidirectional(2))) == []
    found = only(program(messages[0].replace("1UNSHARD ", "").replace(" 1RESHARD", ""), messages[1], placement=Placement.bidirectional(2)))
    assert (found.rank, found.action) == (0, "1F1")
