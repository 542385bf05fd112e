"""The measured timeline of a step, of the same kind as the simulator's, so that one can be laid over the other."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Floats
from penstock.runtime.device.timing import clock
from penstock.runtime.transport.group import Group, Route
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.timeline import Timeline

if TYPE_CHECKING:
    from penstock.runtime.execution.executor import Executor

ROUNDS = 9
"""How often clocks are compared; the quickest exchange is the most exact."""

_TIMED = {Kind.F: "f", Kind.I: "i", Kind.W: "w", Kind.B: "b", Kind.UNSHARD: "unshard", Kind.REDUCE_GRAD: "reduce"}
"""The kinds of actions that take time, and their names in `Costs`."""


@dataclass(frozen=True)
class StepTimes:
    """One rank's times of one step, in nanoseconds on its own clock; for work on a device, the device's times."""

    begun: list[int]
    ended: list[int]
    received: dict[Route, list[tuple[int, int, int]]]
    """For each message, when it was sent (on the sender's clock), asked for, and there."""
    collectives: list[tuple[int, int, int]] = field(default_factory=list)
    """For each all-gather and reduction: the index of the action that started it, its start, and when its end was noticed."""

    @classmethod
    def of(cls, executor: Executor) -> StepTimes:
        """The times that an executor has taken in its last step."""
        watch, actions, begun, ended = executor.watch, executor.actions, list(executor.begun), list(executor.ended)
        received = {route: list(inbox.times) for route, inbox in executor.links.inboxes.items()}
        if watch is not None:
            begun, ended = watch.times(watch.begun), watch.times(watch.ended)
            columns = {route: [watch.times(column) for column in zip(*times, strict=True)] for route, times in received.items()}
            received = {route: list(zip(*three, strict=True)) for route, three in columns.items()}
        return cls(begun, ended, received, list(executor.data.collectives(actions, begun, ended)))


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
    return [0 if machine == first_machine else _offset(theirs, first_readings) for machine, theirs in everyone]


def _offset(theirs: Sequence[tuple[int, int]], first: Sequence[tuple[int, int]]) -> int:
    rounds = zip(theirs, first, strict=True)
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
    costs = _costs(program, start, end, arrive - depart, collective_end - collective_start)
    return Timeline(program, costs, start, end, depart, arrive, collective_start, collective_end, source="measured")


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


def _costs(program: Program, start: Floats, end: Floats, under_way: Floats, collective: Floats) -> Costs:
    """The costs of the step: the median of each stage and kind, and the median message."""
    taken: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(program.stages)] for kind in _TIMED}
    bounds = program.rows.group_offsets.tolist()
    for rank, (low, _) in enumerate(pairwise(bounds)):
        for node, action in enumerate(program[rank], start=low):
            if action.kind in taken:
                apart = action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD)
                taken[action.kind][action.stage].append(float(collective[node] if apart else end[node] - start[node]))
    measured: dict[str, Any] = {}
    for kind, name in _TIMED.items():
        if any(taken[kind]):
            measured[name] = tuple(statistics.median(times) if times else 0.0 for times in taken[kind])
    if "b" in measured and "i" not in measured:
        measured["i"], measured["w"] = tuple(value / 2 for value in measured["b"]), tuple(value / 2 for value in measured["b"])
    return Costs(**measured, latency=float(np.median(under_way)) if len(under_way) else 0.0)
