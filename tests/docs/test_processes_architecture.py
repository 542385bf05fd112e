"""The walk of a training step on processes, as `docs/architecture.md` describes it."""

from __future__ import annotations

import pytest

from docs.walks import check_step, trace_step
from penstock.runtime import launch

SCHEDULES = ("1f1b", "zbv")


def trace_steps() -> list[list[str]]:
    """The files that this rank visits under each of the schedules."""
    return [trace_step(schedule) for schedule in SCHEDULES]


@pytest.mark.slow
def test_walk_of_a_step_on_processes() -> None:
    visits = launch(trace_steps, ranks=2, backend="gloo")
    for schedule, of_ranks in zip(SCHEDULES, zip(*visits, strict=True), strict=True):
        check_step([*of_ranks], "gloo", schedule)
