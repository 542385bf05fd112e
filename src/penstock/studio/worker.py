"""A process that answers questions, and is killed when one takes too long."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Condition
from typing import Any

from penstock.errors import BusyError, PenstockError, TooLongError, UsageError
from penstock.studio.limits import ANSWER_SECONDS

MOST_MEMORY = 16 << 30
"""Bytes of address space of the process: a question that needs more is refused."""


@dataclass(eq=False)
class Question:
    """A question; `left` means that the client has gone, `dropped` that it was ended for that reason."""

    name: str
    body: Any = None
    left: bool = False
    dropped: bool = False


class Worker:
    """One process, started by the first question at the latest; questions are answered one after the other."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        self._turn = Condition()
        self._current: Question | None = None
        self._process: Any = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process now, so that the first question does not wait for it."""
        with self._turn_of(Question("start"), self.seconds):
            self._ensure_running()

    def ask(self, name: str, body: Any) -> bytes:
        """Get the answer as JSON text; an error in the process is raised here."""
        return self.answer(Question(name, body))

    def answer(self, question: Question) -> bytes:
        """Like `ask`, for a question that may be left."""
        with self._turn_of(question, self.seconds):
            data = self._answer(question)
        self._check_left(question)
        return data

    def leave(self, question: Question) -> None:
        """Note that the client has gone: a question that has not begun is dropped."""
        with self._turn:
            question.left = True
            self._turn.notify_all()

    def drop(self, question: Question) -> None:
        """End the work on this question, and on no other."""
        self.leave(question)
        with self._turn:
            if self._current is question:
                question.dropped = True
                self._kill()

    @contextmanager
    def _turn_of(self, question: Question, seconds: float | None) -> Iterator[None]:
        with self._turn:
            self._turn.wait_for(lambda: self._current is None or question.left, seconds)
            self._check_left(question)
            if self._current is not None:
                raise BusyError("the studio is busy with other requests: try again in a moment")
            self._current = question
            self._turn.notify_all()
        try:
            yield
        finally:
            if question.dropped:
                self._end()  # it may have been killed, but still be alive
            with self._turn:
                self._current = None
                self._turn.notify_all()

    def _check_left(self, question: Question) -> None:
        if question.left:
            raise BusyError("the client of this question has gone")

    def _answer(self, question: Question) -> bytes:
        connection = self._ensure_running()
        self._check_left(question)
        try:
            connection.send((question.name, question.body))
            answered = connection.poll(self.seconds)
            answer: Any = connection.recv() if answered else None
        except (EOFError, OSError):
            self._end()
            self._check_left(question)
            raise UsageError("the process that worked on this has ended, probably out of memory: ask for something smaller") from None
        if not answered:
            self._end()
            raise TooLongError(f"this took longer than {self.seconds:g} seconds and was ended: ask for something smaller")
        if isinstance(answer, PenstockError):
            raise answer
        data: bytes = answer
        return data

    def _ensure_running(self) -> Connection:
        if self._connection is None or not self._process.is_alive():
            self._end()
            context = multiprocessing.get_context("spawn")
            connection, far_end = context.Pipe()
            process = context.Process(target=answer_all, args=(far_end,), daemon=True)
            process.start()
            far_end.close()
            with self._turn:
                self._connection, self._process = connection, process
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        """End the process and the current question."""
        with self._turn:
            self._kill()
        with self._turn_of(Question("close"), None):
            self._end()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _end(self) -> None:
        with self._turn:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None and connection is not None:
            process.kill()
            process.join()
            process.close()
            connection.close()


def prepare() -> None:
    """Prepare a process of the studio: leave Ctrl-C to the server, and limit its memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource
    except ImportError:  # this system has no such limits
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
    with suppress(ValueError, OSError):  # the system has this limit, but does not support setting it
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def answer_all(connection: Connection) -> None:
    """Answer questions until the other end is closed."""
    from penstock.studio.handlers import HANDLERS

    prepare()
    while True:
        try:
            name, body = connection.recv()
        except EOFError:
            return
        connection.send(answer(HANDLERS[name], body))


def answer(handle: Callable[[Any], Any], body: Any) -> bytes | PenstockError:
    """Answer a question with JSON text, or with the error."""
    try:
        return json.dumps(handle(body), allow_nan=False, separators=(",", ":")).encode()
    except PenstockError as error:
        return UsageError(str(error))
    except MemoryError:
        return UsageError("this needs more memory than the studio may use: ask for something smaller")
    except Exception as error:  # a schedule of another package, or unforeseen values: the studio goes on
        return UsageError(f"this cannot be computed: {type(error).__name__}: {error}")
