"""The waits of each computation of a timeline, whether its times were simulated or measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.action import Action
from penstock.ir.kind import SENDS
from penstock.ir.rows import Flags, Floats, Ints

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


NEGLIGIBLE = 0.01
"""Of the median computation: a rank that stands idle for less has not waited. Measured times never fall together to the last digit."""


class WaitCauses:
    """One value per computation, in the order of the rows; other computations are named by their place in that order."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        rows, graph, messages = timeline.table.rows, timeline.flat.graph(), timeline.messages
        self.node: Ints = np.flatnonzero(timeline.computes)
        """The action of `table.rows` that each computation is."""
        self.rank: Ints = np.asarray(graph.rank[self.node], dtype=np.int64)
        self.start: Floats = timeline.start[self.node]
        self.end: Floats = timeline.end[self.node]
        self.place: Ints = np.cumsum(timeline.computes) - 1
        """The reverse of `node`; for an action that is not a computation, the place of the computation before it."""
        self.maker: Ints = self.place[rows.group[messages.maker]]
        """The computation that makes each message."""
        first = np.append(True, self.rank[1:] != self.rank[:-1])[: len(self.rank)]
        self.before: Ints = np.where(first, -1, np.arange(len(self.node)) - 1)
        """The rank's computation before this one, -1 for its first."""
        self.free: Floats = np.append(self.end, 0.0)[self.before]
        """When the rank had finished its computation before; 0 for its first."""
        order = np.lexsort((-np.arange(len(timeline.arrive)), timeline.arrive, graph.user))  # of several at once the first counts
        latest = np.full(timeline.flat.num_nodes, -1, dtype=np.int64)
        latest[graph.user[order]] = order
        self.message: Ints = latest[self.node]
        """The last message to arrive of those it needs, -1 if it needs none."""
        self.arrival: Floats = np.append(timeline.arrive, 0.0)[self.message]
        """When that message arrived; 0 if there is none."""
        self.ready: Floats = np.maximum(self.free, self.arrival)
        """When everything that it waits for was there."""
        measured = timeline.source != "simulated" and len(self.node) > 0
        self.negligible: float = NEGLIGIBLE * float(np.median(self.end - self.start)) if measured else 0.0
        """An idle time below this does not count."""
        self.sends: Flags = rows.is_kind(*SENDS)[rows.heads]
        """Whether each action of `table.rows` is a send."""
        waited = self.start - self.free > self.negligible
        self.by_message: Flags = (self.message >= 0) & waited & (self.arrival > self.free)
        """Whether it waited for its message, and not for its rank's computation before."""

    def action(self, place: int) -> Action:
        """A computation as an action."""
        return self.timeline.table.rows.action_of(int(self.node[place]))
