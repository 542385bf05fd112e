"""Compute orders, lowered orders and files are those of the installed torch, for all sizes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from compat.torch.both import BOTH, LOOPED, ON_A_V, OURS, SINGLE, TORCH, VERSION, made, mock_stages, parse, texts
from penstock.errors import ScheduleError

LOCAL = 3
"""Up to this many stages per rank, torch unshards no stage twice."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from([*LOOPED, *ON_A_V]))
    chunks = 2 if name in ON_A_V else draw(st.integers(1, 4))
    return name, draw(st.integers(1, 6)), chunks, draw(st.integers(1, 14))


@settings(max_examples=120)
@given(shapes())
def test_orders_and_lowered_orders(shape: tuple[str, int, int, int]) -> None:
    theirs, mine = (made(package, *shape) for package in BOTH)
    if isinstance(theirs, type):
        assert mine is theirs if shape[0] == "ScheduleDualPipeV" else not isinstance(mine, type)
        return
    assert mine.pipeline_order == theirs.pipeline_order
    assert mine.stage_index_to_group_rank == theirs.stage_index_to_group_rank
    if shape[2] <= LOCAL:
        assert mine.pipeline_order_with_comms == theirs.pipeline_order_with_comms
        late = made(OURS, *shape, defer_pp_recv=True).pipeline_order_with_comms
        if VERSION >= (2, 13):
            assert late == made(TORCH, *shape, defer_pp_recv=True).pipeline_order_with_comms


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 4, 8), (2, 5, 6), (4, 4, 8)])
@pytest.mark.parametrize("name", LOOPED)
def test_many_stages_per_rank_are_unsharded_less_often(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    theirs, mine = (made(package, name, ranks, chunks, microbatches).pipeline_order_with_comms for package in BOTH)

    def without(order: dict[int, list[Any]]) -> dict[int, set[Any]]:
        return {rank: {str(a) for a in row if "SHARD" not in str(a)} for rank, row in order.items()}

    assert without(mine) == without(theirs)
    counts = [sum("UNSHARD" in str(action) for row in order.values() for action in row) for order in (theirs, mine)]
    assert counts[1] <= counts[0]
    if name == "ScheduleInterleaved1F1B":
        assert counts[1] < counts[0]


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 5), (3, 7), (4, 9)])
@pytest.mark.parametrize("name", LOOPED[1:])
def test_counts_that_torch_refuses(name: str, ranks: int, microbatches: int) -> None:
    schedule = made(OURS, name, ranks, 2, microbatches)
    assert (made(TORCH, name, ranks, 2, microbatches) is ValueError) == (microbatches % (microbatches // ranks) != 0)
    assert OURS.schedules._validate_schedule(schedule.pipeline_order, ranks, 2 * ranks, microbatches) == schedule.stage_index_to_group_rank


def test_single_stage_orders() -> None:
    for ranks in range(1, 6):
        for microbatches in range(1, 9):
            theirs, mine = (made(package, "ScheduleGPipe", ranks, 1, microbatches) for package in BOTH)
            assert mine.pipeline_order == theirs.pipeline_order
            theirs, mine = (made(package, "Schedule1F1B", ranks, 1, microbatches) for package in BOTH)
            want = ps.schedule("1f1b", ranks, microbatches)
            for rank in range(ranks):
                reduction = [f"{rank}REDUCE_GRAD", *([f"{rank}WAIT_REDUCE_GRAD"] if VERSION >= (2, 15) else [])]
                assert [str(a) for a in mine.pipeline_order[rank]] == [*map(str, want[rank]), *reduction]
            if not isinstance(theirs, type):  # torch numbers the last rank's forwards from 1
                assert {r: row for r, row in mine.pipeline_order.items() if r < ranks - 1} == {
                    r: row for r, row in theirs.pipeline_order.items() if r < ranks - 1
                }
    assert OURS.schedules._ScheduleForwardOnly(mock_stages(2, 1)[0], 4).pipeline_order is None


@pytest.mark.parametrize("name", [*LOOPED, *ON_A_V])
def test_csv_files(name: str, tmp_path: Path) -> None:
    theirs, mine = (made(package, name, 3, 2, 6) for package in BOTH)
    for form in ("compute_only", "compute_comms"):
        files = [tmp_path / f"{form}-{who}.csv" for who in "ab"]
        for schedule, file in zip((theirs, mine), files, strict=True):
            schedule._dump_csv(str(file), form)
        assert files[0].read_bytes() == files[1].read_bytes()
        for package in BOTH:
            loaded = package.schedules._PipelineScheduleRuntime(mock_stages(3, 2), 6)
            loaded._load_csv(str(files[1]), form)
            assert loaded.pipeline_order_with_comms == theirs.pipeline_order_with_comms
    base = OURS.schedules.PipelineScheduleMulti(mock_stages(3, 2), 6)
    base._load_csv(str(tmp_path / "compute_only-a.csv"))
    assert base.pipeline_order == theirs.pipeline_order
    base._dump_csv(str(tmp_path / "again.csv"))
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "compute_only-a.csv").read_bytes()


def test_invalid_csv_files(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    cases = {"0F0,0B0junk": RuntimeError, "0F0,0F0,0B0": AssertionError, "0F0": AssertionError, "0B0,0F0": AssertionError}
    for text, error in cases.items():
        file.write_text(text + "\n")
        loaded = OURS.schedules._PipelineScheduleRuntime(mock_stages(1, 1), 1)
        with pytest.raises(error):
            loaded._load_csv(str(file))
        assert not loaded.pipeline_order
    for package in BOTH:
        runtime = package.schedules._PipelineScheduleRuntime(mock_stages(1, 1), 1)
        with pytest.raises(NotImplementedError):
            runtime._load_csv(str(file), "other")
        with pytest.raises(AssertionError):
            package.schedules.PipelineScheduleMulti(mock_stages(1, 1), 1)._load_csv(str(file), "compute_comms")


def test_preparing_an_order_with_messages() -> None:
    for package in BOTH:
        runtime = package.schedules._PipelineScheduleRuntime(mock_stages(2, 1), 1)
        with_messages = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
        if VERSION >= (2, 15):
            with_messages = (f"{with_messages[0]} 0WAIT_SEND_F0", f"{with_messages[1]} 1WAIT_SEND_B0")
        runtime._prepare_schedule_with_comms(parse(package, *with_messages), format="compute_comms")
        assert texts(runtime.pipeline_order_with_comms) == {rank: row.split() for rank, row in enumerate(with_messages)}
        with pytest.raises(ValueError, match="Expected compute-only schedule but found communication action '0SEND_F0'"):
            runtime._prepare_schedule_with_comms(parse(package, *with_messages))
        with pytest.raises(AssertionError):
            runtime._prepare_schedule_with_comms(parse(package, "0F0 . 0B0", "1F0 1B0"), format="compute_comms")
        with pytest.raises(NotImplementedError):
            runtime._prepare_schedule_with_comms(parse(package, "0F0 0B0", "1F0 1B0"), format="else")
    runtime._load_actions(parse(OURS, "0F0 0B0", "1F0 1B0"))
    assert "0SEND_F0" in map(str, runtime.pipeline_order_with_comms[0])


@pytest.mark.parametrize(("name", "ranks"), [("v-half", 4), ("zb-h1", 4), ("hanayo", 2), ("eager-1f1b", 3)])
def test_any_schedule_of_ours(name: str, ranks: int) -> None:
    table = ps.schedule(name, ranks, 7)
    runtime = OURS.top.as_torch(table, mock_stages(ranks, table.chunks))
    peer = TORCH.schedules._PipelineScheduleRuntime(mock_stages(ranks, table.chunks), 7)
    peer._prepare_schedule_with_comms({r: [TORCH.schedules._Action.from_str(str(a)) for a in table[r]] for r in range(ranks)})
    assert runtime.pipeline_order_with_comms == peer.pipeline_order_with_comms
    lowered = OURS.top.as_torch(ps.lower(table), mock_stages(ranks, table.chunks))
    assert texts(lowered.pipeline_order_with_comms) == {r: [str(a) for a in ps.lower(table)[r]] for r in range(ranks)}


def test_bidirectional_schedules_are_refused() -> None:
    with pytest.raises(ps.PenstockError, match="PyTorch cannot express a bidirectional placement"):
        OURS.top.as_torch(ps.schedule("dualpipe", 4, 8), mock_stages(4, 2))


def test_lowering_leaves_its_arguments_unchanged() -> None:
    order = made(OURS, "ScheduleInterleavedZeroBubble", 2, 2, 4).pipeline_order
    before = copy.deepcopy(order)
    OURS.schedules._add_send_recv(order, lambda stage: stage % 2, 4)
    OURS.schedules._merge_bw(order[0])
    assert order == before


def test_traces(tmp_path: Path) -> None:
    order = made(OURS, "ScheduleInterleavedZeroBubble", 2, 2, 4).pipeline_order_with_comms
    for package in BOTH:
        package.schedules._dump_chrometrace(order, str(tmp_path / f"{package}.json"))
    theirs, mine = (json.loads((tmp_path / f"{package}.json").read_text())["traceEvents"] for package in BOTH)
    for event in theirs:  # torch files a backward for the input under communication
        event["cat"] = "computation" if re.fullmatch(r"[0-9]+I[0-9]+", event["name"]) else event["cat"]
    assert mine == theirs


@pytest.mark.parametrize("name", [*SINGLE, "ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleDualPipeV"])
def test_no_microbatches(name: str) -> None:
    chunks = 1 if name in SINGLE else 2
    theirs, mine = (made(package, name, 2, chunks, 0) for package in BOTH)
    assert issubclass(mine, ValueError if name in SINGLE else theirs)


@pytest.mark.parametrize("name", [*LOOPED, *ON_A_V])
def test_rows_of_a_subclass(name: str) -> None:
    """Both packages run the row that a subclass returns for a rank."""
    lowered = []
    for package in BOTH:

        class Mine(getattr(package.schedules, name)):  # type: ignore[misc]
            def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
                row = super()._calculate_single_rank_operations(rank)
                return [None, *(action for action in row if action is not None)]

        mine = Mine(mock_stages(2, 2), 4)
        assert [action for action in mine.pipeline_order[1] if action is not None] == mine._calculate_single_rank_operations(1)[1:]
        assert mine.pipeline_order[1][0] is None
        lowered.append(texts(mine.pipeline_order_with_comms))
    assert lowered[0] == lowered[1]


def test_as_torch_by_name_and_its_refusals() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved-1f1b", 3), ("zbv", 2)):
        options = {"chunks": chunks} if chunks > 1 else {}
        table = ps.schedule(name, 2, 4, **options)
        runtime = OURS.top.as_torch(name, mock_stages(2, chunks), 4)
        assert texts(runtime.pipeline_order) == texts(OURS.top.as_torch(table, mock_stages(2, chunks)).pipeline_order)
    with_options = OURS.top.as_torch("interleaved-1f1b{chunks=3}", mock_stages(2, 3), 4)
    assert texts(with_options.pipeline_order) == texts(OURS.top.as_torch("interleaved-1f1b", mock_stages(2, 3), 4).pipeline_order)
    one = mock_stages(2, 1)
    for table, stages, match in (  # type: ignore[assignment]
        ("1f1b", one, "pass n_microbatches="),
        (ps.schedule("1f1b", 4, 4), one, "has 4 ranks and 4 stages.*generate the schedule for 2 ranks"),
        (ps.schedule("zbv", 2, 4), one, "has 2 ranks and 4 stages.*num_stages=4"),
        (ps.schedule("1f1b", 2, 4), one[0], r"write \[stage\]"),
        (3, one, "takes a Schedule, a Program or the name"),
    ):
        with pytest.raises(ScheduleError, match=match):
            OURS.top.as_torch(table, stages)


def test_unknown_class_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'GPipe'"):
        OURS.schedules.get_schedule_class("ScheduleGPipe")


@pytest.mark.parametrize("text", ["0OFFLOAD1", "2RELOAD0"])
def test_copies_to_host_memory_are_refused(text: str) -> None:
    """Torch has no such actions, and its parser does not know them either."""
    for package in BOTH:
        with pytest.raises(RuntimeError, match="Invalid"):
            package.schedules._Action.from_str(text)
