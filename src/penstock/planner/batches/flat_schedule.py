"""A schedule laid flat, to be timed with many orders of the microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Floats, Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.order_search.permutations import Scratch, Steps
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.memory import list_changes_in_order
from penstock.simulator.simulate import retime, simulate
from penstock.simulator.timeline import Timeline

TIMES = ("f", "i", "w", "b")
"""The times that steps take; after their tables come the same for overlapped actions, then one row of zeros."""
_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
SIZES = ("activation", "weight_stash", "output")
"""The sizes that memory changes by. What a whole microbatch keeps for later slices counts as its activation: it has none."""


@dataclass(frozen=True, eq=False)
class FlatSchedule:
    """The steps of a schedule, and the program that it runs as."""

    schedule: Schedule
    program: Program
    steps: Steps
    messages: tuple[Ints, Ints, Ints]
    """Of each row of travels: the stage whose output is sent, and the ranks that it goes from and to."""

    @classmethod
    def build(cls, schedule: Schedule) -> FlatSchedule:
        """Lower and prove a schedule, and lay it flat."""
        program = lower(schedule)
        columns, step, messages = _lay_steps(schedule)
        last, reduced = _list_reductions(program, step)
        bounds, held, position, sign = _list_memory(program)
        steps = Steps(
            ranks=schedule.ranks,
            links=int(columns["link"].max(initial=-1)) + 1,
            **columns,
            first=step[np.minimum(schedule.rows.offsets[:-1], len(step) - 1)],
            last=last,
            reduced=reduced,
            bounds=bounds,
            held=held,
            held_position=position,
            sign=sign,
            has_copies=len(schedule.placement.copies) > 1,
        )
        return cls(schedule, program, steps, messages)

    def make_columns(self, compiled: bool) -> tuple[Steps, Scratch]:
        """The steps and scratch columns as arrays, or as lists for the plain loops, which are faster on lists."""
        count, ranks = len(self.steps.rank), self.steps.ranks
        sizes = {"end": count, "arrive": count, "free": self.steps.links} | dict.fromkeys(("now", "slack", "lane", "busy"), ranks)
        counts = {name: np.zeros(1, dtype=np.int64) for name in ("spent", "full")}
        scratch = Scratch(**{name: np.zeros(size) for name, size in sizes.items()}, **counts)
        if compiled:
            return self.steps, scratch
        lists = {name: column.tolist() for name, column in self.steps._asdict().items() if isinstance(column, np.ndarray)}
        return self.steps._replace(**lists), Scratch(*(column.tolist() for column in scratch))

    @cached_property
    def _timeline(self) -> Timeline:
        return simulate(self.program)

    def time(self, costs: Costs) -> Timeline:
        """The timeline of the program under these costs."""
        return retime(self._timeline, costs)


def _lay_steps(schedule: Schedule) -> tuple[dict[str, Ints], Ints, tuple[Ints, Ints, Ints]]:
    """The columns of `Steps` with one value per step; the step of each entry of the schedule's rows; and the rows of travels.

    Each action's steps are those that wait for all but one of its messages, its parts, and those that send what the last part cannot.
    """
    rows, ranks, stages, microbatches = schedule.rows, schedule.ranks, schedule.stages, schedule.microbatches
    flat = Flat(schedule)
    messages, graph = flat.messages, flat.graph()
    heads = np.flatnonzero(rows.heads)
    needs, sends, parts = np.diff(graph.need_at), np.diff(graph.send_at), np.diff(np.append(heads, len(rows.codes)))
    waits, ends = np.maximum(needs - 1, 0), np.where(parts > 1, sends, np.maximum(sends - 1, 0))
    counts = waits + parts + ends
    # Under these costs every action and message takes time, so that each starts after everything that it waits for.
    walk = np.lexsort((rows.rank[heads], simulate(schedule, Costs(latency=1.0)).start))
    begins = np.empty(len(walk), dtype=np.int64)
    begins[walk] = np.cumsum(counts[walk]) - counts[walk]
    total = int(counts.sum())
    position, need, link, travel = (np.full(total, value, dtype=np.int64) for value in (0, -1, -1, 0))
    time = np.full(total, 2 * len(TIMES) * stages, dtype=np.int64)

    step = begins[rows.group] + waits[rows.group] + np.arange(len(rows.codes)) - heads[rows.group]
    kind = _number_kinds(rows) + np.where(parts[rows.group] > 1, len(TIMES), 0)
    time[step], position[step] = kind * stages + rows.stage, rows.microbatch

    number = np.arange(len(messages.before))
    sender = graph.sender.astype(np.int64)
    sent = begins[sender] + waits[sender] + parts[sender] - (parts[sender] == 1) + number - graph.send_at[sender]
    needed = graph.need.astype(np.int64)
    user = graph.user[needed].astype(np.int64)
    need[begins[user] + number - graph.need_at[user]] = sent[needed]
    link[sent], position[sent] = messages.channel, rows.microbatch[messages.before]
    stage = np.where(messages.backward, rows.stage[messages.after], rows.stage[messages.before])
    way, travel[sent] = np.unique((stage * ranks + messages.source) * ranks + messages.target, return_inverse=True)
    columns = {"position": position, "time": time * microbatches, "need": need, "link": link, "travel": travel * microbatches}
    columns["rank"] = np.repeat(rows.rank[heads][walk], counts[walk])
    return columns, step, (way // ranks**2, way // ranks % ranks, way % ranks)


def _number_kinds(rows: Rows) -> Ints:
    """The place of each entry's time in `TIMES`."""
    return np.asarray(np.argmax([rows.is_kind(kind) for kind in _KINDS], axis=0))


def _list_reductions(program: Program, step: Ints) -> tuple[Ints, Ints]:
    """The steps behind which a stage's gradients are reduced, and these stages."""
    rows = program.rows
    reduces = np.flatnonzero(rows.is_kind(Kind.REDUCE_GRAD))
    computes = np.cumsum(rows.is_kind(*_KINDS))  # these are the schedule's, in its order
    return step[computes[reduces] - 1], rows.stage[reduces]


def _list_memory(program: Program) -> tuple[Ints, Ints, Ints, Floats]:
    """The changes of memory: each rank's first, and of each one the row of sizes, the position and the sign.

    The ledger lists them for sizes that say by their value which they are.
    """
    stages, microbatches = program.stages, program.microbatches
    cells = stages * microbatches
    tables = 1.0 + np.arange(len(SIZES) * cells).reshape(len(SIZES), stages, microbatches)
    sizes: dict[str, Any] = dict(zip(SIZES, tables, strict=True))
    changes, rank = list_changes_in_order(program, Costs(**sizes))
    cell = np.abs(changes.size).astype(np.int64) - 1
    bounds = np.searchsorted(rank, np.arange(program.ranks + 1))
    return bounds, cell // microbatches * microbatches, cell % microbatches, np.sign(changes.size)
