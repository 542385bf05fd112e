"""A measured timeline compared with its prediction, in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.draw.summary import MOST_ROWS, describe_differences, write_sections
from penstock.ir.costs import Costs
from penstock.simulator.comparison.differences import Differences, differences


def laid(name: str, ranks: int, microbatches: int, one: Costs, other: Costs, **options: float) -> Differences:
    table = ps.schedule(name, ranks=ranks, microbatches=microbatches)
    return differences(ps.simulate(table, one), replace(ps.simulate(ps.lower(table), other), source="measured"), **options)


def said(found: Differences, **options: object) -> dict[str, list[str]]:
    """The lines under each title."""
    made: dict[str, list[str]] = {}
    title = ""
    for line in write_sections(list(describe_differences(found, **options))):  # type: ignore[arg-type]
        if line.startswith("  "):
            made[title].append(line.strip())
        elif line:
            made[title := line] = []
    return made


def test_a_slow_stage_is_named_first():
    found = laid("1f1b", 4, 8, Costs(latency=0.125), Costs(f=[1, 1, 1.5, 1], latency=0.125))
    text, allowed = said(found, unit="ms", title="mine"), f"{found.predicted.makespan / 100:.4g}"
    assert next(iter(text)) == "mine, in ms"
    assert text["where they part"][0] == "first at 2F0 on rank 2: it ends at 3.75 instead of 3.25,"
    assert text["where they part"][1] == f"0.5 too late; all before it are within {allowed} ms (1.0% of the predicted makespan)"
    assert text["where they part"][2] == "+0.5: 2F0 on rank 2 takes 1.5 instead of 1"
    (title,) = [title for title in text if title.startswith("what makes it")]
    assert text[title][1].startswith("stage 2 F ")
    assert len(text[title]) <= 3  # the header, the stage, and slack


def test_a_slow_link_is_named_first():
    usual = Costs(output=1, bandwidth=8.0)
    text = said(laid("gpipe", 3, 6, usual, replace(usual, output=(1.0, 9.0, 1.0))))
    assert "the message of 1F0 from rank 1 to 2 takes 1.125 instead of 0.125" in text["where they part"][2]
    (title,) = [title for title in text if title.startswith("what makes it")]
    assert {line.split("  ")[0] for line in text[title][1:]} <= {
        "activations from rank 1 to 2",
        "gradients from rank 2 to 1",
        "slack in the prediction",
    }


def test_table_rows_equal_the_figures():
    found = laid("zbv", 2, 4, Costs(latency=0.25), Costs(w=1.25, latency=0.5))
    text = said(found)
    assert [line.split() for line in text["what an action takes"][1:]] == [
        ["stage", str(stage), kind, "4", "1", "1.25" if kind == "W" else "1", "1.250" if kind == "W" else "1.000"]
        for stage in range(4)
        for kind in "FIW"
    ]
    assert all(line.split()[-3:] == ["0.25", "0.5", "2.000"] for line in text["what a message takes"][1:])
    busy = [(line.split()[2], line.split()[3]) for line in text["by rank"][1:]]
    assert busy == [(f"{both.predicted:g}", f"{both.measured:g}") for both in found.busy]
    causes = {line.split()[0]: float(line.split()[-1]) for line in text["idle time of all ranks"][1:]}
    assert causes == pytest.approx({cause: both.difference for cause, both in found.idle_by_cause.items()}, abs=1e-3)


def test_equal_timelines_are_reported_as_equal():
    table = ps.schedule("dualpipe-v", ranks=4, microbatches=12)
    text = said(differences(ps.simulate(table), replace(ps.simulate(ps.lower(table)), source="measured")))
    assert text["where they part"][0].startswith("nowhere: no action ends more than ")
    assert not any(title.startswith("what makes") for title in text)
    takes = text["what an action takes"]
    assert len(takes) == 1
    assert takes[0].endswith("are as predicted; penstock compare --json lists all")


def test_of_many_rows_only_those_that_differ_are_shown():
    rows = np.ones(16)
    rows[5] = 1.5
    text = said(laid("1f1b", 16, 20, Costs(), Costs(f=rows.tolist())))
    takes = text["what an action takes"]
    assert [line.split()[:3] for line in takes[1:-1]] == [["stage", "5", "F"]]
    assert takes[-1] == "the other 31 of 32 are as predicted; penstock compare --json lists all"
    chance = np.random.default_rng(1)
    text = said(laid("1f1b", 16, 20, Costs(), Costs(f=chance.uniform(1.1, 2, 16).tolist())))
    takes = text["what an action takes"]
    assert len(takes) == 1 + MOST_ROWS + 1
    assert takes[-1] == f"the other {32 - MOST_ROWS} of 32 differ less; penstock compare --json lists all"


def test_early_actions_units_and_order_are_reported():
    found = laid("gpipe", 3, 4, Costs(f=2), Costs(f=[1, 1, 1]))
    assert "too early" in said(found)["where they part"][1]
    assert any(title.startswith("what makes it 6 shorter") for title in said(found))
    text = said(laid("1f1b", 2, 4, Costs(f=100, i=100, w=100), Costs(), scale=1.0))["predicted and measured"]
    assert any("0.01 times as long as predicted: the units must differ" in line for line in text)
    tables = [ps.simulate(ps.schedule(name, ranks=2, microbatches=4)) for name in ("1f1b", "gpipe")]
    text = said(differences(*tables), words=("first", "second"))["first and second"]
    assert "the orders differ on rank 0: first 0B0, second 0F2" in text


def test_every_line_adds_up():
    """The delays sum to the difference, up to the digits shown."""
    chance = np.random.default_rng(5)
    f = chance.uniform(0.8, 1.4, (4, 8)).tolist()
    found = laid("1f1b", 4, 8, Costs(latency=0.1), Costs(f=f, latency=0.3))
    text = said(found)
    (title,) = [title for title in text if title.startswith("what makes it")]
    added = [float(line.split()[-2]) for line in text[title][1:]]
    assert sum(added) == pytest.approx(found.makespan.difference, abs=0.01 + 5e-4 * found.makespan.predicted)
