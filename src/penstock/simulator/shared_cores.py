"""A timeline on fewer cores than ranks: what a pipeline of processes takes when they share the cores of one machine."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.errors import UsageError
from penstock.simulator.timeline import Timeline

SHARED = "shared cores"
"""The source of such a timeline."""


def share_cores(timeline: Timeline, cores: int) -> Timeline:
    """Time a simulated timeline again on so many cores: ranks that compute at the same time get equal shares of them.

    Every rank keeps its order, an action takes as much work as before, and messages take as long as before. With a core for every
    rank, the timeline stays as it is.
    """
    if cores < 1:
        raise UsageError(f"{cores} cores: there must be at least 1")
    return timeline if cores >= timeline.ranks else _SharedCores(timeline, cores).run()


class _SharedCores:
    """The state of the machine: what each rank computes, how much of it is left, and which messages are under way."""

    def __init__(self, timeline: Timeline, cores: int) -> None:
        self.timeline, self.cores, self.now = timeline, cores, 0.0
        rows, messages = timeline.table.rows, timeline.messages
        bounds = rows.group_offsets.tolist()
        self.nodes = [[node for node in range(low, high) if timeline.computes[node]] for low, high in itertools.pairwise(bounds)]
        self.place = [0] * timeline.ranks
        self.left: dict[int, float] = {}
        """The work that is left of the action that each busy rank computes."""
        self.start, self.end = np.zeros_like(timeline.start), np.zeros_like(timeline.end)
        self.travel = (timeline.arrive - timeline.depart).tolist()
        self.depart, self.arrive = np.zeros_like(timeline.depart), np.zeros_like(timeline.arrive)
        self.missing = np.bincount(rows.group[messages.after], minlength=len(timeline.start))
        """How many messages each action still waits for."""
        self.users = rows.group[messages.after].tolist()
        self.made_by: dict[int, list[int]] = {}
        for message, maker in enumerate(rows.group[messages.maker].tolist()):
            self.made_by.setdefault(maker, []).append(message)
        self.under_way: list[tuple[float, int]] = []

    def run(self) -> Timeline:
        self._begin()
        while self.left or self.under_way:
            rate = min(1.0, self.cores / len(self.left)) if self.left else 1.0
            until_end = min(self.left.values(), default=np.inf) / rate
            until_message = self.under_way[0][0] - self.now if self.under_way else np.inf
            passed = min(until_end, until_message)
            self.now += passed
            self.left = {rank: work - passed * rate for rank, work in self.left.items()}
            if until_end <= until_message:
                self._finish(min(self.left, key=self.left.__getitem__))
            else:
                self.missing[self.users[heapq.heappop(self.under_way)[1]]] -= 1
            self._begin()
        return self._build()

    def _begin(self) -> None:
        """Start the next action of every idle rank whose messages have arrived."""
        for rank, nodes in enumerate(self.nodes):
            if rank not in self.left and self.place[rank] < len(nodes) and not self.missing[nodes[self.place[rank]]]:
                node = nodes[self.place[rank]]
                self.start[node] = self.now
                self.left[rank] = float(self.timeline.end[node] - self.timeline.start[node])

    def _finish(self, rank: int) -> None:
        node = self.nodes[rank][self.place[rank]]
        self.end[node] = self.now
        self.place[rank] += 1
        del self.left[rank]
        for message in self.made_by.get(node, ()):
            self.depart[message], self.arrive[message] = self.now, self.now + self.travel[message]
            heapq.heappush(self.under_way, (float(self.arrive[message]), message))

    def _build(self) -> Timeline:
        """Actions that compute nothing take place at the end of the computation before them."""
        timeline, bounds = self.timeline, self.timeline.table.rows.group_offsets.tolist()
        for low, high in itertools.pairwise(bounds):
            before = 0.0
            for node in range(low, high):
                if timeline.computes[node]:
                    before = float(self.end[node])
                else:
                    self.start[node] = self.end[node] = before
        begins = np.where(timeline.collective_start < 0, -1.0, self.start)
        times: dict[str, Any] = {"start": self.start, "end": self.end, "depart": self.depart, "arrive": self.arrive}
        times |= {"collective_start": begins, "collective_end": begins + timeline.collective_end - timeline.collective_start}
        return replace(timeline, source=SHARED, held_by=np.zeros(0, dtype=np.int32), **times)
