"""What an action needs of its own rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.action import Action
from penstock.ir.dependencies import needs
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.verifier.finding import Finding
from penstock.verifier.verify import check
from verifier.build import FIRST, SECOND, only, program, schedule


@pytest.mark.parametrize(
    ("row", "action", "needed"),
    [
        ("0B0 0F0", "0B0", "0F0"),
        ("0F0 0W0 0I0", "0W0", "0I0"),
        ("0F0 0I0 0W0 0W1 0F1 0I1", "0W1", "0I1"),
    ],
)
def test_within_a_stage(row: str, action: str, needed: str) -> None:
    found = only(schedule(row))
    assert (found.rule, found.action) == ("order", action)
    assert f"{action} needs {needed}, which rank 0 runs only in step {row.split().index(needed)}" in found.message


def test_between_stages_of_one_rank() -> None:
    placement = Placement.custom([0, 0])
    assert check(schedule("0F0 1F0 1B0 0B0", placement=placement)) == []
    assert only(schedule("1F0 0F0 1B0 0B0", placement=placement)).action == "1F0"
    assert only(schedule("0F0 1F0 0B0 1B0", placement=placement)).action == "0B0"


def test_a_receive_behind_its_use() -> None:
    found = only(program(FIRST, SECOND.replace("1RECV_F1 1F1", "1F1 1RECV_F1")))
    assert (found.rule, found.rank, found.action) == ("order", 1, "1F1")
    assert "1F1 needs 1RECV_F1" in found.message


def test_a_receive_well_before_its_use() -> None:
    assert check(program("0RECV_B0 0RECV_B1 " + FIRST.replace("0RECV_B0 ", "").replace("0RECV_B1 ", ""), SECOND)) == []


def test_a_send_before_its_maker() -> None:
    found = only(program(FIRST.replace("0F1 0SEND_F1", "0SEND_F1 0F1"), SECOND))
    assert (found.rule, found.action) == ("order", "0SEND_F1")


def test_parts_of_an_overlap_do_not_feed_each_other() -> None:
    found = only(schedule("0F0 (0F1;0B1)OVERLAP_F_B 0B0"))
    assert (found.rule, found.action) == ("order", "(0F1;0B1)OVERLAP_F_B")
    assert "0B1 needs 0F1, but the two run together" in found.message
    assert check(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1")) == []


def test_a_missing_need_is_reported_once() -> None:
    found = only(schedule("0B0 0F1 0B1"))
    assert (found.rule, found.action) == ("complete", "0F0")


# Against a loop that knows nothing but `needs` ------------------------------------------------------------------------


def _runs(rows: list[list[Action]], graph: StageGraph) -> bool:
    """Whether every rank gets to its end when an action runs as soon as all it needs has run."""
    done: set[tuple[int, Kind, int | None]] = set()
    at, moved = [0] * len(rows), True

    def ready(action: Action) -> bool:
        return all((need.stage, kind, need.microbatch) in done for need in needs(action, graph) for kind in (_made_by(need.kind),))

    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and ready(row[at[rank]]):
                done.update((part.stage, _made_by(part.kind), part.microbatch) for part in row[at[rank]].parts)
                at[rank], moved = at[rank] + 1, True
    return at == [len(row) for row in rows]


def _made_by(kind: Kind) -> Kind:
    return Kind.I if kind is Kind.B else kind


@st.composite
def _shuffled(draw: st.DrawFn) -> tuple[list[list[Action]], Placement, StageGraph]:
    """All the work of a small pipeline in any order, some of it overlapped."""
    placement = draw(st.sampled_from([Placement.linear(2), Placement.linear(3), Placement.v(2), Placement.bidirectional(2)]))
    stages, microbatches = placement.stages, draw(st.integers(1, 2))
    graph = StageGraph.chain(stages, [(0, stages - 1)] if stages > 2 and draw(st.booleans()) else [])
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for stage in range(stages):
        for microbatch in range(microbatches):
            backward = draw(st.sampled_from([(Kind.B,), (Kind.I, Kind.W)]))
            rows[placement.rank_of(stage, microbatch)] += [Action(stage, kind, microbatch) for kind in (Kind.F, *backward)]
    return [_overlapped(draw, _order(draw, row, stages)) for row in rows], placement, graph


def _order(draw: st.DrawFn, row: list[Action], stages: int) -> list[Action]:
    """A sensible order, disturbed a little, so that good and bad orders both turn up."""
    sensible = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}
    ordered = sorted(row, key=lambda a: (sensible[a.kind], a.microbatch, a.stage if a.kind is Kind.F else stages - a.stage))
    for _ in range(draw(st.integers(0, 2))):
        ordered.insert(draw(st.integers(0, len(ordered) - 1)), ordered.pop(draw(st.integers(0, len(ordered) - 1))))
    return ordered


def _overlapped(draw: st.DrawFn, row: list[Action]) -> list[Action]:
    at = draw(st.integers(0, len(row)))
    return [*row[:at], Action.overlap(*row[at : at + 2]), *row[at + 2 :]] if draw(st.booleans()) and at + 2 <= len(row) else row


@given(_shuffled())
def test_a_schedule_is_proved_exactly_when_it_runs(case: tuple[list[list[Action]], Placement, StageGraph]) -> None:
    rows, placement, graph = case
    found: list[Finding] = check(Schedule.from_actions(rows, placement, graph=graph))
    assert (not found) == _runs(rows, graph)
    assert {finding.rule for finding in found} <= {"order", "deadlock"}
