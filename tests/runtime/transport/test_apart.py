"""Virtual ranks that are not given the same: all of them know, and go on together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.runtime import launch
from runtime import apart

Run = Callable[[Callable[[], Any]], list[Any]]
REASONS = {"sizes": "tensors of different batch sizes", "target": "the loss function needs a target", "count": "0 microbatches"}


@pytest.fixture(params=[False, True], ids=["baton", "parallel"])
def run(request: pytest.FixtureRequest) -> Run:
    return lambda fn: launch(fn, apart.RANKS, parallel=request.param)


@pytest.mark.parametrize(("victim", "fault"), [(0, "sizes"), (1, "count"), (2, "target")])
def test_refused_batch(run: Run, victim: int, fault: str) -> None:
    check_refused(run(partial(apart.skipping, victim, fault)), victim, fault)


def check_refused(found: list[list[Any]], victim: int, fault: str) -> None:
    """The rank raises why, the others that it has, and every other batch has its own loss."""
    for rank, seen in enumerate(found):
        for k in (0, 3, 4):
            assert seen[k] == pytest.approx(apart.alone(k))
        for kind, text in seen[1:3]:
            assert kind == ("ScheduleError" if rank == victim else "PipelineError")
            assert REASONS[fault] in text
            assert rank == victim or text.startswith(f"rank {victim} refused its input to the step: ScheduleError: ")


def test_batches_of_other_sizes(run: Run) -> None:
    check_sizes(run(apart.other_sizes))


def check_sizes(found: list[list[Any]]) -> None:
    advice = "give all ranks the same batch, or none to those that need none"
    for first, second, third in found:
        text = f"rank 0 was given microbatches of 2 (2 times), but rank 2 was given microbatches of 1 (2 times): {advice}"
        assert second == ("PipelineError", text)
        assert third == first


def test_call_that_was_left_out(run: Run) -> None:
    for seen in run(apart.left_out):
        for _, text in seen:
            assert text.startswith("rank 0 is at batch ")


def test_record_on_only_one_rank(run: Run) -> None:
    for first, second in run(apart.recorded):
        assert first == ("PipelineError", "rank 0 does not record, but rank 1 records: set `record` to the same value on all ranks")
        assert second == pytest.approx(apart.alone(1))


def test_failed_step_restores_buffers(run: Run) -> None:
    assert run(apart.buffers) == [[True] * 3] * apart.RANKS


def test_exception_that_cannot_be_written(run: Run) -> None:
    said = "1F0 (stage 1, forward of microbatch 0) failed on rank 1: SilentError: its message cannot be read: str() raises RuntimeError"
    assert run(apart.silent) == [("PipelineError", said)] * apart.RANKS


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), None, "5", True])
def test_deadline_must_be_a_time(deadline: Any) -> None:
    with pytest.raises(ScheduleError, match="deadline must be a number of seconds above 0, got"):
        launch(partial(apart.made, deadline=deadline), apart.RANKS)
