"""Where a rank keeps what it has made or received until it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.runtime.result import Share

if TYPE_CHECKING:
    from penstock.runtime.group import Group


class _Empty:
    """What is in a cell that nothing has been put into."""

    def __repr__(self) -> str:
        return "empty"


EMPTY = _Empty()


@dataclass
class Feed:
    """What one step is fed with: inputs, keyword arguments and targets by microbatch, and how much each counts."""

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    scales: list[float]
    seed: str | None = None
    """What the random streams of this step are derived from; None leaves random numbers to torch."""
    outputs: bool = False
    losses: bool = True
    share: Share = field(default_factory=Share)


NOTHING = Feed([], {}, None, [])


class Inbox:
    """The receiving end of a channel: messages go to the cells that receives were posted for, in order."""

    def __init__(self, group: Group, route: tuple[int, int, str], wait: Callable[[Callable[[], bool], str], None]) -> None:
        self.group, self.wait = group, wait
        self.channel = group.channel(route)
        self.name = f"{route[2]} from rank {route[0]}"

    def pull(self, cells: list[Any], cell: int) -> Any:
        """The message that was posted for the cell."""
        messages, posted = self.channel.messages, self.channel.posted
        while cells[cell] is EMPTY:
            if not messages:
                self.wait(lambda: bool(messages), self.name)
            cells[posted.popleft()] = messages.popleft()
        return cells[cell]
