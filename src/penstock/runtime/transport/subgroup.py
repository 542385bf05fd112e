"""Some ranks of a group as a group of their own: a row or a column of a device mesh, or the replicas of one stage."""

from __future__ import annotations

import time
import zlib
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.device.connections import abort_connection, connect_devices
from penstock.runtime.transport.all_gather import AllGather
from penstock.runtime.transport.failures import PrefixStore, count_arrival, lengthen_pause
from penstock.runtime.transport.group import EMPTY, Activity, Group, Inbox, Operation, Outbox, Route
from penstock.runtime.transport.processes import Processes

_TAGS = 1 << 27
"""Above the tags of programs. Two processes can be in several subgroups together, so each subgroup has a tag of its own."""
_UNLIMITED = 1 << 30
_PAUSE = 0.001


def get_subgroup(parent: Processes, members: Sequence[int]) -> ProcessSubgroup:
    """The subgroup of these ranks of a group, this process's rank among them. It is made when first asked for."""
    subgroup: ProcessSubgroup | None = parent.subgroups.get(tuple(members))
    if subgroup is None:
        subgroup = parent.subgroups[tuple(members)] = ProcessSubgroup(parent, members)
    return subgroup


def join_members(parent: Group, rank: int, members: Sequence[int]) -> ProcessSubgroup | ThreadSubgroup:
    """The subgroup of these ranks of a group of processes or threads; `rank` is this one's number in the parent."""
    return get_subgroup(parent, members) if isinstance(parent, Processes) else ThreadSubgroup(parent, rank, members)


class Subgroup(Group):
    """A view of a group that numbers the ranks `members` from 0.

    It translates ranks and delegates to the parent, so that failures and generations are the parent's: whatever fails on any rank
    of the parent, all of them raise the same report. Only all-gathers and collectives are its own, because just the members take
    part in them.
    """

    def __init__(self, parent: Group, rank: int, members: Sequence[int]) -> None:
        self.parent, self.members = parent, tuple(members)
        self.rank, self.ranks, self.parallel = self.members.index(rank), len(self.members), parent.parallel
        self.direct, self.rendezvous, self.shares_memory = parent.direct, parent.rendezvous, parent.shares_memory

    @abstractmethod
    def connect_collectives(self, deadline: float) -> Any:
        """A process group, or what stands in for one, for sums and copies of tensors among the members.

        The members must have just met in a `gather`, so that none of them waits for one that has failed.
        """

    @property
    def generation(self) -> int:
        return self.parent.generation

    def describe_rank(self, rank: int) -> str:
        return self.parent.describe_rank(self.members[rank])

    def activity(self, rank: int) -> Activity:
        return self.parent.activity(self.members[rank])

    def ident(self, thing: object) -> Hashable:
        return self.parent.ident(thing)

    def number_pipeline(self, rank: int) -> int:
        return self.parent.number_pipeline(self.members[rank])

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        return self.parent.report_failure(self.members[rank], headline, cause)

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        self.parent.fail(None if rank is None else self.members[rank], error, fatal=fatal)

    def enter(self, rank: int, deadline: float) -> None:
        self.parent.enter(self.members[rank], deadline)

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return self.parent.outbox(self._find_parent_route(route), slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return self.parent.inbox(self._find_parent_route(route), program, deadline)

    def _find_parent_route(self, route: Route) -> Route:
        source, target, what = route
        return self.members[source], self.members[target], what


class ProcessSubgroup(Subgroup):
    """Some of the processes of a group."""

    parent: Processes

    def __init__(self, parent: Processes, members: Sequence[int]) -> None:
        super().__init__(parent, parent.rank, members)
        self._name = "-".join(map(str, self.members))
        self._all_gather = AllGather(parent, self.members, _TAGS + 2 * (zlib.crc32(self._name.encode()) & 0xFFFFFF))
        self._collectives: tuple[int, Any] | None = None
        """The connection for collectives, and the parent's generation that it belongs to."""
        parent.ends.add(self._all_gather)
        parent.ends.add(self)

    def open(self, routes: Iterable[Route], deadline: float) -> None:
        self.parent.open(map(self._find_parent_route, routes), deadline)

    def agree(self, program: int, inputs: Any, deadline: float) -> None:
        if self.direct:
            known = self.parent.generation, inputs
            self.parent.forms.agree(program, known, partial(self.gather, self.rank, "inputs", deadline=deadline))

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        self.enter(rank, deadline)
        return self._all_gather.run(name, value, deadline)

    def connect_collectives(self, deadline: float) -> Any:
        """See `Subgroup`; a new connection after each failure."""
        self.enter(self.rank, deadline)
        generation = self.parent.generation
        if self._collectives is None or self._collectives[0] != generation:
            self._collectives = generation, self.connect(f"slice/{self._name}", deadline)
        return self._collectives[1]

    def connect(self, name: str, deadline: float) -> Any:
        """A new process group of the members under a name that they have not used since the last failure. They must have just met.

        Its connections close when nothing refers to it.
        """
        store = PrefixStore(name, self.parent.board.store)
        self._wait_for_members(store, deadline)
        connect = connect_devices if self.direct else self._connect_gloo
        return connect(store, self.rank, self.ranks, deadline)

    def _wait_for_members(self, store: Any, deadline: float) -> None:
        """Wait until all members are about to connect. Raises if a rank fails before it comes, for which torch would wait all the time."""
        count_arrival(store, "here", self.rank, self.ranks)
        pause = _PAUSE
        while not store.check(["here/all"]):
            self.parent.check_wait(f"ranks {list(self.members)} to connect", deadline)
            time.sleep(pause)
            pause = lengthen_pause(pause)
        self.parent.activity(self.parent.rank).waits = None

    def _connect_gloo(self, store: Any, rank: int, ranks: int, deadline: float) -> Any:
        try:
            return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=deadline))
        except RuntimeError as error:
            self.parent.raise_lost(self.members[(rank + 1) % ranks], f"ranks {list(self.members)} to connect", error)

    def drop(self) -> None:
        """Close the connection for collectives, which wakes the members that wait for this rank."""
        collectives, self._collectives = self._collectives, None
        if collectives is not None:
            abort_connection(collectives[1])


class ThreadSubgroup(Subgroup):
    """Some of the virtual ranks of a launch."""

    def __init__(self, parent: Group, rank: int, members: Sequence[int]) -> None:
        super().__init__(parent, rank, members)
        self._own = rank
        self._channels: dict[tuple[int, float], tuple[Outbox, Inbox, Operation]] = {}

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        """All values, by messages between the members: other ranks take no part."""
        self.enter(rank, deadline)
        others = [member for member in self.members if member != self._own]
        for member in others:
            self._open_channel(member, deadline)[0].put((name, value))
        values = {self._own: value}
        for member in others:
            _, inbox, post = self._open_channel(member, deadline)
            inbox.begin()
            post()
            call, values[member] = inbox.pull([EMPTY], 0)
            if call != name:
                text = f"{self.describe_rank(rank)} is at {name!r}, but {self.parent.describe_rank(member)} at {call!r}"
                raise self.report_failure(rank, f"{text}: every rank must make the same calls in the same order")
        return [values[member] for member in self.members]

    def _open_channel(self, member: int, deadline: float) -> tuple[Outbox, Inbox, Operation]:
        """Both directions between this rank and another member, and the operation that expects its next message."""
        if (member, deadline) not in self._channels:
            what = f"values for ranks {list(self.members)}"
            inbox = self.parent.inbox((member, self._own, what), 0, deadline)
            outbox = self.parent.outbox((self._own, member, what), _UNLIMITED, 0, deadline)
            self._channels[member, deadline] = outbox, inbox, inbox.expect(0)
        return self._channels[member, deadline]

    def connect_collectives(self, deadline: float) -> ThreadCollectives:
        return ThreadCollectives(self, deadline)


@dataclass(frozen=True)
class ThreadCollectives:
    """Collectives of virtual ranks under the names of a process group; each has completed when its call returns."""

    group: ThreadSubgroup
    deadline: float

    @torch.no_grad()
    def allreduce(self, tensors: Sequence[Tensor]) -> ThreadCollectives:
        """Sum a tensor over the ranks, in their order."""
        (tensor,) = tensors
        first, *others = self.group.gather(self.group.rank, "all-reduce", tensor, self.deadline)
        total = sum(others, start=first.clone())
        self.group.gather(self.group.rank, "all-reduced", None, self.deadline)  # no rank overwrites a term that another has yet to read
        tensor.copy_(total)
        return self

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> ThreadCollectives:
        """Copy the tensor of the rank that the options name as root."""
        (tensor,) = tensors
        given = self.group.gather(self.group.rank, "broadcast", tensor, self.deadline)[options.rootRank]
        if given is not tensor:
            tensor.copy_(given)
        self.group.gather(self.group.rank, "broadcast done", None, self.deadline)  # the root may change it from here on
        return self

    def wait(self, timeout: Any = None) -> None:
        """Return at once: the collective is complete."""
