"""Timelines as files: what is saved is what is loaded, and what is no timeline is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import penstock as ps
from penstock.errors import FileFormatError
from penstock.ir.costs import Costs
from penstock.ir.table import Table
from penstock.simulator.timeline import Timeline
from penstock.simulator.timeline_json import decode
from penstock.text.units import Units
from simulator.draws import timed
from simulator.event_loops.test_engines import same
from simulator.runs import run

Data = dict[str, Any]


def whole(timeline: Timeline) -> Data:
    """The timeline after the way through text."""
    data: Data = json.loads(json.dumps(timeline.to_json()))
    return data


@given(timed())
def test_what_is_written_is_read_back(case: tuple[Table, Costs]) -> None:
    timeline = run(case)
    read = decode(whole(timeline))
    same(timeline, read)
    assert read.table == timeline.table
    assert read.costs == timeline.costs
    assert read.source == "simulated"
    for figure in ("makespan", "bubble", "span_bubble", "peak_memory", "idle_by_cause", "critical_path"):
        assert getattr(read, figure) == getattr(timeline, figure)
    same(ps.retime(read, timeline.costs), timeline)


def test_files(tmp_path: Path) -> None:
    program = ps.lower(ps.schedule("dualpipe", ranks=4, microbatches=8), fsdp=True)
    timeline = ps.simulate(program, Costs(f=0.1, latency=1 / 3, unshard=0.7, contention="rank", output=1, bandwidth=3))
    path = tmp_path / "timeline.json"
    timeline.save(path)
    read = Timeline.load(path)
    same(timeline, read)
    assert (read.table.name, read.makespan) == ("dualpipe", timeline.makespan)
    assert repr(read) == repr(timeline)
    data = json.loads(path.read_text())
    assert (data["type"], data["makespan"], data["bubble"]) == ("timeline", timeline.makespan, timeline.bubble)


def test_units_are_kept_and_printed(tmp_path: Path) -> None:
    plain = ps.simulate(ps.schedule("1f1b", ranks=2, microbatches=2), Costs(f=0.001, i=0.001, w=0.001, activation=2**20))
    timeline = plain.in_units(Units("s", in_bytes=True))
    timeline.save(tmp_path / "timeline.json")
    read = Timeline.load(tmp_path / "timeline.json")
    assert read.units == Units("s", in_bytes=True)
    assert repr(read) == "<Timeline '1f1b', simulated, 2 ranks, makespan 9 ms, bubble 33.33%, peak memory 2MiB>"
    assert repr(plain) == "<Timeline '1f1b', simulated, 2 ranks, makespan 0.009, bubble 33.33%>"
    assert (read.scaled(1e3).units.time_unit, read.scaled(0.3).units.time_unit) == ("ms", "")
    data = {name: value for name, value in timeline.to_json().items() if name != "units"}
    assert decode(data).units == Units()
    assert decode({**data, "source": "measured"}).units == Units("s")  # as measured timelines were before they said so


def put(name: str, value: Any) -> Callable[[Data], Any]:
    return lambda data: {**data, name: value}


WRONG: dict[str, tuple[Callable[[Data], Any], str]] = {
    "no object": (lambda data: [data], "not a Penstock timeline"),
    "a schedule": (lambda data: data["table"], "not a Penstock timeline"),
    "another format": (put("format", "other"), "not a Penstock timeline"),
    "a later version": (put("version", 99), "version 99"),
    "no table": (lambda data: {k: v for k, v in data.items() if k != "table"}, "'table' is missing"),
    "no times": (lambda data: {k: v for k, v in data.items() if k != "arrive"}, "'arrive' is missing"),
    "no costs": (lambda data: {k: v for k, v in data.items() if k != "costs"}, "'costs' is missing"),
    "no held_by": (lambda data: {k: v for k, v in data.items() if k != "held_by"}, "'held_by' is missing"),
    "a time short": (lambda data: {**data, "start": data["start"][1:]}, "start has 7 times, but there are 8"),
    "a time more": (lambda data: {**data, "depart": [*data["depart"], 1.0]}, "depart has 5 times, but there are 4"),
    "a number for times": (put("end", 3.0), "end"),
    "null for times": (put("end", None), "end"),
    "text for times": (put("end", "soon"), "end"),
    "text among times": (lambda data: {**data, "end": ["soon", *data["end"][1:]]}, "end"),
    "null among times": (lambda data: {**data, "end": [None, *data["end"][1:]]}, "end"),
    "a list among times": (lambda data: {**data, "end": [[1.0], *data["end"][1:]]}, "end"),
    "no finite time": (lambda data: {**data, "end": [float("nan"), *data["end"][1:]]}, "end"),
    "a time beyond all floats": (lambda data: {**data, "end": [10**400, *data["end"][1:]]}, "end"),
    "an end before its start": (lambda data: {**data, "end": [-5.0, *data["end"][1:]]}, "end"),
    "text for held_by": (put("held_by", "x"), "held_by"),
    "a number too large": (put("held_by", [2**40]), "held_by"),
    "a message that is none": (put("held_by", [7, -1, -1, -1]), "held_by"),
    "too few held_by": (put("held_by", [-1]), "held_by"),
    "text for units": (put("units", "s"), "'units' must be an object"),
    "a number for a unit": (put("units", {"time": 1, "bytes": True}), "'units': 'time' must be text"),
    "a number for source": (put("source", 5), "source"),
    "a cost that is none": (put("costs", {"latencey": 1}), "latency"),
    "a cost below zero": (put("costs", {"latency": -1}), "latency"),
    "costs that do not fit": (put("costs", {"f": [1, 2, 3]}), "f has 3 values for 2 stages"),
    "a broken table": (lambda data: {**data, "table": {**data["table"], "rows": [["0F0x"]]}}, "0F0x"),
    "text for the table": (put("table", "1f1b"), "'table' must be an object, got text"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_timeline_is_refused_with_the_file(what: str, tmp_path: Path) -> None:
    change, said = WRONG[what]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(change(whole(ps.simulate(ps.schedule("1f1b", ranks=2, microbatches=2))))))
    with pytest.raises(FileFormatError) as caught:
        Timeline.load(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": "penstock"', b"[" * 100_000])
def test_what_is_no_json_is_refused_with_the_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"broken\.json: not a JSON file"):
        Timeline.load(path)
