"""Ranks that wait forever, and how that is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.action import Action
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import BufferCounts, Program
from penstock.ir.schedule import Schedule
from penstock.verifier.finding import Severity
from penstock.verifier.verify import check
from verifier.build import FIRST, SECOND, Channels, only, program, rules, schedule


def test_a_cycle_is_told_as_a_chain_of_waits() -> None:
    first = "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1"
    second = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    found = only(program(first, second))
    assert (found.rule, found.severity, found.rank, found.step, found.action) == ("deadlock", Severity.HANG, 0, 3, "0B0")
    assert (
        "rank 0 waits in step 3 (0B0) for 1SEND_B0, which is step 5 of rank 1; "
        "rank 1 waits in step 3 (1F1) for 0SEND_F1, which is step 5 of rank 0"
    ) in found.message
    assert "Let rank 1 run 1SEND_B0" in found.remedy


def test_a_cycle_between_compute_actions_of_a_schedule() -> None:
    found = only(schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert (
        "rank 0 waits in step 1 (0B0) for 1B0, which is step 2 of rank 1; rank 1 waits in step 1 (1F1) for 0F1, which is step 2 of rank 0"
        in found.message
    )
    assert only(schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), semantics="rendezvous") == found


def test_ranks_that_only_wait_for_the_cycle_are_left_out() -> None:
    """Rank 0 is stuck because ranks 1 and 2 are."""
    found = only(schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"))
    assert found.rank == 1
    assert "rank 0" not in found.message


def test_two_cycles_are_two_findings() -> None:
    """Two pipelines of two stages side by side, each stuck."""
    rows = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1", "3F0 3F1 3B0 3B1"]
    found = check(schedule(*rows, graph=StageGraph(4, ((0, 1), (2, 3)))))
    assert [(f.rule, f.rank) for f in found] == [("deadlock", 0), ("deadlock", 2)]


def test_a_long_chain_is_cut_short() -> None:
    """Every rank wants the next one's microbatch first; the last wants the first one's."""
    ranks = 20
    placement = Placement.custom([*range(ranks), 0])
    rows = [f"{ranks}F0 0F0", *(f"{r}F0" for r in range(1, ranks))]
    found = only(schedule(*rows, placement=placement))
    assert "20 ranks wait for each other" in found.message
    assert "over 12 more ranks" in found.message
    assert found.message.count("waits in step") == 8


def test_a_dead_end_in_a_schedule() -> None:
    found = check(schedule("0F0 0B0", "1F0"))
    assert [f.rule for f in found] == ["complete", "deadlock"]
    assert found[1].message == "rank 0 waits in step 1 (0B0) for 1I0 (or 1B0), which nobody runs"


def test_an_overlap_waits_for_all_its_parts() -> None:
    """Rank 1 could run 1F1 alone before its first backward, but not together with 1B0, whose gradient needs rank 2's."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 {} 1B1", "2F0 2F1 2B0 2B1"]
    assert check(schedule(rows[0], rows[1].format("1F1 1B0"), rows[2])) == []
    found = only(schedule(rows[0], rows[1].format("(1F1;1B0)OVERLAP_F_B"), rows[2]))
    assert "rank 1 waits in step 1 ((1F1;1B0)OVERLAP_F_B) for 2B0, which is step 2 of rank 2" in found.message
    assert check(schedule(rows[0], rows[1].format("(1F1;1B0)OVERLAP_F_B"), "2F0 2B0 2F1 2B1")) == []


# Slots ----------------------------------------------------------------------------------------------------------------


def test_too_few_slots() -> None:
    """Rank 0 sends all four activations before it takes a gradient; rank 1 takes the third only after it has sent two gradients."""
    first = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3"
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3"
    gradients, activations = (1, 0, Kind.SEND_B), (0, 1, Kind.SEND_F)
    assert check(program(first, second)) == []
    assert check(program(first, second, channels={gradients: 1, activations: 2})) == []
    assert check(program(first, second, channels={gradients: 2, activations: 1})) == []
    found = only(program(first, second, channels={gradients: 1, activations: 1}))
    assert (found.rule, found.rank, found.action) == ("deadlock", 0, "0SEND_F3")
    assert (
        "rank 0 waits in step 7 (0SEND_F3) for the slot that 1RECV_F2 frees, which is step 8 of rank 1; "
        "rank 1 waits in step 7 (1SEND_B1) for the slot that 0RECV_B0 frees, which is step 8 of rank 0"
    ) in found.message
    assert "Give the channel rank 0 -> rank 1 (activations) more slots" in found.remedy


def test_slots_do_not_matter_to_rendezvous() -> None:
    paired = ps.lower(ps.schedule("1f1b", 3, 6))
    assert paired.buffers is not None
    tight = paired.changed(buffers=BufferCounts(channels=dict.fromkeys(paired.buffers.channels, 1)))
    assert check(tight, semantics="rendezvous") == []


def test_a_slot_that_nobody_frees() -> None:
    """The receive of the first message is missing, so that the second finds the only slot taken."""
    found = check(program(FIRST, SECOND.replace("1RECV_F0 ", ""), channels={(0, 1, Kind.SEND_F): 1}))
    assert [f.rule for f in found] == ["complete", "deadlock"]
    assert found[1].message == "rank 0 waits in step 3 (0SEND_F1) for the slot that 1RECV_F0 frees, which nobody runs"


class _Loop:
    """Runs a valid program of a chain with counted channels, one action at a time."""

    def __init__(self, table: Program, slots: Channels) -> None:
        self.rows, self.placement, self.slots = list(table), table.placement, slots
        self.under_way = dict.fromkeys(slots, 0)
        self.sent: set[tuple[int, Kind, int | None]] = set()

    def gets_through(self) -> bool:
        at, moved = [0] * len(self.rows), True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row) and self.runs(rank, row[at[rank]]):
                    at[rank], moved = at[rank] + 1, True
        return at == [len(row) for row in self.rows]

    def runs(self, rank: int, action: Action) -> bool:
        if not action.kind.is_communication:
            return all(self.has_data(rank, part) for part in action.parts)
        up = action.kind in (Kind.SEND_F, Kind.RECV_B)
        other = self.placement.rank_of(action.stage + (1 if up else -1), action.microbatch or 0)
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            self.under_way[other, rank, Kind.SEND_F if action.kind is Kind.RECV_F else Kind.SEND_B] -= 1
            return True
        channel = (rank, other, action.kind)
        if self.under_way[channel] == self.slots[channel]:
            return False
        self.under_way[channel] += 1
        self.sent.add((action.stage, action.kind, action.microbatch))
        return True

    def has_data(self, rank: int, part: Action) -> bool:
        if part.kind not in (Kind.F, Kind.B, Kind.I):
            return True
        source, kind = (part.stage - 1, Kind.SEND_F) if part.kind is Kind.F else (part.stage + 1, Kind.SEND_B)
        if not 0 <= source < self.placement.stages or self.placement.rank_of(source, part.microbatch or 0) == rank:
            return True
        return (source, kind, part.microbatch) in self.sent


@st.composite
def _warm_ups(draw: st.DrawFn) -> Program:
    """1F1B in which ranks run ahead by more than they need, some as far as GPipe."""
    ranks, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 8))
    ahead, rows = draw(st.integers(0, 1)), list[list[str]]()
    for stage in reversed(range(ranks)):
        warm_up = min(ahead, microbatches)
        row = [f"{stage}F{m}" for m in range(warm_up)]
        for m in range(microbatches):
            row += [f"{stage}F{m + warm_up}"] if m + warm_up < microbatches else []
            row.append(f"{stage}B{m}")
        rows.insert(0, row)
        ahead = warm_up + 1 + draw(st.sampled_from([0, 1, 6]))
    return ps.lower(Schedule.from_actions(rows, Placement.linear(ranks)), receive=draw(st.sampled_from(["paired", "just-in-time"])))


@given(_warm_ups(), st.data())
def test_slots_against_a_loop_that_counts_them(built: Program, data: st.DataObject) -> None:
    assert built.buffers is not None
    slots = {channel: data.draw(st.sampled_from([1, 1, 2, 4])) for channel in built.buffers.channels}
    found = rules(built.changed(buffers=BufferCounts(channels=slots)))
    assert (not found) == _Loop(built, slots).gets_through()
    assert set(found) <= {"deadlock"}


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zbv", "dualpipe", "dualpipe-v"])
def test_slots_of_the_buffers_pass_are_enough(name: str) -> None:
    for receive in ("paired", "just-in-time", 2):
        built = ps.lower(ps.schedule(name, 4, 9), receive=receive)
        assert built.buffers is not None
        assert _Loop(built, built.buffers.channels).gets_through()
        assert check(built) == []
