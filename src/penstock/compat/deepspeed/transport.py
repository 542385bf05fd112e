"""The engine's messages on the ranks of a `launch`: the one place that knows how those are reached."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime.cells import EMPTY
from penstock.runtime.here import current

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.runtime.group import Group, Inbox, Operation, Outbox

_Result = TypeVar("_Result")
_UNLIMITED = 1 << 30
# What each instruction does: sends or receives, the stage at the other end, and what it carries.
_SENDS = {"SendActivation": (1, "activations"), "SendGrad": (-1, "gradients")}
_RECEIVES = {"RecvActivation": (-1, "activations"), "RecvGrad": (1, "gradients")}


class Transport:
    """One rank among the others. Every wait has a deadline, and ends where another rank fails."""

    def __init__(self, deadline: float) -> None:
        self._group, self.rank = current()
        self._deadline = deadline

    @property
    def ranks(self) -> int:
        return self._group.ranks

    def ident(self, thing: object) -> Hashable:
        """What tells an object from those of other ranks."""
        return self._group.ident(thing)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        return self._group.gather(self.rank, name, value, self._deadline)

    def mail(self, instructions: Sequence[Any], streams: Sequence[Any], *, blocking: bool) -> Mail:
        """The messages of this rank's instructions among everyone's streams; where they are blocking, a send waits for its receive."""
        number, slots = zlib.crc32(repr(streams).encode()), 0 if blocking else _UNLIMITED
        return Mail(self._group, self.rank, instructions, number, slots=slots, deadline=self._deadline)

    def together(self, body: Callable[[], _Result], place: Callable[[], str]) -> _Result:
        """Run what all ranks take part in; a failure is raised on all of them, with `place` saying where it was."""
        self._group.enter(self.rank, self._deadline)
        try:
            return body()
        except PipelineError as error:
            self._group.fail(self.rank, error)
            raise
        except Exception as error:
            headline = f"{place()} failed on rank {self.rank}: {type(error).__name__}: {error}"
            raise self._group.report_failure(self.rank, headline, error) from error
        except BaseException as error:
            self._group.fail(self.rank, error)
            raise
        finally:
            self._group.activity(self.rank).stop()


class Mail:
    """The messages of one stream, which may run many times: each receive knows its place among those of its channel."""

    def __init__(self, group: Group, rank: int, instructions: Sequence[Any], number: int, *, slots: int, deadline: float) -> None:
        self._instructions = instructions
        self._activity = group.activity(rank)
        self._outboxes: dict[str, Outbox] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._expected: dict[str, list[Operation]] = {}
        names = [each.name for each in instructions]
        for name, (step, what) in _SENDS.items():
            if name in names:
                self._outboxes[name] = group.outbox((rank, rank + step, what), slots, number, deadline)
        for name, (step, what) in _RECEIVES.items():
            if name in names:
                inbox = self._inboxes[name] = group.inbox((rank + step, rank, what), number, deadline)
                self._expected[name] = [inbox.expect(cell) for cell in range(names.count(name))]
        self._cells: dict[str, list[Any]] = {}
        self._taken: dict[str, int] = {}

    def begin(self) -> None:
        """The stream begins."""
        self._cells = {name: [EMPTY] * len(each) for name, each in self._expected.items()}
        self._taken = dict.fromkeys(self._expected, 0)
        self._activity.start(cast("Sequence[Action]", self._instructions))  # it only prints them
        for outbox in self._outboxes.values():
            outbox.begin()
        for inbox in self._inboxes.values():
            inbox.begin()

    def at(self, index: int) -> None:
        """For reports: where the rank is in the stream."""
        self._activity.at = index

    def send(self, name: str, value: Any) -> None:
        if name not in self._outboxes:
            raise ScheduleError(f"a {name} that was not in the stream when the batch began")
        self._outboxes[name].put(value)

    def receive(self, name: str) -> Any:
        cells, cell = self._cells.get(name, []), self._taken.get(name, 0)
        if cell >= len(cells):
            raise ScheduleError(f"a {name} that was not in the stream when the batch began")
        self._taken[name] = cell + 1
        self._expected[name][cell]()
        value = self._inboxes[name].pull(cells, cell)
        cells[cell] = EMPTY
        return value

    def end(self) -> None:
        """The stream is over, or has failed."""
        for inbox in self._inboxes.values():
            inbox.clear()
        self._cells = {}
