"""Some of the virtual ranks of a launch as a group of their own, as `Slice` is of processes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.batch.step_input import EMPTY
from penstock.runtime.transport.activity import Activity
from penstock.runtime.transport.group import Group, Inbox, Operation, Outbox, Route
from penstock.runtime.transport.processes import Processes
from penstock.runtime.transport.subgroup import Slice

_UNLIMITED = 1 << 30


def join_members(whole: Group, rank: int, members: Sequence[int]) -> Slice | VirtualSlice:
    """The group of these members of a whole; this rank is one of them."""
    return Slice.of(whole, members) if isinstance(whole, Processes) else VirtualSlice(whole, rank, members)


class VirtualSlice(Group):
    """The virtual ranks `members` of a launch, numbered from 0. A failure anywhere is raised on all ranks of the launch."""

    shares_memory = True

    def __init__(self, whole: Group, rank: int, members: Sequence[int]) -> None:
        self.whole, self.members, self.own = whole, tuple(members), rank
        self.rank, self.ranks, self.parallel = self.members.index(rank), len(self.members), whole.parallel
        self._channels: dict[tuple[int, float], tuple[Outbox, Inbox, Operation]] = {}

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        """All values, by messages between the members: other ranks take no part."""
        self.whole.enter(self.own, deadline)
        others = [member for member in self.members if member != self.own]
        for member in others:
            self._channel(member, deadline)[0].put((name, value))
        values = {self.own: value}
        for member in others:
            _, inbox, post = self._channel(member, deadline)
            inbox.begin()
            post()
            theirs, values[member] = inbox.pull([EMPTY], 0)
            if theirs != name:
                text = f"{self.called(rank)} is at {name!r}, but {self.whole.called(member)} at {theirs!r}"
                raise self.report_failure(rank, f"{text}: every rank must make the same calls in the same order")
        return [values[member] for member in self.members]

    def _channel(self, member: int, deadline: float) -> tuple[Outbox, Inbox, Operation]:
        """Both directions between this rank and another member, and the operation that expects its next message."""
        if (member, deadline) not in self._channels:
            what = f"values for ranks {list(self.members)}"
            inbox = self.whole.inbox((member, self.own, what), 0, deadline)
            outbox = self.whole.outbox((self.own, member, what), _UNLIMITED, 0, deadline)
            self._channels[member, deadline] = outbox, inbox, inbox.expect(0)
        return self._channels[member, deadline]

    def collectives(self, deadline: float) -> VirtualCollectives:
        """The reductions and copies of tensors that `Slice.collectives` has for processes."""
        return VirtualCollectives(self, deadline)

    def _of_whole(self, route: Route) -> Route:
        source, target, what = route
        return self.members[source], self.members[target], what

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return self.whole.outbox(self._of_whole(route), slots, program, deadline)

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return self.whole.inbox(self._of_whole(route), program, deadline)

    def activity(self, rank: int) -> Activity:
        return self.whole.activity(self.members[rank])

    def count(self, rank: int) -> int:
        return self.whole.count(self.members[rank])

    def called(self, rank: int) -> str:
        return self.whole.called(self.members[rank])

    def ident(self, thing: object) -> Hashable:
        return self.whole.ident(thing)

    def enter(self, rank: int, deadline: float) -> None:
        self.whole.enter(self.own, deadline)

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        self.whole.fail(self.own, error, fatal=fatal)

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        return self.whole.report_failure(self.own, headline, cause)


@dataclass(frozen=True)
class VirtualCollectives:
    """Collectives of virtual ranks under the names of a process group; each has completed when its call returns."""

    group: VirtualSlice
    deadline: float

    @torch.no_grad()
    def allreduce(self, tensors: Sequence[Tensor]) -> VirtualCollectives:
        """Sum a tensor over the ranks, in their order."""
        (tensor,) = tensors
        first, *others = self.group.gather(self.group.rank, "all-reduce", tensor, self.deadline)
        total = sum(others, start=first.clone())
        self.group.gather(self.group.rank, "all-reduced", None, self.deadline)  # no rank overwrites a term that another has yet to read
        tensor.copy_(total)
        return self

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> VirtualCollectives:
        """Copy the tensor of the first rank."""
        (tensor,) = tensors
        first = self.group.gather(self.group.rank, "broadcast", tensor, self.deadline)[0]
        if first is not tensor:
            tensor.copy_(first)
        self.group.gather(self.group.rank, "broadcast done", None, self.deadline)  # the first may change it from here on
        return self

    def wait(self, timeout: Any = None) -> None:
        """Return at once: the collective is complete."""
