"""Going on after a loss: the microbatches of a lost rank run on the ranks that hold the same stages in other replicas.

A mesh has several replicas of one pipeline. When ranks are lost, one joint schedule over all survivors takes the place of the replicas'
own: microbatch k of replica d becomes microbatch k x replicas + d, and a placement with one copy of the model per replica says which rank
runs it. The rows of the lost ranks are merged into those of their peers by running all rows against the clock; actions that wait for data
let those of the other row go first, so that much of the additional work fits into the bubbles. A backward may be split, so that its
weight gradients fill further gaps (ReCycle, arXiv 2405.14009). Everything is deterministic: ranks that know who was lost need no
messages to agree on the new schedule.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np

from penstock.errors import PlanError, ScheduleError
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
from penstock.planner.problem import SLACK
from penstock.planner.request import Limit, check_limits
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline
from penstock.text.numbers import format_number
from penstock.verifier.proof import Proof
from penstock.verifier.verify import verify

Place = tuple[int, int]
"""A rank's place in the mesh: its rank in its pipeline, and its replica."""
_ROUNDS = 8
"""How often memory is reserved for received messages when a schedule exceeds a limit."""
_GAP = 0.5
"""A weight gradient runs in a gap of at least this share of its time."""


@dataclass(frozen=True)
class Survivors:
    """The ranks that are left of a mesh of `data` replicas of a pipeline; `places[k]` is the place of rank k among them.

    >>> survivors = Survivors.after(pipeline=2, data=3, lost=[(1, 2)])
    >>> survivors.places
    ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    >>> [survivors.find_taker((1, 2), microbatch) for microbatch in range(4)]
    [3, 4, 3, 4]
    """

    pipeline: int
    data: int
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        if self.pipeline < 1 or self.data < 1:
            raise ScheduleError(f"a mesh of {self.pipeline} pipeline ranks x {self.data} replicas: there must be at least 1 of each")
        if len(set(self.places)) < len(self.places):
            raise ScheduleError(f"the places {self.places} have one twice: give each living rank its own")
        for place in self.places:
            _check_place(place, self.pipeline, self.data)
        for rank in range(self.pipeline):
            if not self.list_peers(rank):
                raise ScheduleError(
                    f"all {self.data} replicas of pipeline rank {rank} are lost, so nobody holds its stages any more: start again from the "
                    "last checkpoint"
                )

    @classmethod
    def after(cls, pipeline: int, data: int, lost: Iterable[Place]) -> Survivors:
        """The survivors in the order of a device mesh of `pp` x `dp`."""
        gone = {_check_place(place, pipeline, data) for place in lost}
        places = ((rank, replica) for rank in range(pipeline) for replica in range(data))
        return cls(pipeline, data, tuple(place for place in places if place not in gone))

    @cached_property
    def ranks(self) -> dict[Place, int]:
        """The rank of each living place."""
        return {place: rank for rank, place in enumerate(self.places)}

    @cached_property
    def lost(self) -> tuple[Place, ...]:
        """The places that nobody is at any more."""
        places = ((rank, replica) for rank in range(self.pipeline) for replica in range(self.data))
        return tuple(place for place in places if place not in self.ranks)

    def list_peers(self, pipeline_rank: int) -> tuple[int, ...]:
        """The living ranks with the stages of this rank of the pipeline."""
        return tuple(rank for rank, (held, _) in enumerate(self.places) if held == pipeline_rank)

    def find_taker(self, place: Place, microbatch: int) -> int:
        """The rank that runs a microbatch of a place's replica: the one at the place, or its peers in turn if it is lost."""
        if place in self.ranks:
            return self.ranks[place]
        gone, peers = self._lost_of[place[0]], self.list_peers(place[0])
        return peers[(microbatch * len(gone) + gone.index(place)) % len(peers)]

    @cached_property
    def _lost_of(self) -> dict[int, list[Place]]:
        return {rank: [place for place in self.lost if place[0] == rank] for rank in range(self.pipeline)}

    def find_period(self, microbatches: int) -> int:
        """After how many microbatches of a replica the same ranks take their turns again, at most all of them."""
        turns = [
            len(self.list_peers(rank)) // math.gcd(len(gone), len(self.list_peers(rank))) for rank, gone in self._lost_of.items() if gone
        ]
        return min(math.lcm(*turns), microbatches)

    def place(self, placement: Placement, microbatches: int) -> Placement:
        """The joint placement: microbatch k x replicas + d runs where microbatch k of replica d did, or on the peers of lost ranks."""
        _check_pipeline(placement, self.pipeline)
        period = min(math.lcm(self.find_period(microbatches), len(placement.copies)), microbatches)
        copies = [
            [self.find_taker((holder, replica), k) for holder in placement.copies[k % len(placement.copies)]]
            for k in range(period)
            for replica in range(self.data)
        ]
        return Placement.custom(*copies, ranks=len(self.places))

    def split_number(self, microbatch: int) -> tuple[int, int]:
        """A joint microbatch's number in its replica, and the replica."""
        return divmod(microbatch, self.data)


def _check_place(place: Place, pipeline: int, data: int) -> Place:
    try:
        rank, replica = map(index, place)
    except TypeError:
        raise ScheduleError(f"{place!r} is no place of a mesh: give the rank in the pipeline and the replica, as in (1, 0)") from None
    if not (0 <= rank < pipeline and 0 <= replica < data):
        raise ScheduleError(
            f"place {place} in a mesh of {pipeline} pipeline ranks x {data} replicas: ranks run from 0 to {pipeline - 1}, replicas from "
            f"0 to {data - 1}"
        )
    return rank, replica


def _check_pipeline(placement: Placement, ranks: int) -> None:
    if placement.ranks != ranks:
        raise ScheduleError(f"the schedule is for {placement.ranks} ranks, but the pipelines of the mesh have {ranks}")


@dataclass(frozen=True, eq=False)
class TakeOver:
    """The joint schedule of all survivors with its proof, and what it costs."""

    survivors: Survivors
    schedule: Schedule
    proof: Proof
    timeline: Timeline
    """The predicted step of all survivors."""
    before: Timeline
    """The predicted step of one pipeline before the loss; all replicas ran at the same time."""

    @property
    def slowdown(self) -> float:
        """The predicted time of a step over that before the loss."""
        return self.timeline.makespan / self.before.makespan if self.before.makespan else 1.0

    @property
    def throughput(self) -> float:
        """The predicted throughput over that before the loss."""
        return 1 / self.slowdown if self.slowdown else 1.0

    def count_taken(self, place: Place) -> dict[int, int]:
        """How many microbatches of a lost place each of its peers runs."""
        microbatches = self.schedule.microbatches // self.survivors.data
        return dict(sorted(Counter(self.survivors.find_taker(place, k) for k in range(microbatches)).items()))

    def describe(self) -> str:
        """One line: who was lost, who runs its microbatches, and how long a step takes now."""
        parts = []
        for rank, replica in self.survivors.lost:
            taken = self.count_taken((rank, replica))
            on = " and ".join(f"{count} on (pp {rank}, dp {self.survivors.places[taker][1]})" for taker, count in taken.items())
            parts.append(f"(pp {rank}, dp {replica}) is lost, and its microbatches run elsewhere: {on}")
        return "; ".join([*parts, f"predicted step {format_number(self.slowdown)} of before"])


def take_over(
    schedule: Table, survivors: Survivors, *, costs: Costs | None = None, memory_limit: Limit = None, split: bool = True
) -> TakeOver:
    """Give the microbatches of lost ranks to their peers, under a joint schedule that is proved.

    `schedule` is that of one pipeline. `memory_limit` is one size, or one per rank of the pipeline; rows are reordered to stay below it.
    `split` says whether backwards may be split. Raises `PlanError` with the numbers if no order fits the memory.

    >>> from penstock.schedules.registry import schedule
    >>> after = take_over(schedule("1f1b", ranks=2, microbatches=4), Survivors.after(2, 2, lost=[(1, 1)]))
    >>> print(after.describe())
    (pp 1, dp 1) is lost, and its microbatches run elsewhere: 4 on (pp 1, dp 0); predicted step 1.667 of before
    """
    single = schedule if isinstance(schedule, Schedule) else Program.start(schedule).schedule()
    _check_schedule(single, survivors)
    costs = costs or Costs()
    costs.check(single.stages, single.units, single.ranks)
    costs = costs.with_slowest_link()  # a table of links knows those of one pipeline, and not those between several
    before = simulate(lower(single), costs)
    joint = _Joint(single, survivors, costs, _spread_limits(memory_limit, survivors))
    best: tuple[Schedule, Timeline] | None = None
    excess: tuple[float, int, float] | None = None
    for candidate, timeline in joint.candidates(split):
        over = joint.find_excess(timeline)
        if over is None:
            if best is None or timeline.makespan < best[1].makespan * (1 - SLACK):
                best = candidate, timeline
        elif excess is None or over < excess:
            excess = over
    if best is None:
        assert excess is not None
        _, rank, peak = excess
        place, limit = survivors.places[rank], joint.limits[rank]
        raise PlanError(
            f"rank {rank} (pp {place[0]}, dp {place[1]}) would hold {format_number(peak)} of at most {format_number(limit)} when peers run "
            "the microbatches of lost ranks, in the best of all orders that were tried: give it more memory, or start again from the last "
            "checkpoint with fewer replicas"
        )
    chosen, timeline = best
    proof = verify(lower(chosen), memory_limit=None if memory_limit is None else joint.limits, costs=joint.costs)
    return TakeOver(survivors, chosen, proof, timeline, before)


def _check_schedule(schedule: Schedule, survivors: Survivors) -> None:
    _check_pipeline(schedule.placement, survivors.pipeline)
    if schedule.slices > 1:
        raise ScheduleError(
            f"{schedule.name or 'the schedule'} cuts microbatches into {schedule.slices} slices, which must stay on one rank: peers can "
            "take over only whole microbatches, so use a schedule without slices, or start again from a checkpoint after a loss"
        )
    if schedule.microbatches * survivors.data > MAX_MICROBATCHES:
        raise ScheduleError(f"{schedule.microbatches} microbatches x {survivors.data} replicas: at most {MAX_MICROBATCHES} are supported")


def _spread_limits(limit: Limit, survivors: Survivors) -> tuple[float, ...]:
    """The memory limit of each survivor: that of its rank in the pipeline."""
    limits = check_limits(limit, survivors.pipeline)
    return tuple(math.inf if limits is None else limits[rank] for rank, _ in survivors.places)


# Merging rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Joint:
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

    def candidates(self, split: bool) -> Iterator[tuple[Schedule, Timeline]]:
        """The joint schedules to choose from."""
        kinds = set(self.single.rows.kind.tolist())
        keeps_order = bool(kinds & set(COPIES)) or not self.single.training  # copies to the host were placed for this order
        splits = split and not keeps_order
        for halves in (False, True) if splits else (False,):
            rows = SplitBackward().apply(Program.start(self.single)).rows if halves else self.single.rows
            draft = self._draft(rows)
            whole = draft.merge(defer=halves)
            assert whole is not None, "the action that began first before the loss can always run"
            timeline = simulate(lower(whole), self.costs)
            yield whole, timeline
            if not keeps_order:
                yield from self._fit(draft, np.where(np.isinf(self.limits), timeline.peak_memory, self.limits), defer=halves)

    def _fit(self, draft: _JointDraft, limits: Floats, defer: bool) -> Iterator[tuple[Schedule, Timeline]]:
        """Orders of single actions below these limits; what received messages took too much in one is reserved in the next."""
        room = limits * (1 + SLACK) - self.costs.per_rank("parameters", self.placement)
        for attempt in range(_ROUNDS):
            schedule = draft.merge(defer=defer, room=room)
            if schedule is None:
                return
            timeline = simulate(lower(schedule), self.costs)
            yield schedule, timeline
            if self.find_excess(timeline) is None:
                return
            over = np.maximum(0.0, np.array(timeline.peak_memory) - limits)
            room = room - over * 2.0**attempt

    def _draft(self, rows: Rows) -> _JointDraft:
        """All rows of all replicas on the ranks that run them now, in the order in which their actions began before the loss."""
        single, data = self.single, self.survivors.data
        timed = Schedule.from_rows(rows, single.placement, single.microbatches, graph=single.graph)
        began = simulate(timed, self.single_costs).start[rows.group]
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
        return _JointDraft(schedule, self.costs, began[order], row[order])

    def _list_takers(self, rank: int, replica: int) -> list[int]:
        return [self.survivors.find_taker((rank, replica), k) for k in range(self.single.microbatches)]

    def find_excess(self, timeline: Timeline) -> tuple[float, int, float] | None:
        """By how much the rank with the least room exceeds its limit, that rank and its peak; None if all are within theirs."""
        over = [(peak - limit, rank, peak) for rank, (peak, limit) in enumerate(zip(timeline.peak_memory, self.limits, strict=True))]
        excess = [entry for entry in over if entry[2] > self.limits[entry[1]] * (1 + SLACK)]
        return max(excess) if excess else None


@dataclass(frozen=True)
class _JointDraft:
    """All actions on their ranks, by the time at which they began before the loss; merging runs them against the clock."""

    schedule: Schedule
    costs: Costs
    began: Floats
    """Of each entry."""
    row: Ints
    """The row that each entry is from; rows keep their order."""

    def merge(self, *, defer: bool, room: Floats | None = None) -> Schedule | None:
        """A schedule of all actions; None if the ranks wait for each other within their memory.

        Each rank runs, of the rows that it has, the first action whose data is there and that began first before the loss. With `defer`,
        weight gradients wait for gaps, within the activations that the merged rows hold at most without that. With `room`, the memory of
        each rank for activations, rows fall apart: the forwards and the backwards of a stage keep their order, and a forward runs only if
        the oldest microbatch can still be finished.
        """
        apart = room is not None
        run = _JointClock(self, apart=apart, defer=defer, room=self._count_cells() if room is None else room.tolist())
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


class _JointClock:
    """Runs the rows of a draft, each rank choosing what to run next when it is free."""

    def __init__(self, draft: _JointDraft, *, apart: bool, defer: bool, room: list[float]) -> None:
        table, rows = draft.schedule, draft.schedule.rows
        group = np.arange(len(rows.codes)) if apart else rows.group
        self.apart, self.room = apart, room
        heads = np.concatenate(([True], group[1:] != group[:-1]))
        self.nodes = [list(map(int, part)) for part in np.split(np.arange(len(group)), np.flatnonzero(heads)[1:])]
        """The entries of each node."""
        kind, stage, unit = rows.kind, rows.stage, rows.microbatch
        times = {name: draft.costs.table(name, table.stages, table.units) for name in ("f", "b", "i", "w")}
        names = np.full(codes.MAX_KINDS, -1)
        names[[Kind.F, Kind.B, Kind.I, Kind.W]] = range(4)
        stacked = np.stack([times[name] for name in ("f", "b", "i", "w")])
        takes = np.where(names[kind] < 0, 0.0, stacked[names[kind], stage, unit])
        count = len(self.nodes)
        size = np.bincount(group, minlength=count)
        self.duration = (np.bincount(group, weights=takes, minlength=count) * np.where(size > 1, draft.costs.overlap, 1.0)).tolist()
        self.rank = rows.rank[heads].tolist()
        self.began = draft.began[heads].tolist()
        self.microbatch = unit[heads].tolist()
        is_forward = rows.is_kind(Kind.F)
        self.forward: list[bool] = (np.bincount(group, weights=is_forward, minlength=count) > 0).tolist()
        self.deferred = (rows.is_kind(Kind.W)[heads] & (size == 1) & (defer or apart)).tolist()
        self._set_memory(draft, group, count)
        self._link(draft, group, count)
        key = draft.row * table.stages * 2 + (stage * 2 + is_forward if apart else 0)
        self.queues: list[list[deque[int]]] = [[] for _ in range(table.ranks)]
        self.pool: list[deque[int]] = [deque() for _ in range(table.ranks)]
        self._fill_queues(key[heads].tolist())

    def _set_memory(self, draft: _JointDraft, group: Ints, count: int) -> None:
        """What each node takes when it begins and adds when it ends: in cells, or as the costs say if the rows fall apart."""
        table, rows = draft.schedule, draft.schedule.rows
        full, halves, weights = rows.is_kind(Kind.B), rows.is_kind(Kind.I), rows.is_kind(Kind.W)
        held = stash = np.ones(len(rows.codes))
        if self.apart:
            held, stash = (
                draft.costs.table(name, table.stages, table.units)[rows.stage, rows.microbatch] for name in ("activation", "weight_stash")
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

    def _link(self, draft: _JointDraft, group: Ints, count: int) -> None:
        """The nodes that wait for each node, and how long its message to them takes."""
        rows, links, costs = draft.schedule.rows, draft.schedule.links, draft.costs
        sizes = costs.table("output", draft.schedule.stages, draft.schedule.units)
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
        for node, key in enumerate(keys):
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
        oldest = self.oldest[rank][-1]
        needed = self.unfinished[rank][oldest] if oldest != self.microbatch[node] else 0.0
        return held + self.begins[node] + needed <= self.room[rank]

    def _note_run(self, rank: int, node: int) -> None:
        unit, (entry,) = self.microbatch[node], self.nodes[node]
        if self.forward[node]:
            self.unfinished[rank][unit] -= self.size[entry]
        elif not self.deferred[node]:
            self.backwards[rank][unit] -= 1
            while self.oldest[rank] and not self.backwards[rank][self.oldest[rank][-1]]:
                self.oldest[rank].pop()
