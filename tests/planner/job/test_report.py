"""The words of a job's plan."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.planner.candidate import Verdict
from planner.job.small_jobs import small_job


@pytest.fixture(scope="module")
def plan():
    return ps.plan_job(small_job(memory=3.6e6), schedules=("1f1b", "zb-h1"))


def test_every_other_value_of_every_dimension_has_a_word(plan):
    alternatives = plan.search.alternatives
    for name in ("pipeline", "data", "tensor", "microbatch", "sharding", "vocabulary"):
        values = {getattr(trial.configuration, name) for trial in plan.trials} - {getattr(plan.configuration, name)}
        assert {other.value for other in alternatives if other.dimension == name} == values
    assert any(other.seconds is not None for other in alternatives)


def test_alternatives_are_never_faster_and_say_what_they_lack(plan):
    for other in plan.search.alternatives:
        same = [trial for trial in plan.trials if getattr(trial.configuration, other.dimension) == other.value]
        if other.seconds is not None:
            assert other.seconds == min(trial.seconds for trial in same) >= plan.seconds
            assert "slower" in other.words or "as fast" in other.words
        elif other.excess is not None:
            assert all(trial.verdict == Verdict.OVER for trial in same)
            assert "does not fit" in other.words
        else:
            assert other.bound >= plan.seconds
            assert "at least" in other.words


def test_a_dimension_that_does_not_fit_says_by_how_much():
    plan = ps.plan_job(small_job(memory=3.6e6), pipeline=1, tensor=1, schedules="1f1b")
    over = [other for other in plan.search.alternatives if other.excess is not None]
    assert over
    assert all(other.excess > 0 and "over at least" in other.words for other in over)


def test_the_report_has_degrees_memory_and_reasons(plan):
    text = plan.report()
    chosen = plan.configuration
    assert f"pipeline {chosen.pipeline} x data {chosen.data} x tensor {chosen.tensor} x context {chosen.context}" in text
    for words in ("step", "per GPU", "recompute", "sharding", "bound", "proof", "pipeline rank", "the best with another value"):
        assert words in text
    assert f"{len(plan.trials)} configurations" in text
    assert str(plan) == text
    assert repr(plan).startswith("<JobPlan pipeline")
