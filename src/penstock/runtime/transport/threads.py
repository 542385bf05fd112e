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
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from penstock.errors import PipelineError
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.batch.step_input import EMPTY
from penstock.runtime.device import device
from penstock.runtime.transport.activity import Activity, clock
from penstock.runtime.transport.group import Group, Inbox, Operation, Outbox, Route, runs_another


@dataclass
class Channel:
    """One way from a rank to another: messages that were sent, and the cells of receives that were posted, each in order."""

    messages: deque[tuple[int, Any]] = field(default_factory=deque)
    """Which program each is of, and its value."""
    posted: deque[int] = field(default_factory=deque)
    sent: deque[Any] = field(default_factory=deque)
    """When each of the messages was; on a device, the place in the sender's stream to wait for."""

    def has_room(self, slots: int) -> bool:
        """Whether a message can be sent: one for which a receive is posted takes no slot."""
        return len(self.messages) - len(self.posted) < slots


class _Waiting(NamedTuple):
    ready: Callable[[], bool]
    what: str


@dataclass
class _Failure:
    """The first failure. Every rank raises it once; the group is whole again when all have, unless a rank was lost to it."""

    error: BaseException
    fatal: bool
    raised: set[int] = field(default_factory=set)


@dataclass
class _Board:
    """What ranks put together: the name and the value of each, and how many have read them."""

    names: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    places: dict[int, Any] = field(default_factory=dict)
    """Where in its stream each put its value."""
    read: int = 0


class VirtualGroup(Group):
    """The virtual ranks of one `launch`: the channels between them, what they share, and whose turn it is."""

    shares_memory = True

    def __init__(self, ranks: int, *, parallel: bool = False) -> None:
        self.ranks = ranks
        self.parallel = parallel
        self.failure: _Failure | None = None
        self._channels: dict[Route, Channel] = {}
        self._boards: dict[int, _Board] = {}
        self._gathered = [0] * ranks
        self._gates = [threading.Semaphore(0) for _ in range(ranks)]
        self._change = threading.Condition(threading.RLock())
        self._waiting: dict[int, _Waiting] = {}
        self._ended: set[int] = set()
        self._activities = [Activity() for _ in range(ranks)]
        self._pipelines = [0] * ranks
        self._told: set[int] = set()
        """Ranks on their way out of a failure that another has told them of."""

    # Taking turns -----------------------------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """Wait for the first turn; rank 0 has it."""
        if not self.parallel and rank != 0:
            self._gates[rank].acquire()

    def end(self, rank: int) -> None:
        """Leave for good."""
        with self._change:
            self._ended.add(rank)
            if self.parallel:
                self._look_for_deadlock()
                self._change.notify_all()
        if not self.parallel:
            self._pass_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str, deadline: float) -> None:
        """Let others run until `ready`; raises where another rank failed, all of them wait, or the deadline is over."""
        if ready():
            return
        activity = self._activities[rank]
        with self._change:
            activity.since, activity.waits = clock(), what
            self._waiting[rank] = _Waiting(ready, what)
            if self.parallel:
                self._look_for_deadlock()
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
        """Let the others run; False where the deadline was over first."""
        if self.parallel:
            with self._change:
                return self._change.wait_for(done, deadline)
        state = device.random_state()
        self._pass_on(rank)
        in_time = self._gates[rank].acquire(timeout=deadline)
        device.set_random_state(state)
        return in_time

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can use it; where none can, all wait for each other."""
        self._look_for_deadlock()
        order = [(rank + step) % self.ranks for step in range(1, self.ranks + 1)]
        able = next((other for other in order if other not in self._ended and self._is_able(other)), None)
        if able is not None:
            self._gates[able].release()

    def _is_able(self, rank: int) -> bool:
        waits = self._waiting.get(rank)
        return self.failure is not None or waits is None or waits.ready()

    def _look_for_deadlock(self) -> None:
        alive = [rank for rank in range(self.ranks) if rank not in self._ended]
        if alive and not any(map(self._is_able, alive)):
            self.fail(None, PipelineError(f"no rank can go on: each waits for another\n{self.report()}"))

    def changed(self) -> None:
        """Something that ranks may wait for has changed; only parallel ranks need to be told."""
        if self.parallel:
            with self._change:
                self._change.notify_all()

    # Failures ---------------------------------------------------------------------------------------------------------

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        with self._change:
            if rank in self._told and not fatal:  # this is the failure that it was told of, which the others may have got over
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
        self._told.add(rank)
        error = self.failure.error
        if isinstance(error, PipelineError):
            raise PipelineError(*error.args) from error.__cause__
        raise PipelineError(f"rank {rank} stopped because another rank failed: {error!r}") from error

    def enter(self, rank: int, deadline: float) -> None:
        self._told.discard(rank)
        failure = self.failure
        if failure is None:
            return
        if failure.fatal or rank not in failure.raised:
            self._raise(rank)
        until = time.monotonic() + deadline
        while not self._recovered():
            if self.failure is not failure or failure.fatal:  # the others have begun again, and failed again
                self._raise(rank)
            if time.monotonic() > until:
                raise PipelineError(f"rank {rank} waited {deadline:g} s for the others to begin again after a failure\n{self.report()}")
            self._sleep(rank, lambda: False, 0.01 if self.parallel else deadline)

    def _recovered(self) -> bool:
        """Once every rank that is left has come out of what failed, nothing of it is left."""
        with self._change:
            if self.failure is None:
                return True
            if self.failure.fatal or len(self.failure.raised | self._ended) < self.ranks:
                return False
            self.failure = None
            for channel in self._channels.values():  # emptied, not dropped: executors hold on to them
                channel.messages.clear()
                channel.posted.clear()
                channel.sent.clear()
            self._boards.clear()
            self._gathered = [0] * self.ranks
            return True

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        error = PipelineError(f"{headline}\n{self.report()}")
        error.__cause__ = cause
        self.fail(rank, error)
        return error

    def report(self) -> str:
        """What each rank does."""
        said = ["has ended" if rank in self._ended else each.describe() for rank, each in enumerate(self._activities)]
        return "\n".join(f"  rank {rank} {line}" for rank, line in enumerate(said))

    def activity(self, rank: int) -> Activity:
        return self._activities[rank]

    def count(self, rank: int) -> int:
        self._pipelines[rank] += 1
        return self._pipelines[rank]

    def ident(self, thing: object) -> int:
        return id(thing)

    # Messages ---------------------------------------------------------------------------------------------------------

    def channel(self, route: Route) -> Channel:
        """The one channel of this route."""
        return self._channels.setdefault(route, Channel())

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return _Outbox(self, route, slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return _Inbox(self, route, program, deadline)

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        self.enter(rank, deadline)
        with self._change:
            number = self._gathered[rank]
            self._gathered[rank] += 1
            board = self._boards.setdefault(number, _Board())
            board.names[rank], board.values[rank], board.places[rank] = name, value, device.mark()
            self._change.notify_all()
        self._refuse_others(rank, name, board)
        self.wait(rank, lambda: len(board.values) == self.ranks, f"all ranks to reach {name!r}", deadline)
        values = [board.values[other] for other in range(self.ranks)]
        for place in board.places.values():
            device.follow(place)
        device.adopt([vars(value) if isinstance(value, ResultShare) else value for value in values])
        with self._change:
            board.read += 1
            if board.read == self.ranks:
                del self._boards[number]
        return values

    def _refuse_others(self, rank: int, name: str, board: _Board) -> None:
        for other, theirs in list(board.names.items()):
            if theirs != name:
                error = PipelineError(
                    f"rank {rank} is at {name!r}, but rank {other} at {theirs!r}: every rank must make the same calls in the same order"
                )
                self.fail(rank, error)
                self._told.add(rank)
                raise error


class _Outbox(Outbox):
    def __init__(self, group: VirtualGroup, route: Route, slots: int, program: int, deadline: float) -> None:
        self.group, self.route, self.slots, self.program, self.deadline = group, route, slots, program, deadline
        self.channel = group.channel(route)

    def put(self, value: Any) -> None:
        channel, slots = self.channel, self.slots
        if len(channel.messages) >= slots and not channel.has_room(slots):
            rank, target, what = self.route
            self.group.wait(rank, lambda: channel.has_room(slots), f"rank {target} to take {what}", self.deadline)
            self.group.activity(rank).began = clock()  # what came before was waiting
        channel.sent.append(device.mark() or clock())
        channel.messages.append((self.program, value))
        if self.group.parallel:
            self.group.changed()


class _Inbox(Inbox):
    """Messages go to the cells that receives were posted for, in order."""

    def __init__(self, group: VirtualGroup, route: Route, program: int, deadline: float) -> None:
        super().__init__()
        self.group, self.source, self.rank, self.program, self.deadline = group, route[0], route[1], program, deadline
        self.count = 0
        self.channel = group.channel(route)
        self.name = f"{route[2]} from rank {route[0]}"

    def expect(self, cell: int) -> Operation:
        self.times.append((0, 0, 0))
        group, posted, parallel = self.group, self.channel.posted, self.group.parallel

        def post() -> None:
            posted.append(cell)
            if parallel:
                group.changed()

        return post

    def begin(self) -> None:
        self.count = 0

    def pull(self, cells: list[Any], cell: int) -> Any:
        messages, posted = self.channel.messages, self.channel.posted
        while cells[cell] is EMPTY:
            asked = clock()
            if not messages:
                self.group.wait(self.rank, lambda: bool(messages), self.name, self.deadline)
            (program, value), sent = messages.popleft(), self.channel.sent.popleft()
            if program != self.program:
                raise self.group.report_failure(self.rank, runs_another(self.group, self.source, self.rank))
            self.times[self.count] = (sent, asked, clock()) if type(sent) is int else self._followed(sent, value)
            self.count += 1
            cells[posted.popleft()] = value
        return cells[cell]

    def _followed(self, sent: Any, value: Any) -> tuple[Any, Any, Any]:
        """Have this rank's stream wait for the sender's; the places where it was sent, asked for and there."""
        asked = device.mark() if self.group.activity(self.rank).watch is not None else sent
        device.follow(sent)
        device.adopt(value)
        return sent, asked, device.mark() if asked is not sent else sent

    def clear(self) -> None:
        self.channel.posted.clear()

    def pending(self) -> int:
        return len(self.channel.posted)
