"""Gradients reduced once, when they are whole."""

from __future__ import annotations

import pytest

from penstock.ir.placement import Placement
from penstock.verifier.verify import check
from verifier.build import only, program

BOTH = Placement.custom([0, 0])


@pytest.mark.parametrize(
    "row",
    [
        "0F0 0B0 0REDUCE_GRAD",
        "0F0 0I0 0W0 0REDUCE_GRAD",
        "0F0 0F1 0I0 0I1 0W1 0W0 0REDUCE_GRAD",
        "0F0 0B0",
    ],
)
def test_reduced_once_after_the_last(row: str) -> None:
    assert check(program(row)) == []


@pytest.mark.parametrize(
    ("row", "step", "said"),
    [
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", 3, "0REDUCE_GRAD runs before 0B1, step 4"),
        ("0F0 0I0 0REDUCE_GRAD 0W0", 2, "0REDUCE_GRAD runs before 0W0, step 3"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", 3, "reduces the gradients of stage 0 again, after step 2 of rank 0"),
        ("0F0 0REDUCE_GRAD", 1, "stage 0 makes no gradients on rank 0"),
    ],
)
def test_reduced_wrongly(row: str, step: int, said: str) -> None:
    found = only(program(row))
    assert (found.rule, found.step) == ("reduction", step)
    assert said in found.message


def test_where_one_stage_is_reduced_all_are() -> None:
    assert check(program("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD", placement=BOTH)) == []
    found = only(program("0F0 1F0 1B0 1REDUCE_GRAD 0B0", placement=BOTH))
    assert (found.rule, found.action, found.step) == ("reduction", "0REDUCE_GRAD", 4)
    assert "never reduced" in found.message


def test_a_copy_that_no_microbatch_uses_is_not_reduced() -> None:
    """With one microbatch the second copy of a bidirectional placement does nothing."""
    first = "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD"
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"
    assert check(program(first, second, placement=Placement.bidirectional(2))) == []
    found = only(program(first + " 1REDUCE_GRAD", second, placement=Placement.bidirectional(2)))
    assert (found.rule, found.rank, found.action) == ("reduction", 0, "1REDUCE_GRAD")
