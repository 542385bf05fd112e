"""The critical path: the chain of actions and messages that determines the makespan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.action import Action
from penstock.ir.rows import Ints

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


@dataclass(frozen=True)
class PathStep:
    """One piece of the chain: an action on a rank, a message to a rank, a collective or copy, or the optimizer's step."""

    what: str
    """`action`, `message`, `collective` or `optimizer`."""
    rank: int
    action: Action | None
    start: float
    end: float


def find_simulated_path(timeline: Timeline) -> list[PathStep]:
    """Find the critical path, backwards from the end: each piece starts when the one before it ends."""
    return _PathSearch(timeline).path()


@dataclass
class _PathSearch:
    timeline: Timeline

    def path(self) -> list[PathStep]:
        timeline = self.timeline
        rank = int(np.argmax(timeline.finished))
        steps = [_find_optimizer_step(timeline, rank)]
        here: tuple[str, int] | None = self._find_last(rank)
        seen: set[tuple[str, int]] = set()  # a file can hold times that lead in a circle
        while here is not None and here not in seen:
            seen.add(here)
            steps.append(self._step(*here))
            here = self._find_before(*here)
        return [step for step in reversed(steps) if step.end > step.start]

    def _find_last(self, rank: int) -> tuple[str, int] | None:
        timeline = self.timeline
        low, high = (int(bound) for bound in timeline.table.rows.group_offsets[rank : rank + 2])
        if low == high:
            return None
        ends, collectives = timeline.end[low:high], timeline.collective_end[low:high]
        if collectives.max() > ends.max():
            return "collective", low + int(np.argmax(collectives))
        return "action", high - 1

    def _step(self, what: str, index: int) -> PathStep:
        timeline, rows = self.timeline, self.timeline.table.rows
        if what == "message":
            messages = timeline.messages
            action = rows.part_at(int(messages.before[index]))
            return PathStep(what, int(messages.target[index]), action, float(timeline.depart[index]), float(timeline.arrive[index]))
        starts, ends = (timeline.start, timeline.end) if what == "action" else (timeline.collective_start, timeline.collective_end)
        return PathStep(what, int(timeline.flat.graph().rank[index]), rows.action_of(index), float(starts[index]), float(ends[index]))

    def _find_before(self, what: str, index: int) -> tuple[str, int] | None:
        """The piece that ended when this one began."""
        return {"action": self._find_before_action, "message": self._find_before_message, "collective": self._find_before_collective}[what](
            index
        )

    def _find_before_action(self, node: int) -> tuple[str, int] | None:
        timeline, graph = self.timeline, self.timeline.flat.graph()
        start = timeline.start[node]
        if node > graph.bounds[graph.rank[node]] and timeline.end[node - 1] == start:
            return "action", node - 1
        for message in graph.need[graph.need_at[node] : graph.need_at[node + 1]]:
            if timeline.arrive[message] == start:
                return "message", int(message)
        for gather in graph.gather[graph.gather_at[node] : graph.gather_at[node + 1]]:
            if timeline.collective_end[gather] == start:
                return "collective", int(gather)
        for message in range(int(graph.send_at[node]), int(graph.send_at[node + 1])):
            if (before := self._find_taken_at(int(graph.slot[message]), start)) is not None:
                return before
        return self._find_taken_at(int(graph.retire[node]), start)

    def _find_taken_at(self, message: int, time: float) -> tuple[str, int] | None:
        """What made this the time at which a message was taken: its arrival or its receive; None if it was another time, or no message."""
        timeline, receive = self.timeline, int(self.timeline.flat.graph().receive[message]) if message >= 0 else -1
        if message >= 0 and timeline.arrive[message] == time:
            return "message", message
        return ("action", receive) if message >= 0 and timeline.start[receive] == time else None

    def _find_before_message(self, message: int) -> tuple[str, int]:
        timeline, graph = self.timeline, self.timeline.flat.graph()
        sender = int(graph.sender[message])
        if timeline.depart[message] == timeline.end[sender]:
            return "action", sender
        held_by = int(timeline.held_by[message]) if len(timeline.held_by) else int(self._ahead[message])
        return "message", held_by

    @cached_property
    def _ahead(self) -> Ints:
        """For each message, the one before it on its channel."""
        channel = self.timeline.messages.channel
        order = np.argsort(channel, kind="stable")
        ahead = np.full(len(channel), -1, dtype=np.int64)
        same = channel[order][1:] == channel[order][:-1]
        ahead[order[1:][same]] = order[:-1][same]
        return ahead

    def _find_before_collective(self, node: int) -> tuple[str, int]:
        timeline = self.timeline
        start = timeline.collective_start[node]
        graph = timeline.flat.graph(timeline.costs)
        number = int(graph.meet[node])
        joins = [node] if number < 0 else graph.join[graph.meet_at[number] : graph.meet_at[number + 1]].tolist()
        for join in joins:
            if timeline.end[join] == start:
                return "action", join
        lane = graph.collective
        before = np.flatnonzero((lane == lane[node]) & (timeline.collective_end == start))
        before = before[~np.isin(before, joins)]
        return "collective", int(before[np.argmin(timeline.collective_start[before])])


def find_measured_path(timeline: Timeline) -> list[PathStep]:
    """The chain from the start to the end: each piece began after the one before it, and would not have before."""
    waits = timeline.waits
    rank = int(np.argmax(timeline.finished))
    place = int(np.searchsorted(waits.rank, rank, side="right")) - 1
    steps = [_find_optimizer_step(timeline, rank)]
    seen: set[int] = set()  # a file can hold an order that leads in a circle
    while place >= 0 and place not in seen and (steps[1:] or waits.rank[place] == rank):
        seen.add(place)
        steps.append(PathStep("action", int(waits.rank[place]), waits.action(place), float(waits.start[place]), float(waits.end[place])))
        if waits.by_message[place]:
            message = int(waits.message[place])
            action = timeline.table.rows.part_at(int(timeline.messages.before[message]))
            times = float(timeline.depart[message]), float(timeline.arrive[message])
            steps.append(PathStep("message", int(waits.rank[place]), action, *times))
            place = int(waits.maker[message])
        else:
            place = int(waits.before[place])
    return [step for step in reversed(steps) if step.end > step.start]


def _find_optimizer_step(timeline: Timeline, rank: int) -> PathStep:
    end = float(timeline.finished[rank])
    return PathStep("optimizer", rank, None, end - float(timeline.optimizer[rank]), end)
