"""What a rank is doing, recorded at almost no cost, so that a report can say it when the rank itself no longer can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.device.timing import clock

if TYPE_CHECKING:
    from penstock.runtime.device.timing import ActionTimer

SHOWN = 3
"""How many completed actions a report shows."""


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
        """What the rank waits for, and from which rank."""
        self.since = clock()
        """When the present wait began, or when the last step ended."""
        self.watch: ActionTimer | None = None
        """Times the actions of a step that is recorded on a GPU."""

    def start(self, actions: Sequence[Action]) -> None:
        self.actions, self.at, self.running = actions, 0, True

    def stop(self) -> None:
        self.running, self.waits, self.since = False, None, clock()

    def describe(self) -> str:
        """One line: what the rank does or waits for, since when, and its last actions."""
        now, at, waits = clock(), self.at, self.waits
        if self.over:
            return "has returned"
        if not self.running or at >= len(self.actions):
            return "is between steps" if waits is None else f"waits for {waits} since {_seconds(now - self.since)}"
        action = self.actions[at]
        done = ", ".join(map(str, self.actions[max(0, at - SHOWN) : at])) or "nothing"
        if waits is None:
            return f"runs {action} since {_seconds(now - self.began)}; done before: {done}"
        return f"waits for {waits}, for {action}, since {_seconds(now - self.since)}; done before: {done}"


def _seconds(nanoseconds: int) -> str:
    return f"{max(0, nanoseconds) / 1e9:.1f} s"


def describe_action(action: Action) -> str:
    """An action with its stage, kind and microbatch spelled out, for an error message."""
    names = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward for the input", Kind.W: "backward for the weights"}
    what = names.get(action.kind)
    return str(action) if what is None else f"{action} (stage {action.stage}, {what} of microbatch {action.microbatch})"
