"""Some of the processes as a group of their own: a row or a column of a device mesh.

They are numbered from 0 and have channels and exchanges of their own, but one alarm with all: whatever fails anywhere in the mesh,
every rank of it raises the same report.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.runtime.device.device import direct_connection, stop
from penstock.runtime.transport.activity import Activity
from penstock.runtime.transport.all_gather import Exchange
from penstock.runtime.transport.direct_channels import DirectInbox, DirectOutbox
from penstock.runtime.transport.framed_channels import FramedInbox, FramedOutbox
from penstock.runtime.transport.group import Group, Inbox, Outbox, Route
from penstock.runtime.transport.processes import Ends, Processes
from penstock.runtime.transport.store import PrefixStore

_TAGS = 1 << 27
"""Above the tags of programs. Two processes can be together in several slices, so that each has one of its own."""


class Slice(Group):
    """The processes `members` of a whole, this one among them."""

    parallel = True

    def __init__(self, whole: Processes, members: Sequence[int]) -> None:
        self.whole, self.members = whole, tuple(members)
        self.rank, self.ranks = self.members.index(whole.rank), len(self.members)
        self.learning = False
        self._name = "-".join(map(str, self.members))
        self._agreed: dict[tuple[int, int], list[Any]] = {}
        self._renumbered: _Renumbered | None = None
        self._collectives: tuple[int, Any] | None = None
        self.exchange = Exchange(self, _TAGS + 2 * (zlib.crc32(self._name.encode()) & 0xFFFFFF))
        whole.ends.add(self.exchange)
        whole.ends.add(self)

    # What it has of the whole -----------------------------------------------------------------------------------------

    @classmethod
    def of(cls, whole: Processes, members: Sequence[int]) -> Slice:
        """The one slice of these members."""
        found: Slice | None = whole.slices.get(tuple(members))
        if found is None:
            found = whole.slices[tuple(members)] = cls(whole, members)
        return found

    @property
    def generation(self) -> int:
        return self.whole.generation

    @property
    def ends(self) -> Ends:
        return self.whole.ends

    @property
    def mine(self) -> Activity:
        return self.whole.mine

    @property
    def connection(self) -> Any:
        """The whole's, with this group's numbers; None where it is closed."""
        connection = self.whole.connection
        if connection is None:
            return None
        found = self._renumbered
        if found is None or found.connection is not connection:
            found = self._renumbered = _Renumbered(connection, self.members)
        return found

    @property
    def direct(self) -> bool:  # type: ignore[override]
        return self.whole.direct

    @property
    def rendezvous(self) -> bool:  # type: ignore[override]
        return self.whole.rendezvous

    def called(self, rank: int) -> str:
        return self.whole.called(self.members[rank])

    def activity(self, rank: int) -> Activity:
        return self.whole.mine

    def ident(self, thing: object) -> Hashable:
        return self.whole.ident(thing)

    def count(self, rank: int) -> int:
        return self.whole.count(rank)

    # Failures ---------------------------------------------------------------------------------------------------------

    def lost(self, peer: int, what: str, error: Exception) -> NoReturn:
        self.whole.lost(self.members[peer], what, error)

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        return self.whole.report_failure(self.whole.rank, headline, cause)

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        self.whole.fail(self.whole.rank, error, fatal=fatal)

    def enter(self, rank: int, deadline: float) -> None:
        self.whole.enter(self.whole.rank, deadline)

    # Messages ---------------------------------------------------------------------------------------------------------

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return DirectOutbox(self, route, program, deadline) if self.direct else FramedOutbox(self, route, slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return (DirectInbox if self.direct else FramedInbox)(self, route, program, deadline)

    def open(self, routes: Iterable[Route], deadline: float) -> None:
        self.whole.open(map(self._of_whole, routes), deadline)

    def data(self, route: Route, peer: int) -> tuple[Any, int]:
        return self.whole.data(self._of_whole(route), self.members[peer])

    def _of_whole(self, route: Route) -> Route:
        source, target, what = route
        return self.members[source], self.members[target], what

    def agree(self, program: int, inputs: Any, deadline: float) -> None:
        if self.direct:
            everyone = self.gather(self.rank, "inputs", inputs, deadline)
            self.learning = self._agreed.get((self.generation, program)) != everyone
            self._agreed[self.generation, program] = everyone

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        self.enter(rank, deadline)
        return self.exchange.gather(name, value, deadline)

    # Sums and copies of tensors ---------------------------------------------------------------------------------------

    def collectives(self, deadline: float) -> Any:
        """The connection for what these ranks compute together; a new one after a failure."""
        self.enter(self.rank, deadline)
        if self._collectives is None or self._collectives[0] != self.generation:
            board = PrefixStore(f"slice/{self._name}", self.whole.alarm.store)
            made = direct_connection(board, self.rank, self.ranks, deadline) if self.direct else self._gloo(board, deadline)
            self._collectives = self.generation, made
        return self._collectives[1]

    def _gloo(self, board: Any, deadline: float) -> Any:
        try:
            return dist.ProcessGroupGloo(board, self.rank, self.ranks, timedelta(seconds=deadline))
        except RuntimeError as error:
            self.lost((self.rank + 1) % self.ranks, f"ranks {list(self.members)} to connect", error)

    def drop(self) -> None:
        """Let go of the connections; who waits for this rank then knows."""
        self._renumbered = None
        found, self._collectives = self._collectives, None
        if found is not None:
            stop(found[1])


class _Renumbered:
    """A connection on which ranks have the numbers of a slice."""

    __slots__ = ("connection", "members", "recv_from", "send_to")

    def __init__(self, connection: Any, members: Sequence[int]) -> None:
        self.connection, self.members = connection, members
        self.send_to, self.recv_from = connection.send, connection.recv

    def send(self, frames: Any, target: int, tag: int) -> Any:
        return self.send_to(frames, self.members[target], tag)

    def recv(self, frames: Any, source: int, tag: int) -> Any:
        return self.recv_from(frames, self.members[source], tag)
