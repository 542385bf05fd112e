"""Overlapped actions: run by a hook of the module, on two streams of a device, or one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.device.streams import StreamPair
from penstock.runtime.model.transforms import Recomputed
from penstock.runtime.split_backward.deferrable import Deferrable, run_backward
from penstock.runtime.split_backward.deferral import Deferral, activate
from penstock.runtime.transport.group import Operation

if TYPE_CHECKING:
    from penstock.runtime.execution.operations import StageOperations
    from penstock.runtime.parallel.data_parallel import DataParallel

logger = logging.getLogger(__name__)

Overlap = Callable[[Action, list[Operation]], None]
"""Runs the operations of an overlapped action, which it gets with the action."""

HOOK = "overlapped_forward_backward"
"""The method of a stage's module that runs its forward together with a backward: `(inputs, kwargs, backward) -> output`."""

_BACKWARDS = (Kind.B, Kind.I)
_Place = tuple[int, int | None, int | None]
"""The stage, microbatch and slice of an action."""


@dataclass(frozen=True)
class Backward:
    """A backward that the hook of another stage runs together with its forward.

    Calling it runs all of it. A hook that knows the other stage may run it in pieces instead, starting from `outputs`, which `module`
    computed, with the gradients `grads`.
    """

    module: nn.Module
    outputs: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    deferral: Deferral | None = None

    def __call__(self) -> None:
        before = activate(self.deferral)  # what activation checkpointing recomputes belongs to this backward
        try:
            run_backward(self.outputs, self.grads)
        finally:
            activate(before)

    @contextmanager
    def expect(self, deferrable: Deferrable | None) -> Iterator[None]:
        """A context for the hook's call. Raises afterwards if the hook has not run the backward."""
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
            raise ScheduleError(f"{HOOK} returned without running its backward: call backward()")


def find_pair(action: Action) -> tuple[int, int] | None:
    """The positions of a forward and an independent backward among the parts; None if the action is anything else."""
    kinds = [part.kind for part in action.sub_actions]
    if len(kinds) != 2 or Kind.F not in kinds or not any(kind in _BACKWARDS for kind in kinds):
        return None
    forward = kinds.index(Kind.F)
    first, second = map(_place, action.sub_actions)
    return None if first == second else (forward, 1 - forward)


def _place(action: Action) -> _Place:
    return action.stage, action.microbatch, action.slice


class OverlapHooks:
    """Builds operations that run a forward and a backward together by the `overlapped_forward_backward` of the forward's module."""

    def __init__(self, compute: StageOperations, data: DataParallel, recorded: bool) -> None:
        self._compute, self._data, self._recorded = compute, data, recorded
        self._warned: set[int] = set()

    def build(self, action: Action, note_failure: Callable[[Action, Operation], Operation]) -> Operation | None:
        """The operation of an overlapped action, or None if there is no hook for it; `note_failure` marks each part's operation."""
        compute = self._compute
        pair = find_pair(action) if compute.program.training else None
        if pair is None:
            return None
        forward, backward = (action.sub_actions[position] for position in pair)
        module = compute.stages[forward.stage].module
        hook = getattr(module.module if isinstance(module, Recomputed) else module, HOOK, None)
        if not callable(hook) or not self._is_usable(action, forward.stage):
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs) if compute.hooked_backward is None else hook(args, kwargs, compute.hooked_backward)

        slices = compute.program.slices
        takes = compute.links.input_sources(forward.stage, forward.unit(slices))
        run_forward = compute.forward(forward.stage, forward.unit(slices), call)
        run_backward = compute.backward(backward.stage, backward.unit(slices))

        def run_together() -> None:
            inputs = [take() for take in takes]  # before the backward is prepared: other ranks' threads may run during the wait
            run_backward(note_failure(forward, partial(run_forward, inputs)))

        return note_failure(backward, run_together)

    def _is_usable(self, action: Action, stage: int) -> bool:
        """Whether the hook of a stage's module can be used; warns once per stage if not."""
        obstacles = {
            "graphs=True records a forward and a backward apart": self._recorded,
            "sequences are cut into slices": self._compute.program.slices > 1,
            "the stage is recomputed": isinstance(self._compute.stages[stage].module, Recomputed),
            "stages are sharded, or sum their gradients in another precision": any(
                self._data.surrounds(part.stage) for part in action.sub_actions
            ),
        }
        reason = next((reason for reason, holds in obstacles.items() if holds), None)
        if reason is not None and stage not in self._warned:
            self._warned.add(stage)
            logger.warning("%s of stage %d is not used; its forward and the backward run one after the other: %s", HOOK, stage, reason)
        return reason is None


class TwoStreams:
    """Runs a forward and a backward at the same time, each on a stream of its own: `Pipeline(..., overlap=TwoStreams())`.

    Autograd runs a backward on the stream of its forward, so the forward beside it takes the other stream. Other combinations, and
    everything on a CPU, run one after the other. The numbers are the same.
    """

    def __init__(self) -> None:
        self._lane_of: dict[_Place, int] = {}

    @cached_property
    def lanes(self) -> StreamPair:
        """Created on the thread that runs the first action."""
        return StreamPair()

    def __call__(self, action: Action, operations: list[Operation]) -> None:
        places = find_pair(action)
        if places is None:
            for part, operation in zip(action.sub_actions, operations, strict=True):
                self.run_alone(part, operation)
            return
        forward, backward = (action.sub_actions[place] for place in places)
        lane = self._lane_of.get(_place(backward), 0)
        self._lane_of[_place(forward)] = 1 - lane
        self.lanes.join()
        # The forward first: unlike the backward, it frees no memory of the other stream.
        self.lanes.run_on(1 - lane, operations[places[0]])
        self.lanes.run_on(lane, operations[places[1]])
        self.lanes.join()

    def run_alone(self, part: Action, operation: Operation) -> None:
        """Run an action by itself: a backward on the stream of its forward."""
        lane = 0 if part.kind is Kind.F else self._lane_of.get(_place(part), 0)
        if not lane:
            operation()
            return
        self.lanes.join()
        self.lanes.run_on(lane, operation)
        self.lanes.join()


def make_overlap(option: Any) -> Overlap | None:
    """The overlap function for the option `overlap=`."""
    if option is None or callable(option):
        return option  # type: ignore[no-any-return]
    if option != "streams":
        raise ScheduleError(f"overlap={option!r}: give 'streams', a function (action, operations), or None to run one after the other")
    return TwoStreams()
