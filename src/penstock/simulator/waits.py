"""What each computation of a timeline waited for, whether its times were simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.action import Action
from penstock.ir.kind import SENDS
from penstock.ir.rows import Flags, Floats, Ints

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


NEGLIGIBLE = 0.01
"""Of the median computation: a rank that stands idle for less has not waited. Measured times never fall together to the last digit."""


@dataclass(frozen=True, eq=False)
class WaitCauses:
    """One value per computation, in the order of the rows; other computations are named by their place in that order."""

    timeline: Timeline

    @cached_property
    def node(self) -> Ints:
        """The action of `table.rows` that each computation is."""
        return np.flatnonzero(self.timeline.computes)

    @cached_property
    def place(self) -> Ints:
        """The reverse of `node`; for an action that is not a computation, the place of the computation before it."""
        return np.cumsum(self.timeline.computes) - 1

    @cached_property
    def rank(self) -> Ints:
        return np.asarray(self.timeline.flat.graph().rank[self.node], dtype=np.int64)

    @cached_property
    def start(self) -> Floats:
        return self.timeline.start[self.node]

    @cached_property
    def end(self) -> Floats:
        return self.timeline.end[self.node]

    @cached_property
    def before(self) -> Ints:
        """The rank's computation before this one, -1 for its first."""
        places = np.arange(len(self.node)) - 1
        first = np.ones(len(self.node), dtype=np.bool_)
        first[1:] = self.rank[1:] != self.rank[:-1]
        return np.where(first, -1, places)

    @cached_property
    def free(self) -> Floats:
        """When the rank had finished its computation before; 0 for its first."""
        return np.append(self.end, 0.0)[self.before]

    @cached_property
    def message(self) -> Ints:
        """The last message to arrive of those it needs, -1 if it needs none."""
        user, arrive = self.timeline.flat.graph().user, self.timeline.arrive
        order = np.lexsort((-np.arange(len(arrive)), arrive, user))  # of several at once the first counts
        latest = np.full(self.timeline.flat.num_nodes, -1, dtype=np.int64)
        latest[user[order]] = order
        return latest[self.node]

    @cached_property
    def arrival(self) -> Floats:
        """When that message arrived; 0 if there is none."""
        return np.append(self.timeline.arrive, 0.0)[self.message]

    @cached_property
    def maker(self) -> Ints:
        """The computation that makes each message."""
        return self.place[self.timeline.table.rows.group[self.timeline.messages.maker]]

    @cached_property
    def ready(self) -> Floats:
        """When everything that it waits for was there."""
        return np.maximum(self.free, self.arrival)

    @cached_property
    def sends(self) -> Flags:
        """Whether each action of `table.rows` is a send."""
        rows = self.timeline.table.rows
        return rows.is_kind(*SENDS)[rows.heads]

    @cached_property
    def by_message(self) -> Flags:
        """Whether it waited for its message, and not for its rank's computation before."""
        waited = self.start - self.free > self.negligible
        return (self.message >= 0) & waited & (self.arrival > self.free)

    @cached_property
    def negligible(self) -> float:
        """An idle time below this does not count."""
        if self.timeline.source == "simulated" or not len(self.node):
            return 0.0
        return NEGLIGIBLE * float(np.median(self.end - self.start))

    def action(self, place: int) -> Action:
        """A computation as an action."""
        return self.timeline.table.rows.action_of(int(self.node[place]))
