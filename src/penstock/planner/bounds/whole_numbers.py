"""Common units of times and sizes, for solvers that take whole numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

_LARGEST = 10**7
"""The most units that the largest value may have."""
_CLOSE = Fraction(1, 10**12)


def common_unit(values: Iterable[float]) -> Fraction | None:
    """The largest unit that all values are multiples of, as people write them: 0.3 is three tenths. None if it is too small.

    >>> common_unit([0.3, 1.5, 0.0])
    Fraction(3, 10)
    """
    unit = Fraction(0)
    most = Fraction(0)
    for value in {value for value in values if value > 0}:
        exact = Fraction(value)
        near = exact.limit_denominator(10**6)
        if abs(near - exact) > exact * _CLOSE:
            return None
        unit = Fraction(math.gcd(unit.numerator * near.denominator, near.numerator * unit.denominator), unit.denominator * near.denominator)
        most = max(most, near)
    return unit if unit and most / unit <= _LARGEST else None


def unit_for(values: list[float], steps: int) -> Fraction:
    """The common unit, or if there is none the largest value divided into that many steps."""
    return common_unit(values) or Fraction(max([*values, 0.0]) or 1.0) / steps


def floor_units(value: float, unit: Fraction) -> int:
    """How many whole units a value has; a multiple up to rounding counts as one."""
    units = Fraction(value) / unit
    near = round(units)
    return near if abs(units - near) <= _CLOSE * max(1, near) else math.floor(units)
