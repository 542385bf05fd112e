"""The ranks of a pipeline as processes, connected by gloo.

Connections have generations. On a failure every rank lets go of its own, which wakes whoever waits for it; what ranks do together
next is done under the next generation, so nothing of what failed can reach it.

The connections that carry tensors as they are.

The ends of channels that may have messages under way, for as long as something uses them.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.runtime.device.device import direct_connection, direct_tensor, is_direct, local_device, stop
from penstock.runtime.transport.activity import Activity, clock
from penstock.runtime.transport.all_gather import Exchange
from penstock.runtime.transport.direct_channels import DirectInbox, DirectOutbox
from penstock.runtime.transport.failures import Alarm, Report, count_arrival, describe, next_pause
from penstock.runtime.transport.framed_channels import FramedInbox, FramedOutbox
from penstock.runtime.transport.group import Group, Inbox, Outbox, Route
from penstock.runtime.transport.store import Notices, PrefixStore

TRANSPORTS = ("auto", "framed", "direct", "edges")
_LOOK = 0.2
"""Seconds between two looks at the board."""
_PAUSE = 0.005
_TELLING = 0.5
"""Seconds that a rank whose connection was lost has to be told why."""
CONNECT = 120.0
"""Seconds in which all ranks must have come, at the start and after a failure."""
LEAVE = 10.0
"""Seconds that a rank which is through waits for the others to be."""
_STORE = timedelta(seconds=10)


class Processes(Group):
    """This process's place among the ranks.

    `store` is one that all of them reach, under a name that is theirs alone, by a connection that nothing else here uses: a
    store serves one call at a time.

    `transport`: `framed` carries everything through the host; `direct` sends tensors from device to device, all between two ranks
    in one queue; `edges` does so with a queue for each channel. `auto` is direct where every rank has a device of its own.
    """

    parallel = True

    def __init__(self, store: Any, rank: int, ranks: int, deadline: float, transport: str = "auto") -> None:
        self.rank, self.ranks = rank, ranks
        self.transport = transport
        self.tensors: Tensors | None = None
        self.learning = False
        """Whether this step tells the forms of its messages."""
        self._agreed: dict[int, list[Any]] = {}
        self._routes: list[Route] = []
        self._pipelines = 0
        self._store = store
        self._store.set_timeout(_STORE)
        self.mine = Activity()
        self.ends = Ends()
        """All that may have something under way."""
        self.slices: dict[tuple[int, ...], Any] = {}
        """Groups that some of these ranks have made of themselves."""
        self.names: list[str] = []
        """What else ranks are called, if anything: their places in a device mesh."""
        self.generation = -1
        self.connection: Any = None
        self.exchange = Exchange(self)
        self._failure: Report | None = None
        self._told = False
        """Whether this rank has raised the failure."""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connect(deadline)
        self._watch = threading.Thread(target=self._look, name="penstock watch", daemon=True)
        self._watch.start()

    # Connecting -------------------------------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        """Meet all ranks under the next generation."""
        generation = self.generation + 1
        board = PrefixStore(f"penstock/{generation}", self._store)
        self._meet(board, deadline)
        try:
            connection = dist.ProcessGroupGloo(board, self.rank, self.ranks, timedelta(seconds=deadline))
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank} cannot connect to the others: {error}") from error
        with self._lock:
            self.alarm = Alarm(board, self.rank, self.ranks, Notices(self._store))
            self.generation, self.connection = generation, connection
            self._failure, self._told = None, False
        self._agreed.clear()
        if self.transport == "auto":
            found = self.exchange.gather("devices", local_device(), deadline)
            self.transport = "direct" if is_direct(found) else "framed"
        if self.direct:
            self.tensors = Tensors(board, self.rank, self.ranks, deadline, edges=self.transport == "edges")
            self.tensors.open(self._routes)

    @property
    def direct(self) -> bool:  # type: ignore[override]
        return self.transport != "framed"

    @property
    def rendezvous(self) -> bool:  # type: ignore[override]
        return self.transport == "direct"

    def _meet(self, board: Any, deadline: float) -> None:
        count_arrival(board, "here", self.rank, self.ranks)
        pause, until = _PAUSE, time.monotonic() + deadline
        notices, news = Notices(self._store), True
        while not board.check(["here/all"]):
            ended, returned = (self._ranks_that("ended"), self._ranks_that("returned")) if news else ([], [])
            if ended or returned or time.monotonic() > until:
                missing = [rank for rank in range(self.ranks) if not board.check([f"here/{rank}"])]
                gone = f"ranks {ended} have ended" if ended else f"ranks {returned} have returned: they made fewer calls"
                why = gone if ended or returned else f"ranks {missing} did not come within {deadline:g} s"
                raise PipelineError(f"rank {self.rank} cannot connect to the others: {why}")
            time.sleep(pause)
            pause, news = next_pause(pause), notices.have_come()

    def _is_known(self, what: str) -> bool:
        """Whether any rank has `ended` (its process is gone) or `returned` (it is through)."""
        with contextlib.suppress(RuntimeError):
            return bool(self._store.check([what]))
        return False

    def _ranks_that(self, what: str) -> list[int]:
        """The ranks that have `ended` or `returned`; one request while there are none."""
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self.ranks) if self._store.check([f"{what}/{rank}"])] if self._is_known(what) else []
        return []

    def _find_outrun(self, first_return: tuple[int, int] | None) -> int | None:
        """A rank that has returned before what this one is in, so that it never comes to it.

        A step ends with an exchange. The count is read first: what runs then comes after that many.
        """
        comes_to = self.exchange.number
        comes_to += self.mine.running
        if first_return is None or self.slices:  # slices have exchanges of their own
            return None
        exchanges, rank = first_return
        return rank if comes_to > exchanges else None

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def well(self) -> bool:
        """Whether nothing has failed since the start."""
        return self.generation == 0 and self._failure is None

    def close(self) -> None:
        """Leave for good, once all are through: what a rank that closes has sent and nobody has read yet would be lost."""
        self.mine.over = True
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.set(f"returned/{self.rank}", b"")
            self._store.set("returned", b"")
        self.alarm.tell_return(self.exchange.number)
        if self.connection is not None:
            self.alarm.leave(LEAVE, lambda: self._is_known("ended"))
            if self.alarm.heard():
                self.alarm.say(self.mine.describe())
        self._closing.set()
        self._watch.join()
        self._disconnect()

    def _disconnect(self) -> None:
        """Let go of the connection, and of all that holds on to it: this wakes whoever waits for this rank."""
        self.connection = None
        self.ends.drop()
        self.exchange.drop()
        tensors, self.tensors = self.tensors, None
        if tensors is not None:
            tensors.stop()

    # Failures ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look for the failure of another rank while this one computes or waits: one request per look while nothing happens."""
        looked_at: Alarm | None = None
        first_return: tuple[int, int] | None = None
        notices = Notices(self._store)
        while not self._closing.wait(_LOOK):
            alarm, failed = self.alarm, False
            if self.connection is None:
                continue
            if notices.have_come() or alarm is not looked_at:
                looked_at, failed, first_return = alarm, alarm.heard(), alarm.first_return()
            if failed:
                alarm.say(self.mine.describe())
            elif (gone := self._find_outrun(first_return)) is not None:
                alarm.sound(f"{self.called(gone)} has returned: it made fewer calls than the others", None, self.mine.describe())
            else:
                continue
            with self._lock:
                if alarm is self.alarm:  # else the rank has got over it already
                    self._disconnect()

    def lost(self, peer: int, what: str, error: Exception) -> NoReturn:
        """A message could not be sent or had: raise the failure that is known, or report this one."""
        timed_out = "timed out" in str(error).lower()
        if isinstance(error, RuntimeError) and not self._hears(0.0 if timed_out else _TELLING):
            waited = (clock() - self.mine.since) / 1e9
            text = f"waited {waited:.1f} s for {what}" if timed_out else f"lost the connection to rank {peer} while it waited for {what}"
            raise self.report_failure(self.rank, f"rank {self.rank} {text}", error)
        self._disconnect()
        self._raise()

    def _hears(self, seconds: float) -> bool:
        """Whether another rank tells of a failure by then: gloo lets go of a connection before whoever waited on it can say why."""
        until = time.monotonic() + seconds
        while not self.alarm.heard():
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)
        return True

    def _raise(self) -> NoReturn:
        self._told = True
        if self._failure is None:
            self.alarm.say(self.mine.describe())
            self._failure = self.alarm.report()
        raise self._error(self._failure, None)

    def _error(self, report: Report, cause: BaseException | None) -> PipelineError:
        error = PipelineError(report.text)
        error.__cause__ = cause or (None if report.cause is None else report.cause.error())
        return error

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        self._failure = self.alarm.sound(headline, cause, self.mine.describe())
        self._told = True
        self._disconnect()
        mine = self._failure.text.startswith(headline)
        return self._error(self._failure, cause if mine else None)

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        if self.connection is not None or self._failure is None:
            where = "in" if self.mine.running else "outside of"
            plain = f"{self.called(self.rank)} failed {where} a step: {describe(error)}"
            headline = str(error) if isinstance(error, PipelineError) else plain
            self._failure = self.alarm.sound(headline, error.__cause__ or error, self.mine.describe(), fatal=fatal)
            self._disconnect()
        self._told = True

    def enter(self, rank: int, deadline: float) -> None:
        if self.connection is not None:
            return
        if not self._told:
            self._raise()
        if self._failure is not None and self._failure.fatal:
            raise self._error(self._failure, None)
        self._connect(max(deadline, CONNECT))

    # Messages ---------------------------------------------------------------------------------------------------------

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return DirectOutbox(self, route, program, deadline) if self.direct else FramedOutbox(self, route, slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return (DirectInbox if self.direct else FramedInbox)(self, route, program, deadline)

    def count(self, rank: int) -> int:
        self._pipelines += 1
        return self._pipelines

    def open(self, routes: Iterable[Route], deadline: float) -> None:
        if self.direct:
            everyone = self.gather(self.rank, "routes", sorted(routes), deadline)
            self._routes = sorted({*self._routes, *(route for theirs in everyone for route in theirs)})
            assert self.tensors is not None
            self.tensors.open(self._routes)

    def agree(self, program: int, inputs: Any, deadline: float) -> None:
        if self.direct:
            everyone = self.gather(self.rank, "inputs", inputs, deadline)
            self.learning = self._agreed.get(program) != everyone
            self._agreed[program] = everyone

    def data(self, route: Route, peer: int) -> tuple[Any, int]:
        """The connection that carries a route's tensors, and the peer's number there."""
        if self.tensors is None:
            raise AttributeError("the connection was closed")
        return self.tensors.of(route, peer)

    def activity(self, rank: int) -> Activity:
        return self.mine

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        self.enter(rank, deadline)
        return self.exchange.gather(name, value, deadline)

    def called(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})" if self.names else f"rank {rank}"

    def ident(self, thing: object) -> Hashable:
        return self.rank, id(thing)


class Tensors:
    """One connection for all ranks, or one for each channel: then no message waits behind one of another channel."""

    def __init__(self, board: Any, rank: int, ranks: int, deadline: float, *, edges: bool) -> None:
        self.board, self.rank, self.deadline, self.edges = PrefixStore("tensors", board), rank, deadline, edges
        self._shared = None if edges else direct_connection(self.board, rank, ranks, deadline)
        self._edges: dict[Route, Any] = {}
        self._warm: set[Any] = set()

    def of(self, route: Route, peer: int) -> tuple[Any, int]:
        """The connection of a route, and the peer's number there."""
        if not self.edges:
            return self._shared, peer
        return self._edges[route], int(peer == route[1])

    def open(self, routes: Sequence[Route]) -> None:
        """Connect what is not connected yet, in an order that is the same on every rank, and send something small both ways."""
        for route in routes:
            source, target, what = route
            pair = route if self.edges else (min(source, target), max(source, target))
            if self.rank not in (source, target) or pair in self._warm:
                continue
            self._warm.add(pair)
            if self.edges:
                board = PrefixStore(f"{source}/{target}/{what}", self.board)
                self._edges[route] = direct_connection(board, int(self.rank == target), 2, self.deadline)
            self._greet(route, first=self.rank == min(source, target))

    def _greet(self, route: Route, *, first: bool) -> None:
        connection, peer = self.of(route, route[0] if self.rank == route[1] else route[1])
        sent, got = direct_tensor(), direct_tensor()
        for sends in (first, not first):
            (connection.send([sent], peer, 0) if sends else connection.recv([got], peer, 0)).wait()

    def stop(self) -> None:
        for connection in (self._shared, *self._edges.values()):
            if connection is not None:
                stop(connection)
        self._shared = None
        self._edges.clear()


class Ends:
    """Weak references to everything that must let go of its messages before a connection can close.

    A send in progress does not hold its memory: the end of the channel does. When an end goes away with sends in progress, they are
    kept here until the next end is made, by which time the step that they belong to is over.

    `drop` may be called from another thread.
    """

    def __init__(self) -> None:
        self._sends: dict[weakref.ref[Any], deque[tuple[int, Any, Any]] | None] = {}
        self._left: deque[deque[tuple[int, Any, Any]]] = deque()

    def __len__(self) -> int:
        return len(self._sends)

    def __iter__(self) -> Iterator[Any]:
        alive = (reference() for reference in tuple(self._sends))
        return (end for end in alive if end is not None)

    def add(self, end: Any, sends: deque[tuple[int, Any, Any]] | None = None) -> None:
        """Know an end; `sends` are its messages in progress: number, work, and whatever holds the memory."""
        self._settle()
        self._sends[weakref.ref(end, self._forget)] = sends

    def _forget(self, reference: weakref.ref[Any]) -> None:
        if sends := self._sends.pop(reference, None):
            self._left.append(sends)

    def _settle(self) -> None:
        """Wait for the sends of ends that are gone: their steps are over, so that the other ranks take them."""
        while self._left:
            with contextlib.suppress(RuntimeError, IndexError):  # the connection is lost, or everything was dropped meanwhile
                for _, work, _ in self._left.popleft():
                    work.wait()

    def drop(self) -> None:
        """Let go of everything under way."""
        for end in self:
            end.drop()
        self._left.clear()
