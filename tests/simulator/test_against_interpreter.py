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
from penstock.simulator.timeline import Transfer
from simulator.draws import contentions, disturbed, real_costs, tables, timed
from simulator.interpreter import Outcome, StuckError, interpret


def outcome(table: Table, costs: Costs) -> Outcome | None:
    try:
        return interpret(table, costs)
    except StuckError:
        return None


def described(transfer: Transfer) -> tuple[float, ...]:
    up = transfer.kind is Kind.SEND_F
    ends = transfer.sent.stage + transfer.used.stage
    return (transfer.source, transfer.target, up, ends, transfer.sent.microbatch or 0, transfer.start, transfer.end, transfer.size)


def approx(rows: list[tuple[float, ...]]) -> list[Any]:
    return [pytest.approx(row, rel=1e-9, abs=1e-9) for row in rows]


def compare(table: Table, costs: Costs) -> None:
    """Equal in everything, or stuck both."""
    expected = outcome(table, costs)
    if expected is None:
        with pytest.raises(ScheduleError):
            ps.simulate(table, costs)
        return
    timeline = ps.simulate(table, costs)
    np.testing.assert_allclose(timeline.start, np.concatenate(expected.start), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(timeline.end, np.concatenate(expected.end), rtol=1e-9, atol=1e-9)
    lanes = [(start, end) for start, end in zip(timeline.collective_start, timeline.collective_end, strict=True) if start >= 0]
    assert lanes == approx([each for rank in expected.collectives for _, each in sorted(rank.items())])
    messages = sorted(
        (m.source, m.target, m.edge[0] == "up", m.edge[1] + m.edge[2], m.edge[3], m.left, m.arrived, m.size) for m in expected.messages
    )
    assert sorted(map(described, timeline.transfers())) == approx(messages)
    assert timeline.makespan == pytest.approx(expected.makespan, rel=1e-9)
    assert list(timeline.busy) == pytest.approx(expected.busy, rel=1e-9)
    assert list(timeline.finished) == pytest.approx(expected.finish, rel=1e-9)
    if expected.makespan > 0:
        assert timeline.bubble == pytest.approx(expected.bubble, rel=1e-9, abs=1e-9)
        assert any(timeline.span_bubble == pytest.approx(each, rel=1e-9, abs=1e-9) for each in expected.span_bubbles)
    assert list(timeline.peak_memory) == pytest.approx([expected.peak(rank) for rank in range(table.ranks)], rel=1e-9)


@settings(max_examples=300)
@given(timed())
def test_equal_on_any_table(case: tuple[Table, Costs]) -> None:
    compare(*case)


@settings(max_examples=150)
@given(tables, st.randoms(use_true_random=False), contentions)
def test_equal_with_real_numbers(table: Table, random: Random, contention: str) -> None:
    compare(table, real_costs(table.stages, table.microbatches, random, contention))


@settings(max_examples=150)
@given(timed(disturbed()))
def test_stuck_together(case: tuple[Table, Costs]) -> None:
    compare(*case)
