"""What must come before what: the one home of the dependency rules.

- `F(s, m)` needs `F(t, m)` of every stage t that s reads.
- `B` or `I(s, m)` needs `F(s, m)` and the input gradient, `B` or `I(t, m)`, of every stage t that reads s.
- `W(s, m)` needs `I(s, m)`.

In a schedule these hold between compute actions. In a program what another rank makes comes as a message: the consumer
needs its receive, which its own rank ran before, and the send, which it waits for; a send needs what it sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir import codes
from penstock.ir.action import Action
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Flags, Ints, Rows


def needs(action: Action, graph: StageGraph) -> tuple[Action, ...]:
    """What one compute action needs, with `I` standing for whichever backward makes the input gradient.

    >>> needs(Action.parse("1I0"), StageGraph.chain(3))
    (Action('1F0'), Action('2I0'))
    """
    found: list[Action] = []
    for part in action.parts:
        stage, microbatch = part.stage, part.microbatch
        if part.kind is Kind.F:
            found += [Action(source, Kind.F, microbatch) for source in graph.inputs_of(stage)]
        elif part.kind in (Kind.B, Kind.I):
            found.append(Action(stage, Kind.F, microbatch))
            found += [Action(target, Kind.I, microbatch) for target in graph.outputs_of(stage)]
        elif part.kind is Kind.W:
            found.append(Action(stage, Kind.I, microbatch))
    return tuple(found)


class Needs(NamedTuple):
    """Pairs of entries: `before[k]` must come before `after[k]`."""

    before: Ints
    after: Ints


class Missing(NamedTuple):
    """Entries that need an action which is nowhere: the entry, and the code of what it needs."""

    after: Ints
    code: Ints


@dataclass(frozen=True)
class Links:
    """Every dependency of a schedule or program, resolved to entries."""

    local: Needs
    """Both ends on one rank: held by the order of the row."""
    data: Needs
    """Made on one rank and used on another: held by waiting."""
    messages: Needs
    """Each send and its receive."""
    missing: Missing


@dataclass(frozen=True)
class Linker:
    """Finds the dependencies among the entries of `rows`. Entries of stages or microbatches beyond the counts are passed over."""

    rows: Rows
    placement: Placement
    graph: StageGraph
    microbatches: int
    lowered: bool
    """Whether what crosses ranks crosses by messages."""

    def links(self) -> Links:
        local: list[Needs] = []
        data: list[Needs] = []
        missing: list[Missing] = []
        self._stage_rules(local, missing)
        for forward in (True, False):
            self._edge_rule(forward, local, data, missing)
        messages = self._send_rules(local, missing) if self.lowered else _no_needs()
        return Links(_joined(local), _joined(data), messages, _joined_missing(missing))

    # The rules within a stage -----------------------------------------------------------------------------------------

    def _stage_rules(self, local: list[Needs], missing: list[Missing]) -> None:
        for kinds, table, maker in (((Kind.B, Kind.I), self._forwards, Kind.F), ((Kind.W,), self._gradients, Kind.I)):
            after = self._of(*kinds)
            stage, microbatch = self._stage[after], self._microbatch[after]
            self._resolve(table[self._cell(stage, microbatch)], after, codes.pack(stage, int(maker), microbatch), local, missing)

    # The rules along an edge ------------------------------------------------------------------------------------------

    def _edge_rule(self, forward: bool, local: list[Needs], data: list[Needs], missing: list[Missing]) -> None:
        """Activations forward or gradients backward along every edge that touches the consumer's stage."""
        consumers = self._of(Kind.F) if forward else self._of(Kind.B, Kind.I)
        makers, maker_kind = (self._forwards, Kind.F) if forward else (self._gradients, Kind.I)
        table = self.graph.input_table if forward else self.graph.output_table
        for column in range(table.shape[1]):
            source = table[self._stage[consumers], column]
            after, source = consumers[source >= 0], source[source >= 0]
            microbatch = self._microbatch[after]
            crosses = self._crosses(self._stage[after], source, microbatch)
            near, far = ~crosses, crosses
            made_by = makers[self._cell(source, microbatch)]
            code = codes.pack(source, int(maker_kind), microbatch)
            self._resolve(made_by[near], after[near], code[near], local, missing)
            if not self.lowered:
                self._resolve(made_by[far], after[far], code[far], data, missing)
                continue
            send, receive = (Kind.SEND_F, Kind.RECV_F) if forward else (Kind.SEND_B, Kind.RECV_B)
            after, source, microbatch = after[far], source[far], microbatch[far]
            stage = self._stage[after]
            cell = self._edge(stage, source) * self.microbatches + microbatch
            for kind, at, other, into in ((receive, stage, source, local), (send, source, stage, data)):
                self._resolve(self._ends[kind][cell], after, message_code(kind, at, other, microbatch), into, missing)

    def _send_rules(self, local: list[Needs], missing: list[Missing]) -> Needs:
        """A send needs what it sends; and the pairs of send and receive."""
        pairs: list[Needs] = []
        for send, receive, makers, maker in (
            (Kind.SEND_F, Kind.RECV_F, self._forwards, Kind.F),
            (Kind.SEND_B, Kind.RECV_B, self._gradients, Kind.I),
        ):
            entries = self._of(send)
            stage, microbatch = self._stage[entries], self._microbatch[entries]
            self._resolve(makers[self._cell(stage, microbatch)], entries, codes.pack(stage, int(maker), microbatch), local, missing)
            sent, received = self._ends[send], self._ends[receive]
            both = (sent >= 0) & (received >= 0)
            pairs.append(Needs(sent[both], received[both]))
        return _joined(pairs)

    @staticmethod
    def _resolve(before: Ints, after: Ints, code: Ints, into: list[Needs], missing: list[Missing]) -> None:
        there = before >= 0
        into.append(Needs(before[there], after[there]))
        if not there.all():
            missing.append(Missing(after[~there], code[~there]))

    def forward_at(self, stage: Ints, microbatch: Ints) -> Ints:
        """The entry of each stage and microbatch's forward, -1 where there is none."""
        return np.asarray(self._forwards[self._cell(stage, microbatch)])

    def gradient_at(self, stage: Ints, microbatch: Ints) -> Ints:
        """The entry of each stage and microbatch's B or I, -1 where there is none."""
        return np.asarray(self._gradients[self._cell(stage, microbatch)])

    # Tables -----------------------------------------------------------------------------------------------------------

    @property
    def _stage(self) -> Ints:
        return self.rows.stage

    @property
    def _microbatch(self) -> Ints:
        return self.rows.microbatch

    @cached_property
    def _inside(self) -> Flags:
        return (self._stage < self.graph.stages) & (self._microbatch < self.microbatches)

    def _of(self, *kinds: Kind) -> Ints:
        """The entries of these kinds, inside the counts."""
        return np.flatnonzero(self.rows.is_kind(*kinds) & self._inside)

    @cached_property
    def _place(self) -> Ints:
        """Each stage's row in the tables. Stages that are nowhere share the last one, so that a few ranks alone need little room."""
        present = np.zeros(self.graph.stages, dtype=np.bool_)
        present[self._stage[self._inside]] = True
        return np.where(present, np.cumsum(present) - 1, present.sum())

    def _cell(self, stage: Ints, microbatch: Ints) -> Ints:
        return np.asarray(self._place[stage] * self.microbatches + microbatch)

    def _first(self, cells: Ints, entries: Ints, size: int) -> Ints:
        """A table with the first entry of each cell, -1 where there is none."""
        table = np.full(size, -1, dtype=np.int64)
        table[cells[::-1]] = entries[::-1]
        return table

    @cached_property
    def _forwards(self) -> Ints:
        return self._made_by(Kind.F)

    @cached_property
    def _gradients(self) -> Ints:
        return self._made_by(Kind.B, Kind.I)

    def _made_by(self, *kinds: Kind) -> Ints:
        entries = self._of(*kinds)
        cells = self._cell(self._stage[entries], self._microbatch[entries])
        return self._first(cells, entries, (int(self._place.max()) + 1) * self.microbatches)

    @cached_property
    def _ends(self) -> dict[Kind, Ints]:
        """For each kind of communication, the entry of each edge and microbatch."""
        return {kind: self._end_table(kind) for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)}

    def _end_table(self, kind: Kind) -> Ints:
        entries = self._of(kind)
        stage, peers = self._stage[entries], peer_stages(self.rows)[entries]
        edge = self._edge(stage, peers)
        along = (edge >= 0) & ((peers - stage) * towards(kind) > 0)  # activations only go up, gradients only down
        entries, edge = entries[along], edge[along]
        return self._first(edge * self.microbatches + self._microbatch[entries], entries, len(self.graph.edges) * self.microbatches)

    @cached_property
    def _edge_keys(self) -> Ints:
        return np.array([a * self.graph.stages + b for a, b in self.graph.edges], dtype=np.int64)

    def _edge(self, one: Ints, other: Ints) -> Ints:
        """The index of the edge between two stages, -1 where there is none."""
        keys = self._edge_keys
        if not len(keys):
            return np.full(len(one), -1, dtype=np.int64)
        wanted = np.minimum(one, other) * self.graph.stages + np.maximum(one, other)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        inside = (np.minimum(one, other) >= 0) & (np.maximum(one, other) < self.graph.stages)
        return np.where((keys[at] == wanted) & inside, at, -1)

    def _crosses(self, one: Ints, other: Ints, microbatch: Ints) -> Flags:
        return np.not_equal(self.placement.ranks_of(one, microbatch), self.placement.ranks_of(other, microbatch))


def towards(kind: Kind) -> int:
    """The step from a communication's stage to its neighbour's: +1 up the chain, -1 down."""
    return 1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1


def peer_stages(rows: Rows) -> Ints:
    """The stage at the other end of each communication entry (meaningless for the others)."""
    up = rows.is_kind(Kind.SEND_F, Kind.RECV_B)
    return np.where(rows.peer >= 0, rows.peer, rows.stage + np.where(up, 1, -1))


def message_code(kind: Kind, stage: Ints, other: Ints, microbatch: Ints) -> Ints:
    """The code of one end of a message; the peer is written only where it is not the neighbour."""
    neighbour = other == stage + towards(kind)
    return np.asarray(codes.pack(stage, int(kind), microbatch, np.where(neighbour, -1, other)), dtype=np.int64)


def _joined(parts: list[Needs]) -> Needs:
    if not parts:
        return _no_needs()
    return Needs(np.concatenate([part.before for part in parts]), np.concatenate([part.after for part in parts]))


def _joined_missing(parts: list[Missing]) -> Missing:
    if not parts:
        return Missing(*_no_needs())
    return Missing(np.concatenate([part.after for part in parts]), np.concatenate([part.code for part in parts]))


def _no_needs() -> Needs:
    return Needs(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
