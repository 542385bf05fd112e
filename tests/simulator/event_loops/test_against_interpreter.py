"""The engine and the interpreter of the tests find the same times, messages and memory."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.table import Table
from penstock.simulator.timeline import Timeline, Transfer
from simulator.draws import contentions, copied, disturbed, real_costs, spread, tables, timed
from simulator.interpreter import Message, Outcome, StuckError, interpret

pytestmark = pytest.mark.slow


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def compare(table: Table, costs: Costs) -> None:
    """Equal in everything, or stuck both."""
    try:
        expected = interpret(table, costs)
    except StuckError:
        with pytest.raises(ScheduleError):
            ps.simulate(table, costs)
        return
    timeline = ps.simulate(table, costs)
    compare_times(timeline, expected)
    compare_figures(timeline, expected)
    for rank in range(table.ranks):
        compare_memory(timeline, expected, rank)


def compare_times(timeline: Timeline, expected: Outcome) -> None:
    assert timeline.start == near(np.concatenate(expected.start))
    assert timeline.end == near(np.concatenate(expected.end))
    lanes = [pair for pair in zip(timeline.collective_start, timeline.collective_end, strict=True) if pair[0] >= 0]
    assert lanes == [near(each) for rank in expected.collectives for _, each in sorted(rank.items())]
    transfers = sorted(of_transfer(each, timeline.table.slices) for each in timeline.transfers())
    assert transfers == list(map(near, sorted(map(of_message, expected.messages))))


def of_transfer(transfer: Transfer, slices: int) -> tuple[float, ...]:
    ends = sorted((transfer.sent.stage, transfer.used.stage))
    way = transfer.source, transfer.target, transfer.kind is Kind.SEND_F
    return (*way, *ends, transfer.sent.unit(slices), transfer.start, transfer.end, transfer.size)


def of_message(message: Message) -> tuple[float, ...]:
    kind, _, _, microbatch = message.edge
    return (message.source, message.target, kind == "up", *sorted(message.ends), microbatch, message.left, message.arrived, message.size)


def compare_figures(timeline: Timeline, expected: Outcome) -> None:
    assert timeline.makespan == near(expected.makespan)
    assert list(timeline.busy) == near(expected.busy)
    assert list(timeline.finished) == near(expected.finish)
    if expected.makespan > 0:
        assert timeline.bubble == near(expected.bubble)
        assert any(timeline.span_bubble == near(each) for each in expected.span_bubbles)
    else:
        assert timeline.bubble == timeline.span_bubble == 0


def compare_memory(timeline: Timeline, expected: Outcome, rank: int) -> None:
    curve = timeline.memory(rank)
    assert curve.static == near(expected.static[rank])
    assert timeline.peak_memory[rank] == curve.peak == near(expected.peak(rank))
    last = {float(time): {name: float(held[k]) for name, held in curve.held.items()} for k, time in enumerate(curve.times)}
    assert list(last) == near(sorted({time for time, _ in expected.held(rank)}))
    for found, wanted in zip(last.values(), dict(expected.held(rank)).values(), strict=True):
        assert found == near(wanted)


@settings(max_examples=100)
@given(timed())
def test_equal_on_any_table(case: tuple[Table, Costs]) -> None:
    compare(*case)


@given(copied())
def test_equal_with_copies_to_the_host(case: tuple[Table, Costs]) -> None:
    compare(*case)


@given(spread())
def test_equal_with_a_spread_vocabulary(case: tuple[Table, Costs]) -> None:
    compare(*case)


@given(tables, st.integers(0, 2**32), contentions)
def test_equal_with_real_numbers(table: Table, seed: int, contention: str) -> None:
    compare(table, real_costs(table, Random(seed), contention))


@settings(max_examples=100)
@given(timed(disturbed()))
def test_stuck_together(case: tuple[Table, Costs]) -> None:
    compare(*case)
