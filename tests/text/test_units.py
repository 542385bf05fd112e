"""Times and bandwidths are read from numbers and from text with a unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CostsError
from penstock.text.units import SECONDS, parse_rate, parse_time

EXPONENTS = {"s": 0, "ms": -3, "us": -6, "ns": -9}


@given(
    st.integers(0, 10**9), st.integers(0, 6), st.sampled_from(sorted(SECONDS)), st.sampled_from(sorted(SECONDS)), st.sampled_from(["", " "])
)
def test_a_time_is_the_nearest_number_in_the_other_unit(digits, places, written, unit, space):
    decimal = f"{digits // 10**places}.{digits % 10**places:0{places}d}" if places else str(digits)
    assert parse_time(f"{decimal}{space}{written}", "latency", unit) == float(f"{digits}e{EXPONENTS[written] - EXPONENTS[unit] - places}")
    assert parse_time(f"{digits}e-{places}{written}", "latency", unit) == parse_time(decimal + written, "latency", unit)


@pytest.mark.parametrize("unit", ["", None, "ms"])
def test_a_time_without_a_unit_is_in_that_of_the_others(unit):
    assert parse_time(0.25, "latency", unit) == parse_time("0.25", "latency", unit) == parse_time(" 2.5e-1 ", "latency", unit) == 0.25


@pytest.mark.parametrize(
    ("value", "unit", "reason"),
    [
        ("5 sec", "s", "latency: '5 sec' is not a time: write a number and one of s, ms, us, ns, like 5us"),
        ("5KB", "s", "latency: '5KB' is not a time"),
        ("-5us", "s", "latency: '-5us' is not a time"),
        ("nan", "s", "latency: 'nan' is not a time"),
        ("", "s", "latency: '' is not a time"),
        ("1e9999us", "s", "latency must be a finite number of at least 0, got inf"),
        ("1" * 500, "s", "latency must be a finite number of at least 0, got inf"),
        (
            "5us",
            "",
            "latency: '5us' has a unit, but the other times have none: write a plain number, or give the unit of all times as time_unit",
        ),
        ("5us", "steps", "latency: '5us' has a unit, but the other times have none"),
        ("5us", None, r"latency: '5us' has a unit, but the other times have none: write a plain number$"),
        (-1, "s", "latency must be a finite number of at least 0, got -1"),
        (None, "s", "latency must be a number, got None"),
        (True, "s", "latency must be a number, got True"),
    ],
)
def test_anything_else_is_not_a_time(value, unit, reason):
    with pytest.raises(CostsError, match=reason):
        parse_time(value, "latency", unit)


def test_a_bandwidth_is_a_number_or_a_size():
    assert parse_rate("12.5GB", "bandwidth") == parse_rate(12.5e9, "bandwidth") == 12.5e9
    for wrong in ("100Gbit", "12.5GB/s", "fast", "5us"):
        with pytest.raises(CostsError, match=rf"bandwidth: '{wrong}' is not a bandwidth: write how many bytes pass per unit of time"):
            parse_rate(wrong, "bandwidth")
    with pytest.raises(CostsError, match=r"bandwidth must be a number, got None"):
        parse_rate(None, "bandwidth")
