"""The engine's messages on the ranks of a `launch`: the one place that knows how those are reached."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime.transport.current_group import get_group
from penstock.runtime.transport.group import EMPTY
from penstock.runtime.transport.processes import Processes
from penstock.runtime.transport.subgroup import get_subgroup

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.runtime.transport.group import Group, Inbox, Operation, Outbox

_Result = TypeVar("_Result")
_UNLIMITED = 1 << 30
# What each instruction does: sends or receives, the stage at the other end, and what it carries.
_SENDS = {"SendActivation": (1, "activations"), "SendGrad": (-1, "gradients")}
_RECEIVES = {"RecvActivation": (-1, "activations"), "RecvGrad": (1, "gradients")}


class Transport:
    """One rank among the others. Every wait has a deadline, and ends where another rank fails.

    `pipe` are the ranks of this pipeline by stage, all ranks unless given; `data` are those that hold this stage, one per replica.
    """

    def __init__(self, deadline: float, pipe: Sequence[int] | None = None, data: Sequence[int] | None = None) -> None:
        self._group, self._rank = get_group()
        self._deadline = deadline
        self.pipe = tuple(range(self._group.ranks) if pipe is None else pipe)
        self.data = tuple((self._rank,) if data is None else data)
        self.stage, self.stages = self.pipe.index(self._rank), len(self.pipe)
        self.replica, self.replicas = self.data.index(self._rank), len(self.data)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of all."""
        return self._rank == 0

    @property
    def shares_memory(self) -> bool:
        """Whether what other ranks give is their own tensors rather than copies."""
        return self._group.shares_memory

    def ident(self, thing: object) -> Hashable:
        """What tells an object from those of other ranks."""
        return self._group.ident(thing)

    def gather_all(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks of all pipelines."""
        return self._group.gather(self._rank, name, value, self._deadline)

    def gather_stages(self, name: str, value: Any) -> list[Any]:
        """The values of this pipeline's ranks, by stage."""
        return self._gather(self.pipe, name, value)

    def gather_replicas(self, name: str, value: Any) -> list[Any]:
        """The values of the ranks that hold this stage, by replica."""
        return self._gather(self.data, name, value)

    def _gather(self, members: Sequence[int], name: str, value: Any) -> list[Any]:
        """The members' values. All ranks call this, each for its own members; threads meet all at once, which costs nothing."""
        if len(members) == 1:
            return [value]
        if isinstance(self._group, Processes) and len(members) < self._group.ranks:
            subgroup = get_subgroup(self._group, members)
            return subgroup.gather(subgroup.rank, name, value, self._deadline)
        everyone = self.gather_all(name, value)
        return [everyone[member] for member in members]

    def connect_replicas(self) -> Any:
        """What sums and copies tensors over the ranks of this stage, where they are processes; they must just have met."""
        assert isinstance(self._group, Processes)
        return get_subgroup(self._group, self.data).connect_collectives(self._deadline)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._deadline)

    def mail(self, instructions: Sequence[Any], streams: Sequence[Any], *, blocking: bool) -> Mail:
        """The messages of this rank's instructions among everyone's streams; where they are blocking, a send waits for its receive."""
        number, slots = zlib.crc32(repr(streams).encode()), 0 if blocking else _UNLIMITED
        return Mail(self._group, self.pipe, self.stage, instructions, number, slots=slots, deadline=self._deadline)

    def together(self, body: Callable[[], _Result], place: Callable[[], str]) -> _Result:
        """Run what all ranks take part in; a failure is raised on all of them, with `place` saying where it was."""
        self._group.enter(self._rank, self._deadline)
        try:
            return body()
        except PipelineError as error:
            self._group.fail(self._rank, error)
            raise
        except Exception as error:
            headline = f"{place()} failed on rank {self._rank}: {type(error).__name__}: {error}"
            raise self._group.report_failure(self._rank, headline, error) from error
        except BaseException as error:
            self._group.fail(self._rank, error)
            raise
        finally:
            self._group.activity(self._rank).stop()


class Mail:
    """The messages of one stream, which may run many times: each receive knows its place among those of its channel."""

    def __init__(
        self, group: Group, pipe: Sequence[int], stage: int, instructions: Sequence[Any], number: int, *, slots: int, deadline: float
    ) -> None:
        self._instructions = instructions
        rank = pipe[stage]
        self._activity = group.activity(rank)
        self._outboxes: dict[str, Outbox] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._expected: dict[str, list[Operation]] = {}
        names = [each.name for each in instructions]
        for name, (step, what) in _SENDS.items():
            if name in names:
                self._outboxes[name] = group.outbox((rank, pipe[stage + step], what), slots, number, deadline)
        for name, (step, what) in _RECEIVES.items():
            if name in names:
                inbox = self._inboxes[name] = group.inbox((pipe[stage + step], rank, what), number, deadline)
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
