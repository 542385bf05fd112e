"""`penstock read`: traces of a profiler as one timeline."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from integrations.test_profiler_traces import simulated, write_traces


def test_traces_become_a_timeline_and_a_profile(run, tmp_path):
    wanted = simulated("1f1b")
    traces = write_traces(wanted, tmp_path)
    saved, profile = tmp_path / "measured.json", tmp_path / "stages.json"
    result = run("read", *traces, "-o", saved, "--profile", profile)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[:3] == ["traced: 3 ranks, 4 microbatches", "", f"makespan  {ps.Timeline.load(saved).units.time(wanted.makespan / 1e6)}"]
    assert ps.Timeline.load(saved).bubble == pytest.approx(wanted.bubble)
    assert len(ps.Profile.load(profile)) == 3
    data = json.loads(run("read", *traces, "--json").out)
    assert data["makespan"] == pytest.approx(wanted.makespan / 1e6)
    assert data["slow_rank"] is None


def test_files_that_are_not_there_are_refused(refused):
    assert "there is no file gone.json" in refused(2, "read", "gone.json")
