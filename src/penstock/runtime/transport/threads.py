"""The ranks of a pipeline in one process: threads that pass a baton.

One rank runs at a time and passes the baton only when it waits for another. So every run is the same, and a deadlock is known at
once, when all ranks wait. Random state and torch's settings of a thread (grad mode, autocast) belong to the rank.
`parallel=True` drops the baton and those guarantees: ranks then run at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from penstock.errors import PipelineError
from penstock.runtime.device.rng import get_rng_state, set_rng_state
from penstock.runtime.device.streams import record_event, record_use, wait_event
from penstock.runtime.device.timing import clock
from penstock.runtime.transport.group import EMPTY, Activity, Group, Inbox, Operation, Outbox, Route, describe_other_program


@dataclass
class ThreadChannel:
    """The messages that were sent along one route, and the cells of the receives that were posted for them, each in order."""

    messages: deque[tuple[int, Any]] = field(default_factory=deque)
    """Each message's program and value."""
    posted: deque[int] = field(default_factory=deque)
    sent: deque[Any] = field(default_factory=deque)
    """When each message was sent; on a GPU, the event in the sender's stream to wait for."""

    def has_room(self, slots: int) -> bool:
        """Whether a message can be sent. A message whose receive is posted takes no slot."""
        return len(self.messages) - len(self.posted) < slots


@dataclass
class _Failure:
    """The first failure. Every rank raises it once. The group works again when all have, unless it is fatal."""

    error: BaseException
    fatal: bool
    raised: set[int] = field(default_factory=set)


@dataclass
class _Gathering:
    """One all-gather, and how many ranks have read it."""

    entries: dict[int, tuple[str, Any, Any]] = field(default_factory=dict)
    """Each rank's name for it, its value, and the event in its stream after which the value is there."""
    read: int = 0


class VirtualGroup(Group):
    """The virtual ranks of one `launch`: the channels between them, their failures, and whose turn it is."""

    shares_memory = True
    generation = 0

    def __init__(self, ranks: int, *, parallel: bool = False) -> None:
        self.ranks = ranks
        self.parallel = parallel
        self.failure: _Failure | None = None
        self._channels: dict[Route, ThreadChannel] = {}
        self._gatherings: dict[int, _Gathering] = {}
        self._gathered = [0] * ranks
        self._gates = [threading.Semaphore(0) for _ in range(ranks)]
        self._change = threading.Condition(threading.RLock())
        self._waiting: dict[int, Callable[[], bool]] = {}
        """For each rank that waits, whether it can go on."""
        self._ended: set[int] = set()
        self._activities = [Activity() for _ in range(ranks)]
        self._pipelines = [0] * ranks
        self._leaving: set[int] = set()
        """Ranks that have raised the group's failure and not entered again."""

    # Taking turns -----------------------------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn; rank 0 begins."""
        if not self.parallel and rank != 0:
            self._gates[rank].acquire()

    def end(self, rank: int) -> None:
        """Leave for good: the rank's function has returned."""
        with self._change:
            self._ended.add(rank)
            if self.parallel:
                self._check_deadlock()
                self._change.notify_all()
        if not self.parallel:
            self._pass_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str, deadline: float) -> None:
        """Let others run until `ready()`. Raises if another rank fails, all ranks wait, or the deadline passes."""
        if ready():
            return
        activity = self._activities[rank]
        with self._change:
            activity.since, activity.waits = clock(), what
            self._waiting[rank] = ready
            if self.parallel:
                self._check_deadlock()
        try:
            if not self._sleep(rank, lambda: ready() or self.failure is not None, deadline):
                self.fail(rank, PipelineError(f"rank {rank} waited {deadline:g} s for {what}\n{self.report()}"), fatal=True)
        finally:
            with self._change:
                del self._waiting[rank]
                activity.waits = None
        if not ready():
            self._raise(rank)

    def _sleep(self, rank: int, done: Callable[[], bool], deadline: float) -> bool:
        """Let the others run until `done()`, or until the next turn; False if the deadline passed first."""
        if self.parallel:
            with self._change:
                return self._change.wait_for(done, deadline)
        state = get_rng_state()
        self._pass_on(rank)
        in_time = self._gates[rank].acquire(timeout=deadline)
        set_rng_state(state)
        return in_time

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on. If none can, all wait for each other, which is a deadlock."""
        self._check_deadlock()
        order = [(rank + step) % self.ranks for step in range(1, self.ranks + 1)]
        next_rank = next((other for other in order if other not in self._ended and self._can_go_on(other)), None)
        if next_rank is not None:
            self._gates[next_rank].release()

    def _can_go_on(self, rank: int) -> bool:
        ready = self._waiting.get(rank)
        return self.failure is not None or ready is None or ready()

    def _check_deadlock(self) -> None:
        alive = [rank for rank in range(self.ranks) if rank not in self._ended]
        if alive and not any(map(self._can_go_on, alive)):
            self.fail(None, PipelineError(f"no rank can go on: each waits for another\n{self.report()}"))

    def notify(self) -> None:
        """Wake ranks that wait for something that has changed. Only parallel ranks need it."""
        if self.parallel:
            with self._change:
                self._change.notify_all()

    # Failures ---------------------------------------------------------------------------------------------------------

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        with self._change:
            if rank in self._leaving and not fatal:  # it reports the failure that it raised before, which may be over for the others
                return
            if self.failure is None:
                self.failure = _Failure(error, fatal)
            self.failure.fatal |= fatal
            if rank is not None:
                self.failure.raised.add(rank)
            self._change.notify_all()

    def _raise(self, rank: int) -> NoReturn:
        assert self.failure is not None
        self.failure.raised.add(rank)
        self._leaving.add(rank)
        error = self.failure.error
        if isinstance(error, PipelineError):
            raise PipelineError(*error.args) from error.__cause__
        raise PipelineError(f"rank {rank} stopped because another rank failed: {error!r}") from error

    def enter(self, rank: int, deadline: float) -> None:
        self._leaving.discard(rank)
        failure = self.failure
        if failure is None:
            return
        if failure.fatal or rank not in failure.raised:
            self._raise(rank)
        until = time.monotonic() + deadline
        while not self._recover():
            if self.failure is not failure or failure.fatal:  # the others have started again, and failed again
                self._raise(rank)
            if time.monotonic() > until:
                raise PipelineError(f"rank {rank} waited {deadline:g} s for the others to begin again after a failure\n{self.report()}")
            self._sleep(rank, lambda: False, 0.01 if self.parallel else deadline)

    def _recover(self) -> bool:
        """Whether the failure is over: once every remaining rank has raised it, everything of the failed step is removed."""
        with self._change:
            if self.failure is None:
                return True
            if self.failure.fatal or len(self.failure.raised | self._ended) < self.ranks:
                return False
            self.failure = None
            self.generation += 1
            for channel in self._channels.values():  # emptied, not replaced: executors refer to them
                channel.messages.clear()
                channel.posted.clear()
                channel.sent.clear()
            self._gatherings.clear()
            self._gathered = [0] * self.ranks
            return True

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        error = PipelineError(f"{headline}\n{self.report()}")
        error.__cause__ = cause
        self.fail(rank, error)
        return error

    def report(self) -> str:
        """One line per rank: what it is doing."""
        activities = enumerate(self._activities)
        return "\n".join(f"  rank {rank} {'has ended' if rank in self._ended else activity.describe()}" for rank, activity in activities)

    def activity(self, rank: int) -> Activity:
        return self._activities[rank]

    def number_pipeline(self, rank: int) -> int:
        self._pipelines[rank] += 1
        return self._pipelines[rank]

    def ident(self, thing: object) -> int:
        return id(thing)

    # Messages ---------------------------------------------------------------------------------------------------------

    def channel(self, route: Route) -> ThreadChannel:
        """The channel of a route, which all programs share."""
        return self._channels.setdefault(route, ThreadChannel())

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return _ThreadOutbox(self, route, slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return _ThreadInbox(self, route, program, deadline)

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        self.enter(rank, deadline)
        with self._change:
            number = self._gathered[rank]
            self._gathered[rank] += 1
            gathering = self._gatherings.setdefault(number, _Gathering())
            gathering.entries[rank] = name, value, record_event()
            self._change.notify_all()
        for other, (their_name, _, _) in list(gathering.entries.items()):
            if their_name != name:
                error = PipelineError(
                    f"rank {rank} is at {name!r}, but rank {other} at {their_name!r}: every rank must make the same calls in the same order"
                )
                self.fail(rank, error)
                self._leaving.add(rank)
                raise error
        self.wait(rank, lambda: len(gathering.entries) == self.ranks, f"all ranks to reach {name!r}", deadline)
        values = [gathering.entries[other][1] for other in range(self.ranks)]
        for _, _, event in gathering.entries.values():
            wait_event(event)
        record_use(values)
        with self._change:
            gathering.read += 1
            if gathering.read == self.ranks:
                del self._gatherings[number]
        return values


class _ThreadOutbox(Outbox):
    def __init__(self, group: VirtualGroup, route: Route, slots: int, program: int, deadline: float) -> None:
        self.group, self.route, self.slots, self.program, self.deadline = group, route, slots, program, deadline
        self.channel = group.channel(route)

    def begin(self) -> None:
        """Return at once: the channel is empty between steps."""

    def put(self, value: Any) -> None:
        channel, slots = self.channel, self.slots
        if len(channel.messages) >= slots and not channel.has_room(slots):
            rank, target, what = self.route
            self.group.wait(rank, lambda: channel.has_room(slots), f"rank {target} to take {what}", self.deadline)
            self.group.activity(rank).began = clock()  # the time before was spent waiting
        channel.sent.append(record_event() or clock())
        channel.messages.append((self.program, value))
        if self.group.parallel:
            self.group.notify()


class _ThreadInbox(Inbox):
    """Puts messages into the cells for which receives were posted, in order."""

    def __init__(self, group: VirtualGroup, route: Route, program: int, deadline: float) -> None:
        super().__init__()
        self.group, self.source, self.rank, self.program, self.deadline = group, route[0], route[1], program, deadline
        self.count = 0
        self.channel = group.channel(route)
        self.posted = self.channel.posted
        self.name = f"{route[2]} from rank {route[0]}"

    def expect(self, cell: int) -> Operation:
        self.times.append((0, 0, 0))
        group, posted, parallel = self.group, self.posted, self.group.parallel

        def post() -> None:
            posted.append(cell)
            if parallel:
                group.notify()

        return post

    def begin(self) -> None:
        self.count = 0

    def pull(self, cells: list[Any], cell: int) -> Any:
        messages, posted = self.channel.messages, self.posted
        while cells[cell] is EMPTY:
            asked = clock()
            if not messages:
                self.group.wait(self.rank, lambda: bool(messages), self.name, self.deadline)
            (program, value), sent = messages.popleft(), self.channel.sent.popleft()
            if program != self.program:
                raise self.group.report_failure(self.rank, describe_other_program(self.group, self.source, self.rank))
            self.times[self.count] = (sent, asked, clock()) if type(sent) is int else self._wait_for_sender(sent, value)
            self.count += 1
            cells[posted.popleft()] = value
        return cells[cell]

    def _wait_for_sender(self, sent: Any, value: Any) -> tuple[Any, Any, Any]:
        """Let this rank's stream wait for the sender's; returns the events when the message was sent, needed and there."""
        asked = record_event() if self.group.activity(self.rank).watch is not None else sent
        wait_event(sent)
        record_use(value)
        return sent, asked, record_event() if asked is not sent else sent
