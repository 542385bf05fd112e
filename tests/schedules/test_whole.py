"""Schedules that are built for all ranks at once, and chunks that are counted in waves."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.codes import B, F
from penstock.schedules import registry
from penstock.schedules.registry import Shape, algorithms, linear, register
from penstock.testing import check_schedule


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Each call of a whole generator, registered as `together` for this test alone."""
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(algorithms()))
    made: list[Shape] = []

    def even(shape: Shape) -> int:
        return shape.microbatches + shape.microbatches % 2

    @register("together", placement=linear, accepts=even, whole=True)
    def together(shape: Shape) -> list[list[int]]:
        """Run one microbatch after the other, all ranks made together.

        Bubble: all but one rank
        Memory: 1
        """
        made.append(shape)
        return [[kind(0, i) for i in range(shape.microbatches) for kind in (F, B)] for _ in range(shape.ranks)]

    return made


def test_it_is_built_once_and_not_before_it_is_looked_at(calls: list[Shape]) -> None:
    schedule = ps.schedule("together", ranks=3, microbatches=3)
    assert not calls
    alone = [schedule.row(rank) for rank in (2, 0, 1)]
    assert [str(action) for action in schedule[1]] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    assert all(np.array_equal(schedule.rows.row(rank), row) for rank, row in zip((2, 0, 1), alone, strict=True))
    assert calls == [Shape(3, 1, 4)]
    check_schedule(schedule)


def test_each_schedule_is_its_own(calls: list[Shape]) -> None:
    one, two = (ps.schedule("together", ranks=2, microbatches=m) for m in (2, 4))
    assert (len(one[0]), len(two[0])) == (4, 8)
    assert calls == [Shape(2, 1, 2), Shape(2, 1, 4)]


def test_what_is_dropped_is_what_was_not_asked_for(calls: list[Shape]) -> None:
    assert ps.schedule("together", ranks=2, microbatches=5).rows.microbatch.max() == 4


def test_chunks_in_waves() -> None:
    schedule = ps.schedule("hanayo", ranks=4, microbatches=8, waves=2)
    assert schedule.placement.copies == ps.Placement.wave(4, 2).copies
    assert schedule == ps.schedule("hanayo", ranks=4, microbatches=8, chunks=4)
    assert schedule == ps.schedule("hanayo", ranks=4, microbatches=8, chunks=4, waves=2)
    assert ps.schedule("hanayo", ranks=4, microbatches=8) == ps.schedule("hanayo", ranks=4, microbatches=8, waves=1)


@pytest.mark.parametrize("waves", [0, -1, 1.5, "2", True, None])
def test_waves_are_a_count(waves: object) -> None:
    with pytest.raises(ScheduleError, match=f"waves must be .*{waves!r}"):
        ps.schedule("hanayo", ranks=4, microbatches=8, waves=waves)


def test_chunks_and_waves_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match="hanayo places 2 chunks per rank for each of its waves, got chunks=3"):
        ps.schedule("hanayo", ranks=4, microbatches=8, chunks=3)
    with pytest.raises(ScheduleError, match="hanayo has 4 chunks for waves=2, got chunks=2: give one of the two"):
        ps.schedule("hanayo", ranks=4, microbatches=8, chunks=2, waves=2)
    with pytest.raises(ScheduleError, match="hanayo has no option 'wave'; its options: waves, chunks"):
        ps.schedule("hanayo", ranks=4, microbatches=8, wave=2)
    with pytest.raises(ScheduleError, match="zbv has no option 'waves'; its options: slices"):
        ps.schedule("zbv", ranks=4, microbatches=8, waves=1)
