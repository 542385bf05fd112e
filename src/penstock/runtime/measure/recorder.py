"""The measured timeline of a step, of the same kind as the simulator's, so that one can be laid over the other."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Floats
from penstock.runtime.device.timing import clock
from penstock.runtime.transport.group import Group, Route
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.measured import measure_costs
from penstock.simulator.timeline import Timeline
from penstock.text.units import Units

if TYPE_CHECKING:
    from penstock.runtime.execution.executor import Executor

ROUNDS = 9
"""How often clocks are compared; the quickest exchange is the most exact."""


@dataclass(frozen=True)
class StepTimes:
    """One rank's times of one step, in nanoseconds on its own clock; for work on a device, the device's times."""

    begun: list[int]
    ended: list[int]
    received: dict[Route, list[tuple[int, int, int]]]
    """For each message, when it was sent (on the sender's clock), asked for, and there."""
    collectives: list[tuple[int, int, int]] = field(default_factory=list)
    """For each all-gather, reduction and copy to or from the host: the index of the action that started it, its start, and when its end
    was noticed. For each collective of all ranks: the action that joined it, when this rank's part began, and when it ended."""

    @classmethod
    def of(cls, executor: Executor) -> StepTimes:
        """The times that an executor has taken in its last step."""
        watch, actions, begun, ended = executor.watch, executor.actions, list(executor.begun), list(executor.ended)
        received = {route: list(inbox.times) for route, inbox in executor.links.inboxes.items()}
        if watch is not None:
            begun, ended = watch.times(watch.begun), watch.times(watch.ended)
            columns = {route: [watch.times(column) for column in zip(*times, strict=True)] for route, times in received.items()}
            received = {route: list(zip(*three, strict=True)) for route, three in columns.items()}
        collectives = list(executor.data.collectives(actions, begun, ended))
        collectives += [(at, begun[at], ended[at]) for at, action in enumerate(actions) if action.kind.is_copy]
        if executor.links.spread is not None:
            times = executor.links.spread.vocabulary.list_times()
            starts, ends = [first for first, _ in times], [last for _, last in times]
            if watch is not None:
                starts, ends = watch.times(starts), watch.times(ends)
            joins = [at for at, action in enumerate(actions) if action.kind.is_join]
            collectives += zip(joins, starts, ends, strict=True)
        return cls(begun, ended, received, collectives)


def clock_offsets(group: Group, rank: int, deadline: float) -> list[int]:
    """How far each rank's clock is ahead of rank 0's, in nanoseconds; 0 on the same machine.

    Ranks on other machines read their clocks before and after a gather, in several rounds. The round that was quickest on both sides
    counts: its middle was at the same time on both, to within half its duration.
    """
    readings = []
    for _ in range(ROUNDS):
        before = clock()
        group.gather(rank, "clock", None, deadline)
        readings.append((before, clock()))
    everyone = group.gather(rank, "clocks", (machine_id(), readings), deadline)
    first_machine, first_readings = everyone[0]
    return [0 if machine == first_machine else _find_offset(other_readings, first_readings) for machine, other_readings in everyone]


def _find_offset(readings: Sequence[tuple[int, int]], first: Sequence[tuple[int, int]]) -> int:
    rounds = zip(readings, first, strict=True)
    _, twice = min((end - start + last - begin, start + end - begin - last) for (start, end), (begin, last) in rounds)
    return twice // 2


def machine_id() -> str:
    """Identifies this machine since it was started: its processes share one clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def build_timeline(program: Program, ranks: Sequence[StepTimes], ahead: Sequence[int]) -> Timeline:
    """Put the times of all ranks on one clock, in seconds from the start of the first action; `ahead` is `clock_offsets`."""
    starts = [np.array(times.begun, dtype=np.float64) - ahead[rank] for rank, times in enumerate(ranks)]
    ends = [np.array(times.ended, dtype=np.float64) - ahead[rank] for rank, times in enumerate(ranks)]
    zero = min((float(times[0]) for times in starts if len(times)), default=0.0)
    start, end = ((np.concatenate(times) - zero) / 1e9 for times in (starts, ends))
    depart, arrive = _transfers(program, ranks, ahead, zero)
    collective_start, collective_end = np.full(len(start), -1.0), np.full(len(start), -1.0)
    for rank, times in enumerate(ranks):
        for at, begun, ended in times.collectives:
            node = int(program.rows.group_offsets[rank]) + at
            collective_start[node], collective_end[node] = ((time - ahead[rank] - zero) / 1e9 for time in (begun, ended))
    _start_meetings(program, collective_start, collective_end)
    costs = measure_costs(program, start, end, arrive - depart, collective_end - collective_start)
    return Timeline(program, costs, start, end, depart, arrive, collective_start, collective_end, source="measured", units=Units("s"))


def _start_meetings(program: Program, start: Floats, end: Floats) -> None:
    """Let each collective of all ranks start when the last rank's part of it began: all have joined it, and the one before has ended."""
    graph = Flat(program).graph()
    for low, high in pairwise(graph.meet_at.tolist()):
        joins = graph.join[low:high]
        start[joins] = np.minimum(start[joins].max(), end[joins])


def _transfers(program: Program, ranks: Sequence[StepTimes], ahead: Sequence[int], zero: float) -> tuple[Floats, Floats]:
    """When each message departed and arrived.

    A message that was waited for arrived when the wait ended. One that was there already is assumed to have taken as long as the
    quickest of its channel, because its arrival was not seen.
    """
    messages = Flat(program).messages
    depart, arrive = np.zeros(len(messages.before)), np.zeros(len(messages.before))
    for number, (source, target, kind) in enumerate(messages.channels):
        what = "activations" if kind is Kind.SEND_F else "gradients"
        times = np.array(ranks[target].received[source, target, what], dtype=np.float64)
        sent, asked, there = times[:, 0] - ahead[source] - zero, times[:, 1] - ahead[target] - zero, times[:, 2] - ahead[target] - zero
        there = np.maximum(there, sent)
        quickest = float((there - sent).min())
        waited = asked < sent + quickest
        at = messages.channel == number
        depart[at], arrive[at] = sent / 1e9, np.where(waited, there, np.minimum(there, sent + quickest)) / 1e9
    return depart, arrive
