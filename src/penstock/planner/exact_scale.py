"""Whole numbers for a solver that knows no others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

_LARGEST = 10**7
"""How many units the largest number may have for the unit to be of use."""
_CLOSE = Fraction(1, 10**12)


def common_unit(values: Iterable[float]) -> Fraction | None:
    """The largest number that all values are multiples of, as people write them: 0.3 is three tenths. None where it is too small.

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
    """The common unit, or where there is none the largest value in that many steps."""
    return common_unit(values) or Fraction(max([*values, 0.0]) or 1.0) / steps


def floored(value: float, unit: Fraction) -> int:
    """How many whole units a value has; one that is a multiple but for rounding counts as that."""
    units = Fraction(value) / unit
    near = round(units)
    return near if abs(units - near) <= _CLOSE * max(1, near) else math.floor(units)
