"""Channels that send tensors from device to device, for NCCL. Nothing can be sent along with a tensor, so both ends must know its form.

In a step whose inputs are new to any rank, the form of each message goes ahead of it through the control connection. In later steps
both ends know the forms, for as long as no rank's inputs change. Plain values may differ each time, so a channel with any sends them
through the control connection in every step. Receives are posted where the program has them, which must be proved under
`rendezvous`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.runtime.device.connections import abort_connection, connect_devices, probe_tensor, wait_for_send
from penstock.runtime.device.timing import clock
from penstock.runtime.tensors.boundary import detach_tree
from penstock.runtime.transport.failures import PrefixStore
from penstock.runtime.transport.framed_channels import FramedInbox, FramedOutbox
from penstock.runtime.transport.group import EMPTY, Inbox, Operation, Outbox, Route
from penstock.runtime.transport.message_format import Form, Leaf, Repeated

if TYPE_CHECKING:
    from penstock.runtime.transport.processes import Processes

_UNLIMITED = 1 << 30
"""Slots of a channel whose messages are small and few."""


class DeviceConnections:
    """The connections that carry tensors: one for all ranks, or one per channel, so that no message waits behind another channel's."""

    def __init__(self, store: Any, rank: int, members: Sequence[int], deadline: float, *, edges: bool) -> None:
        """`members` are the ranks that take part, in ascending order."""
        self.store, self.rank, self.deadline, self.edges = PrefixStore("tensors", store), rank, deadline, edges
        self._places = {member: place for place, member in enumerate(members)}
        self._shared = None if edges else connect_devices(self.store, self._places[rank], len(members), deadline)
        self._edges: dict[Route, Any] = {}
        self._probed: set[Any] = set()

    def find(self, route: Route, peer: int) -> tuple[Any, int]:
        """The connection of a route, and the peer's rank on it."""
        if not self.edges:
            return self._shared, self._places[peer]
        return self._edges[route], int(peer == route[1])

    def open(self, routes: Sequence[Route]) -> None:
        """Connect routes that are not connected yet, in an order that is the same on every rank, and send a small tensor both ways."""
        for route in routes:
            source, target, what = route
            pair = route if self.edges else (min(source, target), max(source, target))
            if self.rank not in (source, target) or pair in self._probed:
                continue
            self._probed.add(pair)
            if self.edges:
                store = PrefixStore(f"{source}/{target}/{what}", self.store)
                self._edges[route] = connect_devices(store, int(self.rank == target), 2, self.deadline)
            self._probe(route, first=self.rank == min(source, target))

    def _probe(self, route: Route, *, first: bool) -> None:
        connection, peer = self.find(route, route[0] if self.rank == route[1] else route[1])
        outgoing, incoming = probe_tensor(), probe_tensor()
        for sends in (first, not first):
            (connection.send([outgoing], peer, 0) if sends else connection.recv([incoming], peer, 0)).wait()

    def abort(self) -> None:
        """Close all connections, whatever is in progress on them."""
        for connection in (self._shared, *self._edges.values()):
            if connection is not None:
                abort_connection(connection)
        self._shared = None
        self._edges.clear()


class FormAgreement:
    """Whether the ends of one program know the forms of its messages. All ends of the program on this rank share one."""

    def __init__(self) -> None:
        self.learning = False
        """Whether the present step sends the form of each message ahead of it."""
        self.known: Any = None
        """The connection that the program's last step used; None if an end has been made since, which knows no forms yet."""


class FormAgreements:
    """The agreements of a rank's programs. Each is kept for as long as an end of its program is."""

    def __init__(self) -> None:
        self._by_program: weakref.WeakValueDictionary[int, FormAgreement] = weakref.WeakValueDictionary()
        self._last: FormAgreement | None = None
        """Keeps the agreement of a program that has no channels on this rank, while no other program runs."""

    def __len__(self) -> int:
        return len(self._by_program)

    def join(self, program: int) -> FormAgreement:
        """The agreement of a program, for a new end of one of its channels: the next step sends all forms."""
        agreement = self._find(program)
        agreement.known = None
        return agreement

    def agree(self, program: int, inputs: Any, gather: Callable[[bool], Iterable[bool]]) -> None:
        """Decide with the other ranks whether the next step sends forms: if any rank's inputs differ from those of the last step.

        `gather` is given whether this rank's do, and returns it for all ranks.
        """
        agreement = self._last = self._find(program)
        agreement.learning = any(gather(agreement.known != inputs))
        agreement.known = inputs

    def _find(self, program: int) -> FormAgreement:
        return self._by_program.setdefault(program, FormAgreement())


class _DirectEnd:
    """The shared state of both ends of a channel: the forms of its messages, and the framed channel that goes ahead of it."""

    def __init__(self, group: Processes, route: Route, program: int, ahead: FramedOutbox | FramedInbox) -> None:
        self.group, self.route, self.ahead = group, route, ahead
        self.agreement = group.forms.join(program)
        self.forms: list[Form] = []
        self.count = 0
        self.has_plain = False
        """Whether this step's plain values travel through the control connection."""
        group.ends.add(self)

    def begin(self) -> None:
        self.count, learning = 0, self.agreement.learning
        self.has_plain = not learning and any(form.has_plain for form in self.forms)
        if learning:
            self.forms.clear()
        if learning or self.has_plain:
            self.ahead.begin()


class DirectOutbox(_DirectEnd, Outbox):
    """Sends a value's tensors one after the other."""

    ahead: FramedOutbox

    def __init__(self, group: Processes, route: Route, slots: int, program: int, deadline: float) -> None:
        super().__init__(group, route, program, FramedOutbox(group, route, _UNLIMITED, program, deadline))
        self.slots, self.timeout = slots, timedelta(seconds=deadline)
        self.activity = group.activity(route[0])
        self.sends: dict[int, list[tuple[Any, Tensor]]] = {}
        """The tensors of each message that may still be on its way, with their works."""
        self._oldest = 0
        """No message before this one is in `sends`."""
        self._waits_for = f"{group.describe_rank(route[1])} to take {route[2]}"

    def begin(self) -> None:
        super().begin()
        self.sends.clear()
        self._oldest = 0

    def list_new_forms(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.forms)) if self.agreement.learning else []

    def put(self, value: Any) -> None:
        number, self.count = self.count, self.count + 1
        self._free_slots(number)
        if self.agreement.learning:
            self.forms.append(Form.of(value))
            self.ahead.put(self.forms[-1])
        form = self.forms[number]
        if not form.fits(value, plain=False):
            what, rank = self.route[2], self.route[0]
            text = f"{self.group.describe_rank(rank)} made {what} {number} of the form {Form.of(value)}, but earlier steps had {form}"
            raise self.group.report_failure(rank, f"{text}: on this device only a step whose inputs change may change them")
        if self.has_plain:
            self.ahead.put(form.list_plain(value))
        try:
            connection, peer = self.group.device_connection(self.route, self.route[1])
            sends = self.sends[number] = []
            for leaf, part in zip(form.leaves, form.parts(detach_tree(value)), strict=True):
                if type(leaf) is Leaf:
                    tensor = part.resolve_conj().resolve_neg().contiguous()
                    sends.append((connection.send([tensor], peer, 0), tensor))
        except (RuntimeError, AttributeError) as error:
            self.group.raise_lost(self.route[1], self._waits_for, error)

    def _free_slots(self, number: int) -> None:
        """Let go of messages that have arrived, and wait for those whose slots this message needs."""
        while self._oldest < number and all(work.is_completed() for work, _ in self.sends.get(self._oldest, ())):
            self.sends.pop(self._oldest, None)
            self._oldest += 1
        if self.agreement.learning and self.group.rendezvous:
            return  # a receive waits for its form where it is posted, which the proof of the slots does not know
        while self._oldest <= number - max(1, self.slots):
            self._wait_for_send(self._oldest)
            self._oldest += 1

    def retire(self, number: int) -> None:
        if not self.agreement.learning or self.group.rendezvous:  # else the receive is posted only where the value is used
            self._wait_for_send(number)

    def settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # the step has succeeded: if a connection was lost since then, the next step fails
            for number in tuple(self.sends):
                for work, _ in self.sends.pop(number, ()):
                    wait_for_send(work, self.timeout)

    def _wait_for_send(self, number: int) -> None:
        """Wait until a message has arrived, and let go of it."""
        activity = self.activity
        activity.since, activity.waits = clock(), self._waits_for
        sends: Any = self.sends.pop(number, ())
        work = None
        try:
            for work, _ in sends:
                wait_for_send(work, self.timeout)
        except RuntimeError as error:
            sends = work = None  # the raised error keeps this frame, and the work would keep the connection open
            self.group.raise_lost(self.route[1], self._waits_for, error)
        activity.waits = None

    def drop(self) -> None:
        self.sends.clear()


class DirectInbox(_DirectEnd, Inbox):
    """Posts receives where the program has them, and waits where the value is used."""

    ahead: FramedInbox

    def __init__(self, group: Processes, route: Route, program: int, deadline: float) -> None:
        Inbox.__init__(self)
        _DirectEnd.__init__(self, group, route, program, FramedInbox(group, route, program, deadline))
        self.timeout = timedelta(seconds=deadline)
        self.name = f"{route[2]} from {group.describe_rank(route[0])}"
        self.activity = group.activity(route[1])
        self.order: list[int] = []

    def expect(self, cell: int) -> Operation:
        self.order.append(cell)
        self.times.append((0, 0, 0))
        self.ahead.expect(cell)
        return self._post

    def begin(self) -> None:
        super().begin()
        self.posted.clear()

    def _post(self) -> None:
        """Receive the next message. If its form is not known yet, wait for that only when the queue needs the receive now."""
        number = self.count
        self.count = number + 1
        waits = self.agreement.learning and not self.group.rendezvous
        self.posted.append((number, [] if waits else self._receive(number)))

    def _receive(self, number: int) -> list[tuple[Any, Any]]:
        """Each part of a message, with its work if it is a tensor."""
        if self.agreement.learning:
            self.forms.append(self.ahead.take(number))
        works: list[tuple[Any, Any]] = []
        try:
            connection, peer = self.group.device_connection(self.route, self.route[0])
            for leaf in self.forms[number].leaves:
                part = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) if type(leaf) is Leaf else leaf
                works.append((connection.recv([part], peer, 0) if type(leaf) is Leaf else None, part))
            return works
        except (RuntimeError, AttributeError) as error:
            self.group.raise_lost(self.route[0], self.name, error)

    def pull(self, cells: list[Any], cell: int) -> Any:
        while cells[cell] is EMPTY:
            number, works = self.posted.popleft()
            works = works or self._receive(number)
            activity, asked = self.activity, clock()
            activity.since, activity.waits = asked, self.name
            try:
                for work, _ in works:
                    if work is not None:
                        work.wait(self.timeout)
            except RuntimeError as error:
                works, work = [], None  # the raised error keeps this frame, and the works would keep the connection open
                self.group.raise_lost(self.route[0], self.name, error)
            activity.waits = None
            self.times[number] = asked, asked, clock()
            form = self.forms[number]
            parts = [_restore(part, leaf) for (_, part), leaf in zip(works, form.leaves, strict=True)]
            if self.has_plain:
                plain = iter(self.ahead.take(number))
                parts = [part if type(leaf) in (Leaf, Repeated) else next(plain) for part, leaf in zip(parts, form.leaves, strict=True)]
            cells[self.order[number]] = form.join(parts)
        return cells[cell]


def _restore(part: Any, leaf: Any) -> Any:
    """A received tensor with the sender's strides, so that operators compute the same numbers from it."""
    if type(leaf) is not Leaf:
        return part
    if part.stride() != leaf.stride:
        part = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device).copy_(part)
    return part.requires_grad_() if leaf.grad else part
