"""How values get from one stage to another: through registers on the same rank, through channels between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from penstock.ir.action import Action
from penstock.ir.kind import SEND_WAITS, Kind
from penstock.ir.program import Program
from penstock.runtime.device.timing import clock
from penstock.runtime.execution.spread import SpreadOperations
from penstock.runtime.tensors.boundary import add_grads, copy_for_reader
from penstock.runtime.tensors.dtensor import DTensorPacker
from penstock.runtime.transport.group import EMPTY, Group, Inbox, Operation, Outbox, Route
from penstock.text.table import format_table

Message = tuple[int, int, int]
"""The stage that makes an output, the reader that its message is named after, and the microbatch.

With slices, each slice of a microbatch has a number of its own, which takes the place of the microbatch's throughout (`Action.unit`).
"""
Take = Callable[[], Any]
"""Takes a value out of its register, after waiting for its message if it has not arrived."""


class Registers:
    """Numbered registers, allocated by name while the operations are built and addressed by number while a step runs.

    A name is a tuple whose first word says what the register holds: `context` (a forward's saved state), `stash` (weight gradients
    that wait for W), `received`, `sending`, `part` (of a gradient sum), `handed` (a value for another stage of this rank), or `spread` (a
    value for a spread embedding or head). An operation that takes a value leaves `EMPTY` behind, so that nothing stays referenced longer
    than the program needs it.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.numbers: dict[tuple[Any, ...], int] = {}

    def number(self, *name: Any) -> int:
        """The number of a register, which is allocated when it is first asked for."""
        if name not in self.numbers:
            self.numbers[name] = len(self.values)
            self.values.append(EMPTY)
        return self.numbers[name]


class RankEdges:
    """The edges of the stage graph as one rank's program uses them.

    The operations ask for their sources and targets while they are built. Channels are opened on the way: one per pair of ranks and
    direction, with as many slots as the program's buffers say. Every rank of the group builds its links for the same program in the
    same order, so that both ends of a channel agree on the number and order of its messages.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        group: Group,
        *,
        deadline: float,
        number: int,
        packer: DTensorPacker | None,
        blocking: Collection[Kind] = (),
        spread: SpreadOperations | None = None,
    ) -> None:
        self.spread = spread
        """The embedding and the head if they are spread over the ranks: they take the places of the first and last stage's neighbours."""
        self.program, self.rank, self.group, self.deadline = program, rank, group, deadline
        self.registers = Registers()
        self.blocking = blocking
        """The kinds of sends that wait for their receive, and of receives that wait for their message."""
        self.packer = packer
        """Takes DTensors apart to send them, if the pipeline has a device mesh."""
        self.number = zlib.crc32(program.rows.codes.tobytes(), number)
        """Tells the messages of this program of this pipeline from others'."""
        self.shared = SharedMessages.of(program, rank)
        self.activity = group.activity(rank)
        self.inboxes: dict[Route, Inbox] = {}
        self.outboxes: dict[Route, Outbox] = {}
        self._sends: dict[Route, list[Action]] = {}
        """The messages of each outbox, in order."""
        self._waits_for_sends = bool(program.rows.is_kind(*SEND_WAITS).any())

    # Edges of a stage -------------------------------------------------------------------------------------------------

    def input_sources(self, stage: int, microbatch: int) -> list[Take]:
        """Where a stage's inputs come from: its neighbour first, then stages farther off."""
        if self.spread is not None and self.spread.feeds(stage):
            return [partial(self.spread.take_embeddings, microbatch)]
        return [self._build_source("activations", stage, other, microbatch) for other in self._list_makers(stage)]

    def output_targets(self, stage: int, microbatch: int) -> list[int]:
        """The registers from which the readers of a stage's output take it; readers on one rank may share a register."""
        if self.spread is not None and self.spread.reads(stage):
            return [self.registers.number("spread", "activations", stage, microbatch)]
        readers = self.program.graph.outputs_of(stage)
        return list(dict.fromkeys(self._find_target("activations", stage, reader, microbatch) for reader in readers))

    def gradient_sources(self, stage: int, microbatch: int) -> list[Take]:
        """Where the gradients of a stage's output come from: the farthest reader first, in the order in which autograd adds them.

        Readers on one other rank send one sum, which takes the place of the farthest of them.
        """
        if self.spread is not None and self.spread.reads(stage):
            return [partial(self.spread.take_output_gradients, microbatch)]
        readers = sorted(self.program.graph.outputs_of(stage), reverse=True)
        carriers = dict.fromkeys(self.shared.carrier("gradients", stage, reader, microbatch) for reader in readers)
        return [self._build_source("gradients", stage, carrier, microbatch) for carrier in carriers]

    def gradient_targets(self, stage: int, microbatch: int) -> list[int]:
        """The registers for the gradients of a stage's inputs, in the order of `input_sources`."""
        if self.spread is not None and self.spread.feeds(stage):
            return [self.registers.number("spread", "gradients", stage, microbatch)]
        return [self._find_target("gradients", stage, other, microbatch) for other in self._list_makers(stage)]

    def gradient_additions(self, stage: int, microbatch: int) -> list[Operation]:
        """The last part of a backward, after it has filled its targets: add up the gradients that go to another rank as one sum."""
        additions = ((source, *self.shared.addition(source, stage, microbatch)) for source in self._list_makers(stage))
        return [self._build_addition(stage, source, microbatch, parts, begun) for source, parts, begun in additions if parts]

    def _build_addition(self, stage: int, source: int, microbatch: int, parts: list[int], begun: bool) -> Operation:
        carrier = self.shared.carrier("gradients", source, stage, microbatch)
        values, total = self.registers.values, self.registers.number("sending", "gradients", carrier, source, microbatch)
        terms = [self.registers.number("part", "gradients", part, source, microbatch) for part in parts]

        def add() -> None:
            grads = values[total] if begun else None
            for term in terms:
                grads = values[term] if grads is None else add_grads(grads, values[term])
                values[term] = EMPTY
            values[total] = grads

        return add

    def list_fellow_readers(self, stage: int) -> list[int]:
        """Other stages that read an input of this one."""
        graph = self.program.graph
        return [other for source in graph.inputs_of(stage) for other in graph.outputs_of(source) if other != stage]

    def find_borrowed_inputs(self, stage: int, microbatch: int) -> list[bool]:
        """For each input of a stage, whether it lies in memory of the stage that made it, or of another stage that reads it."""
        if self.spread is not None and self.spread.feeds(stage):
            return [False]
        return [
            self.group.shares_memory or self._rank_of(other, microbatch) == self.rank or self.shared.is_shared(other, stage, microbatch)
            for other in self._list_makers(stage)
        ]

    def _list_makers(self, stage: int) -> list[int]:
        return sorted(self.program.graph.inputs_of(stage), reverse=True)

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return self.program.placement.rank_of(stage, microbatch)

    def _build_source(self, content: str, stage: int, other: int, microbatch: int) -> Take:
        values = self.registers.values
        if self._rank_of(other, microbatch) == self.rank:
            register = self.registers.number("handed", content, other, stage, microbatch)

            def take_handed() -> Any:
                value, values[register] = values[register], EMPTY
                return value

            return take_handed
        source, reader = (other, stage) if content == "activations" else (stage, other)
        carrier = self.shared.carrier(content, source, reader, microbatch)
        ends = (source, carrier) if content == "activations" else (carrier, source)
        is_read_again = content == "activations" and self.shared.is_read_again(source, reader, microbatch)
        register = self.registers.number("received", content, *ends, microbatch)
        inbox, activity, packer = self._open_inbox(self._rank_of(other, microbatch), content), self.activity, self.packer

        def take_received() -> Any:
            value = values[register]
            if value is EMPTY:
                value = inbox.pull(values, register)
                activity.began = clock()  # the time before was spent waiting
                if activity.watch is not None:
                    activity.watch.begin_again()
            if is_read_again:
                value = copy_for_reader(value, stage)
            else:
                values[register] = EMPTY
            return value if packer is None else packer.unpack(value)

        return take_received

    def _find_target(self, content: str, stage: int, other: int, microbatch: int) -> int:
        if self._rank_of(other, microbatch) == self.rank:
            return self.registers.number("handed", content, stage, other, microbatch)
        if content == "activations":
            return self.registers.number("sending", content, stage, self.shared.carrier(content, stage, other, microbatch), microbatch)
        is_summed = bool(self.shared.parts(other, stage, microbatch))
        return self.registers.number("part" if is_summed else "sending", content, stage, other, microbatch)

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, action: Action) -> Operation:
        """The operation of a SEND_F or SEND_B."""
        content, other, microbatch = self._find_edge(action)
        values, register = self.registers.values, self.registers.number("sending", content, action.stage, other, microbatch)
        target = self._rank_of(other, microbatch)
        put, packer = self._open_outbox(target, content, action.kind).put, self.packer
        self._sends.setdefault((self.rank, target, content), []).append(action)

        def send() -> None:
            put(values[register] if packer is None else packer.pack(values[register]))
            values[register] = EMPTY

        return send

    def wait_send(self, action: Action) -> Operation:
        """The operation of a WAIT_SEND_F or WAIT_SEND_B, whose send was built before."""
        kind = Kind.SEND_F if action.kind is Kind.WAIT_SEND_F else Kind.SEND_B
        content, other, microbatch = self._find_edge(replace(action, kind=kind))
        route = (self.rank, self._rank_of(other, microbatch), content)
        edges = [(send.stage, *self._find_edge(send)) for send in self._sends[route]]
        return partial(self.outboxes[route].retire, edges.index((action.stage, content, other, microbatch)))

    def receive(self, action: Action) -> Operation:
        """The operation of a RECV_F or RECV_B: it posts the receive. The value is waited for when it is taken, unless the kind blocks."""
        content, other, microbatch = self._find_edge(action)
        values, register = self.registers.values, self._number_received(action)
        inbox = self._open_inbox(self._rank_of(other, microbatch), content)
        post = inbox.expect(register)
        if action.kind not in self.blocking:
            return post

        def receive() -> None:
            post()
            inbox.pull(values, register)

        return receive

    def swap_received(self, one: Action, other: Action) -> None:
        """Exchange the values that two receives have received, if any: each was meant for the other microbatch."""
        values, first, second = self.registers.values, self._number_received(one), self._number_received(other)
        values[first], values[second] = values[second], values[first]

    def _number_received(self, action: Action) -> int:
        content, other, microbatch = self._find_edge(action)
        return self.registers.number("received", content, other, action.stage, microbatch)

    def _find_edge(self, action: Action) -> tuple[str, int, int]:
        """A message's content, the stage at its other end, and its microbatch."""
        content = "activations" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "gradients"
        step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
        return content, action.stage + step if action.peer is None else action.peer, action.unit(self.program.slices)

    def _open_inbox(self, source: int, content: str) -> Inbox:
        route = (source, self.rank, content)
        if route not in self.inboxes:
            self.inboxes[route] = self.group.inbox(route, self.number, self.deadline)
            if self._waits_for_sends:
                self.inboxes[route].post_in_turn()
        return self.inboxes[route]

    def _open_outbox(self, target: int, content: str, kind: Kind) -> Outbox:
        route = (self.rank, target, content)
        if route not in self.outboxes:
            buffers = self.program.buffers
            slots = self.program.units * self.program.stages if buffers is None else buffers.channels[self.rank, target, kind]
            slots = 0 if kind in self.blocking else slots
            self.outboxes[route] = self.group.outbox(route, slots, self.number, self.deadline)
        return self.outboxes[route]

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        for outbox in self.outboxes.values():
            outbox.begin()
        for inbox in self.inboxes.values():
            inbox.begin()

    def end_step(self) -> None:
        """Let go of all values, and expect no more messages; also called after a failure."""
        self.registers.values[:] = [EMPTY] * len(self.registers.values)
        for inbox in self.inboxes.values():
            inbox.posted.clear()

    def settle_sends(self) -> None:
        """Let go of everything that was sent in a step, which all ranks have finished."""
        for outbox in self.outboxes.values():
            outbox.settle()

    def describe_new_messages(self) -> str:
        """A table of the messages whose form was new in the last step; empty if there was none."""
        rows = [row for route, outbox in self.outboxes.items() for row in _list_message_rows(route, self._sends[route], outbox)]
        return "\n".join(format_table(rows, left=None))


def _list_message_rows(route: Route, sends: Sequence[Action], outbox: Outbox) -> Iterator[tuple[str, ...]]:
    """One row per run of messages of one stage that look the same."""
    forms = [(sends[number], form) for number, form in outbox.list_new_forms()]
    for (_, form, size), run in groupby(forms, key=lambda pair: (pair[0].stage, str(pair[1]), pair[1].size)):
        actions = [action for action, _ in run]
        last = f" to {actions[-1]}" if len(actions) > 1 else ""
        yield f"{actions[0]}{last}", f"{route[2]} to rank {route[1]}", form, f"{size} bytes", f"{len(actions)} times"


@dataclass(frozen=True)
class SharedMessages:
    """The shared messages that one rank sends or receives; empty for most programs."""

    carriers: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    """For activations or gradients, the source, the reader and the microbatch: the reader that the message is named after."""
    last_readers: dict[Message, int] = field(default_factory=dict)
    """For each shared output that this rank receives, the stage that reads it last."""
    sums: dict[Message, list[int]] = field(default_factory=dict)
    """For each sum that this rank sends, the stages whose gradients it is made of, the farthest first."""
    places: dict[tuple[bool, int, int], int] = field(default_factory=dict)
    """Where each forward (True) and backward of the rank stands in its program, by stage and microbatch."""

    @classmethod
    def of(cls, program: Program, rank: int) -> SharedMessages:
        linker, edges, rank_of = program.linker, program.graph.edges, program.placement.rank_of
        shared = cls()
        for what, forward in (("activations", True), ("gradients", False)):
            sharers: dict[Message, set[int]] = {}
            for edge, carrier, microbatch in zip(*(column.tolist() for column in linker.find_shared(forward)), strict=True):
                (source, reader), named = edges[edge], edges[carrier][1]
                if rank in (rank_of(source, microbatch), rank_of(reader, microbatch)):
                    shared.carriers[what, source, reader, microbatch] = named
                if rank == rank_of(reader, microbatch):
                    sharers.setdefault((source, named, microbatch), {named}).add(reader)
            if sharers and not shared.places:
                shared._fill_places(program, rank)
            for message, stages in sharers.items():
                if forward:
                    shared.last_readers[message] = max((shared.places[True, stage, message[2]], stage) for stage in stages)[1]
                else:
                    shared.sums[message] = sorted(stages, reverse=True)
        return shared

    def _fill_places(self, program: Program, rank: int) -> None:
        parts = (part for action in program[rank] for part in action.parts)
        for place, part in enumerate(parts):
            if part.kind in (Kind.F, Kind.B, Kind.I):
                self.places[part.kind is Kind.F, part.stage, part.unit(program.slices)] = place

    def carrier(self, what: str, source: int, reader: int, microbatch: int) -> int:
        """The reader after which the message is named that this one has a part in: mostly itself."""
        return self.carriers.get((what, source, reader, microbatch), reader)

    def is_shared(self, source: int, reader: int, microbatch: int) -> bool:
        """Whether the output that a stage of this rank reads is one tensor for several of its stages."""
        return (source, self.carrier("activations", source, reader, microbatch), microbatch) in self.last_readers

    def is_read_again(self, source: int, reader: int, microbatch: int) -> bool:
        """Whether another stage of this rank reads the same message after this one."""
        message = (source, self.carrier("activations", source, reader, microbatch), microbatch)
        return self.last_readers.get(message, reader) != reader

    def parts(self, source: int, reader: int, microbatch: int) -> list[int]:
        """The stages whose gradients are summed with this one's, the farthest first; none if it goes alone."""
        return self.sums.get((source, self.carrier("gradients", source, reader, microbatch), microbatch), [])

    def addition(self, source: int, reader: int, microbatch: int) -> tuple[list[int], bool]:
        """The stages whose gradients a reader's backward adds to the sum for a source, in order, and whether the sum is begun already.

        Gradients are added from the farthest reader to the nearest. One whose turn has not come waits, and is added by a later backward.
        """
        now, latest = self.places.get((False, reader, microbatch), -1), -1
        added, begun = [], False
        for stage in self.parts(source, reader, microbatch):
            latest = max(latest, self.places[False, stage, microbatch])
            if latest == now:
                added.append(stage)
            begun = begun or latest < now
        return added, begun
