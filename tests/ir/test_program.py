"""Programs: the lowered form, and the slots it needs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import BufferCounts, Program
from penstock.ir.rows import pack_rows
from penstock.ir.schedule import Schedule

ROWS = [["0UNSHARD", "0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE_GRAD", "0RESHARD"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
counts = st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=3)
buffers = st.builds(
    BufferCounts,
    st.lists(counts, max_size=3).map(tuple),
    st.lists(counts, max_size=3).map(tuple),
    st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from((Kind.SEND_F, Kind.SEND_B))), st.integers(1, 9)),
)


def test_a_program_is_lowered_and_holds_its_rows() -> None:
    program = Program.from_actions(ROWS, Placement.linear(2))
    assert program.lowered
    assert program.training
    assert program.microbatches == 1
    assert [list(map(str, row)) for row in program] == ROWS


def test_the_schedule_of_a_program_is_its_compute_actions() -> None:
    program = Program.from_actions(ROWS, Placement.linear(2), name="small")
    assert program.schedule() == Schedule.from_actions([["0F0", "0B0"], ["1F0", "1B0"]], Placement.linear(2))
    assert program.schedule().name == "small"


def test_new_rows_drop_the_buffers_counted_for_the_old() -> None:
    held = BufferCounts(({0: 1}, {1: 1}), ({0: 1}, {}), {(0, 1, Kind.SEND_F): 1})
    program = Program(pack_rows(ROWS), Placement.linear(2), 1, passes="send-receive", buffers=held)
    fewer = program.changed(rows=pack_rows([ROWS[0][1:3], ROWS[1][:2]]))
    assert fewer.buffers is None
    assert fewer.passes == "send-receive"
    assert fewer.placement == program.placement
    assert program.changed(passes="shard").buffers == held


def test_lowering_starts_from_a_schedule_without_messages() -> None:
    schedule = Schedule.from_actions([["0F0"], ["1F0"]], Placement.linear(2))
    begun = Program.start(schedule)
    assert not begun.lowered
    assert begun.schedule() == schedule
    assert Program.start(begun) is begun
    assert begun.links.data.before.tolist() == [0]
    assert not begun.changed(passes="x").lowered


@given(buffers)
def test_buffers_survive_plain_data(held: BufferCounts) -> None:
    assert BufferCounts.from_json(json.loads(json.dumps(held.to_json()))) == held


@pytest.mark.parametrize("function", [ps.lower, ps.verify, ps.simulate, ps.simulate_many])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("zbv", r"takes a Schedule or a Program, got str: build it, penstock\.schedule\('zbv', ranks, microbatches\)"),
        ("a/zbv.csv", r"got str: load the file, penstock\.load\('a/zbv\.csv'\)"),
        (None, "takes a Schedule or a Program, got NoneType"),
        ([["0F0"]], "takes a Schedule or a Program, got list"),
    ],
)
def test_only_schedules_and_programs_are_taken(function, value, said):
    with pytest.raises(ps.PenstockError, match=f"{function.__name__} {said}" if said.startswith("takes") else said) as refused:
        function(value)
    assert isinstance(refused.value, TypeError)


@pytest.mark.parametrize("costs", [{"f": 1}, "f=1", 3])
def test_costs_are_costs(costs):
    with pytest.raises(CostsError, match=r"costs must be a penstock\.Costs, got "):
        ps.simulate(ps.schedule("1f1b", 2, 2), costs)
