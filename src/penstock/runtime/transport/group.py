"""What ranks need of each other, whether they are threads or processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from penstock.errors import PipelineError
from penstock.runtime.transport.activity import Activity

Route = tuple[int, int, str]
"""From rank, to rank, and what it carries: `activations` or `gradients`."""
Operation = Callable[[], None]


def nothing() -> None:
    """An action that has nothing to do."""


class Outbox(ABC):
    """The sending end of a channel, as one program uses it."""

    @abstractmethod
    def put(self, value: Any) -> None:
        """Send the next message. Waits only where all slots of the channel are taken."""

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """A step begins."""

    def learned(self) -> list[tuple[int, Any]]:
        """The messages of the last step whose form was new, by their number in it, and the form."""
        return []

    def drop(self) -> None:  # noqa: B027
        """Let go of everything under way, so that the connection can close. May be called from another thread."""


class Inbox(ABC):
    """The receiving end of a channel, as one program uses it."""

    def __init__(self) -> None:
        self.times: list[tuple[Any, Any, Any]] = []
        """For each message of the last step: when it was sent, on the sender's clock, asked for and there; or places in streams."""

    @abstractmethod
    def expect(self, cell: int) -> Operation:
        """The next message of a step is for this cell; what the receive does when its turn comes."""

    @abstractmethod
    def pull(self, cells: list[Any], cell: int) -> Any:
        """The message for the cell; those before it go into theirs."""

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """A step begins."""

    @abstractmethod
    def clear(self) -> None:
        """A step is over, or has failed: expect nothing more of it."""

    def drop(self) -> None:  # noqa: B027
        """Let go of everything under way, so that the connection can close. May be called from another thread."""

    @abstractmethod
    def pending(self) -> int:
        """How many receives are posted and not yet taken."""


class Group(ABC):
    """The ranks of a pipeline. All of them make the same calls in the same order."""

    ranks: int
    parallel: bool
    """Whether ranks run at the same time."""

    rendezvous = False
    """Whether messages between two ranks share one queue, so that programs must be proved under `rendezvous`."""
    direct = False
    """Whether the forms of messages must be agreed before a step."""
    shares_memory = False
    """Whether a message is the sender's own tensor rather than a copy of it."""

    @abstractmethod
    def count(self, rank: int) -> int:
        """How many pipelines this rank has made, so that messages of one are not taken for those of another."""

    def open(self, routes: Iterable[Route], deadline: float) -> None:  # noqa: B027 - most have nothing to do
        """Make the channels ready that a program uses."""

    def agree(self, program: int, inputs: Any, deadline: float) -> None:  # noqa: B027
        """Compare with the other ranks whether a step's inputs look as they did the last time."""

    @abstractmethod
    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        """A new sending end for the program of this number."""

    @abstractmethod
    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        """A new receiving end for the program of this number."""

    @abstractmethod
    def activity(self, rank: int) -> Activity:
        """What the rank is doing."""

    @abstractmethod
    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        """Everyone's value, in the order of ranks."""

    @abstractmethod
    def enter(self, rank: int, deadline: float) -> None:
        """Begin what all ranks take part in. Who has not raised a failure yet raises it now; who has waits until all have."""

    @abstractmethod
    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        """Make a failure known to all, if it is the first; the rank, if any, raises it by itself. A fatal one is never got over."""

    @abstractmethod
    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        """Make a failure known to all; the error that every rank raises."""

    def called(self, rank: int) -> str:
        """A rank as a message names it."""
        return f"rank {rank}"

    @abstractmethod
    def ident(self, thing: object) -> Hashable:
        """What tells an object from all others, those of other ranks included."""


def runs_another(group: Group, source: int, rank: int) -> str:
    """What is said of a message that belongs to another program than the one that its reader runs."""
    return (
        f"{group.called(source)} runs another step than {group.called(rank)}: give all ranks the same count of microbatches, and make the "
        "same calls on all"
    )
