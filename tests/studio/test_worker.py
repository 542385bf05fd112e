"""The worker process, and how it handles trouble."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest

from penstock.errors import BusyError, TooLongError, UsageError
from penstock.studio.worker import Question, Worker, answer

LONG = 300.0
VIEW = {"schedule": "1f1b", "ranks": 2, "microbatches": 2}


class Ending:
    """Ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (1,)


class Endless:
    """Keeps the process that reads it busy for longer than any test."""

    def __reduce__(self):
        return sleep, (1000.0,)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(seconds=300.0)
    yield made
    made.close()


def test_a_slow_question_is_ended_and_the_next_one_answered(worker: Worker):
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


def test_a_process_that_dies_while_working_fails_the_request(worker: Worker):
    worker.ask("view", VIEW)
    with pytest.raises(UsageError, match="the process that worked on this has ended"):
        worker.ask("view", Ending())
    assert json.loads(worker.ask("view", VIEW))["ranks"] == 2


def test_a_question_that_waits_too_long_is_refused(worker: Worker):
    worker.seconds = 0.01
    with worker._turn_of(Question("other"), None), pytest.raises(BusyError, match="try again"):
        worker.ask("view", VIEW)


def test_an_abandoned_question_is_not_started(worker: Worker):
    question = Question("view", Endless())
    with ThreadPoolExecutor() as pool:
        with worker._turn_of(Question("other"), None):
            waiting = pool.submit(worker.answer, question)
            worker.leave(question)
            with pytest.raises(BusyError, match="the client of this question has gone"):
                waiting.result(LONG)
        assert worker._process is None


def test_abandoned_work_is_ended_and_the_next_question_answered(worker: Worker):
    worker.ask("view", VIEW)
    question, first = Question("view", Endless()), worker._process.pid
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(worker.answer, question)
        with worker._turn:
            assert worker._turn.wait_for(lambda: worker._current is question, LONG)
        worker.drop(question)
        with pytest.raises(BusyError, match="the client of this question has gone"):
            waiting.result(LONG)
    assert json.loads(worker.ask("view", VIEW))["ranks"] == 2
    assert worker._process.pid != first


def test_dropping_a_question_ends_no_other(worker: Worker):
    worker.ask("view", VIEW)
    before = worker._process.pid
    worker.drop(Question("view", VIEW))
    assert json.loads(worker.ask("view", VIEW))["ranks"] == 2
    assert worker._process.pid == before


def test_errors_are_returned_as_messages(worker: Worker):
    with pytest.raises(UsageError, match="did you mean '1f1b'"):
        worker.ask("view", {**VIEW, "schedule": "1f1"})


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "needs more memory"), (ZeroDivisionError("by 0"), "ZeroDivisionError: by 0")])
def test_unexpected_errors_are_returned_as_messages(error, said):
    def broken(body: object) -> object:
        raise error

    found = answer(broken, VIEW)
    assert type(found) is UsageError
    assert said in str(found)
