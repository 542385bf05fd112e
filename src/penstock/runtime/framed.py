"""Channels between processes on gloo: framed messages under a tag, receives posted ahead, sends that nobody waits for."""

from __future__ import annotations

import logging
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.runtime.activity import clock
from penstock.runtime.cells import EMPTY
from penstock.runtime.frames import HEADER, Form, Header, empty, pack_new, unpack_new
from penstock.runtime.group import Inbox, Operation, Outbox, Route, nothing

if TYPE_CHECKING:
    from penstock.runtime.processes import Processes

logger = logging.getLogger(__name__)

AHEAD = 4
"""How many receives are posted before they are asked for: gloo moves a message once its receive is."""
TAGS = {"activations": 0, "gradients": 2, "control": 4}
"""Of each kind of traffic; what does not fit its frame goes under the next one."""


class FramedOutbox(Outbox):
    """Sends frames, and lets go of each when the other end must have taken it."""

    def __init__(self, group: Processes, route: Route, slots: int, program: int, deadline: float) -> None:
        self.group, self.route, self.slots, self.program = group, route, slots, program
        self.target, self.tag = route[1], TAGS[route[2]]
        self._what = f"rank {self.target} to take {route[2]}"
        self.timeout = timedelta(seconds=deadline)
        self.forms: list[Form] = []
        self.generation = group.generation
        self.count = 0
        self.flight: deque[tuple[int, Any]] = deque()
        group.ends.append(self)

    def begin(self) -> None:
        if self.generation != self.group.generation:
            self.generation = self.group.generation
            self.forms.clear()
        while self.flight:  # all taken, for the step that they belong to is over
            self._wait_for_oldest()
        self.count = 0

    def put(self, value: Any) -> None:
        number, forms = self.count, self.forms
        self.count = number + 1
        form = forms[number] if number < len(forms) else None
        frame = empty(HEADER if form is None else form.size)
        if form is not None and form.fits(value):
            form.pack(value, frame)
            Header(self.program, number, clock(), 0).write(frame)
            self._send(number, frame, self.tag)
            return
        new, overflow = pack_new(value)
        logger.debug("rank %d sends %s %d to rank %d: %s, %d bytes", self.route[0], self.route[2], number, self.target, new, new.size)
        forms[number : number + 1] = [new]
        Header(self.program, number, clock(), len(overflow)).write(frame)
        self._send(number, frame, self.tag)
        self._send(number, overflow, self.tag + 1)

    def _send(self, number: int, frame: Tensor, tag: int) -> None:
        flight = self.flight
        while flight and number - flight[0][0] >= self.slots:
            self._wait_for_oldest()
        try:
            flight.append((number, self.group.connection.send([frame], self.target, tag)))
        except (RuntimeError, AttributeError) as error:  # AttributeError: the connection was closed meanwhile
            self.group.lost(self.target, self._what, error)

    def _wait_for_oldest(self) -> None:
        activity = self.group.mine
        activity.since, activity.waits = clock(), self._what
        try:
            self.flight.popleft()[1].wait(self.timeout)
        except (RuntimeError, IndexError) as error:  # IndexError: everything was dropped meanwhile
            self.group.lost(self.target, self._what, error)
        activity.waits = None

    def drop(self) -> None:
        self.flight.clear()


class FramedInbox(Inbox):
    """Takes frames in the order in which they were sent."""

    def __init__(self, group: Processes, route: Route, program: int, deadline: float) -> None:
        super().__init__()
        self.group, self.route, self.program = group, route, program
        self.source, self.tag = route[0], TAGS[route[2]]
        self.timeout = timedelta(seconds=deadline)
        self.name = f"{route[2]} from rank {self.source}"
        self.order: list[int] = []
        """The cell that each message of a step is for."""
        self.forms: list[Form] = []
        self.generation = group.generation
        self.posted: deque[tuple[Any, Tensor]] = deque()
        self.count = 0
        group.ends.append(self)

    def expect(self, cell: int) -> Operation:
        self.order.append(cell)
        self.times.append((0, 0, 0))
        return nothing

    def begin(self) -> None:
        if self.generation != self.group.generation:
            self.generation = self.group.generation
            self.forms.clear()
        self.posted.clear()
        self.count = 0
        for number in range(min(AHEAD, len(self.order))):
            self._post(number)

    def _post(self, number: int) -> None:
        frame = empty(self.forms[number].size if number < len(self.forms) else HEADER)
        try:
            self.posted.append((self.group.connection.recv([frame], self.source, self.tag), frame))
        except (RuntimeError, AttributeError) as error:
            self.group.lost(self.source, self.name, error)

    def pull(self, cells: list[Any], cell: int) -> Any:
        while cells[cell] is EMPTY:
            number = self.count
            cells[self.order[number]] = self._take(number)
        return cells[cell]

    def _take(self, number: int) -> Any:
        if number + AHEAD < len(self.order):
            self._post(number + AHEAD)
        self.count = number + 1
        asked = clock()
        frame = self._arrived(asked)
        header = Header.read(frame)
        if header.program != self.program or header.number != number:
            text = f"rank {self.source} sent {self.route[2]} of another step than rank {self.route[1]} runs"
            raise self.group.report_failure(
                self.route[1], f"{text}: give all ranks the same count of microbatches, and make the same calls on all"
            )
        self.times[number] = header.sent, asked, clock()
        return self._learn(number, header.overflow) if header.overflow else self.forms[number].unpack(frame)

    def _arrived(self, asked: int) -> Tensor:
        activity = self.group.mine
        activity.since, activity.waits = asked, self.name
        try:
            work, frame = self.posted.popleft()
            work.wait(self.timeout)
        except (RuntimeError, IndexError) as error:
            self.group.lost(self.source, self.name, error)
        activity.waits = None
        return frame

    def _learn(self, number: int, size: int) -> Any:
        """A value of a new form, which follows apart."""
        frame = empty(size)
        try:
            self.group.connection.recv([frame], self.source, self.tag + 1).wait(self.timeout)
        except (RuntimeError, AttributeError) as error:
            self.group.lost(self.source, self.name, error)
        form, value = unpack_new(frame)
        self.forms[number : number + 1] = [form]
        return value

    def clear(self) -> None:
        self.posted.clear()

    def pending(self) -> int:
        return len(self.posted)

    def drop(self) -> None:
        self.posted.clear()
