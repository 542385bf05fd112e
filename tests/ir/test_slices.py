"""Slices in the language: the number of a microbatch's slice, its text, its files and its proof."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from ir.strategies import compute_actions
from penstock.errors import ActionError, FileFormatError, PassError, ScheduleError, VerifyError
from penstock.ir.action import Action, pack_action, unpack_code, unpack_row
from penstock.ir.dependencies import needs
from penstock.ir.formats.csv_form import csv_text, parse_csv
from penstock.ir.formats.json_form import decode, encode
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.passes.deepspeed.instructions import streams
from penstock.schedules.registry import algorithms

SLICED = sorted(name for name, known in algorithms().items() if known.slices is not None)


def sliced(name: str = "seq1f1b", ranks: int = 3, microbatches: int = 2, slices: int = 3) -> ps.Schedule:
    return ps.schedule(name, ranks=ranks, microbatches=microbatches, slices=slices)


# Actions --------------------------------------------------------------------------------------------------------------


@given(compute_actions, st.integers(1, 9), st.data())
def test_an_action_of_a_slice_is_packed_and_written(action: Action, slices: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, slices - 1))
    microbatch = (action.microbatch or 0) // (2 * slices)  # so that the number fits
    named = Action(action.stage, action.kind, microbatch, slice=part)
    assert str(named) == f"{action.stage}{action.kind.name}{microbatch}.{part}"
    assert Action.parse(str(named)) == named
    (code,) = pack_action(named, slices)
    assert code == pack_action(Action(action.stage, action.kind, microbatch * slices + part))[0]
    assert unpack_code(code, slices) == (named if slices > 1 else Action(action.stage, action.kind, microbatch))


def test_a_slice_needs_slices() -> None:
    with pytest.raises(ActionError, match=r"2F3\.1 names slice 1, but this schedule has sequences that are not cut"):
        pack_action(Action.parse("2F3.1"))
    with pytest.raises(ActionError, match=r"2F3\.4 names slice 4, but this schedule has 4 slices, 0 to 3"):
        pack_action(Action.parse("2F3.4"), 4)
    for text in ("2UNSHARD.1", "2F.1", "2F3.", "2F3.x", "2F3.1.1"):
        with pytest.raises(ActionError):
            Action.parse(text)


def test_messages_of_slices_are_written_too() -> None:
    assert [str(action) for action in ps.lower(sliced(ranks=2, microbatches=1, slices=2))[1]] == [
        "1RECV_F0.0", "1F0.0", "1RECV_F0.1", "1F0.1", "1B0.1", "1SEND_B0.1", "1B0.0", "1SEND_B0.0", "1REDUCE_GRAD",
    ]  # fmt: skip


def test_rows_unpack_alike_one_by_one_and_all_at_once() -> None:
    program = ps.lower(sliced("seq-zb-h1"), fsdp=True)
    for rank in range(program.ranks):
        one_by_one = tuple(unpack_code(int(code), 3) for code in program.row(rank))
        assert unpack_row(program.row(rank), 3) == one_by_one == program[rank]
        assert any(action.slice is None for action in one_by_one)  # UNSHARD belongs to the stage


def test_needs() -> None:
    chain = StageGraph.chain(3)
    assert list(map(str, needs(Action.parse("1F0.2"), chain, 3))) == ["0F0.2", "1F0.1"]
    assert list(map(str, needs(Action.parse("1F0.0"), chain, 3))) == ["0F0.0"]
    assert list(map(str, needs(Action.parse("1B0.2"), chain, 3))) == ["1F0.2", "2I0.2"]
    assert list(map(str, needs(Action.parse("1W0.1"), chain, 3))) == ["1I0.1"]


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize("lowered", [False, True])
def test_files_give_the_slices_back(name: str, lowered: bool, tmp_path: Path) -> None:
    schedule = sliced(name)
    table = ps.lower(schedule, fsdp=True) if lowered else schedule
    again = decode(json.loads(json.dumps(encode(table))))
    assert again == table
    assert (again.slices, again.microbatches, again.units) == (3, 2, 6)
    table.to_csv(tmp_path / "sliced.csv")
    loaded = ps.load(tmp_path / "sliced.csv")
    assert loaded == table
    assert loaded.slices == 3


def test_pytorch_reads_the_csv_as_an_order_of_microbatches() -> None:
    from torch.distributed.pipelining.schedules import _Action

    schedule = sliced(microbatches=2, slices=3)
    text = csv_text(schedule)
    assert text.startswith("0F0 slices=3,0F1,")
    for rank, row in enumerate(csv.reader(StringIO(text))):
        read = [action for action in map(_Action.from_str, row) if action is not None]
        assert [action.microbatch_index for action in read] == [action.unit(3) for action in schedule[rank]]
        assert [action.stage_index for action in read] == [action.stage for action in schedule[rank]]


def test_json_says_slices_only_where_there_are_any() -> None:
    assert "slices" not in encode(sliced(slices=1))
    data = encode(sliced(slices=2))
    assert (data["slices"], data["microbatches"], data["rows"][0][:3]) == (2, 2, ["0F0.0", "0F0.1", "0F1.0"])
    with pytest.raises(FileFormatError, match="'slices' must be at least 1, got 0"):
        decode({**data, "slices": 0})
    with pytest.raises(FileFormatError, match="'slices' must be a whole number"):
        decode({**data, "slices": "2"})
    with pytest.raises(FileFormatError, match=r"0F0\.1 names slice 1, but this schedule has sequences that are not cut"):
        decode({**data, "slices": 1})


def test_a_csv_file_may_name_slices_itself() -> None:
    named = parse_csv(["0F0.0 slices=2,0F0.1,0B0.1,0B0.0"])
    assert named == parse_csv(["0F0 slices=2,0F1,0B1,0B0"])
    assert (named.microbatches, named.slices) == (1, 2)
    with pytest.raises(FileFormatError, match="not an action"):
        parse_csv(["0F0,0F1 slices=2,0B1,0B0"])
    with pytest.raises(FileFormatError, match=r"stage 0 has no F for microbatch 1, slice 1 of 0\.\.1"):
        parse_csv(["0F0 slices=2,0F1,0F2,0B1,0B0,0B2"])


def test_a_timeline_is_saved_with_its_slices(tmp_path: Path) -> None:
    timeline = ps.simulate(sliced())
    timeline.save(tmp_path / "sliced.json")
    again = ps.Timeline.load(tmp_path / "sliced.json")
    assert again.table == timeline.table
    assert str(again.spans(0)[1].action) == "0F0.1"


# Proofs ---------------------------------------------------------------------------------------------------------------


def findings(rows: list[list[str]], slices: int = 2, microbatches: int = 1) -> str:
    with pytest.raises(VerifyError) as caught:
        ps.verify(ps.Schedule.from_actions(rows, microbatches=microbatches, slices=slices))
    return str(caught.value)


def test_wrong_orders_are_refused_by_name() -> None:
    assert "0F0.1 needs 0F0.0, which rank 0 runs only in step 1" in findings([["0F0.1", "0F0.0", "0B0.1", "0B0.0"]])
    assert "0B0.0 needs 0B0.1, which rank 0 runs only in step 3" in findings([["0F0.0", "0F0.1", "0B0.0", "0B0.1"]])
    assert "stage 0 has no F for microbatch 0, slice 1 of 0..0, slices 0..1" in findings([["0F0.0", "0B0.1", "0B0.0"]])
    missing = findings([["0F0.0", "0F0.1", "0I0.1", "0W0.1", "0I0.0"]])
    assert "stage 0 runs 0I0.0 but never 0W0.0" in missing
    assert "1 microbatch of 2 slices" in missing
    assert "0F1.0 names microbatch 1, slice 0 of 0..0, slices 0..1" in findings([["0F0.0", "0F0.1", "0B0.1", "0B0.0", "0F1.0"]])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SLICED), st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.integers(0, 2**32), st.booleans())
def test_mutants_are_refused(name: str, ranks: int, microbatches: int, slices: int, seed: int, lowered: bool) -> None:
    """Two slices of a stage swapped, one dropped, or the backwards of a microbatch ascending."""
    random, schedule = Random(seed), sliced(name, ranks, microbatches, slices)
    rows = [list(row) for row in (ps.lower(schedule) if lowered else schedule)]
    row = random.choice([row for row in rows if row])
    stage, microbatch = random.choice(schedule.placement.stages_of(rows.index(row))), random.randrange(microbatches)
    kinds = random.choice(((Kind.F,), (Kind.B, Kind.I)) if schedule.training else ((Kind.F,),))
    places = [at for at, action in enumerate(row) if action.kind in kinds and (action.stage, action.microbatch) == (stage, microbatch)]
    change = random.choice(("swap", "drop", "reverse"))
    if change == "swap":
        one, other = random.sample(places, 2)
        row[one], row[other] = row[other], row[one]
    elif change == "drop":
        del row[random.choice(places)]
    else:
        for at, action in zip(places, [row[at] for at in reversed(places)], strict=True):
            row[at] = action
    build = ps.Program if lowered else ps.Schedule
    mutant = build.from_actions(rows, schedule.placement, microbatches=microbatches, slices=slices)
    for semantics in ("channels", "rendezvous"):
        with pytest.raises(VerifyError):
            ps.verify(mutant, semantics=semantics)
    with pytest.raises(ScheduleError, match=r"needs|wait|never"):
        ps.simulate(mutant)


def test_a_proof_says_slices() -> None:
    proof = ps.verify(sliced())
    assert proof.slices == 3
    assert "2 microbatches of 3 slices" in str(proof)
    assert repr(sliced()) == "<Schedule 'seq1f1b', linear, 3 ranks, 3 stages, 2 microbatches of 3 slices>"


# Costs and memory -----------------------------------------------------------------------------------------------------


def test_costs_are_given_by_slice() -> None:
    """One value per stage and slice of each microbatch; a slice is held from its F to its B."""
    schedule = ps.Schedule.from_actions([["0F0.0", "0F0.1", "0B0.1", "0B0.0"]], slices=2)
    costs = ps.Costs(f=[[1.0, 3.0]], b=[[2.0, 6.0]], activation=[[5.0, 7.0]])
    timeline = ps.simulate(schedule, costs)
    assert [(span.start, span.end) for span in timeline.spans(0)] == [(0, 1), (1, 4), (4, 10), (10, 12)]
    curve = timeline.memory(0)
    assert dict(zip(curve.times.tolist(), curve.total.tolist(), strict=True)) == {0.0: 5.0, 1.0: 12.0, 10.0: 5.0, 12.0: 0.0}
    assert ps.verify(schedule, costs=costs, memory_limit=12.0).peak_memory == (12.0,)
    with pytest.raises(VerifyError, match="memory"):
        ps.verify(schedule, costs=costs, memory_limit=11.0)


def test_deepspeed_has_no_slices() -> None:
    with pytest.raises(PassError, match="load whole microbatches, not 3 slices of one"):
        streams(sliced())
