"""The walk of a training step on processes, as `docs/architecture.md` describes it."""

from __future__ import annotations

import pytest

from docs.walks import check_step, trace_step
from penstock.runtime import launch


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_walk_of_a_step_on_processes(schedule: str) -> None:
    check_step(launch(trace_step, ranks=2, backend="gloo", args=(schedule,)), "gloo", schedule)
