"""What must hold of every timeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.costs import Costs
from penstock.ir.dependencies import needs
from penstock.ir.kind import COMPUTE, SEND_WAITS, SHARES, Kind
from penstock.ir.table import Table
from penstock.simulator.gaps import CAUSES
from penstock.simulator.timeline import Timeline
from penstock.verifier.rules.memory import peak_memory
from simulator.draws import programs, spread, tables, timed
from simulator.runs import Interval, lanes, made, result, run

pytestmark = pytest.mark.slow

Case = tuple[Table, Costs]
cases = st.one_of(timed(), spread())


@given(timed())
def test_nothing_starts_before_what_it_needs_is_there(case: Case) -> None:
    table, costs = case
    timeline = run(case)
    there = made(timeline)
    for rank in range(table.ranks):
        for span in timeline.spans(rank):
            for needed in needs(span.action, table.graph, table.slices):
                end, home = there[result(needed)]
                latency = costs.latency[home][rank] if isinstance(costs.latency, tuple) else costs.latency
                assert span.start >= end + (home != rank) * latency


@given(cases)
def test_every_action_takes_its_time(case: Case) -> None:
    table, costs = case
    timeline = run(case)
    takes = {kind: costs.table(kind.name.lower(), table.stages, table.units) for kind in (*COMPUTE, *SHARES)}
    multiples = {Kind.S: costs.rank_s, Kind.T: costs.rank_t}

    def multiply(rank: int, kind: Kind, stage: int) -> float:
        """How many times the time of its stage an action takes on a rank: one value per rank, or one for each end."""
        of_kind = multiples.get(kind, 1.0)
        of_rank = of_kind[rank] if isinstance(of_kind, tuple) else of_kind
        return of_rank[stage > 0] if isinstance(of_rank, tuple) else of_rank

    for rank in range(table.ranks):
        for span in timeline.spans(rank):
            parts = [
                takes[part.kind][part.stage, part.unit(table.slices)] * multiply(rank, part.kind, part.stage) for part in span.action.parts
            ]
            assert span.end - span.start == sum(parts) * (costs.overlap if len(parts) > 1 else 1)
    for transfer in timeline.transfers():
        latency, bandwidth = (
            value[transfer.source][transfer.target] if isinstance(value, tuple) else value for value in (costs.latency, costs.bandwidth)
        )
        assert transfer.end - transfer.start == latency + (0 if bandwidth is None else transfer.size / bandwidth)


@given(cases)
def test_no_lane_overlaps_itself(case: Case) -> None:
    for lane in lanes(run(case)).values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(lane)))


@given(cases)
def test_the_critical_path_is_the_makespan(case: Case) -> None:
    timeline = run(case)
    path = timeline.critical_path
    assert sum(step.end - step.start for step in path) == timeline.makespan
    if path:
        assert (path[0].start, path[-1].end) == (0, timeline.makespan)
    assert all(one.end == other.start for one, other in pairwise(path))
    assert {(step.what, step.rank, step.start, step.end) for step in path} <= pieces(timeline)


def pieces(timeline: Timeline) -> set[tuple[str, int, float, float]]:
    """Everything that a path can be made of."""
    found = {("message", t.target, t.start, t.end) for t in timeline.transfers()}
    occupied = lanes(timeline)
    for rank in range(timeline.ranks):
        found |= {("action", rank, *pair) for pair in occupied["compute", rank]}
        found |= {("collective", rank, *pair) for pair in (*occupied["collective", rank], *occupied["joint", rank])}
        end = float(timeline.finished[rank])
        found.add(("optimizer", rank, end - float(timeline.optimizer[rank]), end))
    return found


@given(cases)
def test_gaps_and_work_fill_the_makespan(case: Case) -> None:
    timeline = run(case)
    for rank in range(timeline.ranks):
        work: list[Interval] = [(span.start, span.end) for span in timeline.spans(rank)]
        end = float(timeline.finished[rank])
        work.append((end - float(timeline.optimizer[rank]), end))
        idle = [(gap.start, gap.end) for gap in timeline.gaps(rank)]
        assert all(start < end for start, end in idle)
        whole = sorted(pair for pair in (*work, *idle) if pair[0] < pair[1])
        assert all(one[1] == other[0] for one, other in pairwise(whole))
        if timeline.makespan > 0:
            assert (whole[0][0], whole[-1][1]) == (0, timeline.makespan)
        assert [gap.cause for gap in timeline.gaps(rank)].count("fill") <= 1
    assert list(timeline.idle_by_cause) == list(CAUSES)
    assert sum(timeline.idle_by_cause.values()) == timeline.ranks * timeline.makespan - timeline.busy.sum()


@given(cases)
def test_each_gap_ends_when_its_cause_does(case: Case) -> None:
    timeline = run(case)
    there = made(timeline)
    arrivals = {(t.target, t.end) for t in timeline.transfers()}
    occupied = lanes(timeline)
    gathered = {(rank, end) for rank in range(timeline.ranks) for kind in ("collective", "joint") for _, end in occupied[kind, rank]}
    for rank in range(timeline.ranks):
        for gap in timeline.gaps(rank):
            if gap.cause == "waiting":
                assert gap.action is not None
                assert gap.rank is not None
                assert gap.rank != rank
                if gap.action.kind in (*SHARES, Kind.OVERLAP_F_B):
                    assert gap.end in [span.end for span in timeline.spans(gap.rank) if span.action == gap.action]
                else:
                    assert (gap.end, gap.rank) == there[result(gap.action)]
            if gap.cause == "communication":
                assert (rank, gap.end) in (arrivals if gap.rank != rank else gathered)
            if gap.cause == "memory":
                assert gap.rank is not None
                assert gap.action is not None
                low = int(timeline.table.rows.group_offsets[gap.rank])
                assert gap.end == timeline.start[low + timeline.table[gap.rank].index(gap.action)]


@given(cases)
def test_memory_is_never_negative_and_ends_at_zero(case: Case) -> None:
    timeline = run(case)
    for rank in range(timeline.ranks):
        curve = timeline.memory(rank)
        assert (np.diff(curve.times) >= 0).all()
        for held in curve.held.values():
            assert (held >= 0).all()
            assert not len(held) or held[-1] == 0
        assert curve.peak == curve.static + max(curve.total, default=0)
        if len(curve.times):
            assert curve.total[curve.times == curve.peak_time].max() == curve.peak - curve.static


@given(timed())
def test_what_a_rank_computes_with_is_what_its_order_holds(case: Case) -> None:
    """Activations and weight stash do not depend on the times: the verifier counts the same along the order."""
    table, costs = case
    bare = replace(costs, output=0.0, parameters=0.0, shard=0.0)
    assert run((table, bare)).peak_memory == peak_memory(table, bare)


@given(timed(programs()))
def test_a_program_holds_at_most_what_its_order_holds(case: Case) -> None:
    """The order knows when receives are posted; only a gather that waits for its lane starts later than its order says."""
    table, costs = case
    prompt = replace(costs, unshard=0.0, reduce=0.0)
    timeline, promptly = run(case), run((table, prompt))
    for rank in (rank for rank in range(table.ranks) if table[rank]):
        assert timeline.peak_memory[rank] <= peak_memory(table, costs)[rank]
        assert promptly.peak_memory[rank] == peak_memory(table, prompt)[rank]


@given(tables)
def test_figures_of_the_default_costs(table: Table) -> None:
    """Every action is counted once: F, I and W take 1, B takes 2."""
    timeline = run((table, Costs()))
    work = [sum(2 if part.kind.name == "B" else 1 for action in row for part in action.parts if part.is_compute) for row in table]
    assert list(timeline.busy) == work
    assert timeline.bubble == pytest.approx(1 - sum(work) / (table.ranks * timeline.makespan))
    assert all(span.wait >= 0 for rank in range(table.ranks) for span in timeline.spans(rank))
    for rank in range(table.ranks):
        spans = timeline.spans(rank)
        assert sum(span.wait for span in spans) + work[rank] == (spans[-1].end if spans else 0)


@given(timed(programs()))
def test_a_program_that_no_slot_holds_up_runs_as_its_schedule_does(case: Case) -> None:
    """Messages of a lowered program leave as those of the schedule do, if gathers take no time and no sends or reductions are awaited."""
    table, costs = case
    free = replace(costs, unshard=0.0, reduce=0.0)
    waits = table.rows.is_kind(*SEND_WAITS, Kind.WAIT_REDUCE_GRAD)
    program = table.changed(rows=table.rows.keep(~waits), buffers=None)  # type: ignore[attr-defined]
    timeline, plain = run((program, free)), ps.simulate(program.schedule(), free)
    for rank in range(table.ranks):
        assert timeline.spans(rank) == plain.spans(rank)
