"""Second implementations, one action at a time: slow, plain, and written from the rules rather than from the library's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.ir.action import Action, unpack_row
from penstock.ir.dependencies import needs
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.buffers import Buffers
from penstock.passes.receive import Receive

WAITS = {Kind.WAIT_SEND_F: Kind.SEND_F, Kind.WAIT_SEND_B: Kind.SEND_B}
MESSAGE = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.I: (Kind.SEND_B, Kind.RECV_B)}


def message(kind: Kind, stage: int, other: int, microbatch: int) -> Action:
    """One end of a message; the peer is written only where it is not the neighbour."""
    neighbour = stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
    return Action(stage, kind, microbatch, peer=None if other == neighbour else other)


def other_end(action: Action) -> int:
    """The stage at the other end of a message."""
    return action.stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1) if action.peer is None else action.peer


def crosses(placement: Placement, one: int, other: int, microbatch: int) -> bool:
    return placement.rank_of(one, microbatch) != placement.rank_of(other, microbatch)


def sharers(placement: Placement, graph: StageGraph, source: int, reader: int, microbatch: int) -> list[int]:
    """The stages on the reader's rank that read the source's output."""
    rank = placement.rank_of(reader, microbatch)
    return [other for other in graph.outputs_of(source) if placement.rank_of(other, microbatch) == rank]


def shared_rows(rows: Sequence[Sequence[Action]], placement: Placement, graph: StageGraph) -> list[list[Action]]:
    """One message per output and reading rank: its receive before the first that needs it, its send after the last that adds to it."""
    made: list[list[Action]] = []
    for row in rows:
        entries = [part for action in row for part in action.parts]
        added: list[Action] = []
        for action in row:
            names = [(part, each) for part in action.parts for each in _with_messages(part, placement, graph) if each != part]
            before, after = [], []
            for part, each in names:
                microbatch = part.microbatch or 0
                low, high = sorted((each.stage, other_end(each)))
                together = sharers(placement, graph, low, high, microbatch)
                kinds = (Kind.F,) if each.kind in (Kind.SEND_F, Kind.RECV_F) else (Kind.B, Kind.I)
                ends = (low, max(together)) if each.stage == low else (max(together), low)
                shared = message(each.kind, *ends, microbatch)
                uses = [e for e in entries if e.kind in kinds and e.microbatch == microbatch and e.stage in together]
                if each.kind is Kind.RECV_F:
                    before += [shared] if part is uses[0] else []
                elif each.kind is Kind.SEND_B:
                    after += [shared] if part is uses[-1] else []
                else:
                    into = after if each.kind is Kind.SEND_F else before
                    into += [] if shared in into else [shared]
            added += [*before, action, *after]
        made.append(added)
    return made


def one_message_per_edge(schedule: Schedule, receive: str | int = "paired") -> Program:
    """The program that Penstock 0.1 made of a schedule: readers of an output have a message each, also on one rank."""
    rows = lowered_rows(numbered(schedule), schedule.placement, schedule.graph)
    program = Program.from_actions(
        rows, schedule.placement, microbatches=schedule.microbatches, graph=schedule.graph, slices=schedule.slices
    )
    return Buffers().apply(Receive(receive).apply(program))


def numbered(table: Table) -> list[tuple[Action, ...]]:
    """The rows with one number for microbatch and slice, as PyTorch has them."""
    return [unpack_row(table.row(rank)) for rank in range(table.ranks)]


def lowered_rows(rows: Sequence[Sequence[Action]], placement: Placement, graph: StageGraph) -> list[list[Action]]:
    """One message per edge: receives right before what needs them, sends right after what makes their data."""
    return [[done for action in row for done in _with_messages(action, placement, graph)] for row in rows]


def _with_messages(action: Action, placement: Placement, graph: StageGraph) -> list[Action]:
    before, after = [], []
    for part in action.parts:
        stage, microbatch = part.stage, part.microbatch
        if part.kind is Kind.W or microbatch is None:
            continue
        forward = part.kind is Kind.F
        send, receive = MESSAGE[Kind.F if forward else Kind.I]
        reads = graph.inputs_of(stage) if forward else graph.outputs_of(stage)
        feeds = graph.outputs_of(stage) if forward else graph.inputs_of(stage)
        before += [message(receive, stage, t, microbatch) for t in reads if crosses(placement, stage, t, microbatch)]
        after += [message(send, stage, t, microbatch) for t in feeds if crosses(placement, stage, t, microbatch)]
    return [*before, action, *after]


Pairs = set[tuple[int, int]]


@dataclass
class NaiveLinks:
    """The links as sets of pairs of entry numbers; `missing` holds the entry and the text of what it needs."""

    local: Pairs = field(default_factory=set)
    data: Pairs = field(default_factory=set)
    messages: Pairs = field(default_factory=set)
    retired: Pairs = field(default_factory=set)
    meetings: Pairs = field(default_factory=set)
    """What each user of a collective waits for: the joins of other ranks."""
    missing: set[tuple[int, str]] = field(default_factory=set)


def naive_links(
    rows: Sequence[Sequence[Action]], placement: Placement, graph: StageGraph, microbatches: int, lowered: bool, slices: int = 1
) -> NaiveLinks:
    """What the linker must find, by looking through all entries for each need. Slices are numbers among the microbatches."""
    entries = [part for row in rows for action in row for part in action.parts]
    ranks = [rank for rank, row in enumerate(rows) for action in row for _ in action.parts]
    search = _Search(entries, placement, graph, microbatches, lowered, slices)
    for number, part in enumerate(entries):
        if search.inside(part):
            search.needs_of(number, part)
            search.find_spread(number, part, ranks)
        if part.kind is Kind.WAIT_REDUCE_GRAD and part.stage < graph.stages:
            search.find_reduction(number, part, ranks)
    if lowered:
        search.pair_messages()
        search.retire_sends()
    return search.links


@dataclass
class _Search:
    entries: list[Action]
    placement: Placement
    graph: StageGraph
    microbatches: int
    lowered: bool
    slices: int = 1
    links: NaiveLinks = field(default_factory=NaiveLinks)

    def inside(self, part: Action) -> bool:
        return part.microbatch is not None and part.stage < self.graph.stages and part.microbatch < self.microbatches

    def is_it(self, part: Action, wanted: Action) -> bool:
        """Whether an entry is the wanted action; a wanted I may be a B."""
        if (part.stage, part.microbatch) != (wanted.stage, wanted.microbatch) or not self.inside(part):
            return False
        if wanted.kind.is_communication:
            return part.kind is wanted.kind and other_end(part) == other_end(wanted)
        return part.kind is wanted.kind or (wanted.kind is Kind.I and part.kind is Kind.B)

    def first(self, wanted: Action) -> int | None:
        return next((number for number, part in enumerate(self.entries) if self.is_it(part, wanted)), None)

    def note(self, into: Pairs, wanted: Action, after: int) -> None:
        found = self.first(wanted)
        if found is None:
            self.links.missing.add((after, str(wanted)))
        else:
            into.add((found, after))

    def needs_of(self, number: int, part: Action) -> None:
        assert part.microbatch is not None
        place = part.microbatch % self.slices
        if part.kind is Kind.F and place > 0:
            self.note(self.links.local, Action(part.stage, Kind.F, part.microbatch - 1), number)
        if part.kind in (Kind.B, Kind.I) and place < self.slices - 1:
            self.note(self.links.local, Action(part.stage, Kind.I, part.microbatch + 1), number)
        copies = [Action(part.stage, kind, part.microbatch) for kind in (Kind.OFFLOAD, Kind.RELOAD)]
        if part.kind in (Kind.B, Kind.I) and any(self.first(copy) is not None for copy in copies):
            self.note(self.links.local, copies[1], number)
        for need in () if part.kind.is_spread else needs(part, self.graph):
            if not crosses(self.placement, part.stage, need.stage, part.microbatch):
                self.note(self.links.local, need, number)
            elif not self.lowered:
                self.note(self.links.data, need, number)
            else:
                send, receive = MESSAGE[need.kind]
                low, high = sorted((part.stage, need.stage))
                carrier = self.carrier(need.kind, low, high, part.microbatch)
                here, there = (carrier, low) if need.kind is Kind.F else (low, carrier)
                self.note(self.links.local, message(receive, here, there, part.microbatch), number)
                self.note(self.links.data, message(send, there, here, part.microbatch), number)
        if self.lowered and part.kind in (Kind.SEND_F, Kind.SEND_B):
            kind, away = (Kind.F if part.kind is Kind.SEND_F else Kind.I), other_end(part)
            makers = [part.stage]
            if kind is Kind.I and (away, part.stage) in self.graph.edges and crosses(self.placement, away, part.stage, part.microbatch):
                together = sharers(self.placement, self.graph, away, part.stage, part.microbatch)
                makers += [each for each in together if self.carrier(kind, away, each, part.microbatch) == part.stage != each]
            for stage in makers:
                self.note(self.links.local, Action(stage, kind, part.microbatch), number)

    def find_spread(self, number: int, part: Action, ranks: list[int]) -> None:
        """What is needed of a spread embedding or head, by the stage that its actions name."""
        last = self.graph.stages - 1
        spread = any(e.kind.is_spread and e.stage == part.stage and self.inside(e) for e in self.entries)
        if not last or not spread or part.stage not in (0, last):
            return
        wanted = {Kind.COMBINE: Kind.S}
        if part.stage == last:
            wanted |= {Kind.BROADCAST: Kind.F, Kind.S: Kind.BROADCAST}
            wanted |= dict.fromkeys((Kind.B, Kind.I, Kind.T), Kind.COMBINE)
        else:
            wanted |= {Kind.F: Kind.COMBINE, Kind.BROADCAST: Kind.I, Kind.T: Kind.BROADCAST}
        if part.kind not in wanted:
            return
        assert part.microbatch is not None
        need = Action(part.stage, wanted[part.kind], part.microbatch)
        if need.kind in (Kind.F, Kind.I):
            if self.placement.rank_of(part.stage, part.microbatch) == ranks[number]:
                self.note(self.links.local, need, number)
            return
        found = next((n for n, e in enumerate(self.entries) if e == need and ranks[n] == ranks[number]), None)
        if found is None:
            self.links.missing.add((number, str(need)))
        else:
            self.links.local.add((found, number))
        if need.kind.is_join:
            joins = [n for n, e in enumerate(self.entries) if e == need and ranks[n] != ranks[number]]
            self.links.meetings |= {(join, number) for join in joins}

    def find_reduction(self, number: int, wait: Action, ranks: list[int]) -> None:
        wanted = Action(wait.stage, Kind.REDUCE_GRAD)
        found = [n for n, part in enumerate(self.entries) if part == wanted and ranks[n] == ranks[number]]
        if found:
            self.links.local.add((found[0], number))
        else:
            self.links.missing.add((number, str(wanted)))

    def retire_sends(self) -> None:
        """Each wait for a send needs the send, and waits for the receive of its message."""
        receive_of = dict(self.links.messages)
        for number, part in enumerate(self.entries):
            if part.kind in WAITS and self.inside(part):
                assert part.microbatch is not None
                kind = WAITS[part.kind]
                away = part.stage + (1 if kind is Kind.SEND_F else -1) if part.peer is None else part.peer
                sent = self.along_edge(kind, part.stage, away, part.microbatch)
                if sent is None:
                    self.links.missing.add(
                        (
                            number,
                            str(message(kind, part.stage, away, part.microbatch))
                            if away >= 0
                            else f"{part.stage}{kind.name}{part.microbatch}",
                        )
                    )
                else:
                    self.links.local.add((sent, number))
                    if sent in receive_of:
                        self.links.retired.add((receive_of[sent], number))

    def along_edge(self, kind: Kind, stage: int, away: int, microbatch: int) -> int | None:
        ends = (stage, away) if kind is Kind.SEND_F else (away, stage)
        return self.first(message(kind, stage, away, microbatch)) if ends in self.graph.edges else None

    def carrier(self, kind: Kind, low: int, high: int, microbatch: int) -> int:
        """The reader that names the message along an edge: itself if the table names such a message, else the farthest on its rank."""
        send, receive = MESSAGE[kind]
        ends = ((send, low, high), (receive, high, low)) if kind is Kind.F else ((send, high, low), (receive, low, high))
        if any(self.first(message(*end, microbatch)) is not None for end in ends):
            return high
        return max(sharers(self.placement, self.graph, low, high, microbatch))

    def pair_messages(self) -> None:
        for low, high in self.graph.edges:
            for microbatch in range(self.microbatches):
                for kind, one, other in ((Kind.F, low, high), (Kind.I, high, low)):
                    send, receive = MESSAGE[kind]
                    sent = self.first(message(send, one, other, microbatch))
                    received = self.first(message(receive, other, one, microbatch))
                    if sent is not None and received is not None:
                        self.links.messages.add((sent, received))


def naive_walk(lengths: Sequence[int], waits: Sequence[tuple[int, int, int]]) -> list[int]:
    """The step of each group, -1 if it never runs; `waits` are (before, after, lag) between groups counted over all ranks.

    Step by step: in each step every rank may run its next group once everything that group waits for is done.
    """
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    step, at = [-1] * sum(lengths), list(starts)
    last_run = [-1] * len(lengths)
    for now in range(sum(lengths) * (1 + max((lag for _, _, lag in waits), default=1)) + 1):
        changed = True
        while changed:  # a lag of 0 lets one group follow another within the step
            changed = False
            for rank, start in enumerate(starts):
                group = at[rank]
                if group == start + lengths[rank] or last_run[rank] == now:
                    continue
                if all(step[b] >= 0 and step[b] + lag <= now for b, a, lag in waits if a == group):
                    step[group], at[rank], last_run[rank], changed = now, group + 1, now, True
    return step
