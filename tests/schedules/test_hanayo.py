"""Waves."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

import pytest

import penstock as ps
from penstock.testing import ScheduleConformance
from schedules.test_formulas import TO_INPUT, bubble, peak

TIMES = (1, 1, 1)
"""A full backward is twice a forward."""


class TestWaves(ScheduleConformance):
    """One wave is tried with all the others."""

    name = "hanayo"
    ranks: ClassVar = range(1, 4)
    chunks: ClassVar = (4, 6)


def rate(p: int, w: int, m: int) -> Fraction:
    idle = bubble("hanayo", p, m, TIMES, waves=w)
    return Fraction(idle, 6 * w * m + idle)


@pytest.mark.parametrize("w", [1, 2, 3, 4])
@pytest.mark.parametrize("p", range(1, 11))
def test_bubble_of_one_microbatch_a_rank(p: int, w: int) -> None:
    """The paper prints (2p-2)/(3pw+p-1)."""
    assert rate(p, w, p) == Fraction(2 * p - 2, 3 * p * w + 2 * p - 2)
    assert rate(p, w, p) <= Fraction(2 * p - 2, 3 * p * w + p - 1)


def test_four_ranks_and_one_wave() -> None:
    assert rate(4, 1, 4) == Fraction(1, 3)


@pytest.mark.parametrize("p", range(1, 11))
def test_one_wave_is_two_thirds_of_1f1b(p: int) -> None:
    for m in range(p, 4 * p, max(1, p // 2)):
        assert bubble("hanayo", p, m, TIMES, waves=1) == 4 * (p - 1)
        assert 2 * bubble("1f1b", p, m, TIMES) == 6 * (p - 1)


@pytest.mark.slow
@pytest.mark.parametrize("w", [1, 2, 3])
def test_longer_batches(w: int) -> None:
    """Never more idle time than 1f1b, whose one stage a rank takes as long as the 2w chunks here; and in its memory."""
    for p in range(1, 9):
        for m in (1, p, 2 * p, 2 * p + 1, 4 * p):
            assert bubble("hanayo", p, m, TIMES, waves=w) <= 2 * w * bubble("1f1b", p, m, TIMES)
            schedule = ps.schedule("hanayo", ranks=p, microbatches=m, waves=w)
            assert max(peak(schedule, rank, TO_INPUT) for rank in range(p)) <= 2 * w * p
