"""Idle times and the critical path of a measured timeline, whose times follow from each other only nearly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from penstock.simulator.critical import PathStep
from penstock.simulator.gaps import OVERHEAD, Gap, tail

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.simulator.timeline import Timeline
    from penstock.simulator.waits import WaitCauses


def measured_gaps(timeline: Timeline, rank: int) -> list[Gap]:
    """The rank's idle times in order: everything but computation and the optimizer's step."""
    waits = timeline.waits
    low, high = np.searchsorted(waits.rank, (rank, rank + 1)).tolist()
    idle: list[Gap] = []
    for place in (low + np.flatnonzero(waits.start[low:high] > waits.free[low:high])).tolist():
        idle += [Gap(0.0, float(waits.start[place]), "fill")] if place == low else _waits(waits, place)
    return idle + list(tail(timeline, rank, float(waits.end[low:high].max(initial=0.0))))


def _waits(waits: WaitCauses, place: int) -> Iterator[Gap]:
    """One idle time, one piece per cause, and the rest at the end."""
    clock, start = float(waits.free[place]), float(waits.start[place])
    for until, cause, action, rank in _causes(waits, place):
        if min(until, start) > clock:
            yield Gap(clock, min(until, start), cause, action, rank)
            clock = min(until, start)


def _causes(waits: WaitCauses, place: int) -> Iterator[tuple[float, str, Action, int]]:
    """The causes of a wait and until when each lasted, in the order in which a program comes to them."""
    timeline, graph, rows = waits.timeline, waits.timeline.flat.graph(), waits.timeline.table.rows
    node, rank = int(waits.node[place]), int(waits.rank[place])
    for own in range(int(waits.node[place - 1]) + 1, node):
        if waits.sends[own]:
            yield from _sending(waits, own, float(timeline.end[own - 1]))
    message = int(waits.message[place])
    if message >= 0:
        sender, maker = int(graph.sender[message]), int(waits.maker[message])
        action, source = rows.part_at(int(timeline.messages.maker[message])), int(timeline.messages.source[message])
        yield float(waits.end[maker]), "waiting", action, source
        yield from _sending(waits, sender, float(waits.end[maker]))
        yield float(timeline.arrive[message]), "communication", action, source
    for gather in graph.gather[graph.gather_at[node] : graph.gather_at[node + 1]].tolist():
        yield float(timeline.collective_end[gather]), "communication", timeline.table.rows.action_of(gather), rank
    yield float(waits.start[place]), OVERHEAD, waits.action(place), rank


def _sending(waits: WaitCauses, send: int, free: float) -> Iterator[tuple[float, str, Action, int]]:
    """A send begins when it has a slot; its time from then on is its own."""
    timeline, action = waits.timeline, waits.timeline.table.rows.action_of(send)
    start, end, rank = float(timeline.start[send]), float(timeline.end[send]), int(timeline.flat.graph().rank[send])
    if start - free > waits.negligible:
        yield start, "memory", action, rank
    if end - max(start, free) > waits.negligible:
        yield end, OVERHEAD, action, rank


def measured_path(timeline: Timeline) -> list[PathStep]:
    """The chain from the start to the end: each piece began after the one before it, and would not have before."""
    waits = timeline.waits
    rank = int(np.argmax(timeline.finished))
    place = int(np.searchsorted(waits.rank, rank, side="right")) - 1
    steps = [_optimizer(timeline, rank)]
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


def _optimizer(timeline: Timeline, rank: int) -> PathStep:
    end = float(timeline.finished[rank])
    return PathStep("optimizer", rank, None, end - float(timeline.optimizer[rank]), end)
