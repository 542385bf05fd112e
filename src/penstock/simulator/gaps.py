"""The idle times of a rank, each with its cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.ir.action import Action
from penstock.ir.kind import Kind

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline

CAUSES = ("fill", "waiting", "communication", "memory", "drain")
OVERHEAD = "overhead"
"""The cause that only measured timelines have."""


@dataclass(frozen=True)
class Gap:
    """An idle time and its cause.

    - `fill`: before the rank's first computation, and `drain`: after its last;
    - `waiting`: for `action` on `rank` to end;
    - `communication`: for what `action` on `rank` sent, gathered or reduced, to arrive;
    - `memory`: for a slot of the channel that `action` is sent on, or, where `action` is a wait, for its buffers to be free;
    - `overhead`, where it was measured: all was there for `action`, and the rank had not begun it.
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
            "communication": f"waits for the message of {self.action} from rank {self.rank}",
            "memory": f"waits {'in' if self._is_wait else 'for a slot to send'} {self.action}",
            OVERHEAD: f"has all that {self.action} needs",
        }[self.cause]
        return f"{self.start:g} to {self.end:g}: {what}"

    @property
    def _is_wait(self) -> bool:
        return self.action is not None and (self.action.kind.is_send_wait or self.action.kind is Kind.WAIT_REDUCE_GRAD)


def gaps(timeline: Timeline, rank: int) -> list[Gap]:
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
            idle += _waits(timeline, node, clock, start)
        clock = max(clock, float(timeline.end[node]))
    idle += tail(timeline, rank, clock)
    return idle


def tail(timeline: Timeline, rank: int, clock: float) -> Iterator[Gap]:
    """The idle time after the last action: the optimizer's step is work, the rest drains."""
    step_end = float(timeline.finished[rank])
    step = float(timeline.optimizer[rank])
    for start, end in ((clock, step_end - step if step else clock), (step_end if step else clock, timeline.makespan)):
        if end > start:
            yield Gap(start, end, "drain")


def _waits(timeline: Timeline, node: int, clock: float, start: float) -> Iterator[Gap]:
    """One idle time before a node, in parts: until another rank has computed, has a slot to send, and its message arrives."""
    table, graph, messages = timeline.table, timeline.flat.graph(), timeline.messages
    gathers = [int(g) for g in graph.gather[graph.gather_at[node] : graph.gather_at[node + 1]]]
    if not timeline.computes[node] and not gathers:
        yield Gap(clock, start, "memory", timeline.table.rows.action_of(node), int(graph.rank[node]))
        return
    arrivals = [int(m) for m in graph.need[graph.need_at[node] : graph.need_at[node + 1]] if timeline.arrive[m] == start]
    if not arrivals:
        last = max(gathers, key=lambda g: float(timeline.collective_end[g]), default=node)
        yield Gap(clock, start, "communication", timeline.table.rows.action_of(last), int(graph.rank[last]))
        return
    message = arrivals[0]
    sender = int(graph.sender[message])
    computed = next(n for n in range(sender, -1, -1) if timeline.computes[n])  # from its end on the sender waits for slots and its sends
    blocked = next((n for n in range(sender, computed, -1) if timeline.start[n] > timeline.end[n - 1]), sender)
    maker, source = table.rows.part_at(int(messages.maker[message])), int(messages.source[message])
    for until, cause, action in (
        (float(timeline.end[computed]), "waiting", maker),
        (float(timeline.end[sender]), "memory", timeline.table.rows.action_of(blocked)),
        (start, "communication", maker),
    ):
        if min(until, start) > clock:
            yield Gap(clock, min(until, start), cause, action, source)
            clock = min(until, start)
