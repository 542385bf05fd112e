"""What a rank is doing, kept up to date at almost no cost, for reports that are wanted when it no longer can say so itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.ir.action import Action
from penstock.ir.kind import Kind

if TYPE_CHECKING:
    from penstock.runtime.device.device import Watch

clock = time.perf_counter_ns
"""Nanoseconds on a clock that all processes of a machine share."""

SHOWN = 3
"""How many completed actions a report shows."""


class Activity:
    """Where a rank is in its program. The executor writes the fields, and a report may read them from another thread."""

    __slots__ = ("actions", "at", "began", "over", "running", "since", "waits", "watch")

    def __init__(self) -> None:
        self.actions: Sequence[Action] = ()
        self.at = 0
        self.running = False
        self.over = False
        """Whether the rank is through with all that it was to do."""
        self.began = clock()
        """When the present action began."""
        self.waits: str | None = None
        """What the rank waits for, and from whom."""
        self.since = clock()
        """Since when it waits, or since when it has been outside of a step."""
        self.watch: Watch | None = None
        """Tells the device's time, where a step is recorded on one."""

    def start(self, actions: Sequence[Action]) -> None:
        self.actions, self.at, self.running = actions, 0, True

    def stop(self) -> None:
        self.running, self.waits, self.since = False, None, clock()

    def describe(self) -> str:
        """One line: what it does or waits for, since when, and what it did last."""
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


def in_words(action: Action) -> str:
    """An action as a sentence may name it."""
    names = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward for the input", Kind.W: "backward for the weights"}
    what = names.get(action.kind)
    return str(action) if what is None else f"{action} (stage {action.stage}, {what} of microbatch {action.microbatch})"
