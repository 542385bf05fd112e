"""What a step took on every rank, as a timeline: the same kind that the simulator makes, so that one can be laid over the other."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.device.timing import clock
from penstock.runtime.transport.group import Group, Route
from penstock.simulator.flat import Flat
from penstock.simulator.timeline import Timeline

if TYPE_CHECKING:
    from penstock.runtime.execution.executor import Executor

ROUNDS = 9
"""How often clocks are compared; the quickest exchange tells best."""

Floats = NDArray[np.float64]
_TIMED = {Kind.F: "f", Kind.I: "i", Kind.W: "w", Kind.B: "b", Kind.UNSHARD: "unshard", Kind.REDUCE_GRAD: "reduce"}
"""The kinds of actions that take time, and what costs call it."""
Times = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Record:
    """One rank's times of one step, in nanoseconds on its own clock; of work on a device, when it was done there."""

    begun: list[int]
    ended: list[int]
    received: dict[Route, list[tuple[int, int, int]]]
    """For each message: sent (on the sender's clock), asked for, there."""
    collectives: list[tuple[int, int, int]] = field(default_factory=list)
    """For each gather and reduction: which action began it, and when it began and was seen to have ended."""

    @classmethod
    def of(cls, executor: Executor) -> Record:
        watch, actions, begun, ended = executor.watch, executor.actions, list(executor.begun), list(executor.ended)
        received = {route: list(inbox.times) for route, inbox in executor.inboxes.items()}
        if watch is not None:
            begun, ended = watch.times(watch.begun), watch.times(watch.ended)
            columns = {route: [watch.times(column) for column in zip(*times, strict=True)] for route, times in received.items()}
            received = {route: list(zip(*three, strict=True)) for route, three in columns.items()}
        return cls(begun, ended, received, list(executor.data.collectives(actions, begun, ended)))


def offsets(group: Group, rank: int, deadline: float) -> list[int]:
    """How far each rank's clock is ahead of rank 0's: not at all on the same machine.

    Elsewhere all ranks read their clocks between two meetings. Of several rounds the one counts in which both met the others
    quickest: its middle was at the same time on both, give or take half of what it took.
    """
    readings = []
    for _ in range(ROUNDS):
        before = clock()
        group.gather(rank, "clock", None, deadline)
        readings.append((before, clock()))
    everyone = group.gather(rank, "clocks", (machine(), readings), deadline)
    return [0 if where == everyone[0][0] else _ahead(theirs, everyone[0][1]) for where, theirs in everyone]


def _ahead(theirs: Sequence[tuple[int, int]], first: Sequence[tuple[int, int]]) -> int:
    rounds = zip(theirs, first, strict=True)
    _, twice = min((end - start + last - begin, start + end - begin - last) for (start, end), (begin, last) in rounds)
    return twice // 2


def machine() -> str:
    """What tells this machine's run from others: its processes share one clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def timeline(program: Program, records: Sequence[Record], ahead: Sequence[int]) -> Timeline:
    """The step on one clock, in seconds from where the first action began."""
    starts = [np.array(record.begun, dtype=np.float64) - ahead[rank] for rank, record in enumerate(records)]
    ends = [np.array(record.ended, dtype=np.float64) - ahead[rank] for rank, record in enumerate(records)]
    zero = min((float(times[0]) for times in starts if len(times)), default=0.0)
    start, end = ((np.concatenate(times) - zero) / 1e9 for times in (starts, ends))
    depart, arrive = _transfers(program, records, ahead, zero)
    collective_start, collective_end = np.full(len(start), -1.0), np.full(len(start), -1.0)
    for rank, record in enumerate(records):
        for at, begun, ended in record.collectives:
            node = int(program.rows.group_offsets[rank]) + at
            collective_start[node], collective_end[node] = ((time - ahead[rank] - zero) / 1e9 for time in (begun, ended))
    costs = _costs(program, start, end, arrive - depart, collective_end - collective_start)
    return Timeline(program, costs, start, end, depart, arrive, collective_start, collective_end, source="measured")


def _transfers(program: Program, records: Sequence[Record], ahead: Sequence[int], zero: float) -> tuple[Floats, Floats]:
    """When each message left and came.

    One that was waited for came when the wait ended. One that was there already is taken to have needed what the channel's
    quickest did, as nobody saw it come.
    """
    messages = Flat(program).messages
    depart, arrive = np.zeros(len(messages.before)), np.zeros(len(messages.before))
    for number, (source, target, kind) in enumerate(messages.channels):
        what = "activations" if kind is Kind.SEND_F else "gradients"
        times = np.array(records[target].received[source, target, what], dtype=np.float64)
        sent, asked, there = times[:, 0] - ahead[source] - zero, times[:, 1] - ahead[target] - zero, times[:, 2] - ahead[target] - zero
        there = np.maximum(there, sent)
        quickest = float((there - sent).min())
        waited = asked < sent + quickest
        at = messages.channel == number
        depart[at], arrive[at] = sent / 1e9, np.where(waited, there, np.minimum(there, sent + quickest)) / 1e9
    return depart, arrive


def _costs(program: Program, start: Floats, end: Floats, under_way: Floats, collective: Floats) -> Costs:
    """What the step's actions took: each stage's median, and the median message."""
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
            measured[name] = tuple(statistics.median(each) if each else 0.0 for each in taken[kind])
    if "b" in measured and "i" not in measured:
        measured["i"], measured["w"] = tuple(value / 2 for value in measured["b"]), tuple(value / 2 for value in measured["b"])
    return Costs(**measured, latency=float(np.median(under_way)) if len(under_way) else 0.0)
