"""Printed rates, closed forms and bounds, on simulated time."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.schedule import Schedule
from penstock.simulator.timeline import Timeline
from simulator.draws import zoo

PRINTED = list(csv.DictReader((Path(__file__).parents[1] / "data" / "zero_bubble.csv").read_text().splitlines()))
"""Profiled times and bubble rates of the Zero Bubble paper, tables 5 and 9."""

EQUAL = (1, 1, 1)
TIMES = [EQUAL, (2, 2, 1), (4, 4, 3), (3, 2, 1), (2, 3, 2)]
"""F, I and W of one stage, none with W > F."""
Times = tuple[float, float, float]


def simulated(name: str, ranks: int, microbatches: int, times: Times = EQUAL, chunks: int | None = None, **costs: float) -> Timeline:
    f, i, w = times
    return ps.simulate(ps.schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks), Costs(f=f, i=i, w=w, **costs))  # type: ignore[arg-type]


def idle(timeline: Timeline) -> set[float]:
    """What each rank's work leaves of the makespan."""
    return {timeline.makespan - busy for busy in timeline.busy.tolist()}


def span_idle(timeline: Timeline) -> float:
    """What its work leaves of the longest rank's span; every rank has the same work."""
    (busy,) = set(timeline.busy.tolist())
    return round(timeline.span_bubble * busy / (1 - timeline.span_bubble), 9)


# Printed rates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: f"{row['model']}x{row['microbatches']}")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("lowered", [False, True], ids=["schedule", "program"])
def test_printed_bubble_rates(row: dict[str, str], name: str, lowered: bool) -> None:
    costs = Costs(**{field: float(row[field]) for field in ("f", "i", "w", "latency", "weight_stash")})  # type: ignore[arg-type]
    schedule = ps.schedule(name, ranks=int(row["ranks"]), microbatches=int(row["microbatches"]))
    timeline = ps.simulate(ps.lower(schedule) if lowered else schedule, costs)
    assert timeline.span_bubble == pytest.approx(float(row[name]), abs=1e-4)


def test_dualpipe_of_8_ranks_and_20_microbatches() -> None:
    timeline = simulated("dualpipe", 8, 20)
    assert timeline.makespan == 66
    assert idle(timeline) == {6}
    assert timeline.bubble == pytest.approx(6 / 66)


# Closed forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", range(1, 6))
def test_bubble_of_linear_schedules(ranks: int, times: Times) -> None:
    f, i, w = times
    for microbatches in range(1, 3 * ranks + 1):
        for name in ("gpipe", "1f1b", "eager-1f1b"):
            timeline = simulated(name, ranks, microbatches, times)
            assert idle(timeline) == {(ranks - 1) * (f + i + w)}
            assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert simulated("inference", ranks, microbatches, times).makespan == (microbatches + ranks - 1) * f
    for microbatches in range(ranks, 3 * ranks + 1):
        assert idle(simulated("zb-h1", ranks, microbatches, times)) == {(ranks - 1) * (f + i - w)}
    for microbatches in range(2 * ranks - 1, 3 * ranks + 1):
        assert span_idle(simulated("zb-h2", ranks, microbatches, times)) == (ranks - 1) * (f + i - 2 * w)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", range(1, 6))
def test_fewer_microbatches_than_ranks(ranks: int, times: Times) -> None:
    f, i, w = times
    for microbatches in range(1, ranks + 1):
        turns = microbatches + ranks - 1
        assert simulated("1f1b", ranks, microbatches, times).makespan == turns * (f + i + w)
        assert simulated("zb-h1", ranks, microbatches, times).makespan == turns * (f + i) + w


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", range(1, 5))
def test_bubble_of_looped_schedules(ranks: int, chunks: int, times: Times) -> None:
    """In times of one stage: a rank's share of layers takes `chunks` times as long."""
    f, i, w = times
    for microbatches in (ranks, 2 * ranks, 3 * ranks):
        for name in ("looped-bfs", "interleaved-1f1b"):
            assert idle(simulated(name, ranks, microbatches, times, chunks)) == {(ranks - 1) * (f + i + w)}
        assert idle(simulated("interleaved-zb", ranks, microbatches, times, chunks)) == {(ranks - 1) * (f + i - w)}


@pytest.mark.parametrize("ranks", range(1, 7))
def test_zbv_has_no_gap_with_equal_times(ranks: int) -> None:
    for microbatches in range(2 * ranks - 1, 3 * ranks + 1):
        timeline = simulated("zbv", ranks, microbatches)
        assert timeline.span_bubble == 0
        assert timeline.makespan == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("times", [EQUAL, (2, 2, 1), (4, 4, 3)])
@pytest.mark.parametrize("ranks", range(1, 5))
def test_bubble_of_dualpipe(ranks: int, times: Times) -> None:
    f, i, w = times
    a_hop = (f + i + w) + (i + w) - 3 * w
    for microbatches in range(2 * ranks, 3 * ranks + 1):
        assert idle(simulated("dualpipe-v", ranks, microbatches, times)) == {(ranks - 1) * a_hop}
        assert idle(simulated("dualpipe", 2 * ranks, 2 * (microbatches + ranks), times)) == {(ranks - 1) * a_hop}


@pytest.mark.parametrize("ranks", range(2, 6))
def test_overlap_shortens_what_runs_together(ranks: int) -> None:
    """The bubble holds one overlapped pair a hop, the work all the others."""
    for factor in (0.5, 0.75, 1.0):
        timeline = simulated("dualpipe-v", ranks, 3 * ranks, overlap=factor)
        schedule = timeline.table
        pairs = [sum(action.kind is Kind.OVERLAP_F_B for action in row) for row in schedule]
        assert timeline.busy.tolist() == [6 * 3 * ranks - 3 * (1 - factor) * count for count in pairs]


def test_eager_hides_latency() -> None:
    """With hops of half a forward 1f1b waits in every round; eager pays each hop once down and once up."""
    for ranks in range(2, 6):
        plain, eager = (simulated(name, ranks, 8 * ranks, (2, 2, 2), latency=1).makespan for name in ("1f1b", "eager-1f1b"))
        assert eager == (8 * ranks + ranks - 1) * 6 + 2 * (ranks - 1)
        assert plain > eager


# Peaks ----------------------------------------------------------------------------------------------------------------

PEAKS: dict[str, tuple[float, Callable[[int, int, int], int]]] = {
    "gpipe": (0, lambda p, r, m: m),
    "1f1b": (0, lambda p, r, m: min(p - r, m)),
    "eager-1f1b": (0, lambda p, r, m: min(2 * (p - r) - 1, m)),
    "zb-h1": (1, lambda p, r, m: min(p, m)),
    "zb-h2": (1, lambda p, r, m: min(2 * p - 1, m)),
}
"""The weight stash of an activation of 1, and the peak: what counts from F to W has a stash as large."""


@pytest.mark.parametrize("times", [EQUAL, (2, 3, 2)])
@pytest.mark.parametrize("name", PEAKS)
def test_peak_of_linear_schedules(name: str, times: Times) -> None:
    stash, formula = PEAKS[name]
    for ranks in range(1, 6):
        for microbatches in range(1, 3 * ranks):
            timeline = simulated(name, ranks, microbatches, times, weight_stash=stash)
            assert timeline.peak_memory == [formula(ranks, rank, microbatches) for rank in range(ranks)]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", range(1, 5))
def test_peak_of_looped_schedules(ranks: int, chunks: int) -> None:
    p, v = ranks, chunks
    for m in (p, 2 * p, 4 * p):
        assert simulated("looped-bfs", p, m, chunks=v).peak_memory == [m * v] * p
        held = simulated("interleaved-1f1b", p, m, chunks=v).peak_memory
        assert held == [min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) for r in range(p)]
        assert held[0] == min(p * v + p - 1, m * v)
        assert simulated("interleaved-zb", p, m, chunks=v, weight_stash=1).peak_memory == [p * v] * p


@pytest.mark.parametrize("ranks", range(1, 6))
def test_peak_of_v_and_bidirectional_schedules(ranks: int) -> None:
    for microbatches in (2 * ranks + 1, 3 * ranks + 1):
        assert simulated("zbv", ranks, microbatches).peak_memory == [2 * ranks] * ranks
        assert simulated("dualpipe-v", ranks, microbatches).peak_memory == [2 * ranks + 1] * ranks
        assert simulated("dualpipe", 2 * ranks, 2 * microbatches).peak_memory == [2 * ranks + 1] * (2 * ranks)


def test_a_bidirectional_rank_keeps_parameters_twice() -> None:
    costs = Costs(activation=0, parameters=[1, 2, 4, 8])  # type: ignore[arg-type]
    assert ps.simulate(ps.schedule("dualpipe", ranks=4, microbatches=8), costs).peak_memory == [9, 6, 6, 9]


# Bounds ---------------------------------------------------------------------------------------------------------------

amounts = st.floats(0.1, 4)


@given(zoo(), amounts, amounts, amounts, st.floats(0, 2))
def test_bounds(table: Schedule, f: float, i: float, w: float, latency: float) -> None:
    timeline = ps.simulate(table, Costs(f=f, i=i, w=w, latency=latency))
    slack = 1 + 1e-9
    for rank in range(table.ranks):
        if timeline.spans(rank):
            assert timeline.finished[rank] - timeline.begun[rank] >= timeline.busy[rank] / slack
    assert 0 <= timeline.bubble < 1
    assert -1e-9 <= timeline.span_bubble < 1
    if table.placement.kind == "linear" and table.graph.is_chain and table.training:
        p, m = table.ranks, table.microbatches
        assert timeline.makespan * slack >= (p - 1) * (f + latency) + m * (f + i + w)
        row = [action.kind for action in table[0]]
        ahead = next(place for place, kind in enumerate(row) if kind is not Kind.F)
        rank_idle = timeline.finished[0] - timeline.begun[0] - timeline.busy[0]
        assert rank_idle >= (p - 1) * (i + 2 * latency) + (p - ahead) * f - 1e-9 * timeline.makespan
        assert timeline.peak_memory[0] >= ahead
