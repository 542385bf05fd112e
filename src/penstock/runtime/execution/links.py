"""Where one operation of a rank puts what another takes: cells, and channels to other ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.batch.step_input import EMPTY
from penstock.runtime.transport.activity import Activity, clock
from penstock.runtime.transport.group import Group, Inbox, Operation, Outbox, Route

if TYPE_CHECKING:
    from penstock.runtime.tensors.dtensor_messages import DTensorPacker


class Wires:
    """The cells of one rank's program, each with a name while the program is made, and its sends and receives."""

    def __init__(
        self, program: Program, rank: int, group: Group, deadline: float, number: int, *, pieces: DTensorPacker | None = None
    ) -> None:
        self.pieces = pieces
        """What takes tensors in parts apart to send them, where there is a mesh that they can lie over."""
        self.program, self.rank, self.group, self.deadline = program, rank, group, deadline
        self.number = zlib.crc32(program.rows.codes.tobytes(), number)
        """What tells this pipeline's program from others."""
        self.cells: list[Any] = []
        self._places: dict[Any, int] = {}
        self.activity: Activity = group.activity(rank)
        self.inboxes: dict[Route, Inbox] = {}
        self.outboxes: dict[Route, Outbox] = {}
        self.sends: dict[Route, list[Action]] = {}
        """What each outbox carries, in order."""

    def _cell(self, *key: Any) -> int:
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = len(self.cells)
            self.cells.append(EMPTY)
        return found

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return self.program.placement.rank_of(stage, microbatch)

    def _inbox(self, source: int, what: str) -> Inbox:
        route = (source, self.rank, what)
        if route not in self.inboxes:
            self.inboxes[route] = self.group.inbox(route, self.number, self.deadline)
        return self.inboxes[route]

    def _outbox(self, target: int, what: str, kind: Kind) -> Outbox:
        route = (self.rank, target, what)
        if route not in self.outboxes:
            self.outboxes[route] = self.group.outbox(route, self._slots(target, kind), self.number, self.deadline)
        return self.outboxes[route]

    def _source(self, what: str, stage: int, other: int, microbatch: int) -> Callable[[], Any]:
        """How to get what another stage made for this one: `activations` of a lower stage, `gradients` of a higher."""
        cells = self.cells
        if self._rank_of(other, microbatch) == self.rank:
            cell = self._cell("handed", what, other, stage, microbatch)

            def take_handed() -> Any:
                value, cells[cell] = cells[cell], EMPTY
                return value

            return take_handed
        cell = self._cell("received", what, other, stage, microbatch)
        inbox, activity, pieces = self._inbox(self._rank_of(other, microbatch), what), self.activity, self.pieces

        def take_received() -> Any:
            value = cells[cell]
            if value is EMPTY:
                value = inbox.pull(cells, cell)
                activity.began = clock()  # what came before was waiting
                if activity.watch is not None:
                    activity.watch.begin_again()
            cells[cell] = EMPTY
            return value if pieces is None else pieces.unpack(value)

        return take_received

    def _target(self, what: str, stage: int, other: int, microbatch: int) -> int:
        """The cell that what this stage made for another goes into: the other's own, or that of its send."""
        here = self._rank_of(other, microbatch) == self.rank
        return self._cell("handed" if here else "sending", what, stage, other, microbatch)

    def _send(self, action: Action) -> Operation:
        microbatch = action.microbatch or 0
        what, step = ("activations", 1) if action.kind is Kind.SEND_F else ("gradients", -1)
        other = action.stage + step if action.peer is None else action.peer
        cells, cell = self.cells, self._cell("sending", what, action.stage, other, microbatch)
        target = self._rank_of(other, microbatch)
        put, pieces = self._outbox(target, what, action.kind).put, self.pieces
        self.sends.setdefault((self.rank, target, what), []).append(action)

        def send() -> None:
            put(cells[cell] if pieces is None else pieces.pack(cells[cell]))
            cells[cell] = EMPTY

        return send

    def _slots(self, target: int, kind: Kind) -> int:
        """How many messages may be under way to another rank at once."""
        buffers = self.program.buffers
        return self.program.microbatches * self.program.stages if buffers is None else buffers.channels[self.rank, target, kind]

    def _receive(self, action: Action) -> Operation:
        microbatch = action.microbatch or 0
        what, step = ("activations", -1) if action.kind is Kind.RECV_F else ("gradients", 1)
        other = action.stage + step if action.peer is None else action.peer
        cell = self._cell("received", what, other, action.stage, microbatch)
        return self._inbox(self._rank_of(other, microbatch), what).expect(cell)
