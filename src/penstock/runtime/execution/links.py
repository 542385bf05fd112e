"""How values get from one stage to another: through a register on the same rank, through a channel between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.device.timing import clock
from penstock.runtime.execution.registers import Registers
from penstock.runtime.transport.group import EMPTY, Group, Inbox, Operation, Outbox, Route

if TYPE_CHECKING:
    from penstock.runtime.tensors.dtensor_messages import Pieces

Take = Callable[[], Any]
"""Takes a value out of its register, after waiting for its message if it has not arrived."""


class Links:
    """The edges of the stage graph as one rank's program uses them.

    The operations ask for their sources and targets while they are built. Channels are opened on the way: one per pair of ranks and
    direction, with as many slots as the program's buffers say. Every rank of the group builds its links for the same program in the
    same order, so that both ends of a channel agree on the number and order of its messages.
    """

    def __init__(
        self, program: Program, rank: int, group: Group, registers: Registers, *, deadline: float, number: int, pieces: Pieces | None
    ) -> None:
        self.program, self.rank, self.group, self.registers, self.deadline = program, rank, group, registers, deadline
        self.pieces = pieces
        """Takes DTensors apart to send them, if the pipeline has a device mesh."""
        self.number = zlib.crc32(program.rows.codes.tobytes(), number)
        """Tells the messages of this program of this pipeline from others'."""
        self.activity = group.activity(rank)
        self.inboxes: dict[Route, Inbox] = {}
        self.outboxes: dict[Route, Outbox] = {}
        self._sends: dict[Route, list[Action]] = {}
        """The messages of each outbox, in order."""

    # Edges of a stage -------------------------------------------------------------------------------------------------

    def input_sources(self, stage: int, microbatch: int) -> list[Take]:
        """Where a stage's inputs come from: its neighbour first, then stages farther off."""
        return [self._source("activations", stage, other, microbatch) for other in self._makers(stage)]

    def output_targets(self, stage: int, microbatch: int) -> list[int]:
        """The registers from which the readers of a stage's output take it."""
        return [self._target("activations", stage, other, microbatch) for other in self.program.graph.outputs_of(stage)]

    def gradient_sources(self, stage: int, microbatch: int) -> list[Take]:
        """Where the gradients of a stage's output come from: the farthest reader first, in the order in which autograd adds them."""
        return [self._source("gradients", stage, other, microbatch) for other in sorted(self.program.graph.outputs_of(stage), reverse=True)]

    def gradient_targets(self, stage: int, microbatch: int) -> list[int]:
        """The registers for the gradients of a stage's inputs, in the order of `input_sources`."""
        return [self._target("gradients", stage, other, microbatch) for other in self._makers(stage)]

    def fellow_readers(self, stage: int) -> list[int]:
        """Other stages that read an input of this one."""
        graph = self.program.graph
        return [other for source in graph.inputs_of(stage) for other in graph.outputs_of(source) if other != stage]

    def borrowed_inputs(self, stage: int, microbatch: int) -> list[bool]:
        """For each input of a stage, whether it lies in memory of the stage that made it."""
        return [self.group.shares_memory or self._rank_of(other, microbatch) == self.rank for other in self._makers(stage)]

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
        register = self.registers.number("received", content, other, stage, microbatch)
        inbox, activity, pieces = self._inbox(self._rank_of(other, microbatch), content), self.activity, self.pieces

        def take_received() -> Any:
            value = values[register]
            if value is EMPTY:
                value = inbox.pull(values, register)
                activity.began = clock()  # the time before was spent waiting
                if activity.watch is not None:
                    activity.watch.begin_again()
            values[register] = EMPTY
            return value if pieces is None else pieces.together(value)

        return take_received

    def _target(self, content: str, stage: int, other: int, microbatch: int) -> int:
        sort = "handed" if self._rank_of(other, microbatch) == self.rank else "sending"
        return self.registers.number(sort, content, stage, other, microbatch)

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, action: Action) -> Operation:
        """The operation of a SEND_F or SEND_B."""
        content, other, microbatch = _edge_of(action)
        values, register = self.registers.values, self.registers.number("sending", content, action.stage, other, microbatch)
        target = self._rank_of(other, microbatch)
        put, pieces = self._outbox(target, content, action.kind).put, self.pieces
        self._sends.setdefault((self.rank, target, content), []).append(action)

        def send() -> None:
            put(values[register] if pieces is None else pieces.apart(values[register]))
            values[register] = EMPTY

        return send

    def receive(self, action: Action) -> Operation:
        """The operation of a RECV_F or RECV_B: it posts the receive. The value is waited for when it is taken."""
        content, other, microbatch = _edge_of(action)
        register = self.registers.number("received", content, other, action.stage, microbatch)
        return self._inbox(self._rank_of(other, microbatch), content).expect(register)

    def _inbox(self, source: int, content: str) -> Inbox:
        route = (source, self.rank, content)
        if route not in self.inboxes:
            self.inboxes[route] = self.group.inbox(route, self.number, self.deadline)
        return self.inboxes[route]

    def _outbox(self, target: int, content: str, kind: Kind) -> Outbox:
        route = (self.rank, target, content)
        if route not in self.outboxes:
            buffers = self.program.buffers
            slots = self.program.microbatches * self.program.stages if buffers is None else buffers.channels[self.rank, target, kind]
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
        if not rows:
            return ""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


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
