"""Actions that run together, by whatever runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import penstock as ps
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from runtime.models import assert_same, blocks, by_loop, by_pipeline

Operations = list[Callable[[], None]]


@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe"])
def test_overlap_executor_is_used_for_every_overlapped_action(name: str) -> None:
    """With its own order of the parts the numbers are those of the fallback, to the last bit."""
    schedule = ps.schedule(name, ranks=2, microbatches=8)
    model, x, y = blocks(schedule.stages), torch.randn(9, 6), torch.randn(9, 6)
    seen: list[Action] = []

    def backwards(action: Action, operations: Operations) -> None:
        seen.append(action)
        assert len(operations) == len(action.sub_actions)
        for operation in reversed(operations):
            operation()

    found = by_pipeline(model, schedule, x, y, overlap=backwards)
    assert_same(found, by_pipeline(model, schedule, x, y))
    wanted = [action for row in schedule for action in row if action.kind is Kind.OVERLAP_F_B]
    assert wanted
    assert sorted(map(str, seen)) == sorted(map(str, wanted))


def test_fallback_equals_the_loop() -> None:
    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=8)
    model, x, y = blocks(4), torch.randn(9, 6), torch.randn(9, 6)
    assert_same(by_pipeline(model, schedule, x, y), by_loop(model, x, y, 8))


def test_three_actions_together() -> None:
    rows = [["0F0", "1F0", "0F1", "1I0", "(1W0;0B0;1F1)OVERLAP_F_B", "1B1", "0B1"]]
    schedule = ps.Schedule.from_actions(rows, ps.Placement.custom([0, 0]))
    model, x, y = blocks(2), torch.randn(4, 6), torch.randn(4, 6)
    assert_same(by_pipeline(model, schedule, x, y), by_loop(model, x, y, 2))


def test_failure_of_the_overlap_executor_itself() -> None:
    def broken(action: Action, operations: Operations) -> None:
        raise ValueError("no streams")

    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=8)
    with pytest.raises(ps.PenstockError, match=r"OVERLAP_F_B failed on rank \d: ValueError: no streams"):
        by_pipeline(blocks(4), schedule, torch.randn(8, 6), torch.randn(8, 6), overlap=broken)
