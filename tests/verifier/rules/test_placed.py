"""Actions on the wrong rank."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.verifier.verify import check
from verifier.build import only, program, rules, schedule


def test_compute_on_another_rank() -> None:
    found = only(schedule("0F0 1B0 0B0", "1F0"))
    assert (found.rule, found.rank, found.step) == ("placed", 0, 1)
    assert "1B0 runs on rank 0, but stage 1 is on rank 1" in found.message


@pytest.mark.parametrize("extra", ["1UNSHARD 1RESHARD", "1REDUCE_GRAD"])
def test_sharding_and_reduction_where_the_stage_is_not_held(extra: str) -> None:
    table = program(f"0F0 {extra} 0SEND_F0", "1RECV_F0 1F0")
    placed = [f for f in check(table) if f.rule == "placed"]
    assert [f.action for f in placed] == extra.split()
    assert all("stage 1 is on rank 1" in f.message for f in placed)


def test_both_copies_of_a_bidirectional_placement() -> None:
    """Stage 0 is on rank 0 for even microbatches and on rank 1 for odd ones."""
    rows = ["0F0 1F1", "0F1 1F0"]
    assert check(schedule(*rows, placement=Placement.bidirectional(2))) == []
    swapped = check(schedule("0F1 1F1", "0F0 1F0", placement=Placement.bidirectional(2)))
    assert [f.rule for f in swapped[:2]] == ["placed", "placed"]
    assert "stage 0 is on rank 1 for microbatch 1" in swapped[0].message


def test_reduction_on_both_holders_of_a_stage() -> None:
    """Each copy has its own gradients."""
    built = ps.schedule("dualpipe", 2, 4)
    rows = [[str(a) for a in row] + ["0REDUCE_GRAD", "1REDUCE_GRAD"] for row in built]
    assert check(Schedule.from_actions(rows, built.placement)) == []
    assert rules(Schedule.from_actions([rows[0], rows[1][:-1]], built.placement)) == ["reduction"]
