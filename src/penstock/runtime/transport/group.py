"""The contracts of ranks that work together: a group of ranks, and the two ends of a channel between two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from penstock.errors import PipelineError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.device.timing import ActionTimer, clock

Route = tuple[int, int, str]
"""Source rank, target rank, and the kind of traffic: `activations` or `gradients`."""
Operation = Callable[[], None]
_SHOWN = 3
"""How many completed actions a report shows."""
RETURNED = "has returned"
"""The activity of a rank whose function has returned."""


class _Empty:
    """The content of a cell that holds no value."""

    def __repr__(self) -> str:
        return "empty"


EMPTY = _Empty()
"""Marks a cell as empty, because None may be a message. `Inbox.pull` fills the cells that hold it."""


def do_nothing() -> None:
    """An operation that does nothing."""


class Outbox(ABC):
    """The sending end of a channel, for one program.

    An executor asks its group for one outbox per route when it is built, and uses it for as long as it lives. In each step it calls
    `begin` on all its outboxes before those of its inboxes, and before the first action runs; then `put` once per message, in the
    order of the program, which is the order in which the other end expects them. All of this happens on the rank's own thread.

    If the group is `direct`, `settle` ends a step that has succeeded on all ranks. A step that fails is simply left: the next `begin`
    starts afresh, and nothing of the failed step may reach the receiver, because the group has emptied its channels or replaced its
    connections by then.
    """

    @abstractmethod
    def put(self, value: Any) -> None:
        """Send the next message of the step.

        Returns as soon as the message is on its way. Blocks only while all slots of the channel are taken by messages that the
        receiver has not taken yet. If another rank fails meanwhile, or the deadline passes, raises the report that all ranks raise.
        The value's tensors must stay as they are until the receiver has taken them: a channel may send them without a copy.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin a step: the next `put` is the step's first message."""

    def retire(self, number: int) -> None:  # noqa: B027 - most own what they send
        """Wait until the receiver has taken a message of this step, and let go of it; `number` counts the step's messages from 0.

        Called at most once per message, after its `put`, and only for programs that wait for their sends; the other end then posts each
        receive in turn (`Inbox.post_in_turn`). A channel that sends copies, or keeps the messages itself, has nothing to wait for. If
        another rank fails meanwhile, or the deadline passes, raises the report that all ranks raise.
        """

    def settle(self) -> None:  # noqa: B027
        """Let go of all messages of a step that is over, on groups that are `direct`: the receiver has taken them. Does not raise."""

    def list_new_forms(self) -> list[tuple[int, Any]]:
        """The messages of the last step whose form (tree, shapes, types) was new: their numbers in the step, and the forms."""
        return []

    def drop(self) -> None:  # noqa: B027
        """Let go of all messages in progress, so that the connection can close.

        The group calls this after a failure, possibly from its watching thread while the rank is inside `put`, which then raises.
        """


class Inbox(ABC):
    """The receiving end of a channel, for one program.

    An executor asks its group for one inbox per route when it is built. While building, it calls `expect` once per receive action of
    the route, in program order, and keeps the operation that this returns as the action itself. In each step it calls `begin`, runs
    those operations where the program has them, and calls `pull` when a compute action needs a message. All of this happens on the rank's
    own thread.

    Cells are the executor's list of values. A message is delivered into the cell that its receive was declared for; a cell that
    holds `EMPTY` has not got its message yet.
    """

    def __init__(self) -> None:
        self.times: list[tuple[Any, Any, Any]] = []
        """Per message of the last step: when it was sent (on the sender's clock), when it was needed, and when it was there.

        Nanoseconds, or events of streams if the ranks are threads on a GPU.
        """
        self.posted: deque[Any] = deque()
        """The receives that are posted and not yet pulled, in order. The executor empties it when a step ends, also by a failure."""

    @abstractmethod
    def expect(self, cell: int) -> Operation:
        """Declare that the next message of every step is for this cell; returns the operation that posts its receive."""

    @abstractmethod
    def pull(self, cells: list[Any], cell: int) -> Any:
        """Fill the cell, if it is `EMPTY`, and return its content.

        Messages arrive in the order in which they were sent, so all messages before it are put into their cells as well. Blocks until
        the message is there. If another rank fails meanwhile, the deadline passes, or the sender runs another program, raises the
        report that all ranks raise.
        """

    def post_in_turn(self) -> None:  # noqa: B027 - most do so anyway
        """Post each receive where the program has it, at the latest.

        The sender waits for its sends, so a receive must not be put off until its message is used. Called once, before the first `expect`.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin a step: the next message is the step's first. May post receives ahead of their turn."""

    def drop(self) -> None:
        """Let go of all receives in progress, so that the connection can close; like `Outbox.drop`."""
        self.posted.clear()


class Activity:
    """Where a rank is in its program. The executor writes the fields; a report may read them from another thread."""

    __slots__ = ("actions", "at", "began", "over", "running", "since", "waits", "watch")

    def __init__(self) -> None:
        self.actions: Sequence[Action] = ()
        self.at = 0
        self.running = False
        self.over = False
        """Whether the rank's function has returned."""
        self.began = clock()
        """When the present action began."""
        self.waits: str | None = None
        """The wait of the rank, and the rank that it waits for."""
        self.since = clock()
        """When the present wait began."""
        self.watch: ActionTimer | None = None
        """Times the actions of a step that is recorded on a GPU."""

    def stop(self) -> None:
        """End a step that has failed."""
        self.running, self.waits = False, None

    def describe(self) -> str:
        """One line: what the rank does or waits for, since when, and its last actions."""
        now, at, waits = clock(), self.at, self.waits
        if self.over:
            return RETURNED
        if not self.running or at >= len(self.actions):
            return "is between steps" if waits is None else f"waits for {waits} since {_format_seconds(now - self.since)}"
        action = self.actions[at]
        done = ", ".join(map(str, self.actions[max(0, at - _SHOWN) : at])) or "nothing"
        if waits is None:
            return f"runs {action} since {_format_seconds(now - self.began)}; done before: {done}"
        return f"waits for {waits}, for {action}, since {_format_seconds(now - self.since)}; done before: {done}"


def _format_seconds(nanoseconds: int) -> str:
    return f"{max(0, nanoseconds) / 1e9:.1f} s"


def describe_action(action: Action) -> str:
    """An action with its stage, kind and microbatch spelled out, for an error message."""
    names = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward for the input", Kind.W: "backward for the weights"}
    what = names.get(action.kind)
    return str(action) if what is None else f"{action} (stage {action.stage}, {what} of microbatch {action.microbatch})"


class Group(ABC):
    """The ranks of a pipeline, as seen from one of them.

    Every rank makes the same calls in the same order; a rank that makes others is found out and reported. All methods are called on
    the rank's own thread, except that `fail` may also be called by the launcher. `rank` is always the caller's
    rank: threads share one group object, while each process has its own, which ignores the argument.

    Each method that waits takes a deadline in seconds. When it passes, or when any rank fails, every rank raises a `PipelineError`
    with the same report: what failed first, and what each rank was doing. A failure is over when all ranks have raised it: the next
    call of `enter` or `gather` then finds every channel empty, and the group works again. After a fatal failure (a rank's function
    has raised, or its process is gone) it never does, and every later call raises the same report.

    A pipeline uses its group like this: `number_pipeline` once; `gather` while it is built; `outbox` and `inbox` for each program,
    then `open`; and per step `enter`, `agree` if the group is `direct`, the channels, and a last `gather` for the result. It passes
    an exception that escapes from the step to `report_failure` or `fail`.
    """

    ranks: int
    parallel: bool
    """Whether ranks run at the same time."""
    rendezvous = False
    """Whether all messages between two ranks share one queue, so that programs must be proved under `rendezvous`."""
    direct = False
    """Whether tensors travel without a description, so that `agree` must be called before each step."""
    shares_memory = False
    """Whether the receiver gets the sender's own tensor rather than a copy."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """A number that grows with each failure that is over: the same on all ranks that have entered since."""

    @abstractmethod
    def number_pipeline(self, rank: int) -> int:
        """The number of a new pipeline, equal on all ranks: it tells the messages of one pipeline from those of another."""

    def open(self, routes: Iterable[Route], deadline: float) -> None:  # noqa: B027 - most have nothing to do
        """Connect the channels of a new program. Called on all ranks after each has made its ends, with its own routes."""

    def agree(self, program: int, inputs: Any, deadline: float) -> None:  # noqa: B027
        """Find out on all ranks whether any rank's inputs look different from those of the program's last step.

        `inputs` describes them, and is compared with `==`. If any differ, the step sends the form of each message ahead of it.
        """

    @abstractmethod
    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        """A new sending end for the program of this number, whose channel holds so many messages."""

    @abstractmethod
    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        """A new receiving end for the program of this number."""

    @abstractmethod
    def activity(self, rank: int) -> Activity:
        """The rank's activity: one object for as long as the group lives, which the rank's executor writes."""

    @abstractmethod
    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        """All-gather: every rank's value, in the order of ranks. Enters first. Ranks that call it with other names fail."""

    @abstractmethod
    def enter(self, rank: int, deadline: float) -> None:
        """Begin something that all ranks take part in.

        Returns at once while nothing has failed. Otherwise raises a pending failure once; called again, blocks until every rank has
        raised it, and returns with the group in order. Raises every time after a fatal failure.
        """

    @abstractmethod
    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        """Tell all ranks of an error that this rank raises by itself, so that they raise it too; None if no rank has raised it.

        Only the first failure counts until all ranks have raised it. A fatal one is never over.
        """

    @abstractmethod
    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        """Tell all ranks of a failure, like `fail`; returns the error with the full report, for the caller to raise."""

    def describe_rank(self, rank: int) -> str:
        """A rank's name in messages."""
        return f"rank {rank}"

    @abstractmethod
    def ident(self, thing: object) -> Hashable:
        """A key that tells an object from all other objects, those of other ranks included."""


def describe_other_program(group: Group, source: int, rank: int) -> str:
    """The error text for a message that belongs to another program than the one its reader runs."""
    return (
        f"{group.describe_rank(source)} runs another step than {group.describe_rank(rank)}: give all ranks the same count of "
        "microbatches and the same order, and make the same calls on all"
    )
