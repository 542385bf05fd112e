"""The order on each rank is the installed torch's, for every shape that torch takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import penstock as ps
from penstock.ir import codes
from penstock.ir.dependencies import Needs
from penstock.ir.kind import Kind
from penstock.ir.steps import walk

pytestmark = pytest.mark.slow

RANKS, CHUNKS, MICROBATCHES = range(1, 9), range(1, 5), range(1, 25)
LOOPED = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "looped-bfs": "ScheduleLoopedBFS",
}
V = {"zbv": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV"}
SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


@pytest.fixture(autouse=True)
def without_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's constructors also lower, which is slow and changes nothing in the order."""
    monkeypatch.setattr(torch_schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda self, actions: None)
    monkeypatch.setattr(torch_schedules.ScheduleInterleavedZeroBubble, "_add_bubbles_to_actions", lambda self, stages: self.pipeline_order)


def torch_order(class_name: str, ranks: int, chunks: int, microbatches: int) -> dict[int, list[Any]] | None:
    """Torch's own order, or None if it refuses the count."""
    stage = SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ranks * chunks, submod=None)
    made = getattr(torch_schedules, class_name)
    try:
        order: dict[int, list[Any]] = made(stage if class_name in SINGLE.values() else [stage] * chunks, microbatches).pipeline_order
    except ValueError:
        return None
    return order


def packed(action: Any) -> tuple[int, ...]:
    if action.sub_actions:
        return codes.overlap(*(code for part in action.sub_actions for code in packed(part)))
    return (codes.pack(action.stage_index, int(Kind[action.computation_type.value]), action.microbatch_index),)


def compute(row: list[Any]) -> list[int]:
    left_out = torch_schedules._ComputationType.REDUCE_GRAD
    return [code for action in row if action is not None and action.computation_type != left_out for code in packed(action)]


def assert_complete(schedule: ps.Schedule) -> None:
    """Every forward and backward is there once, and the order can run to its end."""
    rows = schedule.rows
    want = np.ones((schedule.stages, schedule.microbatches), dtype=int)
    for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
        seen = np.zeros_like(want)
        of_kind = rows.is_kind(*kinds)
        np.add.at(seen, (rows.stage[of_kind], rows.microbatch[of_kind]), 1)
        assert np.array_equal(seen, want), f"{schedule}: {kinds}"
    waits = Needs(*map(np.concatenate, zip(schedule.links.local, schedule.links.data, strict=True)))
    assert walk(rows, waits).complete, schedule


def compare(name: str, class_name: str, shapes: Iterator[tuple[int, int, int]]) -> int:
    """How many shapes torch takes, each of them equal; all are complete here, taken or not."""
    taken = 0
    for ranks, chunks, microbatches in shapes:
        ours = ps.schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert_complete(ours)
        theirs = torch_order(class_name, ranks, chunks, microbatches)
        if theirs is None:
            continue
        taken += 1
        for rank in range(ranks):
            assert ours.row(rank).tolist() == compute(theirs[rank]), f"{ours}, rank {rank}"
    return taken


@pytest.mark.parametrize(("name", "class_name"), LOOPED.items())
def test_looped(name: str, class_name: str) -> None:
    assert compare(name, class_name, product(RANKS, CHUNKS, MICROBATCHES)) > 500


@pytest.mark.parametrize(("name", "class_name"), V.items())
def test_v(name: str, class_name: str) -> None:
    assert compare(name, class_name, product(RANKS, [2], MICROBATCHES)) > 100


def test_gpipe() -> None:
    assert compare("gpipe", SINGLE["gpipe"], product(RANKS, [1], MICROBATCHES)) == len(RANKS) * len(MICROBATCHES)


def test_1f1b_once_the_last_rank_counts_from_zero() -> None:
    """Torch 2.13 numbers the last rank's forwards from 1."""
    for ranks, microbatches in product(RANKS, MICROBATCHES):
        ours = ps.schedule("1f1b", ranks=ranks, microbatches=microbatches)
        assert_complete(ours)
        theirs = torch_order(SINGLE["1f1b"], ranks, 1, microbatches)
        if theirs is None:
            continue
        first = next(action.microbatch_index for action in theirs[ranks - 1] if action is not None)
        for rank in range(ranks):
            shift = first if rank == ranks - 1 else 0
            want = [code - shift if codes.kind_of(code) == Kind.F else code for code in compute(theirs[rank])]
            assert ours.row(rank).tolist() == want


def test_1f1b_is_the_formula() -> None:
    for ranks, microbatches in product(RANKS, MICROBATCHES):
        schedule = ps.schedule("1f1b", ranks=ranks, microbatches=microbatches)
        for rank in range(ranks):
            warm_up = min(ranks - rank - 1, microbatches)
            want = [f"{rank}F{k}" for k in range(warm_up)]
            for k in range(microbatches - warm_up):
                want += [f"{rank}F{warm_up + k}", f"{rank}B{k}"]
            want += [f"{rank}B{k}" for k in range(microbatches - warm_up, microbatches)]
            assert [str(action) for action in schedule[rank]] == want
