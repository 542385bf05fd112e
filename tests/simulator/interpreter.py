"""A second simulator, written from the rules alone: a queue of events over `Action` objects, nothing flat and nothing fast."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ir.naive import numbered
from penstock.ir.action import Action
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.table import Table

Edge = tuple[str, int, int, int]
"""What travels (activations "up" or gradients "down"), the lower and the higher stage of the edge, the microbatch."""
Channel = tuple[int, int, str]


class StuckError(Exception):
    """No event is left and some rank is not at its end: each such rank with the action it stands at."""

    def __init__(self, at: dict[int, Action]) -> None:
        self.at = at
        super().__init__(str(at))


@dataclass(eq=False)
class Message:
    """One message on its way; -1 is a time that has not come."""

    edge: Edge
    source: int
    target: int
    size: float
    sent: float
    ends: tuple[int, int]
    """The stages of the action that sends it, in a schedule the last that adds to it, and of the first that uses it."""
    left: float = -1.0
    arrived: float = -1.0


class Change(NamedTuple):
    """One change of what a rank holds. Changes at one moment come in the order of the row, those of one place all at once."""

    time: float
    place: tuple[int, int]
    """The place of its action in the row; then -1 before the action, 0 at its start, 1 at its end."""
    category: str
    size: float


@dataclass
class Outcome:
    """The result: everything by rank; `start` and `end` have one value per action."""

    start: list[list[float]]
    end: list[list[float]]
    collectives: list[dict[int, tuple[float, float]]]
    """Start and end of collectives and of copies to the host and back, by the place in the row of the action that starts them."""
    messages: list[Message]
    finish: list[float]
    busy: list[float]
    changes: list[list[Change]]
    static: list[float]
    first: list[float]
    """When each rank's first compute action starts."""

    @property
    def makespan(self) -> float:
        return max(self.finish)

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def span_bubbles(self) -> list[float]:
        """Of each rank with the longest span."""
        spans = [finish - first for finish, first in zip(self.finish, self.first, strict=True)]
        return [(span - busy) / span if span else 0.0 for span, busy in zip(spans, self.busy, strict=True) if span == max(spans)]

    def held(self, rank: int) -> list[tuple[float, dict[str, float]]]:
        """What the rank holds of each category after each change."""
        level = dict.fromkeys(("activations", "weight stash", "receive buffers", "parameters"), 0.0)
        levels: dict[tuple[float, tuple[int, int]], dict[str, float]] = {}
        for change in sorted(self.changes[rank]):
            level[change.category] += change.size
            levels[change.time, change.place] = dict(level)
        return [(time, held) for (time, _), held in levels.items()]

    def peak(self, rank: int, *categories: str) -> float:
        """The most that the rank holds at once, of some categories or of all with what it holds for good."""
        levels = [sum(v for k, v in level.items() if not categories or k in categories) for _, level in self.held(rank)]
        return max(levels, default=0.0) + (0.0 if categories else self.static[rank])


def interpret(table: Table, costs: Costs) -> Outcome:
    """Run the table from time 0 until nothing more can happen."""
    return _Run(table, costs).run()


@dataclass
class Leaving:
    """An activation on its way to the host."""

    action: Action
    end: float
    beside: bool = False
    """Whether a compute action has started since, which its copy runs beside."""


@dataclass
class _Rank:
    """Where one rank stands."""

    row: tuple[Action, ...]
    at: int = 0
    running: bool = False
    lane: float = 0.0
    """When its collectives so far are through."""
    whole: dict[int, float] = field(default_factory=dict)
    """When each stage's parameters are (or will be) gathered."""
    summed: dict[int, float] = field(default_factory=dict)
    """When each stage's gradients are (or will be) reduced."""
    leaving: list[Leaving] = field(default_factory=list)
    """Activations on their way to the host whose memory is still held."""
    back: dict[tuple[int, int], float] = field(default_factory=dict)
    """When each activation that was moved is (or will be) back."""


class _Run:
    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.costs = table, costs
        self.now = 0.0
        self.queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self.ticket = 0
        rows = numbered(table)
        self.ranks = [_Rank(row) for row in rows]
        self.named = {self._edge(action) for row in rows for action in row if action.kind.is_communication}
        waits = (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)
        self.awaited = {self._edge(action) for row in rows for action in row if action.kind in waits}
        """The edges whose messages the sender waits for."""
        self.spread = {action.stage for row in rows for action in row if action.kind is Kind.S}
        """The stages of which a layer is spread over the ranks."""
        self.made: set[tuple[str, int, int]] = set()
        self.arrived: set[Edge] = set()
        self.posted: set[Edge] = set()
        self.put: set[Edge] = set()
        self.outbox: list[Message] = []
        self.waiting: list[Message] = []
        self.busy_links: set[object] = set()
        self.sent: dict[Channel, list[Edge]] = defaultdict(list)
        self.host: dict[tuple[Kind, int], float] = {}
        """When each direction of a link to the host is free."""
        self.joined: dict[Action, dict[int, int]] = defaultdict(dict)
        """The ranks that have joined each collective of all ranks, each with the place in its row."""
        self.met: dict[Action, float] = {}
        """When each of these collectives ends, once all have joined."""
        self.communicator = 0.0
        count = len(self.ranks)
        self.out = Outcome(
            start=[[-1.0] * len(rank.row) for rank in self.ranks],
            end=[[-1.0] * len(rank.row) for rank in self.ranks],
            collectives=[{} for _ in range(count)],
            messages=[],
            finish=[0.0] * count,
            busy=[0.0] * count,
            changes=[[] for _ in range(count)],
            static=[self._static(rank) for rank in range(count)],
            first=[0.0] * count,
        )

    # The clock --------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self._at(0.0, -1, lambda: None)
        while self.queue:
            self.now = self.queue[0][0]
            while self.queue and self.queue[0][0] == self.now:
                heapq.heappop(self.queue)[3]()
            self._settle()
            self._launch()
        stuck = {r: rank.row[rank.at] for r, rank in enumerate(self.ranks) if rank.at < len(rank.row)}
        if stuck:
            raise StuckError(stuck)
        self._finish()
        return self.out

    def _at(self, time: float, rank: int, event: Callable[[], None]) -> None:
        """Let the event happen then; at one moment those of lower ranks first."""
        self.ticket += 1
        heapq.heappush(self.queue, (time, rank, self.ticket, event))

    def _settle(self) -> None:
        """Until nothing more can happen at this moment, let the lowest rank that can go on take one action."""
        while any(self._advance(rank) for rank in range(len(self.ranks))):
            pass

    def _advance(self, rank: int) -> bool:
        state = self.ranks[rank]
        return not state.running and state.at < len(state.row) and self._try(rank, state.row[state.at])

    def _try(self, rank: int, action: Action) -> bool:
        if action.is_compute or action.kind.is_copy:
            return self._try_compute(rank, action) if action.is_compute else self._try_copy(rank, action)
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            return self._try_send(rank, action)
        if action.kind in (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B):
            edge = self._edge(action)
            if not (edge in self.arrived and edge in self.posted):
                return False
            self._hold(rank, self._now_at(rank, 1), "receive buffers", -self._size(edge))
        elif action.kind is Kind.WAIT_REDUCE_GRAD:
            if self.now < self.ranks[rank].summed.get(action.stage, float("inf")):
                return False
        elif action.kind in (Kind.RECV_F, Kind.RECV_B):
            edge = self._edge(action)
            self.posted.add(edge)
            self._hold(rank, self._now_at(rank, 1), "receive buffers", self._size(edge))
        elif action.kind in (Kind.BROADCAST, Kind.COMBINE):
            self._join(rank, action)
        elif action.kind is Kind.RESHARD:
            self._hold(rank, self._now_at(rank, 1), "parameters", -self._cost("parameters", action.stage))
        else:
            self._collective(rank, action)
            return True
        self._instant(rank)
        return True

    def _instant(self, rank: int) -> None:
        """The rank's action takes no time."""
        self._record(rank, self.now, self.now)
        self.ranks[rank].at += 1

    def _record(self, rank: int, start: float, end: float) -> None:
        at = self.ranks[rank].at
        self.out.start[rank][at], self.out.end[rank][at] = start, end

    # Copies to the host and back --------------------------------------------------------------------------------------

    def _unit(self, action: Action) -> tuple[int, int]:
        return action.stage, action.microbatch or 0

    def _try_copy(self, rank: int, action: Action) -> bool:
        state = self.ranks[rank]
        if action.kind is Kind.OFFLOAD:
            state.leaving.append(Leaving(action, self._copy(rank, action)))
        else:
            if not self._release(rank, [other for other in state.leaving if self._unit(other.action) == self._unit(action)]):
                return False
            self._hold(rank, self._now_at(rank, 0), "activations", self._cost("activation", action.stage, action.microbatch))
            state.back[self._unit(action)] = self._copy(rank, action)
        self._instant(rank)
        return True

    def _copy(self, rank: int, action: Action) -> float:
        """Start a copy as soon as the link is free; when it ends."""
        link = action.kind, rank // self.costs.host_link_shared
        size = self._cost("activation", action.stage, action.microbatch)
        carried = 0.0 if self.costs.host_bandwidth is None else size / self.costs.host_bandwidth
        start = max(self.now, self.host.get(link, 0.0))
        self.host[link] = end = start + (self.costs.host_latency + carried)
        self.out.collectives[rank][self.ranks[rank].at] = start, end
        self._at(end, -1, lambda: None)
        return end

    def _release(self, rank: int, gone: list[Leaving]) -> bool:
        """Take over the memory of activations that have left; not before their copies have ended."""
        if any(self.now < other.end for other in gone):
            return False
        for other in gone:
            self.ranks[rank].leaving.remove(other)
            size = self._cost("activation", other.action.stage, other.action.microbatch)
            self._hold(rank, self._now_at(rank, 0), "activations", -size)
        return True

    # Computing --------------------------------------------------------------------------------------------------------

    def _try_compute(self, rank: int, action: Action) -> bool:
        state = self.ranks[rank]
        ready = all(
            self._has_met(part) and self._has_inputs(rank, part) and self.now >= state.whole.get(part.stage, 0.0) for part in action.parts
        )
        backs = (state.back.get(self._unit(part), 0.0) for part in action.parts if part.kind in (Kind.B, Kind.I))
        if not ready or any(self.now < back for back in backs):
            return False
        forward = any(part.kind is Kind.F for part in action.parts)
        if not self._release(rank, [other for other in state.leaving if other.beside and forward]):
            return False
        for other in state.leaving:
            other.beside = True
        duration = sum(self._duration(rank, part) for part in action.parts)
        if len(action.parts) > 1:
            duration *= self.costs.overlap
        self._record(rank, self.now, self.now + duration)
        if not any(each.is_compute for each in state.row[: state.at]):
            self.out.first[rank] = self.now
        self.out.busy[rank] += duration
        state.running = True
        for part in action.parts:
            if part.kind is Kind.F and self.table.training:
                self._hold(rank, self._now_at(rank, 0), "activations", self._cost("activation", part.stage, part.microbatch))
            if part.kind is Kind.S:
                self._hold(rank, self._now_at(rank, 0), "activations", self._cost_of_share("logits", rank, part))
                embedding = self._cost("output", 0, part.microbatch) if part.stage == 0 else 0.0
                self._hold(rank, self._now_at(rank, 0), "receive buffers", embedding)
        self._at(self.now + duration, rank, lambda: self._computed(rank, action))
        return True

    def _has_inputs(self, rank: int, part: Action) -> bool:
        microbatch = part.microbatch or 0
        own = {Kind.F: "", Kind.W: "down", Kind.S: "", Kind.T: ""}.get(part.kind, "up")
        if own and (own, part.stage, microbatch) not in self.made:
            return False
        slices = self.table.slices
        if part.kind is Kind.F and microbatch % slices and ("up", part.stage, microbatch - 1) not in self.made:
            return False
        if own == "up" and (microbatch + 1) % slices and ("down", part.stage, microbatch + 1) not in self.made:
            return False
        for edge, maker in self._inputs(part):
            if self.table.placement.rank_of(maker, microbatch) == rank:
                if (edge[0], maker, microbatch) not in self.made:
                    return False
            elif (carrier := self._carrier(edge)) not in self.arrived or (self.table.lowered and carrier not in self.posted):
                return False
        return True

    def _carrier(self, edge: Edge) -> Edge:
        """The edge that names the message which brings what goes along one: itself if a message names it, else the farthest reader's."""
        way, low, high, microbatch = edge
        return edge if edge in self.named else (way, low, max(self._readers(low, high, microbatch)), microbatch)

    def _readers(self, low: int, high: int, microbatch: int) -> list[int]:
        """The stages that read the lower stage's output on the rank of the higher."""
        rank_of = self.table.placement.rank_of
        return [b for a, b in self.table.graph.edges if a == low and rank_of(b, microbatch) == rank_of(high, microbatch)]

    def _sharers(self, edge: Edge) -> list[int]:
        """The readers whose edges one message brings."""
        way, low, high, microbatch = edge
        return [other for other in self._readers(low, high, microbatch) if self._carrier((way, low, other, microbatch)) == edge]

    def _all_made(self, edge: Edge) -> bool:
        """Whether every part of a message is there."""
        makers = [edge[1]] if edge[0] == "up" else self._sharers(edge)
        return all((edge[0], stage, edge[3]) in self.made for stage in makers)

    def _inputs(self, part: Action) -> Iterator[tuple[Edge, int]]:
        """The edges that a part reads, and the stage at the other end of each."""
        graph, stage, microbatch = self.table.graph, part.stage, part.microbatch or 0
        if part.kind is Kind.F:
            yield from ((("up", other, stage, microbatch), other) for other in graph.inputs_of(stage))
        elif part.kind in (Kind.B, Kind.I):
            yield from ((("down", stage, other, microbatch), other) for other in graph.outputs_of(stage))

    def _outputs(self, part: Action) -> Iterator[tuple[Edge, int]]:
        """The edges that a part writes, and the stage at the other end of each."""
        graph, stage, microbatch = self.table.graph, part.stage, part.microbatch or 0
        if part.kind is Kind.F:
            yield from ((("up", stage, other, microbatch), other) for other in graph.outputs_of(stage))
        elif part.kind in (Kind.B, Kind.I):
            yield from ((("down", other, stage, microbatch), other) for other in graph.inputs_of(stage))

    def _duration(self, rank: int, part: Action) -> float:
        if part.kind is Kind.B and self.costs.b is None:
            return self._cost("i", part.stage, part.microbatch) + self._cost("w", part.stage, part.microbatch)
        if part.kind in (Kind.S, Kind.T):
            return self._cost_of_share(part.kind.name.lower(), rank, part)
        return self._cost(part.kind.name.lower(), part.stage, part.microbatch)

    def _computed(self, rank: int, action: Action) -> None:
        for part in action.parts:
            microbatch = part.microbatch or 0
            if part.kind in (Kind.S, Kind.T):
                self._let_go_share(rank, part)
                continue
            self.made.add(({Kind.F: "up", Kind.W: "weights"}.get(part.kind, "down"), part.stage, microbatch))
            self._let_go(rank, part)
            if self.table.lowered:
                continue
            for edge, other in self._outputs(part):
                target, carrier = self.table.placement.rank_of(other, microbatch), self._carrier(edge)
                if target != rank and edge in (carrier, ("down", *edge[1:])) and carrier not in self.put and self._all_made(carrier):
                    self.put.add(carrier)
                    self._put(carrier, rank, target, part.stage)
        self.ranks[rank].running = False
        self.ranks[rank].at += 1

    # A spread vocabulary ----------------------------------------------------------------------------------------------

    def _join(self, rank: int, action: Action) -> None:
        """Join a collective of all ranks; the last to join starts it, once the one before it is through."""
        if action.kind is Kind.BROADCAST:
            self._hold(rank, self._now_at(rank, 0), "receive buffers", self._cost("output", action.stage, action.microbatch))
        joined = self.joined[action]
        joined[rank] = self.ranks[rank].at
        if len(joined) < len(self.ranks):
            return
        start = max(self.now, self.communicator)
        self.communicator = end = start + self._cost(action.kind.name.lower(), action.stage, action.microbatch)
        self.met[action] = end
        for other, at in joined.items():
            self.out.collectives[other][at] = start, end
            if action.kind is Kind.COMBINE:
                embedding = self._cost("output", 0, action.microbatch) if action.stage == 0 else 0.0
                self._hold(other, (end, (at, 1)), "receive buffers", -embedding)
        self._at(end, -1, lambda: None)

    def _has_met(self, part: Action) -> bool:
        """Whether the collective that a part needs is through, if it needs one."""
        last = self.table.stages - 1
        if part.stage not in self.spread:
            return True
        before = {Kind.S: Kind.BROADCAST, Kind.T: Kind.COMBINE, Kind.B: Kind.COMBINE, Kind.I: Kind.COMBINE} if part.stage == last else {}
        before = {Kind.F: Kind.COMBINE, Kind.T: Kind.BROADCAST} if part.stage == 0 else before
        if part.kind not in before:
            return True
        return self.now >= self.met.get(Action(part.stage, before[part.kind], part.microbatch), float("inf"))

    def _let_go_share(self, rank: int, part: Action) -> None:
        if part.kind is (Kind.T if self.table.training else Kind.S):
            brought = self._cost("output", part.stage, part.microbatch) if self.table.training or part.stage else 0.0
            self._hold(rank, self._now_at(rank, 1), "activations", -self._cost_of_share("logits", rank, part))
            self._hold(rank, self._now_at(rank, 1), "receive buffers", -brought)

    # Memory -----------------------------------------------------------------------------------------------------------

    def _let_go(self, rank: int, part: Action) -> None:
        end = self._now_at(rank, 1)
        microbatch, rank_of = part.microbatch or 0, self.table.placement.rank_of
        for edge, maker in self._inputs(part):
            if rank_of(maker, microbatch) != rank and self._is_last_use(part, edge):
                self._hold(rank, end, "receive buffers", -self._size(edge))
        for edge, reader in self._outputs(part):
            parts = self._sharers(self._carrier(edge)) if edge[0] == "down" and rank_of(reader, microbatch) != rank else []
            if len(parts) > 1:
                there = sum(("down", stage, microbatch) in self.made for stage in parts)
                change = (there == 1) - (there == len(parts))
                self._hold(rank, end, "receive buffers", change * self._size(edge))
        activation, stash = (self._cost(name, part.stage, part.microbatch) for name in ("activation", "weight_stash"))
        if part.kind in (Kind.B, Kind.I):
            self._hold(rank, end, "activations", -activation)
        if part.kind is Kind.I:
            self._hold(rank, end, "weight stash", stash)
        elif part.kind is Kind.W:
            self._hold(rank, end, "weight stash", -stash)

    def _is_last_use(self, part: Action, edge: Edge) -> bool:
        """Whether all other users of a message are through: readers on the rank for an output, and one for each sum of gradients."""
        if edge[0] == "up":
            return all(("up", stage, edge[3]) in self.made for stage in self._sharers(self._carrier(edge)))
        return edge == self._carrier(edge)

    def _now_at(self, rank: int, side: int) -> tuple[float, tuple[int, int]]:
        return self.now, (self.ranks[rank].at, side)

    def _hold(self, rank: int, when: tuple[float, tuple[int, int]], category: str, size: float) -> None:
        self.out.changes[rank].append(Change(*when, category, size))

    def _static(self, rank: int) -> float:
        sharded = any(action.kind is Kind.UNSHARD for row in self.table for action in row)
        return sum(self._cost("shard" if sharded else "parameters", stage) for stage in self.table.placement.stages_of(rank))

    # Messages ---------------------------------------------------------------------------------------------------------

    def _edge(self, action: Action) -> Edge:
        """The edge that a send, a receive or a wait for a send stands for."""
        up = action.kind in (Kind.SEND_F, Kind.RECV_F, Kind.WAIT_SEND_F)
        step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B, Kind.WAIT_SEND_F) else -1
        peer = action.stage + step if action.peer is None else action.peer
        return ("up" if up else "down", min(action.stage, peer), max(action.stage, peer), action.microbatch or 0)

    def _try_send(self, rank: int, action: Action) -> bool:
        edge = self._edge(action)
        if not self._all_made(edge):
            return False
        far = edge[2] if edge[0] == "up" else edge[1]
        target = self.table.placement.rank_of(far, edge[3])
        buffers = getattr(self.table, "buffers", None)
        slots = None if buffers is None else buffers.channels.get((rank, target, action.kind))
        before = self.sent[rank, target, edge[0]]
        if slots is not None and len(before) >= slots:
            taken_by = before[len(before) - slots]
            if not (taken_by in self.arrived and taken_by in self.posted):
                return False
        before.append(edge)
        if edge in self.awaited:
            self._hold(rank, self._now_at(rank, 0), "receive buffers", self._size(edge))
        self._put(edge, rank, target, action.stage)
        self._instant(rank)
        return True

    def _put(self, edge: Edge, rank: int, target: int, sender: int) -> None:
        _, user = self._user(edge, target)
        self.outbox.append(Message(edge, rank, target, self._size(edge), self.now, (sender, user)))

    def _launch(self) -> None:
        """Put what was sent at this moment in line, and start what finds its links free."""
        self.waiting += self.outbox
        self.outbox.clear()
        wanted: set[object] = set()
        for message in list(self.waiting):
            links = self._links(message)
            if not links & (self.busy_links | wanted):
                self._leave(message, links)
            wanted |= links

    def _leave(self, message: Message, links: set[object]) -> None:
        self.waiting.remove(message)
        self.busy_links |= links
        latency, bandwidth = (self._of_pair(value, message) for value in (self.costs.latency, self.costs.bandwidth))
        carried = 0.0 if bandwidth is None else message.size / bandwidth
        message.left, message.arrived = self.now, self.now + (latency + carried)
        self.out.messages.append(message)
        self._at(message.arrived, -1, lambda: self._arrive(message, links))

    def _of_pair(self, value: Any, message: Message) -> Any:
        """The value of the link of a message: one for all, or from a table."""
        return value[message.source][message.target] if isinstance(value, tuple) else value

    def _arrive(self, message: Message, links: set[object]) -> None:
        self.busy_links -= links
        self.arrived.add(message.edge)
        if not self.table.lowered:
            self._hold(message.target, (self.now, (self._user(message.edge, message.target)[0], -1)), "receive buffers", message.size)

    def _user(self, edge: Edge, target: int) -> tuple[int, int]:
        """The place in the receiver's row of the action that uses the message first, and its stage."""
        way, low, _, microbatch = edge
        stages, kinds = (self._sharers(edge), (Kind.F,)) if way == "up" else ([low], (Kind.B, Kind.I))
        parts = ((place, part) for place, action in enumerate(self.ranks[target].row) for part in action.parts)
        uses = ((place, p.stage) for place, p in parts if p.stage in stages and p.microbatch == microbatch and p.kind in kinds)
        return next(uses)

    def _links(self, message: Message) -> set[object]:
        match self.costs.contention:
            case "independent":
                return {(message.source, message.target, message.edge[0])}
            case "pair":
                return {(message.source, message.target)}
            case "duplex":
                return {("out of", message.source), ("into", message.target)}
            case "links":
                return set(self._of_pair(self.costs.lanes, message))
            case _:
                return {message.source, message.target}

    def _size(self, edge: Edge) -> float:
        return self._cost("output", edge[1], edge[3])

    # Collectives and the end ------------------------------------------------------------------------------------------

    def _collective(self, rank: int, action: Action) -> None:
        state = self.ranks[rank]
        start = max(self.now, state.lane)
        state.lane = start + self._cost("unshard" if action.kind is Kind.UNSHARD else "reduce", action.stage)
        self.out.collectives[rank][state.at] = start, state.lane
        if action.kind is Kind.UNSHARD:
            state.whole[action.stage] = state.lane
            self._hold(rank, (start, (state.at, 0)), "parameters", self._cost("parameters", action.stage))
        else:
            state.summed[action.stage] = state.lane
        self._at(state.lane, -1, lambda: None)
        self._instant(rank)

    def _finish(self) -> None:
        for rank, state in enumerate(self.ranks):
            last = max(self.out.end[rank], default=0.0)
            step = sum(self._cost("optimizer", stage) for stage in self.table.placement.stages_of(rank))
            self.out.busy[rank] += step
            copied = max((end for _, end in self.out.collectives[rank].values()), default=0.0)
            self.out.finish[rank] = max(last, state.lane, copied) + step

    def _cost_of_share(self, name: str, rank: int, part: Action) -> float:
        """What a rank's share of the vocabulary takes or holds: so many times the value of the stage, for each end."""
        multiple: Any = getattr(self.costs, f"rank_{name}")
        if isinstance(multiple, tuple):
            multiple = multiple[rank]
        if isinstance(multiple, tuple):
            multiple = multiple[0] if part.stage == 0 else multiple[1]
        return float(multiple) * self._cost(name, part.stage, part.microbatch)

    def _cost(self, name: str, stage: int, microbatch: int | None = None) -> float:
        value: Any = getattr(self.costs, name)
        if isinstance(value, tuple):
            value = value[stage]
        if isinstance(value, tuple):
            value = value[microbatch or 0]
        return float(value)
