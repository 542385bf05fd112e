"""Published runs against the job planner (`benchmarks/published_runs.py`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import penstock as ps

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("published_runs", ROOT / "benchmarks" / "published_runs.py")
published_runs = importlib.util.module_from_spec(_SPEC)
sys.modules["published_runs"] = published_runs  # its dataclasses look their module up
_SPEC.loader.exec_module(published_runs)

RUNS, list_stages = published_runs.RUNS, published_runs.list_stages
EXPLAINED = published_runs.EXPLAINED
NAMES = [run.name for run in RUNS]
PAGE = ROOT / "docs" / "job-planning.md"


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_predictions_are_within_a_tenth_of_what_was_published(run):
    difference = abs(run.predict().seconds / run.measured - 1)
    assert difference <= EXPLAINED.get(run.name, 0.10)
    assert run.name not in EXPLAINED or difference > 0.10


def test_stages_of_the_zero_bubble_paper_are_within_a_tenth():
    rows = list(list_stages())
    assert len(rows) == 6
    assert all(abs(row.difference) <= 0.10 for row in rows)


def test_the_share_of_an_a100_is_that_of_its_row():
    row = next(row for row in list_stages() if published_runs.A100_FIT.startswith(f"zero-bubble, {row.model}, {row.microbatches}"))
    assert row.predicted["w"] == pytest.approx(row.measured["w"], rel=0.005)


def test_the_share_of_an_h100_is_that_of_its_row():
    run = next(run for run in RUNS if run.name == published_runs.H100_FIT)
    assert run.predict().seconds == pytest.approx(run.measured, rel=0.005)


def test_the_page_has_the_figures_of_the_benchmark():
    page = PAGE.read_text(encoding="utf-8")
    for line in (*published_runs.list_stage_rows(), *published_runs.list_run_rows()):
        assert line in page


WANTED = {"GPT 22B, selective recompute": {}, "GPT 175B, selective recompute": {"tensor": (4, 8), "microbatch": 1}}
"""Runs that are planned here: one among all configurations, one among those that are like its best."""


@pytest.mark.parametrize("name", WANTED)
def test_the_choice_is_that_of_the_page_and_not_slower_than_the_published_configuration(name):
    run = RUNS[NAMES.index(name)]
    published, choice = run.predict_within_limit(), ps.plan_job(run.job, **WANTED[name])
    assert choice.seconds <= published.seconds
    (row,) = [line for line in _choices() if line.startswith(f"| {name} |")]
    assert f"| {choice.seconds:.2f} s | {published.seconds / choice.seconds:.2f}x |" in row
    degrees = (choice.configuration.pipeline, choice.configuration.data, choice.configuration.tensor, choice.configuration.context)
    assert f"| {' x '.join(map(str, degrees))}, microbatches of {choice.configuration.microbatch}, " in row


def test_the_page_has_a_choice_for_every_job_and_none_is_slower():
    rows = _choices()
    assert len(rows) == len({str(run.job) for run in RUNS})
    assert all(float(row.split("|")[-2].strip().rstrip("x")) >= 1.0 for row in rows)


def _choices() -> list[str]:
    table = PAGE.read_text(encoding="utf-8").partition("| planner's choice |")[2]
    return [line for line in table.splitlines() if line.startswith(("| GPT", "| Llama"))]
