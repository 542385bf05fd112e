"""Traces: valid in their format, with the times of the timeline."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from draw.samples import SAMPLES
from penstock.draw.save import build_trace
from penstock.errors import UsageError

TICK = 0.125


def events(timeline: ps.Timeline, *phases: str, **options: Any) -> list[dict[str, Any]]:
    return [event for event in build_trace(timeline, **options)["traceEvents"] if event["ph"] in phases]


def check(timeline: ps.Timeline, **options: Any) -> None:
    """Check what every trace must satisfy."""
    data = build_trace(timeline, **options)
    assert json.loads(json.dumps(data)) == data
    slices = defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in slices.values():
        ends = 0.0
        for start, end in sorted(lane):
            assert start >= ends  # no two slices of a track overlap
            assert end >= start
            assert (start / TICK, end / TICK) == (start // TICK, end // TICK)
            ends = end
    named = {(event["pid"], event["tid"]) for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert set(slices) <= named
    assert len({lane for _, lane in named}) == len(named)
    check_flows(data["traceEvents"], slices)


def check_flows(trace_events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    """Check that every arrow has both ends, each in a slice of its track."""
    flows = defaultdict(list)
    for event in trace_events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            lane = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] < end or start == event["ts"] == end for start, end in lane), event
    for flow in flows.values():
        phases = "".join(event["ph"] for event in flow)
        assert phases in ("sf", "stf")
        assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_traces_are_valid(name, unit):
    check(SAMPLES[name], unit=unit)


@given(
    st.sampled_from(["1f1b", "zbv", "dualpipe-v", "zb-h1"]),
    st.lists(st.floats(0, 3), min_size=6, max_size=6),
    st.sampled_from(["independent", "pair", "rank"]),
    st.booleans(),
)
def test_traces_under_any_costs_are_valid(name, times, contention, lower):
    schedule = ps.schedule(name, ranks=3, microbatches=5)
    f, i, w, latency, output, optimizer = times
    costs = ps.Costs(f=f, i=i, w=w, latency=latency, output=output, optimizer=optimizer, bandwidth=1.7, contention=contention)
    check(ps.simulate(ps.lower(schedule) if lower else schedule, costs))


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "fsdp"])
def test_slices_equal_the_spans(name):
    timeline = SAMPLES[name]
    waits = Counter((event["pid"], event["name"], event["ts"]) for event in events(timeline, "X") if "wait" in event["args"])
    wanted = Counter(
        (rank, " & ".join(map(str, span.action.parts)), round(span.start * 1000 / TICK) * TICK)
        for rank in range(timeline.ranks)
        for span in timeline.spans(rank)
    )
    assert waits == wanted


def test_messages_equal_the_transfers():
    timeline = SAMPLES["fsdp"]
    transfers = list(timeline.transfers())
    found = [event for event in events(timeline, "X") if "used" in event["args"]]
    assert [(event["pid"], event["name"], event["args"]["used"]) for event in found] == [
        (transfer.source, str(transfer.sent), str(transfer.used)) for transfer in transfers
    ]
    assert [event["dur"] for event in found] == pytest.approx([1000 * (each.end - each.start) for each in transfers], abs=2 * TICK)
    assert len(events(timeline, "s")) == len(events(timeline, "f")) == len(transfers)
    for arrow, transfer in zip(events(timeline, "f"), transfers, strict=True):
        assert arrow["pid"] == transfer.target


def test_messages_that_take_no_time_are_only_arrows():
    timeline = SAMPLES["1f1b"]
    assert not [event for event in events(timeline, "X") if "used" in event["args"]]
    assert len(events(timeline, "s")) == len(events(timeline, "f")) == timeline.num_messages
    assert not events(timeline, "t")


@pytest.mark.parametrize("name", SAMPLES)
def test_counters_follow_the_memory_curve_and_end_at_static_memory(name):
    timeline = SAMPLES[name]
    held = defaultdict(list)
    for event in events(timeline, "C"):
        for key, value in event["args"].items():
            held[event["pid"], event["name"], key].append((event["ts"], value))
    for (rank, _, key), values in held.items():
        curve = timeline.memory(rank)
        times = [time for time, _ in values]
        assert times == sorted(set(times))
        assert values[-1][1] == (curve.static if key == "held" else 0.0)
        assert min(value for _, value in values) >= 0
        assert max(value for _, value in values) <= curve.peak * (1 + 1e-12)
    assert {rank for rank, _, _ in held} == set(range(timeline.ranks))


def test_counters_reach_the_peak():
    timeline = SAMPLES["1f1b"]
    for rank in range(4):
        held = [event["args"]["held"] for event in events(timeline, "C") if event["pid"] == rank]
        assert max(held) == timeline.peak_memory[rank] == 4 - rank


def test_processes_are_ranks_in_order_and_lanes_are_named():
    found = events(SAMPLES["fsdp"], "M")
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in found if event["name"] == "process_sort_index"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    assert sorted(order, key=order.__getitem__) == list(range(4))
    lanes = [event["args"]["name"] for event in found if event["name"] == "thread_name" and event["pid"] == 1]
    assert lanes[:2] == ["compute", "collectives"]
    assert set(lanes[2:]) == {"activations to rank 2", "gradients to rank 0"}


@pytest.mark.parametrize(("unit", "scale"), [("s", 1e6), ("ms", 1e3), ("us", 1.0)])
def test_units(unit, scale):
    last = max(event["ts"] + event["dur"] for event in events(SAMPLES["1f1b"], "X", unit=unit))
    assert last == pytest.approx(33 * scale)
    assert build_trace(SAMPLES["1f1b"], unit=unit)["otherData"]["unit"] == unit


def test_a_unit_without_scale_is_refused():
    with pytest.raises(UsageError, match="'fortnight'"):
        build_trace(SAMPLES["1f1b"], unit="fortnight")
