"""The ranks of a pipeline in one process: threads that pass a baton.

One rank runs at a time and lets go only where it waits for another, so that a run is the same every time, and all ranks
waiting is a deadlock that is known at once. Random state, and whatever torch keeps for a thread (gradient mode, autocast),
belongs to the rank. `parallel=True` drops the baton and those guarantees: ranks then run at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.errors import PipelineError

Channel = tuple[int, int, str]
"""From rank, to rank, and what it carries."""


class _Waiting(NamedTuple):
    ready: Callable[[], bool]
    what: str


class Group:
    """The virtual ranks of one `launch`: the channels between them, what they share, and whose turn it is."""

    def __init__(self, ranks: int, *, parallel: bool = False) -> None:
        self.ranks = ranks
        self.parallel = parallel
        self.failure: tuple[int, BaseException] | None = None
        """The first failure and the number of the step that it was in."""
        self._channels: dict[Channel, deque[Any]] = {}
        self._boards: dict[Any, dict[int, Any]] = {}
        self._read: dict[Any, int] = {}
        self._gates = [threading.Semaphore(0) for _ in range(ranks)]
        self._change = threading.Condition()
        self._waiting: dict[int, _Waiting] = {}
        self._ended: set[int] = set()
        self._back: set[int] = set()
        self._doing: dict[int, str] = {}

    # Taking turns -----------------------------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """Wait for the first turn; rank 0 has it."""
        if not self.parallel and rank != 0:
            self._gates[rank].acquire()

    def end(self, rank: int) -> None:
        """Leave for good."""
        with self._change:
            self._ended.add(rank)
            self._change.notify_all()
        if not self.parallel:
            self._pass_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str, deadline: float) -> None:
        """Let others run until `ready`; raises where another rank failed, all of them wait, or the deadline is over."""
        if ready():
            return
        self._waiting[rank] = _Waiting(ready, what)
        if self.parallel:
            with self._change:
                done = self._change.wait_for(lambda: ready() or self.failure is not None, deadline)
            if not done:
                self.fail(PipelineError(f"rank {rank} waited {deadline:g} s for {what}\n{self.report()}"))
        else:
            self._idle(rank)
        del self._waiting[rank]
        if not ready():
            self.raise_failure(rank)

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can use it; where none can, all wait for each other."""
        order = [(rank + step) % self.ranks for step in range(1, self.ranks + 1)]
        alive = [other for other in order if other not in self._ended]
        able = [other for other in alive if self.failure or other not in self._waiting or self._waiting[other].ready()]
        if not able and alive:
            self.fail(PipelineError(f"no rank can go on: each waits for another\n{self.report()}"))
            able = alive
        if able:
            self._gates[able[0]].release()

    def changed(self) -> None:
        """Something that ranks may wait for has changed; only parallel ranks need to be told."""
        if self.parallel:
            with self._change:
                self._change.notify_all()

    # Failures ---------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, step: int = -1) -> None:
        """Make the first failure known to all."""
        if self.failure is None:
            self.failure = (step, error)
        self.changed()

    def raise_failure(self, rank: int) -> None:
        assert self.failure is not None
        error = self.failure[1]
        if isinstance(error, PipelineError):
            raise PipelineError(*error.args) from error.__cause__
        raise PipelineError(f"rank {rank} stopped because another rank failed: {error!r}") from error

    def enter_step(self, rank: int, step: int, deadline: float) -> None:
        """Begin a step that all ranks take part in: it fails if it has failed already; after an earlier failure all meet and clear up."""
        if self.failure is None:
            return
        if self.failure[0] in (step, -1):
            self.raise_failure(rank)
        self._back.add(rank)
        until = time.monotonic() + deadline
        while not self._cleared():
            if time.monotonic() > until:
                raise PipelineError(f"rank {rank} waited {deadline:g} s for the others to begin again after a failure\n{self.report()}")
            self._idle(rank)

    def _cleared(self) -> bool:
        """Once every rank that is left has come out of the failed step, nothing of it is left."""
        if self.failure is None:
            return True
        if len(self._back | self._ended) < self.ranks:
            return False
        self.failure = None
        self._back.clear()
        for queue in self._channels.values():  # emptied, not dropped: executors hold on to them
            queue.clear()
        self._boards.clear()
        self._read.clear()
        self.changed()
        return True

    def _idle(self, rank: int) -> None:
        """Let the others run once."""
        if self.parallel:
            with self._change:
                self._change.wait(0.01)
            return
        state = torch.get_rng_state()
        self._pass_on(rank)
        self._gates[rank].acquire()
        torch.set_rng_state(state)

    def report(self) -> str:
        """What each rank does."""
        lines = []
        for rank in range(self.ranks):
            waits = self._waiting.get(rank)
            now = "has ended" if rank in self._ended else f"waits for {waits.what}" if waits else "runs"
            lines.append(f"  rank {rank} {now}" + (f", in {self._doing[rank]}" if self._doing.get(rank) else ""))
        return "\n".join(lines)

    def note(self, rank: int, doing: str) -> None:
        """Say what a rank is at, for reports."""
        self._doing[rank] = doing

    # Messages ---------------------------------------------------------------------------------------------------------

    def channel(self, channel: Channel) -> deque[Any]:
        """Messages on their way, in order."""
        found = self._channels.get(channel)
        if found is None:
            found = self._channels.setdefault(channel, deque())
        return found

    def gather(self, rank: int, key: Any, value: Any, deadline: float) -> list[Any]:
        """Everyone's value, in the order of ranks."""
        board = self._boards.setdefault(key, {})
        board[rank] = value
        self.changed()
        self.wait(rank, lambda: len(board) == self.ranks, f"all ranks to reach {key!r}", deadline)
        values = [board[other] for other in range(self.ranks)]
        self._read[key] = self._read.get(key, 0) + 1
        if self._read[key] == self.ranks:
            del self._boards[key], self._read[key]
        return values
