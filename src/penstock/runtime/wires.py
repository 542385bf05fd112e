"""Where one operation of a rank puts what another takes: cells, and channels to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.cells import EMPTY, Inbox
from penstock.runtime.group import Group

Operation = Callable[[], None]


class Wires:
    """The cells of one rank's program, each with a name while the program is made, and its sends and receives."""

    def __init__(self, program: Program, rank: int, group: Group, deadline: float) -> None:
        self.program, self.rank, self.group, self.deadline = program, rank, group, deadline
        self.cells: list[Any] = []
        self._places: dict[Any, int] = {}
        self._inboxes: dict[Any, Inbox] = {}

    def _cell(self, *key: Any) -> int:
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = len(self.cells)
            self.cells.append(EMPTY)
        return found

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self.group.wait(self.rank, ready, what, self.deadline)

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return self.program.placement.rank_of(stage, microbatch)

    def _inbox(self, source: int, what: str) -> Inbox:
        key = (source, self.rank, what)
        if key not in self._inboxes:
            self._inboxes[key] = Inbox(self.group, key, self._wait)
        return self._inboxes[key]

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
        inbox = self._inbox(self._rank_of(other, microbatch), what)

        def take_received() -> Any:
            value = cells[cell]
            if value is EMPTY:
                value = inbox.pull(cells, cell)
            cells[cell] = EMPTY
            return value

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
        group, target = self.group, self._rank_of(other, microbatch)
        channel, parallel = group.channel((self.rank, target, what)), group.parallel
        messages, slots = channel.messages, self._slots(target, action.kind)

        def send() -> None:
            if len(messages) >= slots and not channel.has_room(slots):
                self._wait(lambda: channel.has_room(slots), f"rank {target} to take {what}")
            messages.append(cells[cell])
            cells[cell] = EMPTY
            if parallel:
                group.changed()

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
        posted = self._inbox(self._rank_of(other, microbatch), what).channel.posted
        group, parallel = self.group, self.group.parallel

        def receive() -> None:
            posted.append(cell)
            if parallel:
                group.changed()

        return receive
