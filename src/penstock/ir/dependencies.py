"""Dependencies between actions: the one home of their rules.

- `F(s, m)` needs `F(t, m)` of every stage t that s reads.
- `B` or `I(s, m)` needs `F(s, m)` and the input gradient, `B` or `I(t, m)`, of every stage t that reads s.
- `W(s, m)` needs `I(s, m)`.
- If sequences are cut into slices, each slice counts as a microbatch in these rules. Besides, F of a slice needs F of the slice before it,
  whose keys and values it reads, and B or I of a slice needs that of the slice after it, which adds to their gradients, on the same stage.
- `OFFLOAD` needs the `F` of its stage and microbatch (and slice), `RELOAD` its `OFFLOAD`, and then `B` or `I` the `RELOAD`. The
  copy that an `OFFLOAD` starts runs beside the next compute action of its rank; the first `F` behind that waits for its end, so that it
  can take the memory, or the `RELOAD` does if that comes first.
- `WAIT_SEND` needs its send, and waits until the receive has taken the message; `WAIT_REDUCE_GRAD` needs its `REDUCE_GRAD`.
- A spread vocabulary has no stage of its own: every rank has a share of the head, whose actions name the last stage, or of the embedding,
  whose actions name stage 0, or of both. `BROADCAST` and `COMBINE` are collectives that every rank joins. Of the head, `BROADCAST` needs
  the `F` of the last stage on the rank of that stage, `S` its `BROADCAST`, `COMBINE` its `S`, and `T` and the last stage's `B` or `I` the
  `COMBINE`. Of the embedding, `COMBINE` needs its `S`, the `F` of stage 0 the `COMBINE`, `BROADCAST` the `B` or `I` of stage 0 on the rank
  of that stage, and `T` the `BROADCAST`. What needs a collective waits until every rank has joined it; a rank that joins does not wait.

In a schedule these hold between compute actions. In a program the output of another rank comes as a message: the consumer
needs its receive, which its own rank ran before, and the send, which it waits for; a send needs the action that computes its data.

An output goes once to each rank that reads it, and the gradients of all its readers there come back as one sum. That message
is named after the edge to the farthest of these readers, its *carrier*. A program may also name a message for another of the
edges: that edge then has its own, as every edge had in programs of version 0.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from penstock.ir import codes
from penstock.ir.action import Action
from penstock.ir.graph import StageGraph
from penstock.ir.kind import COMPUTE, JOINS, SEND_WAITS, SENDS, SPREAD, Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Flags, Ints, Rows, find_first

_ENDS = {True: (Kind.SEND_F, Kind.RECV_F), False: (Kind.SEND_B, Kind.RECV_B)}
"""The two ends of a message, of activations (forward) and of gradients."""
_STEP = np.full(codes.MAX_KINDS, -1)
_STEP[[Kind.SEND_F, Kind.RECV_B, Kind.WAIT_SEND_F]] = 1
"""By kind, the step in a chain from the stage of a message's end to that of its other end."""


_HEAD = (
    ((Kind.BROADCAST,), Kind.F),
    ((Kind.S,), Kind.BROADCAST),
    ((Kind.COMBINE,), Kind.S),
    ((Kind.B, Kind.I), Kind.COMBINE),
    ((Kind.T,), Kind.COMBINE),
)
_EMBEDDING = (
    ((Kind.COMBINE,), Kind.S),
    ((Kind.F,), Kind.COMBINE),
    ((Kind.BROADCAST,), Kind.I),
    ((Kind.T,), Kind.BROADCAST),
)
"""The rules of a spread head and a spread embedding: the kinds that need something, and the kind that they need."""


def needs(action: Action, graph: StageGraph, slices: int = 1) -> tuple[Action, ...]:
    """List what one compute action, copy or collective needs, with `I` standing for whichever backward makes the input gradient.

    Whether embedding and head are spread is not known here: the F of stage 0 and the backward of the last stage need a COMBINE besides
    if they are, and a BROADCAST needs its F or I on the rank of its stage only.

    >>> needs(Action.parse("1I0"), StageGraph.chain(3))
    (Action('1F0'), Action('2I0'))
    >>> needs(Action.parse("1I0.2"), StageGraph.chain(3), slices=4)
    (Action('1F0.2'), Action('2I0.2'), Action('1I0.3'))
    >>> needs(Action.parse("2S0"), StageGraph.chain(3)), needs(Action.parse("0S0"), StageGraph.chain(3))
    ((Action('2BROADCAST0'),), ())
    """
    needed: list[Action] = []
    for part in action.parts:
        if part.kind is Kind.F:
            needed += [replace(part, stage=source) for source in graph.inputs_of(part.stage)]
            needed += [replace(part, slice=part.slice - 1)] if part.slice else []
        elif part.kind in (Kind.B, Kind.I):
            needed.append(replace(part, kind=Kind.F))
            needed += [replace(part, kind=Kind.I, stage=target) for target in graph.outputs_of(part.stage)]
            needed += [replace(part, kind=Kind.I, slice=part.slice + 1)] if part.slice is not None and part.slice + 1 < slices else []
        elif part.kind is Kind.W:
            needed.append(replace(part, kind=Kind.I))
        elif part.kind.is_copy:
            needed.append(replace(part, kind=Kind.F if part.kind is Kind.OFFLOAD else Kind.OFFLOAD))
        elif part.kind.is_spread:
            rules = _EMBEDDING if part.stage == 0 else _HEAD
            needed += [replace(part, kind=maker) for kinds, maker in rules if part.kind in kinds]
    return tuple(needed)


class Needs(NamedTuple):
    """Pairs of entries: `before[k]` must come before `after[k]`."""

    before: Ints
    after: Ints


class Missing(NamedTuple):
    """Entries that need an action that does not exist: the entry, and the code of the missing action."""

    after: Ints
    code: Ints


class Deliveries(NamedTuple):
    """The messages between ranks: one value per message and column; all columns but `peer` hold entries."""

    begun: Ints
    """The first action that adds to it, and the last: they differ for a sum of several readers' gradients."""
    made: Ints
    sent: Ints
    """The send; in a schedule the action that made it."""
    first: Ints
    """The first action that uses it, and the last: they differ for an output with several readers on the rank."""
    last: Ints
    peer: Ints
    """The stage that the message is for; for an output with several readers on the rank, the farthest."""


class Meetings(NamedTuple):
    """The collectives that every rank joins, numbered by `code`, which is the same on all ranks."""

    code: Ints
    join: Ints
    """The entries that join a collective, and the number of each one's collective."""
    joined: Ints
    user: Ints
    """The entries that wait for a collective, and the number of each one's collective."""
    used: Ints

    def list_waits(self, rank: Ints) -> Needs:
        """Each entry that waits for a collective, and the joins of all other ranks; `rank` has the rank of every entry."""
        order = np.argsort(self.joined, kind="stable")
        count = np.bincount(self.joined, minlength=len(self.code))
        first = np.concatenate(([0], np.cumsum(count)))[self.used]
        many = count[self.used]
        user = np.repeat(self.user, many)
        within = np.arange(len(user)) - np.repeat(np.cumsum(many) - many, many)
        join = self.join[order[np.repeat(first, many) + within]]
        far = rank[join] != rank[user]
        return Needs(join[far], user[far])


@dataclass(frozen=True)
class Links:
    """Every dependency of a schedule or program, resolved to entries."""

    local: Needs
    """Both ends on one rank: held by the order of the row."""
    data: Needs
    """Made on one rank and used on another: held by waiting."""
    messages: Needs
    """Each send and its receive."""
    retired: Needs
    """Each receive of a message and the sender's WAIT_SEND, which waits for it."""
    meetings: Meetings
    """The collectives of a spread vocabulary: held by waiting until all ranks have joined."""
    missing: Missing


@dataclass(frozen=True)
class Linker:
    """Finds the dependencies among the entries of `rows`. Entries of stages or units beyond the counts are passed over."""

    rows: Rows
    placement: Placement
    graph: StageGraph
    units: int
    """How many microbatches there are, or slices of all of them."""
    lowered: bool
    """Whether data crosses ranks by messages."""

    def links(self) -> Links:
        local: list[Needs] = []
        data: list[Needs] = []
        missing: list[Missing] = []
        self._add_stage_rules(local, missing)
        self._add_copy_rules(local, missing)
        self._add_slice_rules(local, missing)
        for forward in (True, False):
            self._add_edge_rule(forward, local, data, missing)
        messages = self._add_send_rules(local, missing) if self.lowered else _join(Needs)
        retired = self._add_wait_rules(messages, local, missing) if self.lowered else _join(Needs)
        self._add_reduction_rule(local, missing)
        meetings = self._add_spread_rules(local, missing)
        return Links(_join(Needs, local), _join(Needs, data), messages, retired, meetings, _join(Missing, missing))

    # The rules within a stage -----------------------------------------------------------------------------------------

    def _add_stage_rules(self, local: list[Needs], missing: list[Missing]) -> None:
        for kinds, table, maker in (((Kind.B, Kind.I), self._forwards, Kind.F), ((Kind.W,), self._gradients, Kind.I)):
            after = self._find_entries(*kinds)
            stage, microbatch = self.rows.stage[after], self.rows.microbatch[after]
            self._resolve(table[self._cell(stage, microbatch)], after, codes.pack(stage, int(maker), microbatch), local, missing)

    def _add_copy_rules(self, local: list[Needs], missing: list[Missing]) -> None:
        """A moved activation is made, taken away and brought back, in this order, before its backward."""
        offloads, reloads = self._find_entries(Kind.OFFLOAD), self._find_entries(Kind.RELOAD)
        if not len(offloads) + len(reloads):
            return
        moved, returned = self._find_makers(Kind.OFFLOAD), self._find_makers(Kind.RELOAD)
        backwards = self._find_entries(Kind.B, Kind.I)
        cells = self._cell(self.rows.stage[backwards], self.rows.microbatch[backwards])
        backwards = backwards[(moved[cells] >= 0) | (returned[cells] >= 0)]
        for after, table, maker in (
            (offloads, self._forwards, Kind.F),
            (reloads, moved, Kind.OFFLOAD),
            (backwards, returned, Kind.RELOAD),
        ):
            stage, unit = self.rows.stage[after], self.rows.microbatch[after]
            self._resolve(table[self._cell(stage, unit)], after, codes.pack(stage, int(maker), unit), local, missing)

    def _add_slice_rules(self, local: list[Needs], missing: list[Missing]) -> None:
        """Forwards of a microbatch's slices ascend on a stage, backwards descend."""
        slices = self.rows.slices
        if slices == 1:
            return
        for kinds, table, maker, step in (((Kind.F,), self._forwards, Kind.F, -1), ((Kind.B, Kind.I), self._gradients, Kind.I, 1)):
            after = self._find_entries(*kinds)
            after = after[self.rows.microbatch[after] % slices != (0 if step < 0 else slices - 1)]
            stage, unit = self.rows.stage[after], self.rows.microbatch[after] + step
            self._resolve(table[self._cell(stage, unit)], after, codes.pack(stage, int(maker), unit), local, missing)

    # The rules along an edge ------------------------------------------------------------------------------------------

    def _add_edge_rule(self, forward: bool, local: list[Needs], data: list[Needs], missing: list[Missing]) -> None:
        """Activations forward or gradients backward along every edge that touches the consumer's stage."""
        consumers = self._find_entries(Kind.F) if forward else self._find_entries(Kind.B, Kind.I)
        makers, maker_kind = (self._forwards, Kind.F) if forward else (self._gradients, Kind.I)
        table = self.graph.input_table if forward else self.graph.output_table
        for column in range(table.shape[1]):
            source = table[self.rows.stage[consumers], column]
            after, source = consumers[source >= 0], source[source >= 0]
            microbatch = self.rows.microbatch[after]
            crosses = self._crosses(self.rows.stage[after], source, microbatch)
            near, far = ~crosses, crosses
            made_by = makers[self._cell(source, microbatch)]
            code = codes.pack(source, int(maker_kind), microbatch)
            self._resolve(made_by[near], after[near], code[near], local, missing)
            if not self.lowered:
                self._resolve(made_by[far], after[far], code[far], data, missing)
                continue
            after, source, microbatch = after[far], source[far], microbatch[far]
            edge = self.edge_between(self.rows.stage[after], source)
            carrier = self.carried_by(forward, edge, microbatch)
            if not forward:  # a sum is needed once, as the gradient of its carrier
                own = carrier == edge
                after, carrier, microbatch = after[own], carrier[own], microbatch[own]
            low, high = self.graph.edge_table[carrier].T
            stage, other = (high, low) if forward else (low, high)
            cell = carrier * self.units + microbatch
            send, receive = _ENDS[forward]
            for kind, at, away, into in ((receive, stage, other, local), (send, other, stage, data)):
                self._resolve(self._ends[kind][cell], after, message_code(kind, at, away, microbatch), into, missing)

    def _add_send_rules(self, local: list[Needs], missing: list[Missing]) -> Needs:
        """Let sends need the actions that compute their data; returns the pairs of send and receive."""
        pairs: list[Needs] = []
        for forward, makers, maker in ((True, self._forwards, Kind.F), (False, self._gradients, Kind.I)):
            send, receive = _ENDS[forward]
            entries = self._find_entries(send)
            stage, microbatch = self.rows.stage[entries], self.rows.microbatch[entries]
            self._resolve(makers[self._cell(stage, microbatch)], entries, codes.pack(stage, int(maker), microbatch), local, missing)
            sent, received = self._ends[send], self._ends[receive]
            both = (sent >= 0) & (received >= 0)
            pairs.append(Needs(sent[both], received[both]))
        edge, carrier, microbatch = self.find_shared(forward=False)
        entries, reader = self._ends[Kind.SEND_B][carrier * self.units + microbatch], self.graph.edge_table[edge, 1]
        there = entries >= 0
        entries, reader, microbatch = entries[there], reader[there], microbatch[there]
        code = codes.pack(reader, int(Kind.I), microbatch)
        self._resolve(self._gradients[self._cell(reader, microbatch)], entries, code, local, missing)
        return _join(Needs, pairs)

    # The rules of waits -----------------------------------------------------------------------------------------------

    def _add_wait_rules(self, messages: Needs, local: list[Needs], missing: list[Missing]) -> Needs:
        """A WAIT_SEND needs its send; and the pairs of a message's receive and the WAIT_SEND of its sender."""
        waits = self._find_entries(*SEND_WAITS)
        if not len(waits):
            return _join(Needs)
        send = self.sends_awaited(waits)
        stage, microbatch, peer = self.rows.stage[waits], self.rows.microbatch[waits], peer_stages(self.rows)[waits]
        kind = np.where(self.rows.kind[waits] == Kind.WAIT_SEND_F, *SENDS)
        self._resolve(send, waits, message_code(kind, stage, peer, microbatch), local, missing)
        receive = find_first(messages.before, messages.after, len(self.rows.codes) + 1)[send]  # of no send, -1: the last place
        return Needs(receive[receive >= 0], waits[receive >= 0])

    def sends_awaited(self, waits: Ints) -> Ints:
        """For each entry that is a WAIT_SEND, the send that it waits for, -1 if there is none."""
        send = np.full(len(waits), -1, dtype=np.int64)
        stage, peer = self.rows.stage[waits], peer_stages(self.rows)[waits]
        edge = self.edge_between(stage, peer)
        for wait, kind in zip(SEND_WAITS, SENDS, strict=True):
            along = (self.rows.kind[waits] == wait) & (edge >= 0) & ((peer - stage) * find_direction(kind) > 0)
            send[along] = self._ends[kind][edge[along] * self.units + self.rows.microbatch[waits[along]]]
        return send

    def _add_reduction_rule(self, local: list[Needs], missing: list[Missing]) -> None:
        """A WAIT_REDUCE_GRAD needs the REDUCE_GRAD of its stage on its own rank."""
        waits = self._find_entries(Kind.WAIT_REDUCE_GRAD)
        if not len(waits):
            return
        reduces, stages, rank = self._find_entries(Kind.REDUCE_GRAD), self.graph.stages, self.rows.rank
        table = find_first(rank[reduces] * stages + self.rows.stage[reduces], reduces, len(self.rows) * stages)
        stage = self.rows.stage[waits]
        self._resolve(table[rank[waits] * stages + stage], waits, codes.pack(stage, int(Kind.REDUCE_GRAD)), local, missing)

    # The rules of a spread vocabulary ---------------------------------------------------------------------------------

    def _add_spread_rules(self, local: list[Needs], missing: list[Missing]) -> Meetings:
        """The order of a spread layer on each rank, and the collectives that all ranks join."""
        users: list[Ints] = [np.zeros(0, dtype=np.int64)]
        awaited: list[Ints] = [np.zeros(0, dtype=np.int64)]
        for stage, rules in ((self.graph.stages - 1, _HEAD), (0, _EMBEDDING)) if self.graph.stages > 1 else ():
            if not (self.rows.stage[self._find_entries(*SPREAD)] == stage).any():
                continue
            for kinds, maker in rules:
                after = self._find_entries(*kinds)
                after = after[self.rows.stage[after] == stage]
                unit, rank = self.rows.microbatch[after], self.rows.rank[after]
                if maker in COMPUTE:  # only the rank of the stage has it
                    after = after[self.placement.ranks_of(stage, unit) == rank]
                    unit = self.rows.microbatch[after]
                    made_by = (self._forwards if maker is Kind.F else self._gradients)[self._cell(np.full(len(after), stage), unit)]
                else:
                    made_by = self._find_on_ranks(stage, maker)[rank * self.units + unit]
                code = np.asarray(codes.pack(stage, int(maker), unit), dtype=np.int64)
                self._resolve(made_by, after, code, local, missing)
                if maker in JOINS:
                    users.append(after)
                    awaited.append(code)
        user, code = np.concatenate(users), np.concatenate(awaited)
        join = self._find_entries(*JOINS)
        numbers, joined = np.unique(self.rows.codes[join], return_inverse=True)
        used = np.searchsorted(numbers, code)
        there = (used < len(numbers)) & (np.append(numbers, -1)[used] == code)
        return Meetings(numbers, join, joined, user[there], used[there])

    def _find_on_ranks(self, stage: int, kind: Kind) -> Ints:
        """The first entry of a spread kind for each rank and unit."""
        entries = self._find_entries(kind)
        entries = entries[self.rows.stage[entries] == stage]
        return find_first(self.rows.rank[entries] * self.units + self.rows.microbatch[entries], entries, len(self.rows) * self.units)

    @staticmethod
    def _resolve(before: Ints, after: Ints, code: Ints, into: list[Needs], missing: list[Missing]) -> None:
        there = before >= 0
        into.append(Needs(before[there], after[there]))
        if not there.all():
            missing.append(Missing(after[~there], code[~there]))

    def first_use(self, forward: bool, low: Ints, high: Ints, microbatch: Ints) -> Ints:
        """The entry that uses the message of each edge first, -1 if there is none."""
        if not forward:
            return self.gradient_at(low, microbatch)
        use = self.forward_at(high, microbatch)
        edge, carrier, shared_microbatch = self.find_shared(forward)
        if not len(edge):
            return use
        never = len(self.rows.codes)
        table = np.full(len(self.graph.edges) * self.units, never, dtype=np.int64)
        entries = self.forward_at(self.graph.edge_table[edge, 1], shared_microbatch)
        np.minimum.at(table, carrier * self.units + shared_microbatch, np.where(entries < 0, never, entries))
        at = self.edge_between(low, high)
        others = np.where(at < 0, never, table[at * self.units + microbatch])
        first = np.minimum(np.where(use < 0, never, use), others)
        return np.where(first == never, -1, first)

    def forward_at(self, stage: Ints, microbatch: Ints) -> Ints:
        """The entry of each stage and microbatch's forward, -1 if there is none."""
        return np.asarray(self._forwards[self._cell(stage, microbatch)])

    def gradient_at(self, stage: Ints, microbatch: Ints) -> Ints:
        """The entry of each stage and microbatch's B or I, -1 if there is none."""
        return np.asarray(self._gradients[self._cell(stage, microbatch)])

    # Which message carries what ---------------------------------------------------------------------------------------

    def carried_by(self, forward: bool, edge: Ints, microbatch: Ints) -> Ints:
        """The edge after which the message is named that carries each edge's activation (forward) or gradient."""
        table = self._carriers[forward]
        return edge if table is None else np.asarray(table[edge, microbatch])

    def carrier_ends(self, forward: bool, one: Ints, other: Ints, microbatch: Ints) -> tuple[Ints, Ints]:
        """The lower and the higher stage of the edge whose message carries the data between two stages."""
        if self._carriers[forward] is None:
            return np.minimum(one, other), np.maximum(one, other)
        low, high = self.graph.edge_table[self.carried_by(forward, self.edge_between(one, other), microbatch)].T
        return low, high

    def find_shared(self, forward: bool) -> tuple[Ints, Ints, Ints]:
        """The edges that have no message of their own: the edge, the one that carries it, and the microbatch."""
        table = self._carriers[forward]
        if table is None:
            return (np.zeros(0, dtype=np.int64),) * 3
        edge, microbatch = np.nonzero(table != np.arange(len(table))[:, None])
        return edge, table[edge, microbatch], microbatch

    @cached_property
    def _carriers(self) -> dict[bool, Ints | None]:
        """For activations (True) and gradients, the carrier of each edge and microbatch; None if each edge is its own."""
        carriers = carrier_edges(self.graph, self.placement)
        own = np.arange(len(self.graph.edges))
        if (carriers == own).all():
            return {True: None, False: None}
        usual = carriers[np.arange(self.units) % len(carriers)].T
        tables: dict[bool, Ints | None] = {}
        for forward, (send, receive) in _ENDS.items():
            named = ((self._ends[send] >= 0) | (self._ends[receive] >= 0)).reshape(usual.shape)
            tables[forward] = np.where(named, own[:, None], usual)
        return tables

    # Tables -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _inside(self) -> Flags:
        return (self.rows.stage < self.graph.stages) & (self.rows.microbatch < self.units)

    def _find_entries(self, *kinds: Kind) -> Ints:
        """The entries of these kinds, inside the counts."""
        if self.rows.kinds.isdisjoint(kinds):
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.rows.is_kind(*kinds) & self._inside)

    @cached_property
    def _place(self) -> Ints:
        """Each stage's row in the tables. Stages that are nowhere share the last one, so that a few ranks alone need little room."""
        present = np.zeros(self.graph.stages, dtype=np.bool_)
        present[self.rows.stage[self._inside]] = True
        return np.where(present, np.cumsum(present) - 1, present.sum())

    def _cell(self, stage: Ints, microbatch: Ints) -> Ints:
        return np.asarray(self._place[stage] * self.units + microbatch)

    @cached_property
    def _forwards(self) -> Ints:
        return self._find_makers(Kind.F)

    @cached_property
    def _gradients(self) -> Ints:
        return self._find_makers(Kind.B, Kind.I)

    def _find_makers(self, *kinds: Kind) -> Ints:
        entries = self._find_entries(*kinds)
        cells = self._cell(self.rows.stage[entries], self.rows.microbatch[entries])
        return find_first(cells, entries, (int(self._place.max()) + 1) * self.units)

    @cached_property
    def _ends(self) -> dict[Kind, Ints]:
        """For each kind of communication, the entry of each edge and microbatch."""
        return {kind: self._end_table(kind) for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)}

    def _end_table(self, kind: Kind) -> Ints:
        entries = self._find_entries(kind)
        stage, peers = self.rows.stage[entries], peer_stages(self.rows)[entries]
        edge = self.edge_between(stage, peers)
        along = (edge >= 0) & ((peers - stage) * find_direction(kind) > 0)  # activations only go up, gradients only down
        entries, edge = entries[along], edge[along]
        return find_first(edge * self.units + self.rows.microbatch[entries], entries, len(self.graph.edges) * self.units)

    def edge_between(self, one: Ints, other: Ints) -> Ints:
        """The index of the edge between two stages, -1 if there is none."""
        keys = self.graph.edge_table @ (self.graph.stages, 1)
        if not len(keys):
            return np.full(len(one), -1, dtype=np.int64)
        asked = np.minimum(one, other) * self.graph.stages + np.maximum(one, other)
        at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
        inside = (np.minimum(one, other) >= 0) & (np.maximum(one, other) < self.graph.stages)
        return np.where((keys[at] == asked) & inside, at, -1)

    def _crosses(self, one: Ints, other: Ints, microbatch: Ints) -> Flags:
        return np.not_equal(self.placement.ranks_of(one, microbatch), self.placement.ranks_of(other, microbatch))


def carrier_edges(graph: StageGraph, placement: Placement) -> Ints:
    """For each copy of the model (rows) and edge (columns), the edge that carries it: to the farthest reader on the same rank.

    An edge within one rank carries itself.

    >>> graph = StageGraph.chain(4, skips=[(0, 2), (0, 3)])
    >>> carrier_edges(graph, Placement.custom([0, 1, 0, 1])).tolist()
    [[2, 1, 2, 3, 4]]
    """
    edges = graph.edge_table
    carriers = np.empty((len(placement.copies), len(edges)), dtype=np.int64)
    for copy, ranks in enumerate(np.array(placement.copies, dtype=np.int64)):
        source, target = ranks[edges[:, 0]], ranks[edges[:, 1]]
        key = np.where(source == target, -1 - np.arange(len(edges)), edges[:, 0] * placement.ranks + target)
        _, last, group = np.unique(key[::-1], return_index=True, return_inverse=True)  # edges are sorted: the last is the farthest
        carriers[copy] = (len(edges) - 1 - last)[group[::-1]]
    return carriers


def find_deliveries(links: Links, rows: Rows, *, sharing: bool = True) -> Deliveries:
    """List every message of a schedule or program, from its links: its sends; in a schedule what would be sent.

    They are in the order in which they are sent; messages that one action sends to several stages go to the lowest stage first.
    `sharing` says whether any output has several readers; without, each pair of entries is a message.
    """
    before, after = links.data
    begun, makers = _find_message_makers(links, rows, sharing)
    if not sharing:
        return _sort(Deliveries(begun[before], makers[before], before, after, after, rows.stage[after]))
    sends, forward = rows.is_kind(*SENDS)[before], rows.is_kind(Kind.F)[after]
    span, ranks = len(rows.codes), len(rows)
    key = np.where(sends, before, np.where(forward, before * ranks + rows.rank[after], (span + after) * ranks + rows.rank[before]))
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.append(True, key[order][1:] != key[order][:-1])[: len(key)])
    if not len(starts):
        return Deliveries(before, before, before, after, after, after)
    before, after = before[order], after[order]
    first, last = (ends.reduceat(after, starts) for ends in (np.minimum, np.maximum))
    sent, peer = np.maximum.reduceat(before, starts), np.maximum.reduceat(rows.stage[after], starts)
    return _sort(Deliveries(np.minimum.reduceat(begun[before], starts), makers[sent], sent, first, last, peer))


def _sort(deliveries: Deliveries) -> Deliveries:
    order = np.argsort(deliveries.sent * (deliveries.peer.max(initial=0) + 1) + deliveries.peer, kind="stable")
    return Deliveries(*(column[order] for column in deliveries))


def _find_message_makers(links: Links, rows: Rows, sharing: bool) -> Needs:
    """For each send, the first and the last entry that compute its data; any other entry is its own maker."""
    of_send = rows.is_kind(*SENDS)[links.local.after]
    maker, send = links.local.before[of_send], links.local.after[of_send]
    makers = np.arange(len(rows.codes))
    if not sharing:
        makers[send] = maker
        return Needs(makers, makers)
    begun, order = makers.copy(), np.argsort(maker, kind="stable")
    makers[send[order]] = maker[order]
    begun[send[order[::-1]]] = maker[order[::-1]]
    return Needs(begun, makers)


def find_releases(rows: Rows) -> Needs:
    """Each OFFLOAD, and the action of its rank that waits for its copy, so that the memory it has left can be used again.

    That is the first F behind the next compute action, or its RELOAD if that comes first. An OFFLOAD with neither is left out.
    """
    offloads = np.flatnonzero(rows.is_kind(Kind.OFFLOAD))
    if not len(offloads):
        return _join(Needs)
    never = len(rows.codes)
    forwards, computes = (np.append(np.flatnonzero(rows.is_kind(*kinds)), never) for kinds in ((Kind.F,), COMPUTE))
    beside = np.append(rows.group_ends, never)[computes[np.searchsorted(computes, offloads)]]
    forward = forwards[np.searchsorted(forwards, beside)]
    forward = np.where(forward < rows.offsets[rows.rank[offloads] + 1], forward, never)
    reloads = np.flatnonzero(rows.is_kind(Kind.RELOAD))
    cell = rows.stage * (int(rows.microbatch.max(initial=0)) + 1) + rows.microbatch
    reload = find_first(cell[reloads], reloads, int(cell.max(initial=0)) + 1)[cell[offloads]]
    reload = np.where(reload > offloads, reload, never)
    release = np.minimum(forward, reload)
    return Needs(offloads[release < never], release[release < never])


def find_direction(kind: Kind) -> int:
    """The step from a communication's stage to its neighbour's: +1 up the chain, -1 down."""
    return int(_STEP[kind])


def peer_stages(rows: Rows) -> Ints:
    """The stage at the other end of each communication entry and of each wait for a send (meaningless for the others)."""
    return np.where(rows.peer >= 0, rows.peer, rows.stage + _STEP[rows.kind])


def message_code(kind: Kind | Ints, stage: Ints, other: Ints, microbatch: Ints) -> Ints:
    """The code of one end of a message; the peer is written only if it is not the neighbour."""
    peer = np.where(other == stage + _STEP[kind], -1, other)
    return np.asarray(codes.pack(stage, kind, microbatch, peer), dtype=np.int64)


_List = TypeVar("_List", Needs, Missing)


def _join(of: type[_List], parts: Iterable[_List] = ()) -> _List:
    none = np.zeros(0, dtype=np.int64)
    return of(*(np.concatenate(column) for column in zip((none, none), *parts, strict=True)))
