"""Spread the vocabulary over all ranks: every rank computes its share of the output layer and of the input embedding."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir import codes
from penstock.ir.costs import Costs, check_costs
from penstock.ir.kind import COMPUTE, JOINS, SHARES, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Floats, Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table, check_table
from penstock.passes.base import Pass
from penstock.passes.receive import refuse_broken
from penstock.text.units import check_count

_TYPICAL = Costs(s=0.5, t=0.25)
"""The times by which the pass places its actions if it is not told others: a forward takes 1."""
_TIMES = {
    Kind.F: "f",
    Kind.B: "b",
    Kind.I: "i",
    Kind.W: "w",
    Kind.BROADCAST: "broadcast",
    Kind.COMBINE: "combine",
}
_SHARE_TIMES = {Kind.S: "s", Kind.T: "t"}
_EARLY = 2
"""How many embeddings are made before the forward that needs the first of them."""
MOST_PENDING = 2
"""How many microbatches a rank has run S of, at most, before it runs the T of the first of them."""
_SAME = 1e-9
"""Moments that differ by less than this share count as one."""


@dataclass(frozen=True)
class Vocabulary(Pass):
    """Run S and T of a rank's share of the vocabulary on every rank, and join the collectives around them.

    `head` spreads the output layer and the loss, which leave the last stage; `embedding` the input embedding, which leaves stage 0. The
    backward of the last stage has to wait until every rank has run S, so each rank runs forwards in the meantime: it may hold up to `ahead`
    more activations than before. T fills the gaps, but no rank has the logits of more than two microbatches. The faster of two orders is
    taken: every backward `ahead` forwards later than before, or forwards early only where a rank would wait.

    The order of a stage's forwards and of its backwards stays as it is. `spread_vocabulary` does the same for costs of your own.
    """

    name = "vocabulary"
    head: bool = True
    embedding: bool = True
    ahead: int = 1

    def __post_init__(self) -> None:
        check_count("ahead of pass vocabulary", self.ahead, 0, error=PassError)
        for option in ("head", "embedding"):
            if not isinstance(getattr(self, option), bool):
                raise PassError(f"option {option} of pass vocabulary is true or false, got {getattr(self, option)!r}")
        if not (self.head or self.embedding):
            raise PassError("pass vocabulary with head=false and embedding=false spreads nothing: leave it out")

    def apply(self, program: Program) -> Program:
        return self._record(program, rows=self.place(program, _TYPICAL))

    def place(self, table: Table, costs: Costs) -> Rows:
        """The rows with the actions of the spread layers, placed for these costs."""
        strange = np.flatnonzero(~table.rows.is_kind(*COMPUTE))
        if table.lowered or len(strange):
            first = f"{table.rows.action_at(int(strange[0]))} already" if len(strange) else "been lowered"
            raise PassError(f"pass vocabulary changes the order of compute actions, but the program has {first}: run the pass first")
        if table.stages < 2:
            raise PassError("pass vocabulary needs at least two stages, one for the embedding and one for the head; this schedule has 1")
        refuse_broken(Program.start(table))
        stages = [0] * self.embedding + [table.stages - 1] * self.head
        spread = _add_shares(table, stages)
        nodes = _Nodes(spread, costs)
        runs = [_Run(spread, nodes, self.ahead, delays) for delays in (True, False)]
        complete = [run for run in runs if run.finish()]
        assert complete, "a schedule that runs to its end does so with a spread vocabulary"
        return min(complete, key=lambda run: run.now).build()


def spread_vocabulary(schedule: Schedule, costs: Costs | None = None, vocabulary: Vocabulary | None = None) -> Schedule:
    """The schedule with its head and embedding spread over all ranks, placed for these costs.

    >>> from penstock.schedules.registry import schedule
    >>> spread = spread_vocabulary(schedule("1f1b", 2, 2), vocabulary=Vocabulary(embedding=False))
    >>> print(*spread[1])
    1F0 1BROADCAST0 1S0 1COMBINE0 1F1 1BROADCAST1 1S1 1COMBINE1 1T0 1B0 1B1 1T1
    """
    check_table(schedule, "spread_vocabulary")
    if not isinstance(schedule, Schedule):
        raise PassError("spread_vocabulary takes a schedule, got a lowered program: spread the vocabulary first, then lower")
    if vocabulary is not None and not isinstance(vocabulary, Vocabulary):
        raise PassError(f"vocabulary must be a penstock.Vocabulary, like Vocabulary(embedding=False), got {vocabulary!r}")
    options, times = Vocabulary() if vocabulary is None else vocabulary, _TYPICAL if costs is None else check_costs(costs)
    remake = schedule.remake
    shape = schedule.placement, schedule.microbatches
    rows = options.place(schedule, times)
    spread = Schedule.from_rows(rows, *shape, graph=schedule.graph, name=schedule.name, slices=schedule.slices)
    spread.options = schedule.options
    if remake is not None and not any(isinstance(value, tuple) and isinstance(value[0], tuple) for value in vars(times).values()):
        spread.remake = lambda microbatches: spread_vocabulary(remake(microbatches), costs, options)
    return spread


def _add_shares(table: Table, stages: list[int]) -> Schedule:
    """The table with the spread actions of these stages behind each rank's row, in no order."""
    kinds = (*SHARES, *JOINS) if table.training else (Kind.S, Kind.BROADCAST, Kind.COMBINE)
    units = np.arange(table.units, dtype=np.int64)
    further = [
        np.asarray(codes.pack(stage, int(kind), units), dtype=np.int64)
        for stage in stages
        for kind in kinds
        if table.training or stage or kind is not Kind.BROADCAST
    ]
    rows = Rows.join([np.concatenate([table.row(rank), *further]) for rank in range(table.ranks)])
    return Schedule.from_rows(rows, table.placement, table.microbatches, graph=table.graph, name=table.name, slices=table.slices)


class _Nodes:
    """The actions of a table as lists, and what they wait for."""

    def __init__(self, table: Schedule, costs: Costs) -> None:
        rows = table.rows
        self.rank, self.stage, self.unit, kinds = (
            [int(value) for value in column[rows.heads]] for column in (rows.rank, rows.stage, rows.microbatch, rows.kind)
        )
        self.kind = [Kind(kind) for kind in kinds]
        """The kind, stage and unit of its first part, if a node runs several together."""
        self.takes = _list_times(table, costs).tolist()
        """The time of each node; of a join, that of its collective."""
        change = rows.is_kind(Kind.F).astype(np.int64) - rows.is_kind(Kind.B, Kind.I)
        self.holds: Ints = np.bincount(rows.group, change).astype(np.int64)
        """By how many activations each node changes what its rank holds."""
        self.missing = [0] * len(self.rank)
        self.followers: list[list[tuple[int, float]]] = [[] for _ in self.rank]
        """The nodes that need each node, and how long after its end its output is there."""
        for pairs, travel in ((table.links.local, None), (table.links.data, _list_travel(table, costs))):
            columns = rows.group[pairs.before], rows.group[pairs.after], np.zeros(len(pairs.before)) if travel is None else travel
            for before, after, delay in zip(*(column.tolist() for column in columns), strict=True):
                if before != after:
                    self.missing[after] += 1
                    self.followers[before].append((after, delay))
        meetings = table.links.meetings
        self.joined = dict(zip(rows.group[meetings.join].tolist(), meetings.joined.tolist(), strict=True))
        """The collective that each of these nodes joins."""
        self.joins = [[0] * table.ranks for _ in meetings.code]
        """The node of each rank that joins each collective."""
        for node, number in self.joined.items():
            self.joins[number][self.rank[node]] = node


def _list_times(table: Schedule, costs: Costs) -> Floats:
    rows, times = table.rows, np.zeros(len(table.rows.codes))
    for kind, name in _TIMES.items():
        of_kind = rows.is_kind(kind)
        if of_kind.any():
            times[of_kind] = costs.table(name, table.stages, table.units)[rows.stage[of_kind], rows.microbatch[of_kind]]
    for kind, name in _SHARE_TIMES.items():
        of_kind = rows.is_kind(kind)
        places = rows.rank[of_kind], rows.stage[of_kind], rows.microbatch[of_kind]
        times[of_kind] = costs.of_shares(name, (table.stages, table.units), *places)
    nodes = np.bincount(rows.group, times)
    return np.where(np.bincount(rows.group) > 1, nodes * costs.overlap, nodes)


def _list_travel(table: Schedule, costs: Costs) -> Floats:
    """The time that each message between two ranks takes on a free link."""
    rows, (before, after) = table.rows, table.links.data
    size = costs.table("output", table.stages, table.units)[np.minimum(rows.stage[before], rows.stage[after]), rows.microbatch[before]]
    return costs.travel(size, rows.rank[before], rows.rank[after])


class _Run:
    """A run of all ranks in which each starts, whenever it is free, the most urgent action that can run.

    That is S of the head, for which all ranks wait; then S of the embedding if its forward is near, and T if its logits have been held for
    long; then the next action of the schedule; and then any T. The schedule has its backwards `ahead` forwards later than it was; or, if
    `delays` is False, a rank whose next action cannot run yet takes its next forward or weight gradient.
    """

    def __init__(self, table: Schedule, nodes: _Nodes, ahead: int, delays: bool) -> None:
        self.table, self.nodes, self.now = table, nodes, 0.0
        ranks = table.ranks
        bounds = table.rows.group_offsets.tolist()
        self.missing, self.absent = list(nodes.missing), [len(joins) for joins in nodes.joins]
        self.events: list[tuple[float, int, Callable[[int], None], int]] = []
        self.tickets = itertools.count()
        self.busy, self.ended = [False] * ranks, [-1.0] * len(nodes.rank)
        self.changed = set(range(ranks))
        """The ranks that may have something to run since they were last asked."""
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        """The nodes that each rank has run."""
        self.queues = [self._list_queues(range(low, high), ahead, delays) for low, high in itertools.pairwise(bounds)]
        self.shares = [{(kind, head): deque[int]() for kind in SHARES for head in (False, True)} for _ in range(ranks)]
        """The S and T of each rank that can run, of the embedding and of the head."""
        self.embeddings: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        """The S of the embedding of each rank that can run, as a heap by the turn of the forward that needs it."""
        self.held, self.pending = [0] * ranks, [0] * ranks
        """How many activations each rank holds, and the logits of how many microbatches."""
        self.most = [int(np.cumsum(nodes.holds[low:high]).max(initial=0)) + ahead for low, high in itertools.pairwise(bounds)]
        self.free = 0.0
        """When the last collective ends."""
        self.meetings: list[tuple[int, list[int]]] = []
        """The collectives in the order of the communicator, and how many nodes each rank had ended when the last one joined."""
        rows = table.rows
        first = np.flatnonzero(rows.is_kind(Kind.F) & (rows.stage == 0))
        turns = np.unique(rows.step[first] * ranks + rows.rank[first], return_inverse=True)[1]
        self.turn = dict(zip(rows.microbatch[first].tolist(), turns.tolist(), strict=True))
        """For each unit, how many actions need an embedding before it does."""
        self.uses = set(rows.group[first].tolist())
        self.used, self.early = 0, _EARLY * len(table.placement.copies)
        for node, missing in enumerate(nodes.missing):
            if not missing:
                self._mark_ready(node)

    def _list_queues(self, nodes: range, ahead: int, delays: bool) -> list[deque[int]]:
        """A rank's own actions, with every backward later; or forwards, backwards and weight gradients apart.

        If the schedule runs any actions together, all stay in their order.
        """
        own = [node for node in nodes if self.nodes.kind[node] in COMPUTE]
        if not self.table.rows.heads.all():
            return [deque(own)]
        forwards, backwards, weights = (
            [node for node in own if self.nodes.kind[node] in kinds] for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
        )
        if not delays:
            return [deque(forwards), deque(backwards), deque(weights)]
        before = np.cumsum([self.nodes.kind[node] is Kind.F for node in own])
        turn = [
            2 * int(count) if self.nodes.kind[node] is Kind.F else 2 * (int(count) + ahead) + 1
            for node, count in zip(own, before, strict=True)
        ]
        return [deque(node for _, node in sorted(zip(turn, own, strict=True)))]

    def finish(self) -> bool:
        """Run until nothing more can; whether that is the end of all ranks."""
        while True:
            changed, self.changed = sorted(self.changed), set()
            for rank in changed:
                node = None if self.busy[rank] else self._choose(rank)
                if node is not None:
                    self.busy[rank] = True
                    self.order[rank].append(node)
                    self._plan(self.now + self.nodes.takes[node], self._end, node)
            if not self.events:
                break
            until = self.events[0][0] * (1 + _SAME)
            while self.events and self.events[0][0] <= until:
                self.now, _, happen, number = heapq.heappop(self.events)
                happen(number)
        return min(self.ended) >= 0

    def build(self) -> Rows:
        """The rows in the order in which the ranks have run them."""
        return Rows.join([self._build_row(rank) for rank in range(self.table.ranks)]).cut_into(self.table.slices)

    def _choose(self, rank: int) -> int | None:
        """The most urgent node that a rank can run now, taken out of its queue."""
        shares, queues = self.shares[rank], [queue for queue in self.queues[rank] if queue]
        if shares[Kind.S, True]:
            return shares[Kind.S, True].popleft()
        embeddings = self.embeddings[rank]
        if embeddings and embeddings[0][0] < self.used + self.early:
            return heapq.heappop(embeddings)[1]
        late = [head for head in (True, False) if shares[Kind.T, head]]
        if late and (self.pending[rank] if late[0] else len(shares[Kind.T, False])) >= MOST_PENDING:
            return shares[Kind.T, late[0]].popleft()
        queues.sort(key=lambda queue: queue[0])
        for place, queue in enumerate(queues):
            fits = not place or self.held[rank] + self.nodes.holds[queue[0]] <= self.most[rank]
            if fits and not self.missing[queue[0]]:
                return queue.popleft()
        return shares[Kind.T, late[0]].popleft() if late else None

    def _plan(self, time: float, happen: Callable[[int], None], number: int) -> None:
        heapq.heappush(self.events, (time, next(self.tickets), happen, number))

    def _end(self, node: int) -> None:
        nodes = self.nodes
        rank, kind, stage = nodes.rank[node], nodes.kind[node], nodes.stage[node]
        self.busy[rank] = False
        self.changed.add(rank)
        self.held[rank] += int(nodes.holds[node])
        if stage and kind in SHARES:
            self.pending[rank] += 1 if kind is Kind.S else -1
        if node in self.uses:
            self.used += 1
            self.changed.update(range(self.table.ranks))
        self._release(node)

    def _release(self, node: int) -> None:
        """Note the end of a node, or of the collective that it joins."""
        self.ended[node] = self.now
        for other, delay in self.nodes.followers[node]:
            if delay:
                self._plan(self.now + delay, self._supply, other)
            else:
                self._supply(other)

    def _supply(self, node: int) -> None:
        self.missing[node] -= 1
        if not self.missing[node]:
            self._mark_ready(node)

    def _mark_ready(self, node: int) -> None:
        nodes, kind, rank = self.nodes, self.nodes.kind[node], self.nodes.rank[node]
        self.changed.add(rank)
        if kind is Kind.S and not nodes.stage[node]:
            heapq.heappush(self.embeddings[rank], (self.turn[nodes.unit[node]], node))
        elif kind in SHARES:
            self.shares[rank][kind, nodes.stage[node] > 0].append(node)
        elif kind in JOINS:
            number = nodes.joined[node]
            self.absent[number] -= 1
            if not self.absent[number]:
                self.free = max(self.now, self.free) + nodes.takes[node]
                self.meetings.append((number, [len(order) - busy for order, busy in zip(self.order, self.busy, strict=True)]))
                self._plan(self.free, self._end_meeting, number)

    def _end_meeting(self, number: int) -> None:
        for join in self.nodes.joins[number]:
            self._release(join)

    def _build_row(self, rank: int) -> Ints:
        """The nodes of a rank, and each join before the first of them that had not ended when the last rank joined."""
        rows, row, order = self.table.rows, list[int](), self.order[rank]
        for (number, ended), before in zip(self.meetings, [0, *(counts[rank] for _, counts in self.meetings)], strict=False):
            row += order[before : ended[rank]]
            row.append(self.nodes.joins[number][rank])
        row += order[self.meetings[-1][1][rank] :]
        starts = np.append(np.flatnonzero(rows.heads), len(rows.codes))
        return np.concatenate([rows.codes[starts[node] : starts[node + 1]] for node in row])
