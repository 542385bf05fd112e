"""Channels between processes on gloo: framed messages under a tag, receives posted ahead, sends that nobody waits for."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.runtime.batch.step_input import EMPTY
from penstock.runtime.transport.activity import clock
from penstock.runtime.transport.group import Inbox, Operation, Outbox, Route, nothing, runs_another
from penstock.runtime.transport.message_format import (
    NUMBER,
    OVERFLOW,
    PROGRAM,
    SENT,
    TRAILER,
    Form,
    Slot,
    empty,
    pack_new,
    trailer,
    unpack_new,
)

if TYPE_CHECKING:
    from penstock.runtime.transport.processes import Processes
    from penstock.runtime.transport.subgroup import Slice

AHEAD, ROOM = 32, 1 << 22
"""How many receives are posted before they are asked for, at most, and how many bytes they may take together: gloo moves a message
only once its receive is posted."""
KEPT = 1 << 16
"""Bytes up to which frames that were sent are kept to send from again: small ones cost more to make than to hold."""
SIZES = 8
"""How many sizes of frames are kept: where lengths keep changing, old ones may never come again."""
TAGS = {"activations": 0, "gradients": 1, "control": 2}
"""Of each kind of traffic, for what is always of the same size."""


def tag_of(what: str, program: int) -> int:
    """The tag of a program's messages, and of what does not fit their frames the next one.

    Programs do not share tags: gloo ends a process that is sent more than it expects.
    """
    return 4 + 4 * (program & 0xFFFFFF) + 2 * TAGS[what]


class FramedOutbox(Outbox):
    """Sends frames, and lets go of each when the other end must have taken it."""

    def __init__(self, group: Processes | Slice, route: Route, slots: int, program: int, deadline: float) -> None:
        self.group, self.route, self.slots, self.program = group, route, slots, program
        self.target, self.tag = route[1], tag_of(route[2], program)
        self._hello = Slot(TRAILER)
        self._what = f"{group.called(self.target)} to take {route[2]}"
        self.timeout = timedelta(seconds=deadline)
        self.forms: list[Form] = []
        self._new: list[int] = []
        self.generation = group.generation
        self.count = 0
        self.flight: deque[tuple[int, Any, Slot | Tensor]] = deque()
        """Number, work, and what holds the memory, for the work does not."""
        self.free: dict[int, list[Slot]] = {}
        """Frames to send from again, by their size."""
        group.ends.add(self, self.flight)

    def begin(self) -> None:
        if self.generation != self.group.generation:
            self.generation = self.group.generation
            self.forms.clear()
        while self.flight:  # all taken, for the step that they belong to is over
            self._wait_for_oldest()
        self.count = 0
        self._new.clear()
        self._hello.words[PROGRAM] = self.program
        self._dispatch(0, self._hello.frames, TAGS[self.route[2]], self._hello)

    def put(self, value: Any) -> None:
        number, forms, flight = self.count, self.forms, self.flight
        self.count = number + 1
        while flight and number - flight[0][0] >= self.slots:
            self._wait_for_oldest()
        if number >= len(forms):
            self._put_new(number, TRAILER, value)
        elif (form := forms[number]).fits(value):
            slot = self._slot(form.size)
            form.pack(value, slot.address)
            self._send(number, slot, 0)
        else:
            self._put_new(number, form.size, value)

    def _put_new(self, number: int, size: int, value: Any) -> None:
        """A value of a new form follows apart, behind a frame of the size that the other end expects."""
        new, overflow = pack_new(value)
        self.forms[number : number + 1] = [new]
        self._new.append(number)
        self._send(number, self._slot(size), len(overflow))
        self._dispatch(number, [overflow], self.tag + 1, overflow)

    def learned(self) -> list[tuple[int, Any]]:
        return [(number, self.forms[number]) for number in self._new]

    def _slot(self, size: int) -> Slot:
        free = self.free.get(size)
        return free.pop() if free else Slot(size)

    def _keep(self, slot: Slot) -> None:
        if slot.size not in self.free and len(self.free) >= SIZES:
            self.free.clear()
        self.free.setdefault(slot.size, []).append(slot)

    def _send(self, number: int, slot: Slot, overflow: int) -> None:
        words = slot.words
        words[NUMBER], words[SENT], words[OVERFLOW] = number, clock(), overflow
        self._dispatch(number, slot.frames, self.tag, slot)

    def _dispatch(self, number: int, frames: list[Tensor], tag: int, held: Slot | Tensor) -> None:
        try:
            self.flight.append((number, self.group.connection.send(frames, self.target, tag), held))
        except (RuntimeError, AttributeError) as error:  # AttributeError: the connection was closed meanwhile
            self.group.lost(self.target, self._what, error)

    def _wait_for_oldest(self) -> None:
        activity = self.group.mine
        activity.since, activity.waits = clock(), self._what
        try:
            _, work, held = self.flight.popleft()
            work.wait(self.timeout)
        except (RuntimeError, IndexError) as error:  # IndexError: everything was dropped meanwhile
            work = held = None  # the raised error keeps this frame, and the work would keep the connection open
            self.group.lost(self.target, self._what, error)
        if isinstance(held, Slot) and held.size <= KEPT and held is not self._hello:
            self._keep(held)
        activity.waits = None
        activity.began = clock()  # what came before was waiting

    def drop(self) -> None:
        self.flight.clear()


class FramedInbox(Inbox):
    """Takes frames in the order in which they were sent."""

    def __init__(self, group: Processes | Slice, route: Route, program: int, deadline: float) -> None:
        super().__init__()
        self.group, self.route, self.program = group, route, program
        self.source, self.tag = route[0], tag_of(route[2], program)
        self.timeout = timedelta(seconds=deadline)
        self.name = f"{route[2]} from {group.called(self.source)}"
        self.order: list[int] = []
        """The cell that each message of a step is for."""
        self.forms: list[Form] = []
        self.generation = group.generation
        self.posted: deque[tuple[Any, Tensor]] = deque()
        self.count = 0
        self.ahead = 0
        """How many receives are posted before they are asked for."""
        group.ends.add(self)

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
        largest = max((form.size for form in self.forms), default=TRAILER)
        self.ahead = min(AHEAD, max(2, ROOM // largest))
        self._post(empty(TRAILER), TAGS[self.route[2]])
        for number in range(min(self.ahead, len(self.order))):
            self._post(self._frame(number), self.tag)

    def _frame(self, number: int) -> Tensor:
        return self.forms[number].frame() if number < len(self.forms) else empty(TRAILER)

    def _post(self, frame: Tensor, tag: int) -> None:
        try:
            self.posted.append((self.group.connection.recv([frame], self.source, tag), frame))
        except (RuntimeError, AttributeError) as error:
            self.group.lost(self.source, self.name, error)

    def pull(self, cells: list[Any], cell: int) -> Any:
        while cells[cell] is EMPTY:
            number = self.count
            cells[self.order[number]] = self.take(number)
        return cells[cell]

    def take(self, number: int) -> Any:
        """The message of this number, which is the next."""
        if not number:
            self._check_program()
        if number + self.ahead < len(self.order):
            self._post(self._frame(number + self.ahead), self.tag)
        self.count = number + 1
        asked = clock()
        frame = self._arrived(asked)
        words = trailer(frame)
        assert words[NUMBER] == number, "messages of a channel are taken in the order in which they were sent"
        self.times[number] = words[SENT], asked, clock()
        return self._learn(number, words[OVERFLOW]) if words[OVERFLOW] else self.forms[number].unpack(frame)

    def _arrived(self, asked: int) -> Tensor:
        activity = self.group.mine
        activity.since, activity.waits = asked, self.name
        try:
            work, frame = self.posted.popleft()
            work.wait(self.timeout)
        except (RuntimeError, IndexError) as error:
            work = None  # the raised error keeps this frame, and the work would keep the connection open
            self.group.lost(self.source, self.name, error)
        activity.waits = None
        return frame

    def _check_program(self) -> None:
        """What comes before all else says which program the sender runs."""
        frame = self._arrived(clock())
        if trailer(frame)[PROGRAM] != self.program:
            raise self.group.report_failure(self.route[1], runs_another(self.group, self.source, self.route[1]))

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
