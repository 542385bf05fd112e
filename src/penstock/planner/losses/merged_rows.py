"""The rows of lost ranks, merged into those of their peers by running all rows against the clock.

Actions that wait for data let those of another row go first, so that much of the additional work fits into the bubbles. A backward may be
split, so that its weight gradients fill further gaps (ReCycle, arXiv 2405.14009). Under a memory limit the rows fall apart into single
actions, and forwards wait until there is room.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile

import numpy as np

from penstock.ir import codes
from penstock.ir.codes import MAX_MICROBATCHES
from penstock.ir.costs import Costs
from penstock.ir.kind import COPIES, Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Floats, Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.lower import lower
from penstock.passes.split_backward import SplitBackward
from penstock.planner.losses.survivors import Survivors
from penstock.planner.problem import SLACK
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline

_ROUNDS = 8
"""How often memory is reserved for received messages when a schedule exceeds a limit."""
_FEW = 20_000
"""Up to this many actions are simulated without numba."""
_GAP = 0.5
"""A weight gradient runs in a gap of at least this share of its time."""


def lower_joint(schedule: Schedule) -> Program:
    """The program of a joint schedule: peers run different rows, so they reduce their gradients at the end."""
    return lower(schedule, reduce_at_end=True)


def time_table(table: Table, costs: Costs) -> Timeline:
    """Simulate, without numba if there are few actions: in a process that has not used it yet, loading it takes longer."""
    return simulate(table, costs, engine="plain" if len(table.rows.codes) < _FEW else "auto")


@dataclass(frozen=True)
class JointRows:
    """The rows of all replicas, and the orders in which survivors may run them."""

    single: Schedule
    survivors: Survivors
    single_costs: Costs
    limits: tuple[float, ...]

    @property
    def microbatches(self) -> int:
        return self.single.microbatches * self.survivors.data

    @cached_property
    def costs(self) -> Costs:
        """The costs by joint microbatch."""
        return self.single_costs.permuted([number // self.survivors.data for number in range(self.microbatches)])

    @cached_property
    def placement(self) -> Placement:
        return self.survivors.place(self.single.placement, self.single.microbatches)

    def list_candidates(self, split: bool) -> Iterator[tuple[Schedule, Timeline]]:
        """The joint schedules to choose from."""
        kinds = set(self.single.rows.kind.tolist())
        keeps_order = bool(kinds & set(COPIES)) or not self.single.training  # copies to the host were placed for this order
        splits = split and not keeps_order
        for halves in (False, True) if splits else (False,):
            rows = SplitBackward().apply(Program.start(self.single)).rows if halves else self.single.rows
            placed = self._place_rows(rows)
            whole = placed.merge(defer=halves)
            assert whole is not None, "the action that began first before the loss can always run"
            timeline = time_table(lower_joint(whole), self.costs)
            yield whole, timeline
            if not keeps_order:
                yield from self._fit(placed, np.where(np.isinf(self.limits), timeline.peak_memory, self.limits), defer=halves)

    def _fit(self, placed: _PlacedRows, limits: Floats, defer: bool) -> Iterator[tuple[Schedule, Timeline]]:
        """Orders of single actions below these limits; what received messages took too much in one is reserved in the next."""
        room = limits * (1 + SLACK) - self.costs.per_rank("parameters", self.placement)
        for attempt in range(_ROUNDS):
            schedule = placed.merge(defer=defer, room=room) or placed.merge(defer=defer, room=room, in_turn=True)
            if schedule is None:
                return
            timeline = time_table(lower_joint(schedule), self.costs)
            yield schedule, timeline
            if self.find_excess(timeline) is None:
                return
            over = np.maximum(0.0, np.array(timeline.peak_memory) - limits)
            room = room - over * 2.0**attempt

    def _place_rows(self, rows: Rows) -> _PlacedRows:
        """All rows of all replicas on the ranks that run them now, in the order in which their actions began before the loss."""
        single, data = self.single, self.survivors.data
        timed = Schedule.from_rows(rows, single.placement, single.microbatches, graph=single.graph)
        began = time_table(timed, self.single_costs).start[rows.group]
        taker = np.array([[self._list_takers(rank, d) for d in range(data)] for rank in range(single.ranks)])
        columns = []
        for replica in range(data):
            holder = taker[rows.rank, replica, rows.microbatch]
            entries = (rows.codes & ~codes.JOIN & ~(MAX_MICROBATCHES - 1)) | (rows.microbatch * data + replica)
            alone = np.append(holder[1:] != holder[:-1], True) | ~codes.is_joined(rows.codes)
            entries = np.where(alone, entries, entries | codes.JOIN)
            columns.append((entries, holder, began, rows.rank * data + replica, np.arange(len(entries))))
        entries, holder, began, row, place = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.lexsort((place, row, began, holder))
        joint = Rows.sorted_by(entries[order], holder[order], len(self.survivors.places))
        name = f"{single.name} after {len(self.survivors.lost)} lost".strip()
        schedule = Schedule.from_rows(joint, self.placement, self.microbatches, graph=single.graph, name=name)
        return _PlacedRows(schedule, self.costs, began[order], row[order])

    def _list_takers(self, rank: int, replica: int) -> list[int]:
        return [self.survivors.find_taker((rank, replica), k) for k in range(self.single.microbatches)]

    def find_excess(self, timeline: Timeline) -> tuple[float, int, float] | None:
        """By how much the rank with the least room exceeds its limit, that rank and its peak; None if all are within theirs."""
        over = [(peak - limit, rank, peak) for rank, (peak, limit) in enumerate(zip(timeline.peak_memory, self.limits, strict=True))]
        excess = [entry for entry in over if entry[2] > self.limits[entry[1]] * (1 + SLACK)]
        return max(excess) if excess else None


@dataclass(frozen=True)
class _PlacedRows:
    """All actions on their ranks, by the time at which they began before the loss; merging runs them against the clock."""

    schedule: Schedule
    costs: Costs
    began: Floats
    """Of each entry."""
    row: Ints
    """The row that each entry is from; rows keep their order."""

    def merge(self, *, defer: bool, room: Floats | None = None, in_turn: bool = False) -> Schedule | None:
        """A schedule of all actions; None if the ranks wait for each other within their memory.

        Each rank runs, of the rows that it has, the first action whose data is there and that began first before the loss. With `defer`,
        weight gradients wait for gaps, within the activations that the merged rows hold at most without that. With `room`, the memory of
        each rank for activations, rows fall apart: the forwards and the backwards of a stage keep their order, and a forward runs only if
        the oldest microbatch can still be finished. `in_turn`, each stage runs its microbatches by their numbers, and a forward runs only
        if all microbatches before it can be finished one after the other: ranks never wait for each other then, but the step is longer.
        """
        apart = room is not None
        run = _Merging(self, apart=apart, defer=defer, room=self._count_cells() if room is None else room.tolist(), in_turn=in_turn)
        order = run.run()
        if order is None:
            return None
        rows, given = self.schedule.rows, self.schedule
        entries = rows.codes & ~codes.JOIN if apart else rows.codes
        joint = Rows.sorted_by(entries[order], rows.rank[order], given.ranks)
        return Schedule.from_rows(joint, given.placement, given.microbatches, graph=given.graph, name=given.name)

    def _count_cells(self) -> list[float]:
        """The most microbatches that each rank holds between F and B, if each of its rows runs as before."""
        rows = self.schedule.rows
        change = rows.is_kind(Kind.F).astype(np.int64) - rows.is_kind(Kind.B, Kind.W)
        most = [0.0] * self.schedule.ranks
        keys = self.row * self.schedule.ranks + rows.rank
        for key in np.unique(keys):
            own = keys == key
            most[int(key) % self.schedule.ranks] += float(np.cumsum(change[own]).max(initial=0))
        return most


class _Merging:
    """Runs the placed rows, each rank choosing what to run next when it is free."""

    def __init__(self, placed: _PlacedRows, *, apart: bool, defer: bool, room: list[float], in_turn: bool) -> None:
        table, rows = placed.schedule, placed.schedule.rows
        group = np.arange(len(rows.codes)) if apart else rows.group
        self.apart, self.room, self.in_turn = apart, room, in_turn
        heads = np.concatenate(([True], group[1:] != group[:-1]))
        self.nodes = [list(map(int, part)) for part in np.split(np.arange(len(group)), np.flatnonzero(heads)[1:])]
        """The entries of each node."""
        kind, stage, unit = rows.kind, rows.stage, rows.microbatch
        times = {name: placed.costs.table(name, table.stages, table.units) for name in ("f", "b", "i", "w")}
        names = np.full(codes.MAX_KINDS, -1)
        names[[Kind.F, Kind.B, Kind.I, Kind.W]] = range(4)
        stacked = np.stack([times[name] for name in ("f", "b", "i", "w")])
        takes = np.where(names[kind] < 0, 0.0, stacked[names[kind], stage, unit])
        count = len(self.nodes)
        size = np.bincount(group, minlength=count)
        self.duration = (np.bincount(group, weights=takes, minlength=count) * np.where(size > 1, placed.costs.overlap, 1.0)).tolist()
        self.rank = rows.rank[heads].tolist()
        self.began = placed.began[heads].tolist()
        self.microbatch = unit[heads].tolist()
        is_forward = rows.is_kind(Kind.F)
        self.forward: list[bool] = (np.bincount(group, weights=is_forward, minlength=count) > 0).tolist()
        self.deferred = (rows.is_kind(Kind.W)[heads] & (size == 1) & (defer or apart)).tolist()
        self._set_memory(placed, group, count)
        self._link(placed, group, count)
        key = placed.row * (0 if in_turn else 2 * table.stages) + (stage * 2 + is_forward if apart else 0)
        self.queues: list[list[deque[int]]] = [[] for _ in range(table.ranks)]
        self.pool: list[deque[int]] = [deque() for _ in range(table.ranks)]
        self._fill_queues(key[heads].tolist())

    def _set_memory(self, placed: _PlacedRows, group: Ints, count: int) -> None:
        """What each node takes when it begins and adds when it ends: in cells, or as the costs say if the rows fall apart."""
        table, rows = placed.schedule, placed.schedule.rows
        full, halves, weights = rows.is_kind(Kind.B), rows.is_kind(Kind.I), rows.is_kind(Kind.W)
        held = stash = np.ones(len(rows.codes))
        if self.apart:
            held, stash = (
                placed.costs.table(name, table.stages, table.units)[rows.stage, rows.microbatch] for name in ("activation", "weight_stash")
            )
        self.size = held.tolist()
        begins, ends = held * rows.is_kind(Kind.F), halves * (stash - held) - full * held - weights * stash
        self.begins: list[float]
        self.ends: list[float]
        self.begins, self.ends = (np.bincount(group, weights=change, minlength=count).tolist() for change in (begins, ends))
        self.unfinished: list[dict[int, float]] = [{} for _ in range(table.ranks)]
        """Per rank and microbatch, the activations of its forwards that have not run."""
        self.backwards: list[Counter[int]] = [Counter() for _ in range(table.ranks)]
        """Per rank and microbatch, the backwards that have not run."""
        if self.apart:
            for entry, (rank, unit, forward, weight) in enumerate(
                zip(rows.rank.tolist(), rows.microbatch.tolist(), rows.is_kind(Kind.F).tolist(), weights.tolist(), strict=True)
            ):
                if forward:
                    self.unfinished[rank][unit] = self.unfinished[rank].get(unit, 0.0) + self.size[entry]
                elif not weight:
                    self.backwards[rank][unit] += 1
        self.oldest = [sorted(units, reverse=True) for units in self.unfinished]

    def _link(self, placed: _PlacedRows, group: Ints, count: int) -> None:
        """The nodes that wait for each node, and how long its message to them takes."""
        rows, links, costs = placed.schedule.rows, placed.schedule.links, placed.costs
        sizes = costs.table("output", placed.schedule.stages, placed.schedule.units)
        self.after: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        self.unmet = [0] * count
        for needs, crosses in ((links.local, False), (links.data, True)):
            lower_stage = np.minimum(rows.stage[needs.before], rows.stage[needs.after])
            travel = np.zeros(len(lower_stage))
            if crosses:
                size = sizes[lower_stage, rows.microbatch[needs.before]]
                travel = costs.travel(size, rows.rank[needs.before], rows.rank[needs.after])
            for before, after, time in zip(group[needs.before].tolist(), group[needs.after].tolist(), travel.tolist(), strict=True):
                if before != after:
                    self.after[before].append((after, time))
                    self.unmet[after] += 1

    def _fill_queues(self, keys: list[int]) -> None:
        by_key: dict[tuple[int, int], deque[int]] = {}
        nodes = sorted(range(len(keys)), key=self.microbatch.__getitem__) if self.in_turn else range(len(keys))
        for node, key in ((node, keys[node]) for node in nodes):
            if not self.deferred[node]:
                rank = self.rank[node]
                if (rank, key) not in by_key:
                    by_key[rank, key] = deque()
                    self.queues[rank].append(by_key[rank, key])
                by_key[rank, key].append(node)

    def run(self) -> list[int] | None:
        """The entries in the order of ranks, and within a rank as they were run; None if the ranks wait for each other."""
        ranks, left = len(self.queues), len(self.nodes)
        arrive, free, held = [0.0] * left, [0.0] * ranks, [0.0] * ranks
        order: list[list[int]] = [[] for _ in range(ranks)]
        wakes = [(0.0, rank) for rank in range(ranks)]
        while wakes:
            time, rank = heapq.heappop(wakes)
            if time < free[rank]:
                continue
            node, coming = self._choose(rank, time, arrive, held[rank])
            if node is None:
                if coming < math.inf:
                    heapq.heappush(wakes, (coming, rank))
                continue
            left -= 1
            order[rank].append(node)
            held[rank] += self.begins[node] + self.ends[node]
            if self.apart:
                self._note_run(rank, node)
            end = free[rank] = time + self.duration[node]
            heapq.heappush(wakes, (end, rank))
            for other, travel in self.after[node]:
                self.unmet[other] -= 1
                arrive[other] = max(arrive[other], end + travel)
                if not self.unmet[other]:
                    if self.deferred[other]:
                        self.pool[self.rank[other]].append(other)
                    elif self.rank[other] != rank:
                        heapq.heappush(wakes, (max(arrive[other], free[self.rank[other]]), self.rank[other]))
        return None if left else [entry for row in order for node in row for entry in self.nodes[node]]

    def _choose(self, rank: int, time: float, arrive: list[float], held: float) -> tuple[int | None, float]:
        """The node that a free rank runs next, and the time at which the next one comes if there is none."""
        best, coming, cramped = None, math.inf, False
        for queue in self.queues[rank]:
            if not queue or self.unmet[queue[0]]:
                continue
            node = queue[0]
            if arrive[node] > time:
                coming = min(coming, arrive[node])
            elif self.forward[node] and not self._has_room(rank, node, held):
                cramped = True
            elif best is None or (self.began[node], node) < (self.began[best], best):
                best = node
        pool = self.pool[rank]
        if best is None and pool and (cramped or coming - time >= _GAP * self.duration[pool[0]]):
            return pool.popleft(), coming
        if best is not None:
            queue = next(queue for queue in self.queues[rank] if queue and queue[0] == best)
            queue.popleft()
        return best, coming

    def _has_room(self, rank: int, node: int, held: float) -> bool:
        """Whether a forward may run: weight gradients that wait should go first, and the oldest microbatch must still fit afterwards."""
        if not self.apart:
            return held + self.begins[node] <= self.room[rank] or not self.pool[rank]
        before = takewhile(lambda unit: unit != self.microbatch[node], reversed(self.oldest[rank]))
        needed = max((self.unfinished[rank][unit] for unit in (before if self.in_turn else islice(before, 1))), default=0.0)
        return held + self.begins[node] + needed <= self.room[rank]

    def _note_run(self, rank: int, node: int) -> None:
        unit, (entry,) = self.microbatch[node], self.nodes[node]
        if self.forward[node]:
            self.unfinished[rank][unit] -= self.size[entry]
        elif not self.deferred[node]:
            self.backwards[rank][unit] -= 1
            while self.oldest[rank] and not self.backwards[rank][self.oldest[rank][-1]]:
                self.oldest[rank].pop()
