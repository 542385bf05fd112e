"""Channels that carry tensors as they are, for NCCL: nothing can be told along with them, so their forms are agreed beforehand.

In a step whose inputs are new to any rank, each message's form goes ahead of it by the control connection. In the steps after, as
long as no rank's inputs change, both ends know it. Plain values may be others each time, so a channel with any sends them by the control
connection in every step. Receives are posted where the program has them, which must be proved under
`rendezvous`.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.runtime.batch.step_input import EMPTY
from penstock.runtime.tensors.boundary import detach_tree
from penstock.runtime.transport.activity import clock
from penstock.runtime.transport.framed_channels import FramedInbox, FramedOutbox
from penstock.runtime.transport.group import Inbox, Operation, Outbox, Route
from penstock.runtime.transport.message_format import Form, Leaf, Repeated

if TYPE_CHECKING:
    from penstock.runtime.transport.processes import Processes
    from penstock.runtime.transport.subgroup import Slice

_ONCE = 1 << 30
"""Slots of a channel whose messages are small and few."""


class DirectOutbox(Outbox):
    """Sends a value's tensors one after the other."""

    def __init__(self, group: Processes | Slice, route: Route, program: int, deadline: float) -> None:
        self.group, self.route = group, route
        self.ahead = FramedOutbox(group, route, _ONCE, program, deadline)
        self.timeout = timedelta(seconds=deadline)
        self.forms: list[Form] = []
        self.count = 0
        self.tells = False
        """Whether plain values go by the control connection in this step."""
        self.flight: deque[tuple[Any, Tensor]] = deque()
        self._what = f"{group.called(route[1])} to take {route[2]}"
        group.ends.add(self)

    def begin(self) -> None:
        self.count = 0
        self.flight.clear()
        self.tells = not self.group.learning and any(form.tells for form in self.forms)
        if self.group.learning:
            self.forms.clear()
        if self.group.learning or self.tells:
            self.ahead.begin()

    def learned(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.forms)) if self.group.learning else []

    def put(self, value: Any) -> None:
        number, self.count = self.count, self.count + 1
        if self.group.learning:
            self.forms.append(Form.of(value))
            self.ahead.put(self.forms[-1])
        form = self.forms[number]
        if not form.fits(value, plain=False):
            what, rank = self.route[2], self.route[0]
            text = f"{self.group.called(rank)} made {what} {number} of the form {Form.of(value)}, where the steps before had {form}"
            raise self.group.report_failure(rank, f"{text}: on this device only a step whose inputs change may change them")
        if self.tells:
            self.ahead.put(form.plain(value))
        try:
            connection, peer = self.group.data(self.route, self.route[1])
            for leaf, part in zip(form.leaves, form.parts(detach_tree(value)), strict=True):
                if type(leaf) is Leaf:
                    sent = part.resolve_conj().resolve_neg().contiguous()
                    self.flight.append((connection.send([sent], peer, 0), sent))
        except (RuntimeError, AttributeError) as error:
            self.group.lost(self.route[1], self._what, error)

    def drop(self) -> None:
        self.flight.clear()


class DirectInbox(Inbox):
    """Receives where the program says so, and waits where the value is used."""

    def __init__(self, group: Processes | Slice, route: Route, program: int, deadline: float) -> None:
        super().__init__()
        self.group, self.route = group, route
        self.ahead = FramedInbox(group, route, program, deadline)
        self.timeout = timedelta(seconds=deadline)
        self.name = f"{route[2]} from {group.called(route[0])}"
        self.order: list[int] = []
        self.forms: list[Form] = []
        self.posted: deque[tuple[int, list[tuple[Any, Any]]]] = deque()
        self.count = 0
        self.tells = False
        group.ends.add(self)

    def expect(self, cell: int) -> Operation:
        self.order.append(cell)
        self.times.append((0, 0, 0))
        self.ahead.expect(cell)
        return self._post

    def begin(self) -> None:
        self.posted.clear()
        self.count = 0
        self.tells = not self.group.learning and any(form.tells for form in self.forms)
        if self.group.learning:
            self.forms.clear()
        if self.group.learning or self.tells:
            self.ahead.begin()

    def _post(self) -> None:
        """Receive the next message. One whose form is still to be told is left for when it is used, where no queue needs it now."""
        number = self.count
        self.count = number + 1
        self.posted.append((number, [] if self.group.learning and not self.group.rendezvous else self._receive(number)))

    def _receive(self, number: int) -> list[tuple[Any, Any]]:
        """Each part's work, if it has any, and the part."""
        if self.group.learning:
            self.forms.append(self.ahead.take(number))
        parts = [_room(leaf) if type(leaf) is Leaf else leaf for leaf in self.forms[number].leaves]
        try:
            connection, peer = self.group.data(self.route, self.route[0])
            leaves = zip(parts, self.forms[number].leaves, strict=True)
            return [(connection.recv([part], peer, 0) if type(leaf) is Leaf else None, part) for part, leaf in leaves]
        except (RuntimeError, AttributeError) as error:
            self.group.lost(self.route[0], self.name, error)

    def pull(self, cells: list[Any], cell: int) -> Any:
        while cells[cell] is EMPTY:
            number, works = self.posted.popleft()
            works = works or self._receive(number)
            activity, asked = self.group.mine, clock()
            activity.since, activity.waits = asked, self.name
            try:
                for work, _ in works:
                    if work is not None:
                        work.wait(self.timeout)
            except RuntimeError as error:
                self.group.lost(self.route[0], self.name, error)
            activity.waits = None
            self.times[number] = asked, asked, clock()
            form = self.forms[number]
            parts = [_laid(part, leaf) for (_, part), leaf in zip(works, form.leaves, strict=True)]
            if self.tells:
                plain = iter(self.ahead.take(number))
                parts = [part if type(leaf) in (Leaf, Repeated) else next(plain) for part, leaf in zip(parts, form.leaves, strict=True)]
            cells[self.order[number]] = form.join(parts)
        return cells[cell]

    def clear(self) -> None:
        self.posted.clear()

    def pending(self) -> int:
        return len(self.posted)

    def drop(self) -> None:
        self.posted.clear()


def _room(leaf: Leaf) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def _laid(part: Any, leaf: Any) -> Any:
    """A received tensor with the strides that it was made with, so that what is computed from it is the same."""
    if type(leaf) is not Leaf:
        return part
    if part.stride() != leaf.stride:
        part = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device).copy_(part)
    return part.requires_grad_() if leaf.grad else part
