"""How values get from one stage to another: through a register on the same rank, through a channel between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.ir.action import Action
from penstock.ir.kind import SEND_WAITS, Kind
from penstock.ir.program import Program
from penstock.runtime.device.timing import clock
from penstock.runtime.execution.registers import Registers
from penstock.runtime.execution.shared_messages import SharedMessages
from penstock.runtime.tensors.boundary import add_grads, copy_for_reader
from penstock.runtime.transport.group import EMPTY, Group, Inbox, Operation, Outbox, Route
from penstock.text.table import format_table

if TYPE_CHECKING:
    from penstock.runtime.tensors.dtensor_messages import DTensorPacker

Take = Callable[[], Any]
"""Takes a value out of its register, after waiting for its message if it has not arrived."""


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
        registers: Registers,
        *,
        deadline: float,
        number: int,
        packer: DTensorPacker | None,
        blocking: Collection[Kind] = (),
    ) -> None:
        self.program, self.rank, self.group, self.registers, self.deadline = program, rank, group, registers, deadline
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
        return [self._source("activations", stage, other, microbatch) for other in self._makers(stage)]

    def output_targets(self, stage: int, microbatch: int) -> list[int]:
        """The registers from which the readers of a stage's output take it; readers on one rank may share a register."""
        readers = self.program.graph.outputs_of(stage)
        return list(dict.fromkeys(self._target("activations", stage, reader, microbatch) for reader in readers))

    def gradient_sources(self, stage: int, microbatch: int) -> list[Take]:
        """Where the gradients of a stage's output come from: the farthest reader first, in the order in which autograd adds them.

        Readers on one other rank send one sum, which takes the place of the farthest of them.
        """
        readers = sorted(self.program.graph.outputs_of(stage), reverse=True)
        carriers = dict.fromkeys(self.shared.carrier("gradients", stage, reader, microbatch) for reader in readers)
        return [self._source("gradients", stage, carrier, microbatch) for carrier in carriers]

    def gradient_targets(self, stage: int, microbatch: int) -> list[int]:
        """The registers for the gradients of a stage's inputs, in the order of `input_sources`."""
        return [self._target("gradients", stage, other, microbatch) for other in self._makers(stage)]

    def gradient_additions(self, stage: int, microbatch: int) -> list[Operation]:
        """What a backward does after it has filled its targets: add up the gradients that go to another rank as one sum."""
        sources = [other for other in self._makers(stage) if self.shared.addition(other, stage, microbatch)[0]]
        return [self._addition(stage, source, microbatch) for source in sources]

    def _addition(self, stage: int, source: int, microbatch: int) -> Operation:
        parts, begun = self.shared.addition(source, stage, microbatch)
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

    def fellow_readers(self, stage: int) -> list[int]:
        """Other stages that read an input of this one."""
        graph = self.program.graph
        return [other for source in graph.inputs_of(stage) for other in graph.outputs_of(source) if other != stage]

    def borrowed_inputs(self, stage: int, microbatch: int) -> list[bool]:
        """For each input of a stage, whether it lies in memory of the stage that made it, or of another stage that reads it."""
        return [
            self.group.shares_memory or self._rank_of(other, microbatch) == self.rank or self.shared.is_shared(other, stage, microbatch)
            for other in self._makers(stage)
        ]

    def _makers(self, stage: int) -> list[int]:
        return sorted(self.program.graph.inputs_of(stage), reverse=True)

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return self.program.placement.rank_of(stage, microbatch)

    def _source(self, content: str, stage: int, other: int, microbatch: int) -> Take:
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
        inbox, activity, packer = self._inbox(self._rank_of(other, microbatch), content), self.activity, self.packer

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

    def _target(self, content: str, stage: int, other: int, microbatch: int) -> int:
        if self._rank_of(other, microbatch) == self.rank:
            return self.registers.number("handed", content, stage, other, microbatch)
        if content == "activations":
            return self.registers.number("sending", content, stage, self.shared.carrier(content, stage, other, microbatch), microbatch)
        is_summed = bool(self.shared.parts(other, stage, microbatch))
        return self.registers.number("part" if is_summed else "sending", content, stage, other, microbatch)

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, action: Action) -> Operation:
        """The operation of a SEND_F or SEND_B."""
        content, other, microbatch = _edge_of(action)
        values, register = self.registers.values, self.registers.number("sending", content, action.stage, other, microbatch)
        target = self._rank_of(other, microbatch)
        put, packer = self._outbox(target, content, action.kind).put, self.packer
        self._sends.setdefault((self.rank, target, content), []).append(action)

        def send() -> None:
            put(values[register] if packer is None else packer.pack(values[register]))
            values[register] = EMPTY

        return send

    def wait_send(self, action: Action) -> Operation:
        """The operation of a WAIT_SEND_F or WAIT_SEND_B, whose send was built before."""
        kind = Kind.SEND_F if action.kind is Kind.WAIT_SEND_F else Kind.SEND_B
        content, other, microbatch = _edge_of(Action(action.stage, kind, action.microbatch, peer=action.peer))
        route = (self.rank, self._rank_of(other, microbatch), content)
        edges = [(send.stage, *_edge_of(send)) for send in self._sends[route]]
        return partial(self.outboxes[route].retire, edges.index((action.stage, content, other, microbatch)))

    def receive(self, action: Action) -> Operation:
        """The operation of a RECV_F or RECV_B: it posts the receive. The value is waited for when it is taken, unless the kind blocks."""
        content, other, microbatch = _edge_of(action)
        values, register = self.registers.values, self._received_register(action)
        inbox = self._inbox(self._rank_of(other, microbatch), content)
        post = inbox.expect(register)
        if action.kind not in self.blocking:
            return post

        def receive() -> None:
            post()
            inbox.pull(values, register)

        return receive

    def swap_received(self, one: Action, other: Action) -> None:
        """Exchange the values that two receives have received, if any: each was meant for the other microbatch."""
        values, first, second = self.registers.values, self._received_register(one), self._received_register(other)
        values[first], values[second] = values[second], values[first]

    def _received_register(self, action: Action) -> int:
        content, other, microbatch = _edge_of(action)
        return self.registers.number("received", content, other, action.stage, microbatch)

    def _inbox(self, source: int, content: str) -> Inbox:
        route = (source, self.rank, content)
        if route not in self.inboxes:
            self.inboxes[route] = self.group.inbox(route, self.number, self.deadline)
            if self._waits_for_sends:
                self.inboxes[route].post_in_turn()
        return self.inboxes[route]

    def _outbox(self, target: int, content: str, kind: Kind) -> Outbox:
        route = (self.rank, target, content)
        if route not in self.outboxes:
            buffers = self.program.buffers
            slots = self.program.microbatches * self.program.stages if buffers is None else buffers.channels[self.rank, target, kind]
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
        """Expect no more messages; also called after a failure."""
        for inbox in self.inboxes.values():
            inbox.clear()

    def count_pending(self) -> int:
        """How many receives are posted and not yet taken."""
        return sum(inbox.pending() for inbox in self.inboxes.values())

    def describe_new_messages(self) -> str:
        """A table of the messages whose form was new in the last step; empty if there was none."""
        rows = [row for route, outbox in self.outboxes.items() for row in _message_rows(route, self._sends[route], outbox)]
        return "\n".join(format_table(rows, left=None))


def _edge_of(action: Action) -> tuple[str, int, int]:
    """A message's content, the stage at its other end, and its microbatch."""
    content = "activations" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "gradients"
    step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    return content, action.stage + step if action.peer is None else action.peer, action.microbatch or 0


def _message_rows(route: Route, sends: Sequence[Action], outbox: Outbox) -> Iterator[tuple[str, ...]]:
    """One row per run of messages of one stage that look the same."""
    forms = [(sends[number], form) for number, form in outbox.new_forms()]
    for (_, form, size), run in groupby(forms, key=lambda pair: (pair[0].stage, str(pair[1]), pair[1].size)):
        actions = [action for action, _ in run]
        last = f" to {actions[-1]}" if len(actions) > 1 else ""
        yield f"{actions[0]}{last}", f"{route[2]} to rank {route[1]}", form, f"{size} bytes", f"{len(actions)} times"
