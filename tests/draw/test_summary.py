"""The figures of a timeline, as data and as text."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from draw.samples import SAMPLES
from penstock.draw.summary import find_fullest_rank, list_summary_rows, memory_unit, shape_of, summarize, title_of
from penstock.text.units import Units


@pytest.mark.parametrize("name", SAMPLES)
def test_data_is_plain_and_equals_the_timeline_s(name):
    timeline = SAMPLES[name]
    said = summarize(timeline)
    assert json.loads(json.dumps(said)) == said
    for key in ("makespan", "bubble", "span_bubble", "peak_memory", "idle_by_cause"):
        assert said[key] == getattr(timeline, key)
    assert said["peak"] == max(timeline.peak_memory) == timeline.peak_memory[find_fullest_rank(timeline)]
    assert sum(said["idle_by_cause"].values()) == pytest.approx(timeline.bubble * timeline.ranks * timeline.makespan)


def test_text_equals_values_computed_by_hand():
    """1f1b with 4 ranks and 8 microbatches takes (8 + 3) x (1 + 2), of which 3 x 3 are idle on each rank."""
    rows = dict(list_summary_rows(SAMPLES["1f1b"], "ms"))
    assert rows["makespan"] == "33 ms"
    assert rows["bubble"].startswith("27.3%")
    assert rows["peak memory"] == "4 activations on rank 0, least 1"
    assert rows["messages"] == str(2 * 3 * 8)
    assert rows["idle"] == "36 ms"


def test_titles():
    assert title_of(SAMPLES["zbv"]) == "zbv"
    assert shape_of(SAMPLES["zbv"]) == ["4 ranks", "2 chunks per rank", "12 microbatches"]
    assert shape_of(SAMPLES["one rank"]) == ["1 rank", "3 microbatches"]


def test_no_idle_time_does_not_divide_by_zero():
    assert dict(list_summary_rows(SAMPLES["no time"]))["idle"] == "0"


@pytest.mark.parametrize(
    ("name", "costs", "unit"),
    [
        ("1f1b", ps.Costs(), "activations"),
        ("zbv", ps.Costs(), "activations of a stage"),
        ("zbv", ps.Costs(activation=0.5, weight_stash=0.25), "activations"),
        ("zbv", ps.Costs(activation=3.0), "in units of the costs"),
    ],
)
def test_memory_has_a_unit(name, costs, unit):
    timeline = ps.simulate(ps.schedule(name, 4, 8), costs)
    assert memory_unit(timeline) == unit
    assert memory_unit(timeline.in_units(Units("s", in_bytes=True))) == ""
