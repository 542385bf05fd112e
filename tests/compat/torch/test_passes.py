"""Our lowering functions, validator, dry run and formatter against torch's."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from compat.torch.both import BOTH, OURS, TORCH, VERSION, made, parse, texts

NAMES = ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb", "looped-bfs", "zbv", "v-half", "dualpipe-v", "eager-1f1b"]


@st.composite
def orders(draw: st.DrawFn) -> tuple[ps.Schedule, dict[int, list[str]]]:
    """An order of one of our schedules with random idle slots, as text (a dot is an idle slot)."""
    table = ps.schedule(draw(st.sampled_from(NAMES)), draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    order: dict[int, list[str]] = {}
    for rank in range(table.ranks):
        row = [str(action) for action in table[rank]]
        for place in draw(st.lists(st.integers(0, len(row)), max_size=4)):
            row.insert(place, ".")
        order[rank] = row
    return table, order


def read(package: Any, order: dict[int, list[str]]) -> dict[int, list[Any]]:
    return parse(package, *(" ".join(row) for row in order.values()))


@settings(max_examples=80)
@given(orders())
def test_send_recv_with_idle_slots_and_dry_run(drawn: tuple[ps.Schedule, dict[int, list[str]]]) -> None:
    table, order = drawn
    lowered = [package.schedules._add_send_recv(read(package, order), table.placement.rank_of, table.stages) for package in BOTH]
    assert lowered[1] == lowered[0]
    late = [OURS.schedules._defer_recv_ops(lowered[1], table.placement.rank_of)] * 2
    if VERSION >= (2, 13):
        late[0] = TORCH.schedules._defer_recv_ops(lowered[0], table.placement.rank_of)
        assert late[1] == late[0]
    if "dualpipe" in table.name:  # torch's dry run does not support overlaps
        assert OURS.schedules._simulate_comms_compute(lowered[1], table.placement.rank_of, table.stages)
        return
    for each in (lowered, late):
        theirs = TORCH.schedules._simulate_comms_compute(copy.deepcopy(each[0]), table.placement.rank_of, table.stages)
        assert OURS.schedules._simulate_comms_compute(each[1], table.placement.rank_of, table.stages) == theirs


@settings(max_examples=80)
@given(orders(), st.integers(1, 7))
def test_passes_on_one_row(drawn: tuple[ps.Schedule, dict[int, list[str]]], count: int) -> None:
    table, order = drawn
    for rank in range(table.ranks):
        rows = [read(package, order)[rank] for package in BOTH]
        assert OURS.schedules._add_reduce_grad(rows[1], table.microbatches) == TORCH.schedules._add_reduce_grad(rows[0], table.microbatches)
        assert OURS.schedules._add_unshard_reshard(rows[1]) == TORCH.schedules._add_unshard_reshard(rows[0])
        assert OURS.schedules._merge_bw(rows[1]) == TORCH.schedules._merge_bw(list(rows[0]))
        if count > table.microbatches:
            assert OURS.schedules._add_reduce_grad(rows[1], count) == TORCH.schedules._add_reduce_grad(rows[0], count)


def test_residency() -> None:
    row = parse(OURS, "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0")[0]
    for residency in (1, 2, 3, 4):
        held: set[int] = set()
        for action in OURS.schedules._add_unshard_reshard(row, residency):
            if "UNSHARD" in str(action):
                held.add(action.stage_index)
            elif "RESHARD" in str(action):
                held.remove(action.stage_index)
            else:
                assert action.stage_index in held
            assert len(held) <= residency
        assert not held


def test_malformed_orders() -> None:
    for package in BOTH:
        schedules = package.schedules
        with pytest.raises(AssertionError, match="Malformed compute schedule, can't schedule sends/recvs"):
            schedules._add_send_recv(parse(package, "0B0 0F0", "1F0 1B0"), lambda stage: stage, 2)
        if package is OURS or VERSION >= (2, 13):
            with pytest.raises(AssertionError, match="Malformed input schedule on rank 0"):
                schedules._defer_recv_ops(parse(package, "1RECV_F0 0F0"), lambda stage: stage)
        for rows in (("0F0", "1F0"), ("0F0", "1RECV_F0 1F0"), ("0F0 0W0 0SEND_B0", "1W0 1W0 1RECV_F0")):
            with pytest.raises(ValueError, match="Schedule is not progressing"):
                schedules._simulate_comms_compute(parse(package, *rows), lambda stage: stage, 2)


def test_the_dry_run_accepts_every_kind() -> None:
    """Torch's dry run refuses orders that its own lowering produces."""
    schedule = made(OURS, "ScheduleDualPipeV", 2, 2, 6)
    run = schedule._simulate()
    assert {r: [a for a in row if a is not None] for r, row in run.items()} == schedule.pipeline_order_with_comms


def test_steps_of_the_dry_run() -> None:
    lowered = OURS.schedules._add_send_recv(parse(OURS, "0F0 0F1 . 0B0 . 0B1", ". 1F0 1B0 1F1 1B1 ."), lambda stage: stage, 2)
    run = OURS.schedules._simulate_comms_compute(lowered, lambda stage: stage, 2)
    assert max(map(len, run.values())) == 11


# Formatting -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(orders(), st.integers(0, 12))
def test_formatted_order(drawn: tuple[ps.Schedule, dict[int, list[str]]], mark: int) -> None:
    table, order = drawn
    mine = OURS.schedules._format_pipeline_order(read(OURS, order), error_step_number=mark)
    if max(map(len, order.values())) >= table.ranks:  # torch's own fails on fewer steps than ranks
        assert mine == TORCH.schedules._format_pipeline_order(read(TORCH, order), error_step_number=mark)
    assert len(mine.splitlines()) == max(map(len, order.values())) + 1


def test_fewer_steps_than_ranks() -> None:
    order = parse(OURS, "0F0", "1F0", "2F0")
    assert OURS.schedules._format_pipeline_order(order).splitlines() == ["        Rank 0 Rank 1 Rank 2", "Step 0: 0F0    1F0    2F0   "]
    with pytest.raises(IndexError):
        TORCH.schedules._format_pipeline_order(order)


# The validator --------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(orders(), st.data())
def test_refuses_what_torch_refuses(drawn: tuple[ps.Schedule, dict[int, list[str]]], data: st.DataObject) -> None:
    table, order = drawn
    rank = data.draw(st.integers(0, table.ranks - 1))
    change = data.draw(st.sampled_from(["drop", "swap", "move", "none", "stage"]))
    row = order[rank]
    at, to = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) - 1))
    if change == "drop":
        del row[at]
    elif change == "swap":
        row[at], row[to] = row[to], row[at]
    elif change == "move" and table.ranks > 1:
        order[(rank + 1) % table.ranks].append(row.pop(at))
    elif change == "stage":
        row[at] = "0F0"
    said = []
    for package in BOTH:
        refused = (AssertionError, IndexError) if package is TORCH else (AssertionError,)  # torch's formatter fails on few steps
        try:
            where = package.schedules._validate_schedule(read(package, order), table.ranks, table.stages, table.microbatches)
            said.append(where)
        except refused as error:
            said.append(str(error).split("\n", maxsplit=1)[0])
    if isinstance(said[0], str):
        assert isinstance(said[1], str)
    elif not isinstance(said[1], str):
        assert said[1] == said[0]
    if change == "none":
        assert said[1] == said[0] == {stage: table.placement.rank_of(stage) for stage in range(table.stages)}


def refusal(package: Any, *rows: str, ranks: int = 2, stages: int = 2, microbatches: int = 1) -> str:
    with pytest.raises(AssertionError) as caught:
        package.schedules._validate_schedule(parse(package, *rows), ranks, stages, microbatches)
    return str(caught.value)


@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 0B0",),
        ("0F0", "1F0 1B0"),
        ("0B0 0F0", "1F0 1B0"),
        (". 0I0 0F0 0W0", "1F0 1B0"),
        ("0F0 0W0 0I0", "1F0 1B0"),
        ("0B0", "1F0 1B0"),
        ("0F0 0B0", "0F0 1F0 1B0"),
        ("0F0 0I0", "1F0 1B0"),
        ("0F0 0B0", "1B0"),
    ],
)
def test_errors_begin_with_the_words_of_torch(rows: tuple[str, ...]) -> None:
    first = refusal(TORCH, *rows).split("\n\n", maxsplit=1)[0]
    said = " ".join(refusal(OURS, *rows).replace("microbatches for stage", " microbatches for stage").split())
    assert said.startswith(" ".join(first.replace("_ComputationType.FORWARD", "F").replace("FORWARD", "F").split())[:60])


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), "microbatch 1 of 0..0"),
        (("0F0 0F0 0B0", "1F0 1B0"), "0F0 runs"),
        (("0F0 0B0", "1F0 1B0 2F0"), "stage 2 of 0..1"),
    ],
)
def test_refuses_more_than_torch(rows: tuple[str, ...], reason: str) -> None:
    assert reason in refusal(OURS, *rows)


def test_deadlocks_are_refused() -> None:
    rows = ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    TORCH.schedules._validate_schedule(parse(TORCH, *rows), 2, 2, 2)
    assert "waits" in refusal(OURS, *rows, microbatches=2)


def test_parts_of_an_overlap_run_one_after_the_other() -> None:
    for package in BOTH:
        order = parse(package, "0F0 0B0", "(1F0;1B0)OVERLAP_F_B")
        assert package.schedules._validate_schedule(order, 2, 2, 1) == {0: 0, 1: 1}


def test_foreign_objects_are_refused() -> None:
    for package in BOTH:
        with pytest.raises(AssertionError, match="Rank 0, step 0: Got an invalid action"):
            package.schedules._validate_schedule({0: ["0F0"]}, 1, 1, 1)


# Actions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["1F0", "2I1", "0W3", "0B3", "1UNSHARD", "3RESHARD", "2REDUCE_GRAD", "2SEND_B2", "1RECV_F1", "(3F1;0B4)OVERLAP_F_B"]
)
def test_actions_equal_torch(text: str) -> None:
    theirs, mine = (package.schedules._Action.from_str(text) for package in BOTH)
    assert mine == theirs
    assert theirs == mine
    assert hash(mine) == hash(theirs)
    assert repr(mine) == str(mine) == text == str(theirs)
    assert mine.is_compute_op == theirs.is_compute_op
    assert OURS.schedules._get_profiler_function_name(mine) == TORCH.schedules._get_profiler_function_name(theirs)


def test_blank_text_is_no_action() -> None:
    for package in BOTH:
        assert package.schedules._Action.from_str("   ") is None


@pytest.mark.parametrize("text", ["1F0xyz", "F0", "1X0", "1UNSHARD3", "(1F0)OVERLAP_F_B", "1F"])
def test_parsing_is_strict(text: str) -> None:
    with pytest.raises(RuntimeError, match="Invalid action string"):
        OURS.schedules._Action.from_str(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("2F3.1", "slice of a microbatch"), ("0OFFLOAD0", "between device and host"), ("0SEND_F1>3", "skips stages")],
)
def test_what_torch_does_not_have_is_refused(text: str, reason: str) -> None:
    """Torch itself drops what stands behind the microbatch, and would run something else."""
    with pytest.raises(RuntimeError, match=reason):
        OURS.schedules._Action.from_str(text)


def test_files_of_sliced_schedules_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """As orders of microbatches; the number of slices behind the first action is passed over."""
    ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3).to_csv(tmp_path / "sliced.csv")
    with open(tmp_path / "sliced.csv", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert cells[0] == "0F0 slices=3"
    for cell in cells:
        theirs, mine = (package.schedules._Action.from_str(cell) for package in BOTH)
        assert mine == theirs


def test_computation_types_from_text() -> None:
    for package in BOTH:
        assert package.schedules._ComputationType.from_str("F") == "F"
        with pytest.raises(RuntimeError, match="Invalid computation type"):
            package.schedules._ComputationType.from_str("Q")


def test_mixing_actions_of_both_packages() -> None:
    """A program may mix the two: they are tuples with the same fields."""
    order = made(TORCH, "ScheduleDualPipeV", 2, 2, 4).pipeline_order
    assert texts(OURS.schedules._add_send_recv(order, lambda stage: [0, 1, 1, 0][stage], 4))
    assert OURS.schedules._validate_schedule(order, 2, 4, 4) == {0: 0, 3: 0, 1: 1, 2: 1}
