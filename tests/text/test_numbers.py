"""Numbers keep four digits, and units are known ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CostsError, UsageError
from penstock.text.numbers import format_count, format_number
from penstock.text.units import check_count, seconds_per

PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@given(st.floats(1e-12, 9e17))
def test_a_number_reads_back_to_four_digits(value):
    text = format_number(value)
    back = float(text[:-1]) * PREFIXES[text[-1]] if text[-1] in PREFIXES else float(text)
    assert back == pytest.approx(value, rel=5.1e-4)
    assert len(text) <= 9


@given(st.integers(0, 99_999))
def test_whole_numbers_stay_whole(value):
    assert format_number(float(value)) == str(value)


def test_counts_and_units():
    assert [format_count(n, "microbatch") for n in (0, 1, 2)] == ["0 microbatches", "1 microbatch", "2 microbatches"]
    assert seconds_per("s") == 1000 * seconds_per("ms") == 1e6 * seconds_per("us") == pytest.approx(1e9 * seconds_per("ns"))
    with pytest.raises(UsageError, match=r"one of s, ms, us, ns, got 'minute'"):
        seconds_per("minute")


def test_counts_are_whole_numbers_within_their_limits():
    assert [check_count("ranks", value, 0, 3) for value in (0, np.int64(2), 3)] == [0, 2, 3]
    assert type(check_count("ranks", np.int32(2))) is int
    for value in (-1, 4, 1.0, True, "2", None, np.float64(1), np.bool_(True)):
        with pytest.raises(UsageError, match=r"^ranks must be a whole number of at least 0 and at most 3, got "):
            check_count("ranks", value, 0, 3, error=UsageError)
    with pytest.raises(CostsError, match=r"^ranks must be a whole number of at least 1, got 0$"):
        check_count("ranks", 0)
