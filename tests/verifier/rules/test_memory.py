"""What each rank holds, and its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.table import Table
from penstock.verifier.finding import Severity
from penstock.verifier.rules.memory import peak_memory, sum_held
from penstock.verifier.verify import check
from verifier.build import only, program, schedule

NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v", "dualpipe", "inference"]


def _peaks(table: Table, costs: Costs) -> list[float]:
    """Step by step with sets of what is held: all that a step takes at its start, then what its end changes."""
    sharded = any(part.kind is Kind.UNSHARD for row in table for action in row for part in action.parts)
    peaks = []
    for rank, row in enumerate(table):
        static = sum(costs.of_stage("shard" if sharded else "parameters", stage) for stage in table.placement.stages_of(rank))
        held: dict[tuple[str, int, int | None], float] = {}
        peak = static
        for action in row:
            for part in action.parts:
                _take(table, costs, part, held)
            peak = max(peak, static + sum(held.values()))
            for part in action.parts:
                _give(costs, part, held)
        assert not held
        peaks.append(peak)
    return peaks


def _take(table: Table, costs: Costs, part: ps.Action, held: dict[tuple[str, int, int | None], float]) -> None:
    stage, microbatch = part.stage, part.microbatch
    if part.kind is Kind.F and table.training:
        held["activation", stage, microbatch] = costs.of_stage("activation", stage, microbatch or 0)
    elif part.kind in (Kind.RECV_F, Kind.RECV_B):
        lower = stage - 1 if part.kind is Kind.RECV_F else stage
        held[part.kind.name, stage, microbatch] = costs.of_stage("output", lower, microbatch or 0)
    elif part.kind is Kind.UNSHARD:
        held["parameters", stage, None] = costs.of_stage("parameters", stage)


def _give(costs: Costs, part: ps.Action, held: dict[tuple[str, int, int | None], float]) -> None:
    stage, microbatch = part.stage, part.microbatch
    if part.kind is Kind.F:
        held.pop(("RECV_F", stage, microbatch), None)
    elif part.kind in (Kind.B, Kind.I):
        held.pop(("RECV_B", stage, microbatch), None)
        held.pop(("activation", stage, microbatch))
        if part.kind is Kind.I:
            held["stash", stage, microbatch] = costs.of_stage("weight_stash", stage, microbatch or 0)
    elif part.kind is Kind.W:
        held.pop(("stash", stage, microbatch))
    elif part.kind is Kind.RESHARD:
        held.pop(("parameters", stage, None))


@given(st.sampled_from(NAMES), st.sampled_from([2, 4]), st.integers(1, 8), st.booleans(), st.booleans(), st.data())
def test_the_peak_is_that_of_what_is_held(name: str, ranks: int, microbatches: int, lowered: bool, fsdp: bool, data: st.DataObject) -> None:
    table: Table = ps.schedule(name, ranks, microbatches)
    table = ps.lower(table, fsdp=fsdp) if lowered else table
    size = st.integers(0, 40).map(lambda n: n / 10)
    of_stage = st.one_of(size, st.lists(size, min_size=microbatches, max_size=microbatches))
    sizes = st.lists(of_stage, min_size=table.stages, max_size=table.stages)
    each = st.lists(size, min_size=table.stages, max_size=table.stages)
    costs = Costs(
        activation=data.draw(sizes),
        weight_stash=data.draw(sizes),
        output=data.draw(sizes),
        parameters=data.draw(each),
        shard=data.draw(each),
    )
    assert peak_memory(table, costs) == pytest.approx(_peaks(table, costs))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (4, 2), (4, 9), (7, 20)])
def test_the_peaks_of_the_formulas(ranks: int, microbatches: int) -> None:
    assert peak_memory(ps.schedule("gpipe", ranks, microbatches)) == [microbatches] * ranks
    assert peak_memory(ps.schedule("1f1b", ranks, microbatches)) == [min(ranks - r, microbatches) for r in range(ranks)]
    assert peak_memory(ps.schedule("inference", ranks, microbatches)) == [0] * ranks


def test_the_end_of_the_input_backward_turns_the_activation_into_the_stash() -> None:
    costs = Costs(activation=1.0, weight_stash=0.5)
    assert peak_memory(schedule("0F0 0I0 0W0"), costs) == [1.0]
    assert peak_memory(schedule("0F0 0I0 0F1 0I1 0W0 0W1"), costs) == [1.5]
    assert peak_memory(schedule("0F0 0B0"), costs) == [1.0]


SHARED = "2RECV_F0<0 1F0 2F0 2B0 1B0 2SEND_B0>0"
ALONE = "1RECV_F0 2RECV_F0<0 1F0 2F0 2B0 2SEND_B0>0 1B0 1SEND_B0"


@pytest.mark.parametrize(
    ("second", "first", "held"),
    [
        (SHARED, "0F0 0SEND_F0>2 0RECV_B0<2 0B0", [1, 1, 1, 0, 1, 0]),  # till the last reader; the sum while its first part waits
        (ALONE, "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0<2 0RECV_B0 0B0", [1, 2, 2, 1, 0, 0, 0, 0]),
    ],
)
def test_a_message_with_two_readers_is_held_until_the_last_and_their_sum_until_it_is_whole(
    first: str, second: str, held: list[int]
) -> None:
    table = program(first, second, placement=ps.Placement.custom([0, 1, 1]), graph=ps.StageGraph.chain(3, [(0, 2)]))
    costs = Costs(activation=0.0, output=(1.0, 0.0, 0.0))
    assert check(table) == []
    assert sum_held(table, costs)[table.rows.group_offsets[1] :].tolist() == held
    timeline = ps.simulate(table, costs)
    assert timeline.peak_memory == peak_memory(table, costs)


def test_an_overlap_takes_before_it_gives() -> None:
    assert peak_memory(schedule("0F0 0B0 0F1 0B1")) == [1.0]
    assert peak_memory(schedule("0F0 (0B0;0F1)OVERLAP_F_B 0B1")) == [2.0]


def test_over_the_limit() -> None:
    found = only(ps.schedule("gpipe", 2, 4), memory_limit=[3, 4])
    assert (found.rule, found.severity, found.rank, found.step, found.action) == ("memory", Severity.MEMORY, 0, 3, "0F3")
    assert "rank 0 holds 4 at its peak, 1 over its limit of 3; 2 of its 8 steps are over, the first is step 3" in found.message


def test_at_the_limit() -> None:
    assert check(ps.schedule("gpipe", 2, 4), memory_limit=4) == []
    tenths = Costs(activation=0.1)
    assert 0.1 + 0.1 + 0.1 > 0.3  # which is why a limit has a little slack
    assert check(schedule("0F0 0F1 0F2 0B0 0B1 0B2"), memory_limit=0.3, costs=tenths) == []


def test_limits_with_units() -> None:
    costs = Costs(activation=3 * 2.0**30)
    table = schedule("0F0 0F1 0B0 0B1")
    assert check(table, memory_limit="6GiB", costs=costs) == []
    found = only(table, memory_limit="4GiB", costs=costs)
    assert "holds 6GiB at its peak, 2GiB over its limit of 4GiB" in found.message
    assert "3KiB" in only(table, memory_limit="3KiB", costs=Costs(activation=3 * 1024)).message
    assert "2TiB over" in only(table, memory_limit="0B", costs=Costs(activation=2.0**40)).message


def test_forward_only_holds_nothing() -> None:
    assert check(program("0F0 0F1 0F2"), memory_limit=0) == []
