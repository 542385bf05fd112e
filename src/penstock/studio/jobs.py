"""Plans that are being made: one at a time, each in a process of its own that can be ended."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any

from penstock.errors import BusyError, UnknownNameError
from penstock.studio.job_process import run

GRACE = 120.0
"""Seconds that a plan may take beyond those it was given to search: the named schedules are timed before."""


@dataclass(frozen=True)
class Event:
    name: str
    data: dict[str, Any]


@dataclass
class Job:
    """One plan: everything that was told of it so far."""

    key: str
    process: Any
    connection: Connection
    deadline: float
    events: list[Event] = field(default_factory=list)
    candidates: list[bytes | None] = field(default_factory=list)
    plan: bytes | None = None
    ended: bool = False
    followers: int = 0
    changed: Condition = field(default_factory=Condition)

    def after(self, place: int, seconds: float) -> tuple[list[Event], bool]:
        """The events from this place on, waiting for one at most so long; and whether no more will come."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or len(self.events) > place, seconds)
            return self.events[place:], self.ended

    def listen(self) -> None:
        """Take what the process tells, until it ends or its time is over."""
        try:
            while not self.ended:
                if not self.connection.poll(max(self.deadline - monotonic(), 0.0)):
                    self.end(
                        Event("failed", {"error": "the plan took longer than it may and was ended: ask for less, or give it more time"})
                    )
                else:
                    self._take(*self.connection.recv())
        except (EOFError, OSError):
            self.end(Event("failed", {"error": "the process of the plan ended early, most likely for memory: ask for something smaller"}))
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _take(self, name: str, data: dict[str, Any], payload: bytes | None) -> None:
        if name in ("done", "failed"):
            self.plan = payload
            self.end(Event(name, data))
            return
        with self.changed:
            if name == "candidate":
                self.candidates.append(payload)
            if not self.ended:
                self.events.append(Event(name, data))
            self.changed.notify_all()

    def cancel(self) -> bool:
        """End it; what was found stays. False where it had ended before."""
        with self.changed:
            best = [each.data for each in self.events if each.name == "candidate" and each.data["fits"]]
        index = min(best, key=lambda each: each["makespan"])["index"] if best else None
        return self.end(Event("done", {"best": index, "cancelled": True}))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While a page follows it. With the last one it ends, for only they know its key, and there is one plan at a time."""
        self.followers += 1
        try:
            yield
        finally:
            self.followers -= 1
            if not self.followers:
                self.cancel()

    def end(self, event: Event) -> bool:
        """Tell the last event, once; the process is of no use any more."""
        with self.changed:
            if self.ended:
                return False
            self.events.append(event)
            self.ended = True
            self.changed.notify_all()
        self.process.kill()
        return True


class Jobs:
    """The plan that is being made, or the last that was."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._job: Job | None = None
        self._listener: Thread | None = None

    def start(self, body: Any, seconds: float) -> str:
        """Start a plan; its key."""
        with self._lock:
            return self._start(body, seconds)

    def _start(self, body: Any, seconds: float) -> str:
        if self._job is not None and not self._job.ended:
            raise BusyError("a plan is being made: wait for it, or cancel it first")
        self._join()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(theirs, body), daemon=True)
        process.start()
        theirs.close()
        self._job = Job(secrets.token_urlsafe(9), process, ours, monotonic() + seconds + GRACE)
        self._listener = Thread(target=self._job.listen, daemon=True)
        self._listener.start()
        return self._job.key

    def get(self, key: str) -> Job:
        if self._job is None or not secrets.compare_digest(key.encode(), self._job.key.encode()):
            raise UnknownNameError("there is no such plan: only the last one that was started is kept")
        return self._job

    def cancel(self, key: str) -> bool:
        """End a plan; what was found stays. False where it had ended before."""
        return self.get(key).cancel()

    def close(self) -> None:
        """End whatever runs."""
        if self._job is not None:
            self._job.end(Event("failed", {"error": "the studio was closed"}))
        self._join()

    def _join(self) -> None:
        if self._listener is not None:
            self._listener.join()
