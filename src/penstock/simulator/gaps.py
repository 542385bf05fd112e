"""The idle times of a rank, each with its cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.action import Action
from penstock.ir.kind import Kind

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline
    from penstock.simulator.waits import WaitCauses

CAUSES = ("fill", "waiting", "communication", "memory", "drain")
OVERHEAD = "overhead"
"""The cause that only measured timelines have."""


@dataclass(frozen=True)
class Gap:
    """An idle time and its cause.

    - `fill`: before the rank's first computation, and `drain`: after its last;
    - `waiting`: for `action` on `rank` to end;
    - `communication`: for what `action` on `rank` sent, gathered or reduced, to arrive, or for a collective of all ranks to end;
    - `memory`: for a slot of the channel that `action` is sent on, or, where `action` is a wait, for its buffers to be free;
    - `overhead`, if it was measured: all was there for `action`, and the rank had not begun it.
    """

    start: float
    end: float
    cause: str
    action: Action | None = None
    rank: int | None = None

    def __str__(self) -> str:
        what = {
            "fill": "the pipeline fills",
            "drain": "the pipeline drains",
            "waiting": f"waits for {self.action} on rank {self.rank}",
            "communication": self._describe_communication(),
            "memory": f"waits {'in' if self._is_wait else 'for a slot to send'} {self.action}",
            OVERHEAD: f"has all that {self.action} needs",
        }[self.cause]
        return f"{self.start:g} to {self.end:g}: {what}"

    def _describe_communication(self) -> str:
        if self.action is not None and self.action.kind.is_join:
            return f"waits for {self.action} of all ranks"
        is_copy = self.action is not None and self.action.kind.is_copy
        return f"waits for the {'copy' if is_copy else 'message'} of {self.action} from rank {self.rank}"

    @property
    def _is_wait(self) -> bool:
        return self.action is not None and (self.action.kind.is_send_wait or self.action.kind is Kind.WAIT_REDUCE_GRAD)


def find_simulated_gaps(timeline: Timeline, rank: int) -> list[Gap]:
    """The rank's idle times in order, from 0 to the makespan."""
    table = timeline.table
    low, high = (int(bound) for bound in table.rows.group_offsets[rank : rank + 2])
    idle: list[Gap] = []
    clock = 0.0
    begun = False
    for node in range(low, high):
        start = float(timeline.start[node])
        if timeline.computes[node] and not begun:
            idle += [Gap(0.0, start, "fill")] if start > 0 else []
            begun, clock = True, start
        if begun and start > clock:
            idle += _split_idle(clock, start, _list_simulated_causes(timeline, node, start))
        clock = max(clock, float(timeline.end[node]))
    idle += _find_tail(timeline, rank, clock)
    return idle


def _find_tail(timeline: Timeline, rank: int, clock: float) -> Iterator[Gap]:
    """The idle time after the last action: the optimizer's step is work, the rest drains."""
    step_end = float(timeline.finished[rank])
    step = float(timeline.optimizer[rank])
    for start, end in ((clock, step_end - step if step else clock), (step_end if step else clock, timeline.makespan)):
        if end > start:
            yield Gap(start, end, "drain")


Cause = tuple[float, str, Action, int]
"""Until when a cause lasted, its name, and the action and the rank that it is about."""


def _split_idle(clock: float, start: float, causes: Iterable[Cause]) -> Iterator[Gap]:
    """One idle time in pieces, one per cause."""
    for until, cause, action, rank in causes:
        if min(until, start) > clock:
            yield Gap(clock, min(until, start), cause, action, rank)
            clock = min(until, start)


def _list_simulated_causes(timeline: Timeline, node: int, start: float) -> Iterator[Cause]:
    """Until another rank has computed, has a slot to send, and its message arrives."""
    rows, graph, messages = timeline.table.rows, timeline.flat.graph(), timeline.messages
    gathers = [int(g) for g in graph.gather[graph.gather_at[node] : graph.gather_at[node + 1]]]
    arrivals = [int(m) for m in graph.need[graph.need_at[node] : graph.need_at[node + 1]] if timeline.arrive[m] == start]
    if not timeline.computes[node] and not gathers:
        yield start, "memory", rows.action_of(node), int(graph.rank[node])
    elif not arrivals:
        last = max(gathers, key=lambda g: float(timeline.collective_end[g]), default=node)
        yield from _list_late_joins(timeline, last)
        yield start, "communication", rows.action_of(last), int(graph.rank[last])
    else:
        message, sender = arrivals[0], int(graph.sender[arrivals[0]])
        computed = next(
            n for n in range(sender, -1, -1) if timeline.computes[n]
        )  # from its end on the sender waits for slots and its sends
        blocked = next((n for n in range(sender, computed, -1) if timeline.start[n] > timeline.end[n - 1]), sender)
        maker, source = rows.part_at(int(messages.maker[message])), int(messages.source[message])
        yield float(timeline.end[computed]), "waiting", maker, source
        yield float(timeline.end[sender]), "memory", rows.action_of(blocked), source
        yield start, "communication", maker, source


def _list_late_joins(timeline: Timeline, node: int) -> Iterator[Cause]:
    """Until the last rank has joined the collective of all ranks that a node joins, if it does: the computation that kept it."""
    graph, rows = timeline.flat.graph(), timeline.table.rows
    number = int(graph.meet[node])
    if number < 0:
        return
    joins = graph.join[graph.meet_at[number] : graph.meet_at[number + 1]].tolist()
    latest = max(joins, key=lambda join: float(timeline.end[join]))
    rank = int(graph.rank[latest])
    kept_by = next((n for n in range(latest, int(graph.bounds[rank]) - 1, -1) if timeline.computes[n]), None)
    if kept_by is not None and rank != int(graph.rank[node]):
        yield float(timeline.end[latest]), "waiting", rows.action_of(kept_by), rank


# Measured times follow from each other only nearly ---------------------------------------------------------------------


def find_measured_gaps(timeline: Timeline, rank: int) -> list[Gap]:
    """The rank's idle times in order: everything but computation and the optimizer's step."""
    waits = timeline.waits
    low, high = np.searchsorted(waits.rank, (rank, rank + 1)).tolist()
    idle: list[Gap] = []
    for place in (low + np.flatnonzero(waits.start[low:high] > waits.free[low:high])).tolist():
        free, start = float(waits.free[place]), float(waits.start[place])
        idle += [Gap(0.0, start, "fill")] if place == low else _split_idle(free, start, _list_measured_causes(waits, place))
    return idle + list(_find_tail(timeline, rank, float(waits.end[low:high].max(initial=0.0))))


def _list_measured_causes(waits: WaitCauses, place: int) -> Iterator[Cause]:
    """The causes of a wait and until when each lasted, in the order in which a program comes to them."""
    timeline, graph, rows = waits.timeline, waits.timeline.flat.graph(), waits.timeline.table.rows
    node, rank = int(waits.node[place]), int(waits.rank[place])
    for own in range(int(waits.node[place - 1]) + 1, node):
        if waits.sends[own]:
            yield from _list_sending(waits, own, float(timeline.end[own - 1]))
    message = int(waits.message[place])
    if message >= 0:
        sender, maker = int(graph.sender[message]), int(waits.maker[message])
        action, source = rows.part_at(int(timeline.messages.maker[message])), int(timeline.messages.source[message])
        yield float(waits.end[maker]), "waiting", action, source
        yield from _list_sending(waits, sender, float(waits.end[maker]))
        yield float(timeline.arrive[message]), "communication", action, source
    for gather in graph.gather[graph.gather_at[node] : graph.gather_at[node + 1]].tolist():
        yield from _list_late_joins(timeline, gather)
        yield float(timeline.collective_end[gather]), "communication", timeline.table.rows.action_of(gather), rank
    yield float(waits.start[place]), OVERHEAD, waits.action(place), rank


def _list_sending(waits: WaitCauses, send: int, free: float) -> Iterator[Cause]:
    """A send begins when it has a slot; its time from then on is its own."""
    timeline, action = waits.timeline, waits.timeline.table.rows.action_of(send)
    start, end, rank = float(timeline.start[send]), float(timeline.end[send]), int(timeline.flat.graph().rank[send])
    if start - free > waits.negligible:
        yield start, "memory", action, rank
    if end - max(start, free) > waits.negligible:
        yield end, OVERHEAD, action, rank
