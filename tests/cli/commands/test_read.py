"""`penstock read`: traces of a profiler as one timeline."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from integrations.test_profiler_traces import simulated, slow_on, write_traces


def test_traces_become_a_timeline_and_a_profile(run, tmp_path):
    wanted = simulated("1f1b")
    traces = write_traces(wanted, tmp_path)
    saved, profile = tmp_path / "measured.json", tmp_path / "stages.json"
    result = run("read", *traces, "-o", saved, "--profile", profile)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[:3] == ["traced: 3 ranks, 4 microbatches", "", f"makespan  {ps.Timeline.load(saved).units.time(wanted.makespan / 1e6)}"]
    assert ps.Timeline.load(saved).bubble == pytest.approx(wanted.bubble)
    assert lines[-1].startswith("no rank is slow")
    assert len(ps.Profile.load(profile)) == 3
    plan = tmp_path / "plan.json"
    assert run("plan", "--profile", profile, "-p", 3, "-m", 4, "--schedules", "1f1b", "--seconds", 0, "-o", plan).code == 0
    assert ps.Plan.load(plan).predicted.makespan == pytest.approx(wanted.makespan / 1e6)
    data = json.loads(run("read", *traces, "--json").out)
    assert data["makespan"] == pytest.approx(wanted.makespan / 1e6)
    assert (data["slow_rank"], data["busiest_rank"], data["processes"]) == (None, None, [0, 1, 2])


def test_a_slow_rank_and_a_busy_one_are_told_apart(run, tmp_path):
    assert run("read", *write_traces(slow_on(1), tmp_path)).out.splitlines()[-1].startswith("rank 1 is slow: it takes 1.50 times")
    traces = write_traces(slow_on(2), tmp_path, head="aten::cross_entropy_loss", processes=(0, 2, 4))
    lines = run("read", *traces).out.splitlines()
    assert lines[1] == "ranks 0 to 2 of the pipeline are the processes 0, 2, 4"
    assert lines[-1].startswith("rank 2 is the busiest: it computes for 1.50 times")


def test_files_that_are_not_there_are_refused(refused):
    assert "there is no file gone.json" in refused(2, "read", "gone.json")
