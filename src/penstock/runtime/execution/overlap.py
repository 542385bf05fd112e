"""Actions that run together: by a hook of the model's own, on two streams of a device, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.device.streams import StreamPair
from penstock.runtime.split_backward.deferrable import Deferrable, run_backward
from penstock.runtime.split_backward.deferral import Deferral, activate
from penstock.runtime.transport.group import Operation

Overlap = Callable[[Action, list[Operation]], None]
"""Runs the operations of actions that go together."""

HOOK = "overlapped_forward_backward"
"""The method of a stage's module that runs its forward together with a backward: `(inputs, kwargs, backward) -> output`."""

_BACKWARDS = (Kind.B, Kind.I)


@dataclass(frozen=True)
class Backward:
    """A backward that a stage's hook is to run together with its forward.

    Calling it runs all of it. A hook that knows the other stage may instead run it in its own pieces: from the `outputs` that
    `module` has made, whose gradients are `grads`, to all that these were made from.
    """

    module: nn.Module
    outputs: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    deferral: Deferral | None = None

    def __call__(self) -> None:
        before = activate(self.deferral)  # what a checkpoint runs again belongs to this backward
        try:
            run_backward(self.outputs, self.grads)
        finally:
            activate(before)

    @contextmanager
    def expected(self, deferrable: Deferrable | None) -> Iterator[None]:
        """The hook runs inside; raises where it has come to no output of the other stage."""
        reached: list[Tensor] = []
        first: Any = self.outputs[0]
        handle = first.register_hook(reached.append)
        try:
            if deferrable is None or self.deferral is None:
                yield
            else:
                with deferrable.backward(self.deferral):
                    yield
        finally:
            handle.remove()
        if not reached:
            raise ScheduleError(f"{HOOK} returned without having run the backward it was given: call backward()")


def hook_of(module: nn.Module) -> Callable[..., Any] | None:
    """The module's own way of running its forward together with a backward, if it has one."""
    found = getattr(module, HOOK, None)
    return found if callable(found) else None


def pair(action: Action) -> tuple[int, int] | None:
    """Where among the parts a forward and a backward are that have nothing to do with each other; None where that is not all."""
    kinds = [part.kind for part in action.sub_actions]
    if len(kinds) != 2 or Kind.F not in kinds or not any(kind in _BACKWARDS for kind in kinds):
        return None
    forward = kinds.index(Kind.F)
    first, second = ((part.stage, part.microbatch) for part in action.sub_actions)
    return None if first == second else (forward, 1 - forward)


class TwoStreams:
    """Runs a forward and a backward at the same time, each on a stream of its own: `Pipeline(..., overlap=TwoStreams())`.

    A backward runs where its forward ran, as autograd has it, so that the forward beside it takes the other stream. Whatever
    else there is to run together goes one after the other. The numbers are the same. Without a device, so does everything.
    """

    def __init__(self) -> None:
        self._lanes: StreamPair | None = None
        self._lane_of: dict[tuple[int, int | None], int] = {}

    @property
    def lanes(self) -> StreamPair:
        """Made in the thread that runs the first action."""
        if self._lanes is None:
            self._lanes = StreamPair()
        return self._lanes

    def __call__(self, action: Action, operations: list[Operation]) -> None:
        places = pair(action)
        if places is None:
            for part, operation in zip(action.sub_actions, operations, strict=True):
                self.alone(part, operation)
            return
        forward, backward = (action.sub_actions[place] for place in places)
        lane = self._lane_of.get((backward.stage, backward.microbatch), 0)
        self._lane_of[forward.stage, forward.microbatch] = 1 - lane
        self.lanes.join()
        # The forward first: it lets go of no memory of the other stream's, as the backward does.
        self.lanes.on(1 - lane, operations[places[0]])
        self.lanes.on(lane, operations[places[1]])
        self.lanes.join()

    def alone(self, part: Action, operation: Operation) -> None:
        """An action by itself: a backward where its forward was."""
        lane = 0 if part.kind is Kind.F else self._lane_of.get((part.stage, part.microbatch), 0)
        if not lane:
            operation()
            return
        self.lanes.join()
        self.lanes.on(lane, operation)
        self.lanes.join()


def overlap_of(given: Any) -> Overlap | None:
    """What was given as `overlap=`: a function of one's own, "streams", or nothing."""
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    if given != "streams":
        raise ScheduleError(f"overlap={given!r}: give 'streams', a function (action, operations), or None for one after the other")
    return TwoStreams()
