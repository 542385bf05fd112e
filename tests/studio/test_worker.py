"""The process that answers: what it does with trouble."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from penstock.errors import BusyError, TooLongError, UsageError
from penstock.studio.worker import Worker, answer

VIEW = {"schedule": "1f1b", "ranks": 2, "microbatches": 2}


class Ending:
    """Ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (1,)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(seconds=300.0)
    yield made
    made.close()


def test_what_takes_too_long_is_ended_and_the_next_question_answered(worker: Worker):
    worker.seconds = 0.0  # less than a process takes to start
    with pytest.raises(TooLongError, match="took longer than 0 seconds"):
        worker.ask("view", VIEW)
    worker.seconds = 300.0
    assert json.loads(worker.ask("view", VIEW))["ranks"] == 2


def test_a_process_that_dies_is_replaced(worker: Worker):
    worker.ask("view", VIEW)
    worker._process.kill()
    worker._process.join()
    assert json.loads(worker.ask("view", VIEW))["ranks"] == 2


def test_a_process_that_dies_at_work_is_an_error_of_the_request(worker: Worker):
    worker.ask("view", VIEW)
    with pytest.raises(UsageError, match="ended the process that worked on it"):
        worker.ask("view", Ending())
    assert json.loads(worker.ask("view", VIEW))["ranks"] == 2


def test_who_waits_too_long_for_others_is_told(worker: Worker):
    worker.seconds = 0.01
    with worker._lock, pytest.raises(BusyError, match="try again"):
        worker.ask("view", VIEW)


def test_errors_come_back_as_messages(worker: Worker):
    with pytest.raises(UsageError, match="did you mean '1f1b'"):
        worker.ask("view", {**VIEW, "schedule": "1f1"})


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "needs more memory"), (ZeroDivisionError("by 0"), "ZeroDivisionError: by 0")])
def test_whatever_goes_wrong_is_a_message(error, said):
    def broken(body: object) -> object:
        raise error

    found = answer(broken, VIEW)
    assert type(found) is UsageError
    assert said in str(found)
