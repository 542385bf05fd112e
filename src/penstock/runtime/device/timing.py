"""When work begins and ends: the host's clock, and the GPU's time translated to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from penstock.runtime.device.gpu import cuda, is_initialized
from penstock.runtime.device.streams import get_current_stream, record_event
from penstock.runtime.torch_internals import pytree

clock = time.perf_counter_ns
"""Nanoseconds on a clock that all processes of a machine share."""


def mark_time() -> Any:
    """The present moment: of this thread's stream, as an event for `ActionTimer.times`, or of the host's clock without a GPU."""
    event = record_event()
    return clock() if event is None else event


class ActionTimer:
    """When each action of a step begins and ends on the GPU, told on the host's clock.

    The executor makes one per recorded step, calls `start` once and then `begin` and `end` for each action by its index. A receive
    inside an action calls `begin_again` when its message has arrived, so that waiting does not count. `times` is read after the step.
    """

    def __init__(self, actions: int) -> None:
        self.begun, self.ended = ([cuda.Event(enable_timing=True) for _ in range(actions)] for _ in range(2))
        self.reference = cuda.Event(enable_timing=True)
        self.zero = 0
        self.at = 0
        self.fresh = True
        """Whether the present action has done nothing yet except wait."""

    def start(self) -> None:
        """Read the host's clock at a known moment of the GPU's."""
        self.reference.record(get_current_stream())
        self.reference.synchronize()
        self.zero = clock()

    def begin(self, at: int) -> None:
        self.at, self.fresh = at, True
        self.begun[at].record(get_current_stream())

    def begin_again(self) -> None:
        """Count the present action from now, if it has only waited so far."""
        if self.fresh:
            self.begun[self.at].record(get_current_stream())

    def end(self, at: int) -> None:
        self.ended[at].record(get_current_stream())

    def times(self, events: Sequence[Any]) -> list[int]:
        """Nanoseconds of each recorded event, once it has happened. Integers are times already, and stay."""
        return [event if type(event) is int else self._time(event) for event in events]

    def _time(self, event: Any) -> int:
        event.synchronize()
        return int(self.zero + round(self.reference.elapsed_time(event) * 1e6))


def create_timer(actions: int) -> ActionTimer | None:
    """A timer for a step of so many actions; None without a GPU, because the host's clock is enough then."""
    return ActionTimer(actions) if is_initialized() else None


class Stopwatch:
    """Seconds between marks. On a GPU it is the GPU's own time, and the host runs so far ahead that its overhead does not count."""

    AHEAD = 4_000_000
    """Cycles that the GPU sleeps first: about two milliseconds."""

    def __init__(self, sample: Any) -> None:
        """Time work on the device that the sample's tensors are on."""
        self.on_gpu = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(sample))
        self.marks: list[Any] = []
        if self.on_gpu:
            cuda.current_stream().synchronize()
            cuda._sleep(self.AHEAD)
        self.mark()

    def mark(self) -> None:
        self.marks.append(record_event() if self.on_gpu else clock())

    def seconds(self) -> list[float]:
        if not self.on_gpu:
            return [(after - before) / 1e9 for before, after in pairwise(self.marks)]
        self.marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self.marks)]
