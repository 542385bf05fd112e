"""Every schedule, compared with both references."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import algorithms
from runtime.models import assert_close, assert_same, blocks, by_batch, by_loop, by_pipeline, sums_in_order

COUNTS = (1, 2, 3, 5, 8)
BATCH = 13


def _schedule(name: str, ranks: int, microbatches: int) -> Schedule | None:
    try:
        made = ps.schedule(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError:
        return None
    return made if made.training and made.slices == 1 else None


CASES = [(name, ranks) for name in algorithms() for ranks in (1, 2, 4) if _schedule(name, ranks, 5)]


def test_every_schedule_is_tested() -> None:
    assert len({name for name, _ in CASES}) >= 19
    assert {ranks for _, ranks in CASES} == {1, 2, 4}


@pytest.mark.parametrize(("name", "ranks"), [pytest.param(*case, marks=[pytest.mark.slow] if case[1] == 4 else []) for case in CASES])
@pytest.mark.parametrize("microbatches", COUNTS)
def test_schedule_equals_both_references(name: str, ranks: int, microbatches: int) -> None:
    schedule = _schedule(name, ranks, microbatches)
    assert schedule is not None
    model, x, y = blocks(schedule.stages + 1), torch.randn(BATCH, 6), torch.randn(BATCH, 6)
    found, wanted = by_pipeline(model, schedule, x, y), by_loop(model, x, y, microbatches)
    if sums_in_order(schedule):
        assert_same(found, wanted)
    else:
        assert_close(found, wanted, 1e-5)
    model, x, y = model.double(), x.double(), y.double()
    assert_close(by_pipeline(model, schedule, x, y), by_batch(model, x, y), 1e-12)


def test_most_schedules_sum_in_order() -> None:
    """The bitwise comparison above applies to most schedules."""
    bitwise = {name for name, ranks in CASES if ranks == 4 and sums_in_order(ps.schedule(name, ranks=4, microbatches=8))}
    assert {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v"} <= bitwise
