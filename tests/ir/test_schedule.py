"""Schedules: one rank's actions on demand, the whole when asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ActionError, ScheduleError
from penstock.ir.action import Action
from penstock.ir.codes import MAX_MICROBATCHES, F
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.rows import Ints
from penstock.ir.schedule import Schedule


def asking(ranks: int) -> tuple[Schedule, list[int]]:
    """A schedule of one forward a rank, and the list of ranks whose rows were made."""
    asked: list[int] = []

    def source(rank: int) -> Ints:
        asked.append(rank)
        return np.array([F(rank, 0)], dtype=np.int64)

    return Schedule(Placement.linear(ranks), 1, source), asked


def test_only_the_rank_that_is_looked_at_is_made() -> None:
    schedule, asked = asking(1000)
    assert schedule[7] == (Action.parse("7F0"),)
    assert schedule[-1] == (Action.parse("999F0"),)
    assert asked == [7, 999]


def test_the_whole_is_made_once() -> None:
    schedule, asked = asking(4)
    assert schedule.rows is schedule.rows
    assert [row[0].stage for row in schedule] == [0, 1, 2, 3]
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [4, -5, 100])
def test_a_rank_that_is_not_there_is_an_index_error(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank}: there are 4 ranks, 0 to 3"):
        asking(4)[0][rank]


def test_written_out_actions_are_text_or_actions() -> None:
    placement = Placement.linear(2)
    one = Schedule.from_actions([["0F0", "0B0"], [Action.parse("1F0"), "1B0"]], placement)
    assert one.microbatches == 1
    assert [list(map(str, row)) for row in one] == [["0F0", "0B0"], ["1F0", "1B0"]]
    assert (one.ranks, one.stages, one.chunks, len(one), one.lowered, one.training) == (2, 2, 1, 2, False, True)
    assert not Schedule.from_actions([["0F0"], ["1F0"]], placement).training
    assert Schedule.from_actions([["0F3"], ["1F3"]], placement).microbatches == 4
    assert Schedule.from_actions([["0F0"], ["1F0"]], placement, microbatches=9).microbatches == 9


def test_equal_schedules_have_equal_rows_on_equal_ranks() -> None:
    rows = [["0F0", "0F1"], ["1F0", "1F1"]]
    one = Schedule.from_actions(rows, Placement.linear(2), name="a")
    assert one == Schedule.from_actions(rows, Placement.custom([0, 1]), name="b")
    assert one != Schedule.from_actions(rows, Placement.linear(2), microbatches=3)
    assert one != Schedule.from_actions([rows[0], rows[1][::-1]], Placement.linear(2))
    assert one != Schedule.from_actions(rows, Placement.custom([1, 0]))
    assert one != ps.Program.from_actions(rows, Placement.linear(2))
    assert one != rows
    wide = Schedule.from_actions([["0F0"], ["1F0"], ["2F0"]], Placement.linear(3))
    assert wide != wide.with_graph(StageGraph.chain(3, [(0, 2)]))


def test_another_graph_keeps_the_order() -> None:
    schedule, asked = asking(3)
    wired = schedule.with_graph(StageGraph.chain(3, [(0, 2)]))
    assert wired[2] == schedule[2]
    assert asked == [2, 2]
    assert wired.graph.skips == ((0, 2),)
    assert schedule.graph.is_chain


@pytest.mark.parametrize("microbatches", [0, -1, MAX_MICROBATCHES + 1])
def test_the_microbatch_count_is_checked(microbatches: int) -> None:
    with pytest.raises(ScheduleError, match=f"{microbatches} microbatches: the count must be from 1 to {MAX_MICROBATCHES}"):
        Schedule.from_actions([["0F0"]], Placement.linear(1), microbatches=microbatches)


def test_the_graph_must_have_the_stages_of_the_placement() -> None:
    with pytest.raises(ScheduleError, match="the stage graph has 3 stages, the placement 2"):
        Schedule.from_actions([["0F0"], ["1F0"]], Placement.linear(2), graph=StageGraph.chain(3))


def test_a_schedule_says_what_it_is() -> None:
    assert repr(ps.schedule("1f1b", 4, 8)) == "<Schedule '1f1b', linear, 4 ranks, 4 stages, 8 microbatches>"


@given(st.integers(1, 6), st.integers(1, 12))
def test_the_order_of_1f1b_is_right_on_the_last_rank(ranks: int, microbatches: int) -> None:
    """PyTorch numbers the last rank's forwards from 1 to M; the data has microbatches 0 to M - 1."""
    last = [str(action) for action in ps.schedule("1f1b", ranks, microbatches)[-1]]
    assert last == [f"{ranks - 1}{kind}{m}" for m in range(microbatches) for kind in "FB"]


# Written-out actions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ps.available()))
def test_actions_in_pytorchs_form_give_the_schedule_back(name: str) -> None:
    schedule = ps.schedule(name, ranks=1 if name == "data-parallel" else 4, microbatches=8)
    idle = {rank: [cell for action in row for cell in (None, action, "")] for rank, row in enumerate(schedule)}
    text = [[str(action) for action in row] for row in schedule]
    for actions in (idle, text, dict(enumerate(text))):
        again = Schedule.from_actions(actions, slices=schedule.slices)
        assert again == schedule
        assert again.placement.copies == schedule.placement.copies


def test_actions_of_torch() -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = torch._ComputationType
    forward, backward = torch._Action(0, kinds.FORWARD, 1), torch._Action(3, kinds.FULL_BACKWARD, 0)
    both = torch._Action(-1, kinds.OVERLAP_F_B, None, (forward, backward))
    order = {0: [torch._Action(0, kinds.FORWARD, 0), None, both], 1: [torch._Action(1, kinds.FORWARD, 0)]}
    schedule = Schedule.from_actions(order, Placement.v(2))
    assert [list(map(str, row)) for row in schedule] == [["0F0", "(0F1;3B0)OVERLAP_F_B"], ["1F0"]]


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ({0: ["0F0"], 2: ["1F0"]}, "there are 2 rows of actions, but none for rank 1"),
        ([["0F0"], ["0B0", "1F0"]], r"placement cannot be inferred: .*\(rank 1\), cell 1: 0B0 is on rank 1, but stage 0 is on rank 0"),
        ([[], []], "placement cannot be inferred, because there is no compute action: give placement="),
        ([["0F0"], ["2F0"]], "placement cannot be inferred: .*stage 1 is on no rank, though stages go up to 2"),
    ],
)
def test_a_placement_that_cannot_be_inferred(actions: Any, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Schedule.from_actions(actions)


def test_what_is_no_action_is_named_with_its_place() -> None:
    with pytest.raises(ActionError, match=r"entry 2 of rank 1: '1Fx' is not an action"):
        Schedule.from_actions([["0F0"], [None, "1F0", "1Fx"]])
