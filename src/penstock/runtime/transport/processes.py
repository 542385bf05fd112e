"""The ranks of a pipeline as processes, connected by gloo, and by NCCL if each has a GPU of its own.

Connections have generations. On a failure every rank closes its own, which wakes the ranks that wait for it. The ranks meet again
under the next generation, so that no message of the failed step can reach a later one.

If ranks may be lost (`allow_losses`), the ranks whose processes are gone are left out of the next generation, and a process that takes the
place of a lost one joins a later one (`readmit`). Ranks keep their numbers.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from penstock.errors import LostRankError, PipelineError
from penstock.runtime.device.connections import can_use_nccl, device_id
from penstock.runtime.device.timing import clock
from penstock.runtime.transport.all_gather import CONTROL_TAG, AllGather
from penstock.runtime.transport.direct_channels import DeviceConnections, DirectInbox, DirectOutbox, FormAgreements
from penstock.runtime.transport.failures import (
    FailureBoard,
    FailureReport,
    Notices,
    PrefixStore,
    count_arrival,
    describe_error,
    is_timeout,
    lengthen_pause,
)
from penstock.runtime.transport.framed_channels import FramedInbox, FramedOutbox
from penstock.runtime.transport.group import Activity, Group, Inbox, Outbox, Route

TRANSPORTS = ("auto", "framed", "direct", "edges")
CONNECT = 120.0
"""Seconds in which all ranks must arrive, at the start and after a failure."""
LEAVE = 10.0
"""Seconds that a rank which has finished waits for the others to finish."""
_LOOK = 0.2
"""Seconds between two looks for failures of other ranks."""
_PAUSE = 0.005
_EXPLAIN = 0.5
"""Seconds for another rank to say why a connection was lost."""
_STORE_TIMEOUT = timedelta(seconds=10)
_RETURN = 24 * 3600.0
"""Seconds that a process which takes the place of a lost rank waits for the others to come to a checkpoint."""


class Processes(Group):
    """This process's rank among all ranks.

    `store` is a store that all ranks reach, under a prefix that only they use, through a connection that nothing else in this process
    uses: a store serves one call at a time.

    `transport` is `framed` (everything goes through the host), `direct` (tensors go from device to device, all messages between two
    ranks in one queue), `edges` (the same with one queue per channel) or `auto`: direct if every rank has a GPU of its own.

    A process that takes the place of a lost rank (`returning`) connects in its first exchange, once the others have let it in.
    """

    parallel = True
    generation = -1

    def __init__(self, store: Any, rank: int, ranks: int, deadline: float, transport: str = "auto", *, returning: bool = False) -> None:
        self.rank, self.ranks = rank, ranks
        self.members = tuple(range(ranks))
        """The ranks that take part; those that were lost do not."""
        self.newcomers: tuple[int, ...] = ()
        """The members that have come back in the place of lost ranks when the ranks last connected."""
        self.goes_on = False
        """Whether the others go on after ranks are lost."""
        self.returning = returning
        """Whether this process takes the place of a lost rank and has not been let in yet."""
        self.expects_losses = False
        """Whether the processes were launched such that the others live on when some end."""
        self.transport = transport
        self._activity = Activity()
        self.names: list[str] = []
        """A second name of each rank for messages, if any: its place in a device mesh."""
        self.subgroups: dict[tuple[int, ...], Any] = {}
        """The groups that some of these ranks form, by their members."""
        self.recovery: Any = None
        """Makes the calls of these ranks' pipelines again when ranks are lost, if any pipeline goes on then."""
        self.ends = ChannelEnds()
        """Everything that may have messages in progress."""
        self.forms = FormAgreements()
        self._connecting: FailureBoard | None = None
        """The board of the generation under which this rank is about to meet the others."""
        self.connection: Any = None
        """Gloo's connection of all ranks; None while it is closed after a failure."""
        self.all_gather = AllGather(self, range(ranks), CONTROL_TAG)
        self._devices: DeviceConnections | None = None
        self._routes: list[Route] = []
        self._pipelines = 0
        self._failure: FailureReport | None = None
        self._raised = False
        """Whether this rank has raised the failure."""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._store = store
        self._store.set_timeout(_STORE_TIMEOUT)
        self.board = FailureBoard(PrefixStore("penstock/none", store), rank, self.members, Notices(store))
        if not returning:
            self._connect(deadline)
        self._watcher = threading.Thread(target=self._watch, name="penstock watch", daemon=True)
        self._watcher.start()

    # Connecting -------------------------------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        """Meet all members under the next generation."""
        generation = self.generation + 1
        store = PrefixStore(f"penstock/{generation}", self._store)
        board = FailureBoard(store, self.rank, self.members, Notices(self._store), self._list_ended if self.goes_on else None)
        self._connecting = board
        try:
            self._meet(store, deadline)
            if self.connection is not None:  # nobody uses it any more: all have come here
                self._disconnect()
            connection = self._open_gloo(store, deadline)
        except PipelineError as error:
            if not self.goes_on:
                raise
            self._disconnect()
            with self._lock:
                self.board, self.generation, self._raised = board, generation, True
            self._failure = board.post_failure(str(error), None, self._activity.describe(), disconnected=True)
            raise self._build_error(self._failure, error) from error
        finally:
            self._connecting = None
        with self._lock:
            self.board = board
            self.generation, self.connection = generation, connection
            self._failure, self._raised = None, False
        self.all_gather.members = self.members
        if self.transport == "auto":
            devices = self.all_gather.run("devices", device_id(), deadline)
            self.transport = "direct" if can_use_nccl(devices) else "framed"
        self.direct, self.rendezvous = self.transport != "framed", self.transport == "direct"
        if self.direct:
            self._devices = DeviceConnections(store, self.rank, self.members, deadline, edges=self.transport == "edges")
            self._devices.open(self._living_routes())

    def _open_gloo(self, store: Any, deadline: float) -> Any:
        place = self.members.index(self.rank)
        try:
            connection = dist.ProcessGroupGloo(store, place, len(self.members), timedelta(seconds=deadline))
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank} cannot connect to the others: {error}") from error
        return connection if len(self.members) == self.ranks else RenumberedConnection(connection, self.members)

    def _meet(self, store: Any, deadline: float) -> None:
        """Wait until all members have arrived. Raises if one never will, or the deadline passes."""
        count_arrival(store, "here", self.rank, len(self.members))
        pause, until = _PAUSE, time.monotonic() + deadline
        notices, news = Notices(self._store), True
        while not store.check(["here/all"]):
            ended, returned = (self._list_ended(), self._list_members("returned")) if news else ([], [])
            is_over = news and self.goes_on and store.check(["failure"])
            if ended or returned or is_over or time.monotonic() > until:
                missing = [rank for rank in self.members if not store.check([f"here/{rank}"])]
                gone = f"ranks {ended} have ended" if ended else f"ranks {returned} have returned: they made fewer calls"
                why = gone if ended or returned else f"ranks {missing} did not come within {deadline:g} s"
                raise PipelineError(f"rank {self.rank} cannot connect to the others: {why}")
            time.sleep(pause)
            pause, news = lengthen_pause(pause), notices.have_come()

    def _has_any(self, what: str) -> bool:
        """Whether any rank has `ended` (its process is gone) or `returned` (its function has)."""
        with contextlib.suppress(RuntimeError):
            return bool(self._store.check([what]))
        return False

    def _list_members(self, what: str) -> list[int]:
        """The members that have `ended` or `returned`; one request while there are none."""
        with contextlib.suppress(RuntimeError):
            return [rank for rank in self.members if self._store.check([f"{what}/{rank}"])] if self._has_any(what) else []
        return []

    def _list_ended(self) -> list[int]:
        return self._list_members("ended")

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def healthy(self) -> bool:
        """Whether nothing has failed since the start."""
        return self.generation == 0 and self._failure is None

    def close(self) -> None:
        """Leave for good. Waits until all ranks have finished, because messages that are not read yet would be lost."""
        self._activity.over = True
        if self._failure is None or self.rank not in (self._failure.lost or ()):
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._store.set(f"returned/{self.rank}", b"")
                self._store.set("returned", b"")
            self.board.post_return(self.all_gather.number)
        if self.connection is not None:
            self.board.wait_until_all_leave(LEAVE, lambda: bool(self._list_ended()))
            if self.board.has_failure():
                self.board.post_activity(self._activity.describe())
        self._closing.set()
        self._watcher.join()
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connections, and drop everything that uses them: this wakes the ranks that wait for this one."""
        self.connection = None
        self.ends.drop()
        self.all_gather.drop()
        devices, self._devices = self._devices, None
        if devices is not None:
            devices.abort()

    # Failures ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look for failures of other ranks while this one computes or waits: one request per look while nothing happens."""
        seen: FailureBoard | None = None
        first_return: tuple[int, int] | None = None
        ended: list[int] = []
        notices = Notices(self._store)
        while not self._closing.wait(_LOOK):
            board, failed, connecting = self.board, False, self._connecting
            if connecting is not None and self.goes_on and connecting.has_failure():
                connecting.post_activity(self._activity.describe())  # this rank is alive, though it cannot get through to the others
            if self.connection is None:
                continue
            if notices.have_come() or board is not seen:
                seen, failed, first_return = board, board.has_failure(), board.find_first_return()
                ended = self._list_ended() if self.goes_on else []
            if failed:
                board.post_activity(self._activity.describe())
            elif (gone := self._find_outrun(first_return)) is not None:
                headline = f"{self.describe_rank(gone)} has returned: it made fewer calls than the others"
                board.post_failure(headline, None, self._activity.describe())
            elif ended:
                headline = f"the process of {self.describe_rank(ended[0])} has ended"
                board.post_failure(headline, None, self._activity.describe(), disconnected=True)
            else:
                continue
            with self._lock:
                if board is self.board:  # else this rank has raised it and connected again
                    self._disconnect()

    def _find_outrun(self, first_return: tuple[int, int] | None) -> int | None:
        """A rank that has returned before the exchange that this rank is in or comes to, so that it never takes part.

        A step ends with an exchange. The count is read before `running`: a step that runs then comes after that many.
        """
        comes_to = self.all_gather.number
        comes_to += self._activity.running
        if first_return is None or self.subgroups:  # subgroups count exchanges of their own
            return None
        exchanges, rank = first_return
        return rank if comes_to > exchanges else None

    def raise_lost(self, peer: int, what: str, error: Exception) -> NoReturn:
        """A message could not be sent or received: raise the known failure, or report this one."""
        timed_out = is_timeout(error)
        until = time.monotonic() + (0.0 if timed_out else _EXPLAIN)
        # Gloo closes a connection before the rank at its end can say why.
        while isinstance(error, RuntimeError) and not self.board.has_failure():
            if time.monotonic() >= until:
                waited = f"waited {(clock() - self._activity.since) / 1e9:.1f} s for {what}"
                text = waited if timed_out else f"lost the connection to rank {peer} while it waited for {what}"
                raise self._report(f"rank {self.rank} {text}", error, late=timed_out, disconnected=not timed_out)
            time.sleep(_PAUSE)
        self._disconnect()
        self._raise()

    def check_wait(self, what: str, deadline: float) -> None:
        """Raise if any rank has failed, or the deadline has passed. Call it again and again while waiting for torch's own collectives."""
        activity = self._activity
        if activity.waits != what:
            activity.since, activity.waits = clock(), what
        if self.connection is None:
            self.raise_lost(self.rank, what, AttributeError("the connection was closed"))
        if clock() - activity.since > deadline * 1e9:
            self.raise_lost(self.rank, what, RuntimeError("timed out"))

    def _raise(self) -> NoReturn:
        self._raised = True
        if self._failure is None:
            self.board.post_activity(self._activity.describe())
            self._failure = self.board.read_report()
        raise self._build_error(self._failure, None)

    def _build_error(self, report: FailureReport, cause: BaseException | None) -> PipelineError:
        if report.lost is None:
            error = PipelineError(report.text)
        elif self.rank in report.lost:
            error = LostRankError(f"{self.describe_rank(self.rank)} did not answer the others, which go on without it\n{report.text}")
        else:
            error = LostRankError(report.text, report.lost)
        error.__cause__ = cause or (None if report.cause is None else report.cause.rebuild())
        return error

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        return self._report(headline, cause)

    def _report(self, headline: str, cause: BaseException | None, *, late: bool = False, disconnected: bool = False) -> PipelineError:
        self._failure = self.board.post_failure(headline, cause, self._activity.describe(), late=late, disconnected=disconnected)
        self._raised = True
        self._disconnect()
        is_first = self._failure.text.startswith(headline)
        return self._build_error(self._failure, cause if is_first else None)

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        if self.connection is not None or self._failure is None:
            where = "in" if self._activity.running else "outside of"
            plain = f"{self.describe_rank(self.rank)} failed {where} a step: {describe_error(error)}"
            headline = str(error) if isinstance(error, PipelineError) else plain
            self._failure = self.board.post_failure(headline, error.__cause__ or error, self._activity.describe(), fatal=fatal)
            self._disconnect()
        self._raised = True

    def enter(self, rank: int, deadline: float) -> None:
        if self.connection is not None:
            return
        if self.returning:
            self._return()
        elif not self._raised:
            self._raise()
        if self._failure is not None and (self._failure.fatal or self.rank in (self._failure.lost or ())):
            raise self._build_error(self._failure, None)
        if self._failure is not None and self._failure.lost:
            self.members = tuple(rank for rank in self.members if rank not in (self._failure.lost or ()))
        if self._failure is not None:
            self.newcomers = ()
        self._connect(max(deadline, CONNECT))

    # Losses -----------------------------------------------------------------------------------------------------------

    def allow_losses(self) -> None:
        """From now on, a rank whose process is gone fails the others with a `LostRankError`, after which they go on without it.

        Called on all ranks, between exchanges.
        """
        self.goes_on, self.board.list_ended = True, self._list_ended

    def list_returning(self) -> list[int]:
        """The lost ranks in whose place a process waits to be let in."""
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self.ranks) if rank not in self.members and self._store.check([f"waiting/{rank}"])]
        return []

    def readmit(self, ranks: Sequence[int], deadline: float) -> None:
        """Let in the processes that wait in the place of lost ranks. Called on all members, after the same exchange."""
        members = tuple(sorted({*self.members, *ranks}))
        if self.rank == self.members[0]:
            for rank in ranks:
                self._store.delete_key(f"ended/{rank}")
                self._store.delete_key(f"waiting/{rank}")
                self._store.set(f"invited/{rank}", pickle.dumps((self.generation + 1, members, tuple(ranks), self.transport)))
        self.gather(self.rank, "invited", None, deadline)  # nobody looks for them before the old ones are forgotten
        self.members, self.newcomers = members, tuple(ranks)
        self._connect(max(deadline, CONNECT))

    def _return(self) -> None:
        """Wait until the others let this process in, which takes the place of a lost rank."""
        self._store.set(f"waiting/{self.rank}", b"")
        pause, until = _PAUSE, time.monotonic() + _RETURN
        while not self._store.check([f"invited/{self.rank}"]):
            if self._has_any("returned") or time.monotonic() > until:
                why = "have finished" if self._has_any("returned") else f"have saved no checkpoint for {_RETURN / 3600:g} hours"
                raise LostRankError(f"rank {self.rank} cannot come back: the others {why}")
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK)
        generation, self.members, self.newcomers, self.transport = pickle.loads(self._store.get(f"invited/{self.rank}"))
        self._store.delete_key(f"invited/{self.rank}")
        self.generation, self.returning, self.goes_on = generation - 1, False, True

    # Messages ---------------------------------------------------------------------------------------------------------

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return (DirectOutbox if self.direct else FramedOutbox)(self, route, slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return (DirectInbox if self.direct else FramedInbox)(self, route, program, deadline)

    def number_pipeline(self, rank: int) -> int:
        self._pipelines += 1
        return self._pipelines

    def open(self, routes: Iterable[Route], deadline: float) -> None:
        if self.direct:
            everyone = self.gather(self.rank, "routes", sorted(routes), deadline)
            self._routes = sorted({*self._routes, *(route for opened in everyone for route in opened)})
            assert self._devices is not None
            self._devices.open(self._living_routes())

    def _living_routes(self) -> list[Route]:
        return [route for route in self._routes if {route[0], route[1]} <= set(self.members)]

    def agree(self, program: int, inputs: Any, deadline: float) -> None:
        if self.direct:
            self.forms.agree(program, (self.generation, inputs), partial(self.gather, self.rank, "inputs", deadline=deadline))

    def device_connection(self, route: Route, peer: int) -> tuple[Any, int]:
        """The connection that carries a route's tensors, and the peer's rank on it."""
        if self._devices is None:
            raise AttributeError("the connection was closed")
        return self._devices.find(route, peer)

    def activity(self, rank: int) -> Activity:
        return self._activity

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        self.enter(rank, deadline)
        return self.all_gather.run(name, value, deadline)

    def describe_rank(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})" if self.names else f"rank {rank}"

    def ident(self, thing: object) -> Hashable:
        return self.rank, id(thing)


class RenumberedConnection:
    """A connection of some ranks, which gloo numbers from 0, under the numbers that they have among all."""

    def __init__(self, connection: Any, members: Sequence[int]) -> None:
        self._connection, self._places = connection, {rank: place for place, rank in enumerate(members)}

    def send(self, tensors: Any, target: int, tag: int) -> Any:
        return self._connection.send(tensors, self._places[target], tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._connection.recv(tensors, self._places[source], tag)


class ChannelEnds:
    """Weak references to everything that must drop its messages before a connection can close.

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
        """Register an end. `sends` are its messages in progress: number, work, and the object that holds the memory."""
        self._settle()
        self._sends[weakref.ref(end, self._forget)] = sends

    def _forget(self, reference: weakref.ref[Any]) -> None:
        if sends := self._sends.pop(reference, None):
            self._left.append(sends)

    def _settle(self) -> None:
        """Wait for the sends of ends that are gone. Their steps are over, so the other ranks have taken the messages."""
        while self._left:
            with contextlib.suppress(RuntimeError, IndexError):  # the connection is lost, or everything was dropped meanwhile
                for _, work, _ in self._left.popleft():
                    work.wait()

    def drop(self) -> None:
        """Let go of all messages in progress."""
        for end in self:
            end.drop()
        self._left.clear()
