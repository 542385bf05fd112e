"""Copies to the host and back, timed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.draw.boxes import copy_boxes
from penstock.errors import CostsError
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.simulator.timeline import Timeline

ROW = "0F0 0OFFLOAD0 0F1 0F2 0F3 0B3 0B2 0RELOAD0 0B1 0B0"


def timeline(costs: Costs, *rows: str) -> Timeline:
    return ps.simulate(Schedule.from_actions([row.split() for row in rows], Placement.linear(len(rows))), costs)


def test_a_copy_runs_beside_the_computation() -> None:
    times = timeline(Costs(activation=3.0, host_bandwidth=2.0, host_latency=0.5), ROW)  # a copy takes 2
    assert times.makespan == 13.0  # 4 forwards, 4 backwards of 2, and 1 that 0F2 waits for the end of the copy
    boxes = copy_boxes(times)
    assert list(zip(boxes.start, boxes.end, strict=True)) == [(1.0, 3.0), (9.0, 11.0)]
    assert [str(gap) for gap in times.gaps(0)] == ["2 to 3: waits for the copy of 0OFFLOAD0 from rank 0"]
    assert [step.what for step in times.critical_path][:2] == ["action", "collective"]


def test_memory_while_it_is_away() -> None:
    times = timeline(Costs(activation=1.0, host_bandwidth=1.0), ROW)
    curve = times.memory(0)
    held = dict(zip(curve.times.tolist(), curve.total.tolist(), strict=True))
    forwards = {0.0: 1.0, 1.0: 2.0, 2.0: 2.0, 3.0: 3.0}  # 0F2 takes over what 0F0 has left
    assert held == forwards | {6.0: 2.0, 8.0: 2.0, 10.0: 1.0, 12.0: 0.0}  # 0RELOAD0 at 8, when 0B2 has ended


def test_the_host_holds_it_from_its_offload_to_its_backward() -> None:
    times = timeline(Costs(activation=3.0, host_bandwidth=2.0, host_latency=0.5), ROW)
    curve = times.host_memory(0)
    assert dict(zip(curve.times.tolist(), curve.total.tolist(), strict=True)) == {1.0: 3.0, 11.0: 0.0}  # 0B0 starts at 11
    assert (curve.peak, curve.peak_time) == (3.0, 1.0)
    assert timeline(Costs(), "0F0 0B0").host_memory(0).peak == 0.0


def test_a_backward_waits_for_its_reload() -> None:
    costs = Costs(host_bandwidth=0.25)
    times = timeline(costs, "0F0 0OFFLOAD0 0F1 0F2 0B1 0RELOAD0 0B0 0B2")
    assert times.makespan == 1 + 4 + 1 + 2 + 4 + 2 + 2  # both copies take 4; 0F1 runs beside the first, nothing beside the second


@pytest.mark.parametrize(("shared", "makespan"), [(1, 10.0), (2, 14.0), (4, 22.0)])
def test_ranks_that_share_a_link_wait_for_each_other(shared: int, makespan: float) -> None:
    """Four ranks with the same work and no messages between them: each moves one activation, and waits for it at once."""
    rows = [[f"{r}F0", f"{r}OFFLOAD0", f"{r}RELOAD0", f"{r}B0"] for r in range(4)]
    table = Schedule.from_actions(rows, Placement.linear(4), graph=_apart(4))
    costs = Costs(f=1.0, i=0.5, w=0.5, activation=4.0, host_bandwidth=1.0, host_link_shared=shared)
    for engine in ("plain", "compiled"):
        times = ps.simulate(table, costs, engine=engine)
        assert times.makespan == makespan  # the last of a link's ranks has left after `shared` copies of 4, and comes back at once


def _apart(stages: int) -> ps.StageGraph:
    return ps.StageGraph(stages, ())


def test_the_link_s_directions_do_not_wait_for_each_other() -> None:
    row = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0F3 0B0 0RELOAD1 0B1 0B2 0B3"
    boxes = copy_boxes(timeline(Costs(f=2.0, host_bandwidth=0.5), row))
    assert list(zip(boxes.start, boxes.end, strict=True)) == [(2.0, 4.0), (4.0, 6.0), (6.0, 8.0), (10.0, 12.0)]


def test_files_and_pictures(tmp_path: Path) -> None:
    program = ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8), offload=100)
    times = ps.simulate(program, Costs(host_bandwidth=0.5, host_link_shared=2))
    times.save(tmp_path / "t.json")
    again = Timeline.load(tmp_path / "t.json")
    assert again.makespan == times.makespan
    assert again.costs == times.costs
    times.save(tmp_path / "t.svg")
    svg = (tmp_path / "t.svg").read_text()
    assert "boxes-0-OFFLOAD" in svg
    assert "boxes-0-RELOAD" in svg
    assert "activations moved to host memory and back" in svg
    times.save(tmp_path / "t.trace.json")
    events = json.loads((tmp_path / "t.trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"copies to the host", "copies from the host"} <= names
    assert sum(event["ph"] == "X" and "OFFLOAD" in event["name"] for event in events) == len(
        [action for row in program for action in row if action.kind.name == "OFFLOAD"]
    )


def test_costs_of_the_link() -> None:
    costs = Costs(host_bandwidth=2.0, host_latency=1.0, host_link_shared=2)
    assert Costs.from_json(costs.to_json()) == costs
    assert costs.scaled(2.0) == Costs(f=2.0, i=2.0, w=2.0, host_bandwidth=1.0, host_latency=2.0, host_link_shared=2)
    for wrong in ({"host_bandwidth": 0}, {"host_link_shared": 0}, {"host_link_shared": 1.5}, {"host_latency": -1}):
        with pytest.raises(CostsError, match=next(iter(wrong))):
            Costs(**wrong)  # type: ignore[arg-type]
