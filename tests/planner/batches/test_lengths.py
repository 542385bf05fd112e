"""What samples cost by their lengths."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import CostsError
from penstock.planner.batches.lengths import LengthCosts, read_lengths


def test_attention_of_packed_samples_is_within_each_sample() -> None:
    costs = LengthCosts(100, quadratic=0.25)
    assert costs.of([100]) == 1.0
    assert costs.of([200]) == 0.75 * 2 + 0.25 * 4
    assert costs.of([100, 100]) == 2.0
    assert LengthCosts(100).of([30, 50]) == 0.8


def test_lengths_are_numbers_lists_or_arrays() -> None:
    assert read_lengths([5, [3, 4], np.int64(2)]) == [(5,), (3, 4), (2,)]
    assert read_lengths(np.array([[1, 2], [3, 4]])) == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths of 0 microbatches"),
        ([5, 0], r"lengths\[1\] must be a whole number of tokens, at least 1, got 0"),
        ([5, [3, 2.5]], r"lengths\[1\]\[1\] must be a whole number of tokens, at least 1, got 2.5"),
        ([5, []], r"lengths\[1\] is empty"),
        ([True], r"lengths\[0\] must be a whole number"),
        ([float("nan")], r"lengths\[0\] must be a whole number"),
        (["12"], r"lengths\[0\] must be a sequence, got str"),
        (7, "lengths must be a sequence, got int"),
        ({3, 5}, "lengths must be a sequence, got set"),
        ({0: 5}, "lengths must be a sequence, got dict"),
        ([5, 10**400], r"lengths\[1\] must be a number of tokens up to 1099511627776, got one of 401 digits"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: object, message: str) -> None:
    with pytest.raises(CostsError, match=message):
        read_lengths(lengths)


def test_shares_are_from_0_to_1() -> None:
    with pytest.raises(CostsError, match="from 0 to 1, got"):
        LengthCosts(100, quadratic=1.5)
    with pytest.raises(CostsError, match="sequence must be a whole number of tokens"):
        LengthCosts(0)
