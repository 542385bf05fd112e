"""A process that answers questions, and is ended when one takes too long."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from penstock.errors import BusyError, PenstockError, TooLongError, UsageError
from penstock.studio.limits import ANSWER_SECONDS

MOST_MEMORY = 16 << 30
"""Bytes of address space of the process: a question that needs more is refused instead of filling the machine."""


class Worker:
    """One process, started when first asked at the latest; questions wait for each other."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        self._lock = Lock()
        self._process: Any = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process, so that the first question need not wait for it."""
        with self._lock:
            self._running()

    def ask(self, name: str, body: Any) -> bytes:
        """The answer as JSON text; whatever is wrong with the question is raised as it was there."""
        if not self._lock.acquire(timeout=self.seconds):
            raise BusyError("the studio is at work on other requests: try again in a moment")
        try:
            return self._answer(name, body)
        finally:
            self._lock.release()

    def _answer(self, name: str, body: Any) -> bytes:
        connection = self._running()
        try:
            connection.send((name, body))
            answered = connection.poll(self.seconds)
            answer: Any = connection.recv() if answered else None
        except (EOFError, OSError):
            self._end()
            raise UsageError("this ended the process that worked on it, most likely for memory: ask for something smaller") from None
        if not answered:
            self._end()
            raise TooLongError(f"this took longer than {self.seconds:g} seconds and was ended: ask for something smaller")
        if isinstance(answer, PenstockError):
            raise answer
        found: bytes = answer
        return found

    def _running(self) -> Connection:
        if self._connection is None or not self._process.is_alive():
            self._end()
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=answer_all, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        return self._connection

    def close(self) -> None:
        """End the process, and whatever is being asked."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._connection.close()
        self._process = self._connection = None


def prepare() -> None:
    """What every process of the studio does first: leave Ctrl-C to the server, and take no more memory than it may."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
    with suppress(ValueError, OSError):  # a system that knows the limit and does not keep it
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def answer_all(connection: Connection) -> None:
    """Answer until nobody asks any more."""
    from penstock.studio.answers import ANSWERS

    prepare()
    while True:
        try:
            name, body = connection.recv()
        except EOFError:
            return
        connection.send(answer(ANSWERS[name], body))


def answer(how: Callable[[Any], Any], body: Any) -> bytes | PenstockError:
    """The answer as JSON text, or why there is none."""
    try:
        return json.dumps(how(body), allow_nan=False, separators=(",", ":")).encode()
    except PenstockError as error:
        return UsageError(str(error))
    except MemoryError:
        return UsageError("this needs more memory than the studio takes: ask for something smaller")
    except Exception as error:  # a schedule of another package, or values that nobody thought of: the studio goes on
        return UsageError(f"this cannot be worked out: {type(error).__name__}: {error}")
