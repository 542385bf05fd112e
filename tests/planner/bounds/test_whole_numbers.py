"""Whole numbers for times and sizes."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.bounds.whole_numbers import common_unit, floor_units, unit_for

tenths = st.integers(1, 5000).map(lambda number: number / 10)


@given(values=st.lists(tenths, min_size=1, max_size=6))
def test_the_unit_divides_all_and_nothing_larger_does(values: list[float]) -> None:
    unit = common_unit(values)
    assert unit is not None
    counts = [Fraction(round(value * 10), 10) / unit for value in values]
    assert all(count.denominator == 1 for count in counts)
    for factor in range(2, 12):
        assert not all((count / factor).denominator == 1 for count in counts)


def test_values_without_a_common_unit_have_none() -> None:
    assert common_unit([1.0, 2**0.5]) is None
    assert common_unit([1e-3, 1e9]) is None
    assert common_unit([0.0]) is None


@given(value=st.floats(0.0, 1e6), other=st.floats(1e-3, 1e6))
def test_rounding_goes_down_by_less_than_a_unit(value: float, other: float) -> None:
    unit = unit_for([value, other], 1000)
    units = Fraction(value) / unit
    assert units - 1 < floor_units(value, unit) <= units * (1 + Fraction(1, 10**11)) + Fraction(1, 10**11)


def test_a_multiple_up_to_rounding_counts_as_one() -> None:
    assert floor_units(0.1 + 0.2, Fraction(1, 10)) == 3
    assert floor_units(0.3 - 1e-3, Fraction(1, 10)) == 2
