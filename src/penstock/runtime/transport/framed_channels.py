"""Channels between processes on gloo: each message is a frame under a tag. Receives are posted ahead, and sends are not waited for."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.runtime.device.timing import clock
from penstock.runtime.transport.group import EMPTY, Inbox, Operation, Outbox, Route, describe_other_program, do_nothing
from penstock.runtime.transport.message_format import (
    NUMBER,
    OVERFLOW,
    PROGRAM,
    SENT,
    TRAILER,
    Form,
    SendFrame,
    allocate_bytes,
    pack_new,
    trailer,
    unpack_new,
)

if TYPE_CHECKING:
    from penstock.runtime.transport.processes import Processes

AHEAD, AHEAD_BYTES = 32, 1 << 22
"""The most receives that are posted ahead, and the most bytes that they may take together: gloo moves a message only once its
receive is posted."""
REUSED = 1 << 16
"""The size in bytes up to which sent frames are reused: small frames cost more to make than to keep."""
SIZES = 8
"""How many sizes of frames are kept: if lengths keep changing, old ones may never come again."""
TAGS = {"activations": 0, "gradients": 1}
"""The tag of each kind of traffic for the greeting that begins a step."""


def tag_of(what: str, program: int) -> int:
    """The tag of a program's messages. Values that do not fit their frames follow under the next tag.

    Programs do not share tags, because gloo ends a process that is sent more bytes than it expects.
    """
    return 4 + 4 * (program & 0xFFFFFF) + 2 * TAGS[what]


class _FramedEnd:
    """The shared part of both ends of a channel: its tag, and the forms of its messages in the present generation of connections."""

    def __init__(self, group: Processes, route: Route, program: int, deadline: float) -> None:
        self.group, self.route, self.program = group, route, program
        self.tag, self.timeout = tag_of(route[2], program), timedelta(seconds=deadline)
        self.activity = group.activity(group.rank)
        self.forms: list[Form] = []
        self.generation = group.generation
        self.count = 0

    def begin(self) -> None:
        self.count = 0
        if self.generation != self.group.generation:
            self.generation = self.group.generation
            self.forms.clear()


class FramedOutbox(_FramedEnd, Outbox):
    """Sends frames, and waits for each only once the receiver must have taken it."""

    def __init__(self, group: Processes, route: Route, slots: int, program: int, deadline: float) -> None:
        super().__init__(group, route, program, deadline)
        self.target, self.slots = route[1], slots
        self._greeting = SendFrame(TRAILER)
        self._waits_for = f"{group.describe_rank(self.target)} to take {route[2]}"
        self._new: list[int] = []
        self.sends: deque[tuple[int, Any, SendFrame | Tensor]] = deque()
        """Sends in progress: number, work, and the object that holds the memory, because the work does not."""
        self.free: dict[int, list[SendFrame]] = {}
        """Frames to reuse, by their size."""
        group.ends.add(self, self.sends)

    def begin(self) -> None:
        super().begin()
        while self.sends:  # all received, because the step that they belong to is over
            self._wait_for_oldest()
        self._new.clear()
        self._greeting.words[PROGRAM] = self.program
        self._dispatch(0, self._greeting.buffers, TAGS[self.route[2]], self._greeting)

    def put(self, value: Any) -> None:
        number, forms, sends = self.count, self.forms, self.sends
        self.count = number + 1
        while sends and number - sends[0][0] >= self.slots:
            self._wait_for_oldest()
        if number >= len(forms):
            self._put_new(number, TRAILER, value)
        elif (form := forms[number]).fits(value):
            frame = self._take_frame(form.size)
            form.pack(value, frame.address)
            self._send(number, frame)
        else:
            self._put_new(number, form.size, value)

    def retire(self, number: int) -> None:
        pending = []
        while self.sends and self.sends[0][0] <= number:
            if isinstance(self.sends[0][2], SendFrame):
                self._wait_for_oldest()
            else:  # a value of a new form is received only where it is used; this is a copy of it
                pending.append(self.sends.popleft())
        self.sends.extendleft(reversed(pending))

    def _put_new(self, number: int, size: int, value: Any) -> None:
        """Send a value of a new form in a message of its own, behind a frame of the size that the receiver expects."""
        new, overflow = pack_new(value)
        self.forms[number : number + 1] = [new]
        self._new.append(number)
        self._send(number, self._take_frame(size), len(overflow))
        self._dispatch(number, [overflow], self.tag + 1, overflow)

    def list_new_forms(self) -> list[tuple[int, Any]]:
        return [(number, self.forms[number]) for number in self._new]

    def _take_frame(self, size: int) -> SendFrame:
        free = self.free.get(size)
        return free.pop() if free else SendFrame(size)

    def _send(self, number: int, frame: SendFrame, overflow: int = 0) -> None:
        words = frame.words
        words[NUMBER], words[SENT], words[OVERFLOW] = number, clock(), overflow
        self._dispatch(number, frame.buffers, self.tag, frame)

    def _dispatch(self, number: int, frames: list[Tensor], tag: int, held: SendFrame | Tensor) -> None:
        try:
            self.sends.append((number, self.group.connection.send(frames, self.target, tag), held))
        except (RuntimeError, AttributeError) as error:  # AttributeError: the connection was closed meanwhile
            self.group.raise_lost(self.target, self._waits_for, error)

    def _wait_for_oldest(self) -> None:
        activity = self.activity
        activity.since, activity.waits = clock(), self._waits_for
        try:
            _, work, held = self.sends.popleft()
            work.wait(self.timeout)
        except (RuntimeError, IndexError) as error:  # IndexError: everything was dropped meanwhile
            work = held = None  # the raised error keeps this frame, and the work would keep the connection open
            self.group.raise_lost(self.target, self._waits_for, error)
        if isinstance(held, SendFrame) and held.size <= REUSED and held is not self._greeting:
            if held.size not in self.free and len(self.free) >= SIZES:
                self.free.clear()
            self.free.setdefault(held.size, []).append(held)
        activity.waits = None
        activity.began = clock()  # the time before was spent waiting

    def drop(self) -> None:
        self.sends.clear()


class FramedInbox(_FramedEnd, Inbox):
    """Receives frames in the order in which they were sent."""

    posted: deque[tuple[Any, Tensor]]

    def __init__(self, group: Processes, route: Route, program: int, deadline: float) -> None:
        Inbox.__init__(self)
        _FramedEnd.__init__(self, group, route, program, deadline)
        self.source = route[0]
        self.name = f"{route[2]} from {group.describe_rank(self.source)}"
        self.order: list[int] = []
        """The cell of each message of a step."""
        self.ahead = 0
        """How many receives are posted ahead."""
        self._in_turn = False
        self._next = 0
        """The number of the next message to post a receive for."""
        group.ends.add(self)

    def expect(self, cell: int) -> Operation:
        number = len(self.order)
        self.order.append(cell)
        self.times.append((0, 0, 0))
        return partial(self._post_through, number) if self._in_turn else do_nothing

    def post_in_turn(self) -> None:
        self._in_turn = True

    def begin(self) -> None:
        super().begin()
        self.posted.clear()
        largest = max((form.size for form in self.forms), default=TRAILER)
        self.ahead = min(AHEAD, max(2, AHEAD_BYTES // largest))
        self._post(allocate_bytes(TRAILER), TAGS[self.route[2]])
        self._next = 0
        self._post_through(min(self.ahead, len(self.order)) - 1)

    def _post_through(self, number: int) -> None:
        """Post the receives up to this message."""
        while self._next <= number:
            self._post(self.forms[self._next].frame() if self._next < len(self.forms) else allocate_bytes(TRAILER), self.tag)
            self._next += 1

    def _post(self, frame: Tensor, tag: int) -> None:
        try:
            self.posted.append((self.group.connection.recv([frame], self.source, tag), frame))
        except (RuntimeError, AttributeError) as error:
            self.group.raise_lost(self.source, self.name, error)

    def pull(self, cells: list[Any], cell: int) -> Any:
        while cells[cell] is EMPTY:
            number = self.count
            cells[self.order[number]] = self.take(number)
        return cells[cell]

    def take(self, number: int) -> Any:
        """The next message, whose number this is."""
        asked = clock()
        if not number:
            greeting = self._wait_for_frame(asked)  # says which program the sender runs
            if trailer(greeting)[PROGRAM] != self.program:
                raise self.group.report_failure(self.route[1], describe_other_program(self.group, self.source, self.route[1]))
        if number + self.ahead < len(self.order):
            self._post_through(number + self.ahead)
        self.count = number + 1
        frame = self._wait_for_frame(asked)
        words = trailer(frame)
        assert words[NUMBER] == number, "messages of a channel are taken in the order in which they were sent"
        self.times[number] = words[SENT], asked, clock()
        return self._learn(number, words[OVERFLOW]) if words[OVERFLOW] else self.forms[number].unpack(frame)

    def _wait_for_frame(self, asked: int) -> Tensor:
        activity = self.activity
        activity.since, activity.waits = asked, self.name
        try:
            work, frame = self.posted.popleft()
            work.wait(self.timeout)
        except (RuntimeError, IndexError) as error:
            work = None  # the raised error keeps this frame, and the work would keep the connection open
            self.group.raise_lost(self.source, self.name, error)
        activity.waits = None
        return frame

    def _learn(self, number: int, size: int) -> Any:
        """Receive a value of a new form, which follows in a message of its own."""
        frame = allocate_bytes(size)
        try:
            self.group.connection.recv([frame], self.source, self.tag + 1).wait(self.timeout)
        except (RuntimeError, AttributeError) as error:
            self.group.raise_lost(self.source, self.name, error)
        form, value = unpack_new(frame)
        self.forms[number : number + 1] = [form]
        return value
