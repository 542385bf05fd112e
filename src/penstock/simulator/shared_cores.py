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
        self.bounds = bounds = rows.group_offsets.tolist()
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
        """When each message on its way arrives. The collectives of all ranks are numbered behind the messages."""
        graph = timeline.flat.graph()
        self.meet, self.absent = graph.meet, np.diff(graph.meet_at).tolist()
        """The collective that each action joins, and how many ranks have yet to join each collective."""
        self.meeting_takes = [
            float(timeline.collective_end[join] - timeline.collective_start[join]) for join in graph.join[graph.meet_at[:-1]]
        ]
        self.meeting_ends = np.full(len(timeline.start), -1.0)
        self.meeting_users: list[list[int]] = [[] for _ in self.absent]
        self.meeting_free = 0.0
        meetings = timeline.table.links.meetings
        for user, number in zip(rows.group[meetings.user].tolist(), meetings.used.tolist(), strict=True):
            self.meeting_users[number].append(user)
            self.missing[user] += 1
        for rank, low in enumerate(bounds[:-1]):
            self._join(range(low, self.nodes[rank][0] if self.nodes[rank] else bounds[rank + 1]))

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
                arrived = heapq.heappop(self.under_way)[1]
                users = [self.users[arrived]] if arrived < len(self.users) else self.meeting_users[arrived - len(self.users)]
                for user in users:
                    self.missing[user] -= 1
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
        following = self.nodes[rank][self.place[rank]] if self.place[rank] < len(self.nodes[rank]) else self.bounds[rank + 1]
        self._join(range(node + 1, following))

    def _join(self, nodes: range) -> None:
        """Join the collectives of all ranks among actions that compute nothing; the last rank to join starts one."""
        for node in nodes:
            number = int(self.meet[node])
            if number < 0:
                continue
            self.absent[number] -= 1
            if not self.absent[number]:
                self.meeting_free = max(self.now, self.meeting_free) + self.meeting_takes[number]
                self.meeting_ends[self.meet == number] = self.meeting_free
                heapq.heappush(self.under_way, (self.meeting_free, len(self.users) + number))

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
        takes = timeline.collective_end - timeline.collective_start
        begins = np.where(self.meet >= 0, self.meeting_ends - takes, np.where(timeline.collective_start < 0, -1.0, self.start))
        times: dict[str, Any] = {"start": self.start, "end": self.end, "depart": self.depart, "arrive": self.arrive}
        times |= {"collective_start": begins, "collective_end": begins + takes}
        return replace(timeline, source=SHARED, held_by=np.zeros(0, dtype=np.int32), **times)
