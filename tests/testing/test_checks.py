"""The suite refuses what is wrong, and says why; and it needs no pytest."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.placement import Placement
from penstock.ir.rows import Ints
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import algorithms
from penstock.testing import check_schedule

pytestmark = pytest.mark.slow

Rows = list[list[str]]


def zero_bubble() -> Rows:
    return [[str(action) for action in row] for row in ps.schedule("zb-h1", ranks=2, microbatches=3)]


def remade(rows: Rows) -> Schedule:
    return Schedule.from_actions(rows, Placement.linear(2), microbatches=3)


def swap(rows: Rows, rank: int, one: str, other: str) -> None:
    row = rows[rank]
    at, to = row.index(one), row.index(other)
    row[at], row[to] = row[to], row[at]


def missing(rows: Rows) -> None:
    rows[1].remove("1W2")


def missing_backward(rows: Rows) -> None:
    rows[0].remove("0I1")
    rows[0].remove("0W1")


def repeated(rows: Rows) -> None:
    rows[0].append("0F1")


def both_backwards(rows: Rows) -> None:
    rows[1].append("1B0")


def wrong_rank(rows: Rows) -> None:
    rows[0].remove("0W2")
    rows[1].append("0W2")


def backward_before_forward(rows: Rows) -> None:
    swap(rows, 1, "1F0", "1I0")


def weights_before_input(rows: Rows) -> None:
    swap(rows, 0, "0I2", "0W2")


def each_waits_for_the_other(rows: Rows) -> None:
    """Rank 0 wants the gradient of microbatch 0 before it forwards microbatch 1, rank 1 the forward of 1 before it makes it."""
    swap(rows, 0, "0F1", "0I0")
    swap(rows, 1, "1F1", "1I0")


def no_such_microbatch(rows: Rows) -> None:
    rows[0] += ["0F3", "0B3"]


def message(rows: Rows) -> None:
    rows[0].insert(1, "0SEND_F0")


def reduction(rows: Rows) -> None:
    rows[0].append("0REDUCE_GRAD")


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (missing, "1I2 but never 1W2"),
        (missing_backward, "stage 0 has no backward for microbatch 1"),
        (repeated, "0F1 runs twice"),
        (both_backwards, "1I0 is a part of the backward that 1B0"),
        (wrong_rank, "0W2 runs on rank 1, but stage 0 is on rank 0"),
        (backward_before_forward, "1I0 needs 1F0"),
        (weights_before_input, "0W2 needs 0I2"),
        (each_waits_for_the_other, "2 ranks wait for each other in a cycle: rank 0 waits in step 1 \\(0I0\\) for 1I0"),
        (no_such_microbatch, "0F3 names microbatch 3 of 0..2"),
        (message, "0SEND_F0 is not compute"),
        (reduction, "0REDUCE_GRAD is not compute"),
    ],
)
def test_what_is_wrong_is_refused(breaks: Callable[[Rows], None], reason: str) -> None:
    rows = zero_bubble()
    check_schedule(remade(rows))
    breaks(rows)
    with pytest.raises(AssertionError, match=reason) as refused:
        check_schedule(remade(rows))
    assert str(refused.value).startswith("<Schedule linear, 2 ranks, 2 stages, 3 microbatches>: ")


def test_a_rank_that_differs_when_asked_again_is_refused() -> None:
    calls = itertools.count()
    good = ps.schedule("1f1b", ranks=2, microbatches=2)

    def source(rank: int) -> Ints:
        return np.roll(good.row(rank), next(calls) // 3)

    with pytest.raises(AssertionError, match="rank 1 asked alone differs from entry 0 on"):
        check_schedule(Schedule(good.placement, 2, source))


@settings(max_examples=25)
@given(st.sampled_from(sorted(algorithms())), st.integers(5, 9), st.integers(1, 4), st.integers(1, 30))
def test_shapes_beyond_the_grid(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    algorithm = algorithms()[name]
    try:
        schedule = algorithm.build(ranks, microbatches, algorithm.layout.chunks if algorithm.layout.fixed else chunks)
    except ScheduleError:
        assume(False)
    check_schedule(schedule)


@settings(max_examples=25)
@given(st.data())
def test_group_sizes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["interleaved-1f1b", "interleaved-zb"]))
    ranks, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    microbatches = data.draw(st.integers(ranks, 4 * ranks))
    group_size = data.draw(st.integers(ranks, microbatches))
    try:
        schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, group_size=group_size)
    except ScheduleError:
        assume(False)
    check_schedule(schedule)


def test_importing_the_suite_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import penstock.testing as t; print(len(t.conformance_cases('1f1b')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 3 + 6 + 9 + 12
