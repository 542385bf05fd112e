"""A plan in words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import penstock as ps
from penstock.text.table import format_table
from penstock.text.units import Units

LAYER = ps.Layer(f=0.01, i=0.01, w=0.01, activation="100MiB", output="1MiB", parameters="200MiB", gradients="200MiB", optimizer="1GiB")
MODEL = ps.Profile([replace(LAYER, name=f"block {place}") for place in range(8)], input=1024, time_unit="s", size_unit="B")


@pytest.fixture(scope="module")
def plan() -> ps.Plan:
    return ps.plan(MODEL, ranks=4, microbatches=8, memory_limit="3.5GiB", seconds=0)


def test_the_report_shows_the_figures_of_the_plan(plan):
    said = str(plan)
    assert said.startswith(f"plan: {plan.name} on 4 ranks")
    assert f"{plan.objective * 1000:.5g} ms" in said or f"{plan.objective:.5g} s" in said
    assert f"bubble {plan.predicted.bubble:.1%}" in said
    assert f"by {plan.bound_name}: at most {plan.gap:.2%} to gain with this placement and partition" in said
    assert f"{8 / plan.objective:.4g} samples per second" in said


def numbers_of(text: str) -> list[int]:
    """The numbers that a cell such as `0..3,3..0,7` stands for."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        low, high = int(first), int(last or first)
        found += range(low, high + 1) if high >= low else range(low, high - 1, -1)
    return found


def stage_rows(plan: ps.Plan) -> list[tuple[list[int], list[int], int, int]]:
    """Stages, ranks, the first layer and the layers of each stage, by row."""
    pattern = r"^ +([\d.,]+) +([\d.,]+) +block (\d+)(?: \.\. block \d+ \((\d+)(?: each)?\))?"
    rows = re.findall(pattern, str(plan), flags=re.MULTILINE)
    return [(numbers_of(stages), numbers_of(ranks), int(first), int(count or 1)) for stages, ranks, first, count in rows]


def test_each_layer_is_in_the_table_of_stages(plan):
    rows = stage_rows(plan)
    assert [stage for stages, *_ in rows for stage in stages] == list(range(plan.placement.stages))
    assert [rank for _, ranks, *_ in rows for rank in ranks] == list(plan.placement.copies[0])
    assert [count for stages, _, _, count in rows for _ in stages] == list(plan.partition)


def test_equal_stages_share_a_line():
    """Sixty-four ranks of which the first is another: two lines."""
    odd = replace(MODEL.layers[0], f=0.005)
    model = replace(MODEL, layers=[odd, *(replace(LAYER, name=f"block {place}") for place in range(1, 64))])
    plan = ps.plan(model, ranks=64, microbatches=2, schedules="gpipe", seconds=0)
    rows = stage_rows(plan)
    assert [(stages, ranks) for stages, ranks, *_ in rows] == [([0], [0]), (list(range(1, 64)), list(range(1, 64)))]
    assert len(str(plan).splitlines()) < 30  # as ranks that hold the same share one too


def test_the_memory_of_each_rank_is_shown_against_its_limit(plan):
    units = Units(in_bytes=True)
    lines = [line.split() for line in str(plan).splitlines() if re.match(r" +[\d.,]+ +[\d.]+[KMG]iB", line) and "3.5GiB" in line]
    by_rank = {rank: cells for cells in lines for rank in numbers_of(cells[0])}
    assert sorted(by_rank) == [0, 1, 2, 3]
    for rank, peak in enumerate(plan.predicted.peak_memory):
        assert units.size(peak) in by_rank[rank]
        assert f"{peak / (3.5 * 2**30):.0%}" in by_rank[rank]


def test_every_candidate_is_listed_with_its_verdict(plan):
    said = str(plan)
    for each in plan.alternatives:
        assert each.name in said
    assert "left out: inference: it has no backward" in said
    assert re.search(r"would hold [\d.]+[KMG]iB more than its limit", said)


def test_recomputed_stages_are_listed():
    model = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=8, output=1)] * 4, input=1)
    plan = ps.plan(model, ranks=4, microbatches=8, memory_limit=[20, 40, 40, 40], schedules="1f1b", recompute=True, seconds=0)
    assert "recompute    stage 0\n" in str(plan)
    assert re.search(r"rank +reserve +microbatches", str(plan))  # no parameters, so no columns for them


def test_a_plan_without_a_limit_has_the_same_report():
    plan = ps.plan(MODEL, ranks=2, microbatches=3, barrier=False, seconds=0, jitter=0.1)
    assert "longest span" in str(plan)
    assert "varies by 10%" in str(plan)
    assert " none" in str(plan)


@pytest.mark.parametrize(
    ("value", "said"), [(1.5, "1.5 s"), (0.0123456, "12.346 ms"), (2e-6, "2 us"), (3e-9, "3 ns"), (0.0, "0 ns"), (1e-12, "0.001 ns")]
)
def test_times(value, said):
    assert Units("s").time(value) == said
    assert Units("ms").time(value * 1000) == said
    assert Units().time(12.0) == "12"
    assert Units("steps").time(12.0) == "12 steps"


@pytest.mark.parametrize(
    ("value", "said", "up"), [(0, "0B", "0B"), (1023, "1023B", "1023B"), (1536, "1.5KiB", "1.5KiB"), (10241, "10KiB", "10.01KiB")]
)
def test_sizes(value, said, up):
    assert Units(in_bytes=True).size(value) == said
    assert Units(in_bytes=True).size(value, up=True) == up
    assert Units().size(12345.6, up=True) == "1.235e+04"


def test_tables():
    assert list(format_table([("a", "bb"), ("ccc", "d")], left=(0,), indent="  ")) == ["  a    bb", "  ccc   d"]


# The choice explains itself -------------------------------------------------------------------------------------------


def test_runners_up_have_time_p95_memory_placement_and_a_trade_off(plan):
    chosen = plan.alternatives[plan.chosen]
    assert plan.runners_up
    assert chosen not in plan.runners_up
    assert len({other.shape for other in plan.runners_up}) == len(plan.runners_up)
    for other in (chosen, *plan.runners_up):
        cells = [other.name, other.placement, plan.units.time(other.objective), plan.units.time(other.p95), plan.units.size(other.peak)]
        assert any(all(cell in line for cell in cells) for line in str(plan).splitlines()), cells
    for other in plan.runners_up:
        assert other.compare(chosen) in str(plan)
    listed = plan.to_json()["runners_up"]
    assert [(entry["name"], entry["p95"], entry["peak"]) for entry in listed] == [(o.name, o.p95, o.peak) for o in plan.runners_up]
    assert [entry["compared"] for entry in listed] == [other.compare(chosen) for other in plan.runners_up]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": 101.4, "peak": 5.8}, "1.4% slower, 42% less memory"),
        ({"objective": 99.66, "peak": 12.0}, "0.34% faster, 20% more memory"),
        ({}, "as fast, the same memory"),
        ({"p95": 120.0}, "as fast, 9.1% higher p95, the same memory"),
    ],
)
def test_the_trade_off_in_words(plan, changes, words):
    this = replace(plan.alternatives[plan.chosen], objective=100.0, peak=10.0, p95=110.0 if "p95" in changes else None)
    assert replace(this, **changes).compare(this) == words


def test_the_tally_counts_each_candidate_once(plan):
    tried = plan.candidates
    total, *parts = map(int, re.findall(r"\d+", plan.tally))
    assert total == sum(parts) == len(tried)
    assert f"{sum(candidate.fits for candidate in tried)} fit;" in plan.tally
    assert plan.tally in str(plan)
    assert plan.to_json()["tally"] == plan.tally


def test_the_repr_has_units(plan):
    assert plan.units.time(plan.objective) in repr(plan)
    assert plan.units.size(max(plan.predicted.peak_memory)) in repr(plan)


def test_a_searched_order_that_is_a_named_schedule_is_listed_once():
    layers = [ps.Layer(f=1.0, i=1.4, w=0.6, activation=1.0, weight_stash=0.5, parameters=0.25)] * 8
    plan = ps.plan(ps.Profile(layers=layers, latency=0.05), ranks=2, microbatches=4, memory_limit=9.0, rounds=30)
    copies = [other for other in plan.alternatives if other.placement and other not in plan.candidates]
    assert copies
    assert all(copy.name == "searched" for copy in copies)
    for copy in copies:
        assert any((copy.placement, copy.chunks) == (other.placement, other.chunks) for other in plan.candidates)
    rows = re.findall(r"^  (?:->|  )  (\S+) +(?:linear|looped|v|wave)[ ,].*$", str(plan).partition("that fit\n")[2], re.MULTILINE)
    assert len(rows) == min(12, sum(other.fits for other in plan.candidates))
    figures = [line.split() for line in str(plan).splitlines() if line.lstrip("-> ").startswith("searched ")]
    assert len(figures) == len({tuple(cells) for cells in figures})
