"""Idle times and critical path as they are read off measured times: of exact times they are the simulator's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.simulator.measured import measure_costs
from simulator.draws import programs, schedules_of_any_kind, timed, zoo
from simulator.runs import run

Case = tuple[Table, Costs]


@settings(deadline=None, max_examples=80)
@given(timed(schedules_of_any_kind))
def test_gaps_of_exact_times_are_the_simulator_s(case: Case) -> None:
    simulated = run(case)
    measured = replace(simulated, source="measured")
    for rank in range(simulated.ranks):
        assert measured.gaps(rank) == simulated.gaps(rank)
    assert measured.idle_by_cause == simulated.idle_by_cause


@settings(deadline=None, max_examples=60)
@given(timed(programs()))
def test_gaps_fill_the_makespan(case: Case) -> None:
    measured = replace(run(case), source="measured")
    assert sum(measured.idle_by_cause.values()) == pytest.approx(measured.ranks * measured.makespan - measured.busy.sum())
    for rank in range(measured.ranks):
        assert all(gap.start < gap.end for gap in measured.gaps(rank))
        assert all(str(gap) for gap in measured.gaps(rank))


@settings(deadline=None, max_examples=60)
@given(zoo().filter(lambda table: table.graph.is_chain))
def test_the_path_of_exact_times_is_the_simulator_s(table: Schedule) -> None:
    """Where no message waits for another: a measured path goes from a message to what made it."""
    simulated = ps.simulate(table, Costs(f=1, i=1.5, w=0.5, latency=0.25, optimizer=0.5))
    assert replace(simulated, source="measured").critical_path == simulated.critical_path


def test_a_wait_for_a_slot_is_memory() -> None:
    """Eight forwards into a slow second rank that has one slot: the first rank waits for it."""
    table = ps.schedule("gpipe", ranks=2, microbatches=8)
    program = ps.lower(table)
    (channel,) = [key for key in program.buffers.channels if key[:2] == (0, 1)]
    tight = program.changed(buffers=replace(program.buffers, channels={**program.buffers.channels, channel: 1}))
    simulated = ps.simulate(tight, Costs(f=[1, 3]))
    assert simulated.idle_by_cause["memory"] > 0
    measured = replace(simulated, source="measured")
    assert measured.idle_by_cause["memory"] == simulated.idle_by_cause["memory"]


def test_a_send_that_takes_long_is_no_wait_for_a_slot() -> None:
    """Sends of two, behind actions of one: the rank itself is slowed by what they take, and no rank waits for room."""
    program = ps.lower(ps.schedule("gpipe", ranks=2, microbatches=4))
    quick = ps.simulate(program, Costs())
    sends = np.array([action.kind in (Kind.SEND_F, Kind.SEND_B) for rank in range(2) for action in program[rank]])
    late = 2.0 * np.concatenate([np.cumsum(part) for part in np.split(sends, [len(program[0])])])
    after = 2.0 * len(program[0])  # the second rank runs when all has come, so that only sends are between two actions
    late[len(program[0]) :] += after
    measured = replace(
        quick,
        source="measured",
        start=quick.start + late - 2.0 * sends,
        end=quick.end + late,
        depart=np.where(quick.messages.source == 0, quick.depart, quick.depart + 2 * after),
        arrive=np.where(quick.messages.source == 0, quick.arrive, quick.arrive + 2 * after),
    )
    assert measured.idle_by_cause["memory"] == 0
    assert [(gap.cause, gap.end - gap.start) for gap in measured.gaps(0)[:4]] == [("overhead", 2.0)] * 4  # one behind each forward


def test_gathers_are_communication() -> None:
    program = ps.lower(ps.schedule("1f1b", ranks=2, microbatches=4), fsdp=True)
    simulated = ps.simulate(program, Costs(unshard=2.5))
    measured = replace(simulated, source="measured")
    assert measured.idle_by_cause == simulated.idle_by_cause


@pytest.mark.parametrize("multiples", [{}, {"rank_s": [0.5, (2.0, 0.25), 1.0], "rank_t": [1.0, 1.0, 3.0]}])
def test_measured_costs_of_a_spread_vocabulary_know_each_rank(multiples: dict[str, Any]) -> None:
    """Exact times give costs under which the step takes as long again; equal shares have no multiples."""
    costs = Costs(s=[0.5, 0.0, 2.0], t=[0.25, 0.0, 1.0], broadcast=0.125, combine=0.25, **multiples)
    program = ps.lower(ps.spread_vocabulary(ps.schedule("1f1b", ranks=3, microbatches=5), costs))
    exact = ps.simulate(program, costs)
    collective = exact.collective_end - exact.collective_start
    measured = measure_costs(program, exact.start, exact.end, exact.arrive - exact.depart, collective)
    assert ps.simulate(program, measured).makespan == pytest.approx(exact.makespan)
    assert bool(multiples) != ((measured.rank_s, measured.rank_t) == (1.0, 1.0))
    for name in "st":
        assert measured.share_table(name, 3, 3) == pytest.approx(costs.share_table(name, 3, 3))
