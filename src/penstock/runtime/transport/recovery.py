"""Going on after ranks were lost: every call that all ranks make is done exactly once on each rank that is left.

A call ends with an exchange between all ranks, in which it is decided: if any rank has completed the exchange, all have entered it, so each
has everything that it needs to complete the call. When ranks are lost, the others meet again and compare how many calls they have
completed. A rank that is one call behind completes it with the result of another; if none is ahead, all of them run the call again.

Calls count across all pipelines of the ranks, because one rank may have completed a call of one pipeline and be in a call of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from penstock.errors import LostRankError
from penstock.runtime.transport.group import Group, do_nothing
from penstock.runtime.transport.processes import Processes
from penstock.runtime.transport.subgroup import get_subgroup
from penstock.runtime.transport.threads import VirtualGroup

T = TypeVar("T")
READMITTED = "readmitted"
"""The name of the exchange that ends the call in which processes come back."""


@dataclass(frozen=True)
class Prepared:
    """A call whose last exchange has begun: everything of it is done on this rank, and can still be undone."""

    undo: Callable[[], None]
    complete: Callable[[Any], Any]
    """Completes the call with the result of its last exchange; returns what the call returns."""


class RecoveredPipeline(Protocol):
    """The part of a pipeline that goes on with the ranks that are left."""

    @property
    def number(self) -> int:
        """Its number among the pipelines of this process, the same on all ranks."""
        ...

    def regroup(self) -> None:
        """Prepare for the ranks that are left; called on all of them after a loss, when they have met again. May exchange values."""
        ...


class Recovery:
    """The calls of all pipelines on the ranks of a mesh, see `find_recovery`.

    `run` makes a call, which must end with `decide`, and makes it again if ranks are lost in it. Before a call is repeated, all pipelines
    that were added are prepared for the ranks that are left.
    """

    def __init__(self, group: Processes, deadline: float) -> None:
        self.group, self.deadline = group, deadline
        self.done = 0
        """How many calls this rank has completed."""
        self.result: Any = None
        """The result of the last exchange of the last of them."""
        self.alone = False
        """Whether this process has come back in the place of a lost rank and has not run a step yet: its calls are its own until then."""
        self._pipelines: WeakValueDictionary[int, RecoveredPipeline] = WeakValueDictionary()
        self._prepared: Prepared | None = None
        self._running = self._repeating = False

    def add(self, pipeline: RecoveredPipeline, deadline: float) -> None:
        """Prepare this pipeline too after losses, for as long as it is there; waits last up to the longest deadline of all."""
        self._pipelines[pipeline.number] = pipeline
        self.deadline = max(self.deadline, deadline)

    @property
    def pipelines(self) -> int:
        """How many pipelines there are."""
        return len(self._pipelines)

    def run(self, call: Callable[[], T]) -> T:
        """Make a call; a call within another is part of it."""
        if self._running or self.alone:
            return call()
        self._running = True
        try:
            while True:
                try:
                    return call()
                except LostRankError as error:
                    if error.lost is None:
                        raise
                # Not in the handler: the error keeps the frames of the call, and with them connections that other ranks still wait on.
                completed, result = self._recover()
                if completed:
                    return result  # type: ignore[no-any-return]
        finally:
            self._running = False
            self._undo()

    def decide(self, name: str, value: Any, undo: Callable[[], None], complete: Callable[[list[Any]], T]) -> T:
        """End a call: exchange values with all ranks, and complete the call with all of them, in the order of ranks."""
        if self.alone:
            return complete([value])
        if self._repeating:
            return complete(self.group.gather(self.group.rank, name, value, self.deadline))
        self._prepared = Prepared(undo, complete)
        values = self.group.gather(self.group.rank, name, value, self.deadline)
        self._prepared = None
        self.done, self.result = self.done + 1, values
        return complete(values)

    def find_members(self) -> tuple[Group, int]:
        """All ranks that take part in calls now as a group, and this one's number in it."""
        if self.alone:
            return VirtualGroup(1), 0
        members = get_subgroup(self.group, self.group.members)
        return members, members.rank

    @property
    def is_prepared(self) -> bool:
        """Whether the present call may still be completed or undone: its last exchange has begun."""
        return self._prepared is not None

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """A context, in `regroup`, for calls that were completed before and whose effects are lost: they do not count again."""
        self._repeating = True
        try:
            yield
        finally:
            self._repeating = False

    def join(self, value: Any) -> list[Any]:
        """Take part, in a process that has come back, in the call in which the others let it in; returns the values of all ranks."""
        values = self.group.gather(self.group.rank, READMITTED, (self.done, value), self.deadline)
        self.done, self.result, self.alone = max(done for done, _ in values) + 1, values, True
        return [sent for _, sent in values]

    def let_in(self, value: Any) -> list[Any]:
        """End the call in which a process comes back: the counterpart of `join` on all other ranks."""
        values = self.decide(READMITTED, (self.done, value), do_nothing, lambda values: values)
        return [sent for _, sent in values]

    def _recover(self) -> tuple[bool, Any]:
        """Meet the ranks that are left; returns whether another rank has completed this call, and then what it returns here."""
        outcome: tuple[bool, Any] = (False, None)
        while True:
            try:
                group = self.group
                group.enter(group.rank, self.deadline)
                completed = group.gather(group.rank, "completed calls", self.done, self.deadline)
                if max(completed) > min(completed):
                    source = completed.index(max(completed))
                    own = self.result if group.members[source] == group.rank else None
                    result = group.gather(group.rank, "result of a completed call", own, self.deadline)[source]
                    if self.done < max(completed):
                        assert self._prepared is not None, "all ranks have entered the last exchange of a call that any has completed"
                        prepared, self._prepared = self._prepared, None
                        self.done, self.result = self.done + 1, result
                        outcome = True, prepared.complete(result)
                self._undo()
                self._go_on()
                return outcome
            except LostRankError as error:
                if error.lost is None:
                    raise

    def _undo(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.undo()

    def _go_on(self) -> None:
        """Prepare the pipelines that all ranks still have; a rank may have let go of one already that others are about to let go of."""
        pipelines = dict(self._pipelines)
        for number in sorted(set.intersection(*self.group.gather(self.group.rank, "pipelines", set(pipelines), self.deadline))):
            pipelines[number].regroup()


def find_recovery(group: Processes, deadline: float) -> Recovery:
    """Return the recovery of a group's ranks, which all its pipelines share."""
    if group.recovery is None:
        group.recovery = Recovery(group, deadline)
    recovery: Recovery = group.recovery
    return recovery
