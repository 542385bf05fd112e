"""Groups that are smaller than the pipeline."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ScheduleError
from penstock.testing import check_schedule
from schedules.test_formulas import EQUAL, TO_WEIGHTS, bubble, peak

SHAPES = [(p, v, g) for p, v in product(range(1, 8), range(1, 5)) for g in range((p + 1) // 2, p + 1)]


@pytest.mark.parametrize(("p", "v", "g"), SHAPES)
def test_peak(p: int, v: int, g: int) -> None:
    for m in (2 * p, 4 * p):
        schedule = ps.schedule("grouped-interleaved", ranks=p, microbatches=g * m, chunks=v, group_size=g)
        assert [peak(schedule, rank, TO_WEIGHTS) for rank in range(p)] == [g * (v - 1) + p - rank for rank in range(p)]


@pytest.mark.parametrize(("p", "v", "g"), SHAPES)
def test_bubble(p: int, v: int, g: int) -> None:
    """In times of one chunk; with groups of p it is that of a split 1f1b."""
    for groups in (1, 2, 5):
        assert bubble("grouped-interleaved", p, groups * g, EQUAL, chunks=v, group_size=g) == 2 * (p - 1) + (v - 1) * (p - g)


def test_the_default_is_half_the_ranks() -> None:
    for p in range(1, 8):
        whole = {"ranks": p, "microbatches": 3 * p, "chunks": 2}
        assert ps.schedule("grouped-interleaved", **whole) == ps.schedule("grouped-interleaved", **whole, group_size=(p + 1) // 2)


def test_it_holds_less_than_its_neighbours() -> None:
    for p, v in product(range(2, 7), range(2, 4)):
        mine, full = (ps.schedule(name, ranks=p, microbatches=4 * p, chunks=v) for name in ("grouped-interleaved", "interleaved-zb"))
        assert max(peak(mine, r, TO_WEIGHTS) for r in range(p)) < max(peak(full, r, TO_WEIGHTS) for r in range(p))


@settings(max_examples=25)
@given(st.data())
def test_any_group_and_count(data: st.DataObject) -> None:
    p, v = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    g, m = data.draw(st.integers((p + 1) // 2, p)), data.draw(st.integers(1, 3 * p))
    check_schedule(ps.schedule("grouped-interleaved", ranks=p, microbatches=m, chunks=v, group_size=g))


@pytest.mark.parametrize("wrong", [0, 3, 9, -4, 4.0, "4", True])
def test_wrong_groups(wrong: object) -> None:
    with pytest.raises(ScheduleError, match=f"group_size must be a whole number from 4 to 8 for 8 ranks, got {wrong!r}"):
        ps.schedule("grouped-interleaved", ranks=8, microbatches=8, group_size=wrong)
