"""Some of the processes as a group of their own: a row or a column of a device mesh."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.runtime.device.connections import abort_connection, connect_devices
from penstock.runtime.transport.activity import Activity
from penstock.runtime.transport.all_gather import AllGather
from penstock.runtime.transport.group import Group, Inbox, Outbox, Route
from penstock.runtime.transport.processes import Processes
from penstock.runtime.transport.store import PrefixStore

_TAGS = 1 << 27
"""Above the tags of programs. Two processes can be in several subgroups together, so each subgroup has a tag of its own."""


def get_subgroup(parent: Processes, members: Sequence[int]) -> Subgroup:
    """The subgroup of these ranks of a group, this process's rank among them. It is made when first asked for."""
    subgroup: Subgroup | None = parent.subgroups.get(tuple(members))
    if subgroup is None:
        subgroup = parent.subgroups[tuple(members)] = Subgroup(parent, members)
    return subgroup


class Subgroup(Group):
    """A view of a group that numbers the ranks `members` from 0.

    It translates ranks and delegates to the parent, so that failures and generations are the parent's: whatever fails on any rank
    of the parent, all of them raise the same report. Only all-gathers and collectives are its own, because just the members take
    part in them.
    """

    parallel = True

    def __init__(self, parent: Processes, members: Sequence[int]) -> None:
        self.parent, self.members = parent, tuple(members)
        self.rank, self.ranks = self.members.index(parent.rank), len(self.members)
        self._name = "-".join(map(str, self.members))
        self._all_gather = AllGather(parent, self.members, _TAGS + 2 * (zlib.crc32(self._name.encode()) & 0xFFFFFF))
        self._collectives: tuple[int, Any] | None = None
        """The connection for collectives, and the parent's generation that it belongs to."""
        parent.ends.add(self._all_gather)
        parent.ends.add(self)

    @property
    def direct(self) -> bool:  # type: ignore[override]
        return self.parent.direct

    @property
    def rendezvous(self) -> bool:  # type: ignore[override]
        return self.parent.rendezvous

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
        return self.parent.outbox(self._parent_route(route), slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return self.parent.inbox(self._parent_route(route), program, deadline)

    def open(self, routes: Iterable[Route], deadline: float) -> None:
        self.parent.open(map(self._parent_route, routes), deadline)

    def _parent_route(self, route: Route) -> Route:
        source, target, what = route
        return self.members[source], self.members[target], what

    def agree(self, program: int, inputs: Any, deadline: float) -> None:
        if self.direct:
            known = self.parent.generation, inputs
            self.parent.forms.agree(program, known, lambda changed: self.gather(self.rank, "inputs", changed, deadline))

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        self.enter(rank, deadline)
        return self._all_gather.run(name, value, deadline)

    def connect_collectives(self, deadline: float) -> Any:
        """The process group for sums and copies of tensors among the members; a new one after each failure.

        The members must have just met in a `gather`, so that none of them waits for one that has failed.
        """
        self.enter(self.rank, deadline)
        generation = self.parent.generation
        if self._collectives is None or self._collectives[0] != generation:
            store = PrefixStore(f"slice/{self._name}", self.parent.board.store)
            connect = connect_devices if self.direct else self._connect_gloo
            self._collectives = generation, connect(store, self.rank, self.ranks, deadline)
        return self._collectives[1]

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
