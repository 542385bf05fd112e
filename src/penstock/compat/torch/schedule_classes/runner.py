"""A rank's order as a list of operations on torch-shaped stages, settled once and walked in every step.

The runtime's executor keeps values in cells that no program sees. Programs of torch's kind do see theirs (the stages' caches, the
schedule's receives under way, custom functions that stand in for actions), so that the list is made of calls on stages instead.
The receives are waited for at their use, sends at the end of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    _Action,
    parts_of,
)

if TYPE_CHECKING:
    from penstock.compat.torch.schedule_classes.base import _PipelineSchedule

Operation = Callable[["Walk"], None]
"""Takes the walk as its argument rather than keeping it, so that a schedule goes as soon as nobody has it any more."""
_BACKWARD = frozenset((FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, SEND_B, RECV_B, REDUCE_GRAD))


@dataclass
class Feed:
    """What one step is fed with, and the schedule it is a step of."""

    schedule: Any
    args: list[Any]
    kwargs: list[Any]
    targets: list[Any] | None = None
    losses: list[Any] | None = None
    outputs: bool = True
    loss_kwargs: dict[str, Any] | None = None


NOTHING = Feed(None, [], [])


class Walk:
    """One rank's operations for one order, in training or not."""

    def __init__(self, schedule: _PipelineSchedule, stages: Sequence[Any], actions: Sequence[_Action]) -> None:
        self.stages: dict[int, Any] = {stage.stage_index: stage for stage in stages}
        self.training = schedule._has_backward
        self.count = schedule._n_microbatches
        self.scale = self.count if schedule.scale_grads else 1
        self.functions = dict(getattr(schedule, "_comp_type_to_function_map", {}))
        self.given = list(actions)
        self.feed = NOTHING
        self.sending: dict[tuple[bool, int, int], list[Any]] = {}
        """What is being sent: whether forward, the stage and the microbatch."""
        self.given_up: list[list[Any]] = []
        """What a failed step was sending, so that it is not called back."""
        self.forward_works: dict[tuple[int, int], list[Any]] = getattr(schedule, "fwd_recv_ops", {})
        self.backward_works: dict[tuple[int, int], list[Any]] = getattr(schedule, "bwd_recv_ops", {})
        self.operations: list[tuple[int, Operation]] = []
        """What is to be done, each with the place of its action in the order."""
        self._refuse_strangers(actions)
        self.split = {index: _split_chunks(actions, index) if self.training else frozenset[int]() for index in self.stages}
        """The microbatches whose backward this order splits, by stage."""
        idle = frozenset[int]() if self.training else _idle_gathers(actions, self.functions)
        for place, action in enumerate(actions):
            operation = None if place in idle else self._operation(action)
            if operation is not None:
                self.operations.append((place, operation))

    def _refuse_strangers(self, actions: Sequence[_Action]) -> None:
        for action in actions:
            for part in parts_of(action):
                if part.stage_index not in self.stages:
                    held = ", ".join(map(str, sorted(self.stages)))
                    raise ValueError(f"this rank is to run {action}, but holds only stages {held}: give it the stages of its row")

    def fits(self, schedule: _PipelineSchedule, stages: Sequence[Any], actions: Sequence[_Action]) -> bool:
        """Whether this is the walk for what the schedule is now."""
        same = self.training == schedule._has_backward and self.scale == (self.count if schedule.scale_grads else 1)
        same = same and self.functions == getattr(schedule, "_comp_type_to_function_map", {})
        return same and list(self.stages.values()) == list(stages) and self.given == actions

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self, feed: Feed) -> None:
        """Walk the list once."""
        for index, stage in self.stages.items():
            if hasattr(stage, "_begin_step"):
                stage._begin_step(self.split[index], self.scale)
        self.feed, at, failed = feed, 0, True
        try:
            watched = torch.autograd._profiler_enabled() or schedule_log.isEnabledFor(logging.DEBUG)  # type: ignore[attr-defined]
            for place, operation in self._watched() if watched else self.operations:
                at = place
                operation(self)
            at = len(self.given)
            for works in self.sending.values():
                _wait(works)
            for stage in self.stages.values():
                if hasattr(stage, "_finish_sending"):
                    stage._finish_sending()
            failed = False
        except Exception as error:
            if at < len(self.given):
                error.add_note(f"in action {self.given[at]}, step {at} of {len(self.given)} of this rank")
                feed.schedule._log_failure(at, self.given, error)
            raise
        finally:
            self._finish(failed)

    def _watched(self) -> Iterator[tuple[int, Operation]]:
        """All actions, those that have nothing to do here too, each in a range of the profiler and with its lines in the log."""
        operations = dict(self.operations)
        for place, action in enumerate(self.given):
            yield place, _watched(place, action, operations.get(place))

    def _finish(self, failed: bool) -> None:
        if failed:
            self._give_up()
        if not self.training and not failed:
            self._reshard()
        self.feed, self.sending = NOTHING, {}
        self.forward_works.clear()
        self.backward_works.clear()
        for stage in self.stages.values():
            if hasattr(stage, "_end_step"):
                stage._end_step(failed)

    def _give_up(self) -> None:
        """What is being sent still goes out, and what was to be received is left to the stages."""
        self.given_up = list(self.sending.values())
        ours = [stage for stage in self.stages.values() if hasattr(stage, "_give_up")]
        talked = any(stage._talked() for stage in ours)
        for stage in ours:
            both = enumerate((self.forward_works, self.backward_works))
            index = stage.stage_index
            stage._give_up({(what, mb): each for what, works in both for (of, mb), each in works.items() if of == index}, talked)

    def _reshard(self) -> None:
        """Nothing is left gathered after forwards alone: no backward comes that would free it."""
        for stage in self.stages.values():
            modules = stage.submod.modules() if isinstance(stage.submod, nn.Module) else ()
            for module in modules:
                if isinstance(module, FSDPModule):
                    module.reshard()
        getattr(self.feed.schedule, "unsharded_stages", set[int]()).clear()

    # Operations -------------------------------------------------------------------------------------------------------

    def _operation(self, action: _Action) -> Operation | None:
        """What an action does; None where that is nothing."""
        if action.computation_type in self.functions:
            return _custom(action, self.functions[action.computation_type])
        if action.sub_actions is None:
            return self._operation_of_part(action)
        parts = [made for part in action.sub_actions if (made := self._operation_of_part(part)) is not None]
        return _all_of(parts) if parts else None

    def _operation_of_part(self, action: _Action) -> Operation | None:  # noqa: PLR0911 - one a kind
        kind, stage = action.computation_type, self.stages[action.stage_index]
        if kind in _BACKWARD and not self.training:
            return None
        if kind in (UNSHARD, RESHARD):
            return _sharding(kind == UNSHARD, stage) if isinstance(stage.submod, FSDPModule) else None
        if kind == REDUCE_GRAD:
            return lambda walk: stage.perform_reduce_grad(walk.scale)
        microbatch = action.microbatch_index
        if microbatch is None or kind == OVERLAP_F_B:
            raise AssertionError(f"{action=} missing mb_index")
        if kind in (SEND_F, SEND_B):
            return _send(kind == SEND_F, stage, microbatch)
        if kind in (RECV_F, RECV_B):
            return _receive(kind == RECV_F, stage, microbatch)
        if kind == FORWARD:
            return self._forward(stage, microbatch)
        if kind in (FULL_BACKWARD, BACKWARD_INPUT):
            return self._backward(stage, microbatch, whole=kind == FULL_BACKWARD)
        if kind == BACKWARD_WEIGHT:
            return _weight(stage, microbatch)
        raise ValueError(f"{action=} is unknown or unsupported")

    def _forward(self, stage: Any, microbatch: int) -> Operation:
        index = stage.stage_index
        remote = not stage.is_first and index - 1 not in self.stages
        reader = self.stages.get(index + 1)
        drops = not self.training and (reader is not None or stage.is_last)

        def forward(walk: Walk) -> None:
            feed = walk.feed
            _gathered(feed.schedule, stage)
            if remote:
                _arrive(walk.forward_works, index, microbatch, "F")
            output = stage.forward_one_chunk(microbatch, feed.args[microbatch], feed.kwargs[microbatch], save_forward_output=feed.outputs)
            more = {} if feed.loss_kwargs is None else {"loss_kwargs": feed.loss_kwargs}
            feed.schedule._maybe_compute_loss(stage, output, feed.targets, microbatch, **more)
            if reader is not None:
                reader.set_local_fwd_input(output, microbatch)
            if drops:
                stage.fwd_cache.pop(microbatch, None)

        return forward

    def _backward(self, stage: Any, microbatch: int, whole: bool) -> Operation:
        index = stage.stage_index
        remote = not stage.is_last and index + 1 not in self.stages
        reader = self.stages.get(index - 1)

        def backward(walk: Walk) -> None:
            schedule = walk.feed.schedule
            _gathered(schedule, stage)
            if remote:
                _arrive(walk.backward_works, index, microbatch, "B" if whole else "I")
                walk.sent(index, microbatch)
            loss = schedule._maybe_get_loss(stage, microbatch)
            last = whole and walk.is_last(index)
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=whole, last_backward=last)
            if reader is not None:
                reader.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

        return backward

    def is_last(self, stage: int) -> bool:
        """Count a weight gradient of a stage; whether it was the last."""
        counter = self.feed.schedule.backward_counter
        counter[stage] += 1
        return bool(counter[stage] == self.count)

    def sent(self, stage: int, microbatch: int) -> None:
        """A gradient has come back, so that the activations were taken: let go of them."""
        _wait(self.sending.pop((True, stage, microbatch), ()))


def _split_chunks(actions: Sequence[_Action], stage: int) -> frozenset[int]:
    parts = (part for action in actions for part in parts_of(action))
    return frozenset(part.microbatch_index or 0 for part in parts if part[:2] == (stage, BACKWARD_INPUT))


def _watched(place: int, action: _Action, operation: Operation | None) -> Operation:
    def run(walk: Walk) -> None:
        schedule = walk.feed.schedule
        schedule._log_action(place, action, done=False)
        with torch.profiler.record_function(schedule._range_name(action)):
            if operation is not None:
                operation(walk)
        schedule._log_action(place, action, done=True)

    return run


def _idle_gathers(actions: Sequence[_Action], functions: Container[Any]) -> set[int]:
    """The places of actions that gather and free parameters around backwards only, which forwards alone leave out."""
    idle, gathers = set[int](), dict[int, int]()
    for at, action in enumerate(actions):
        if action.computation_type == UNSHARD:
            gathers[action.stage_index] = at
        elif action.computation_type == RESHARD and action.stage_index in gathers:
            idle |= {at, gathers.pop(action.stage_index)}
        elif action.computation_type in functions:
            gathers.clear()
        else:
            for part in parts_of(action):
                if part.computation_type == FORWARD:
                    gathers.pop(part.stage_index, None)
    return idle | set(gathers.values())


def _custom(action: _Action, function: Callable[..., Any]) -> Operation:
    from penstock.compat.torch.schedule_classes.runtime import _PipelineContext

    def custom(walk: Walk) -> None:
        feed = walk.feed
        function(action, _PipelineContext(feed.schedule, feed.args, feed.kwargs, feed.targets, feed.losses))

    return custom


def _send(forward: bool, stage: Any, microbatch: int) -> Operation:
    ops, key = stage.get_fwd_send_ops if forward else stage.get_bwd_send_ops, (forward, stage.stage_index, microbatch)
    desc = "fwd_send" if forward else "bwd_send"

    def send(walk: Walk) -> None:
        walk.sending[key] = walk.feed.schedule._start_p2p(ops(microbatch), desc)

    return send


def _receive(forward: bool, stage: Any, microbatch: int) -> Operation:
    ops, key = stage.get_fwd_recv_ops if forward else stage.get_bwd_recv_ops, (stage.stage_index, microbatch)
    desc = "fwd_recv" if forward else "bwd_recv"

    def receive(walk: Walk) -> None:
        works = walk.forward_works if forward else walk.backward_works
        if key in works:
            raise AssertionError(f"Recv twice for stage_idx={key[0]} mb_index={microbatch} without executing it in between")
        works[key] = walk.feed.schedule._start_p2p(ops(microbatch), desc)

    return receive


def _arrive(works: dict[tuple[int, int], list[Any]], stage: int, microbatch: int, what: str) -> None:
    """Wait for what an action needs from another rank."""
    if (stage, microbatch) not in works:
        raise AssertionError(f"Computing {stage}{what}{microbatch} before receiving input")
    _wait(works.pop((stage, microbatch)))


def _weight(stage: Any, microbatch: int) -> Operation:
    def weight(walk: Walk) -> None:
        _gathered(walk.feed.schedule, stage)
        stage.backward_weight_one_chunk(microbatch, last_backward=walk.is_last(stage.stage_index))

    return weight


def _gathered(schedule: Any, stage: Any) -> None:
    """Wait for a stage's parameters to be gathered, where they are sharded and a schedule does that."""
    if isinstance(stage.submod, FSDPModule) and hasattr(schedule, "_assert_unsharded"):
        schedule._assert_unsharded(stage)


def _sharding(gather: bool, stage: Any) -> Operation:
    return lambda walk: walk.feed.schedule._unshard(stage) if gather else walk.feed.schedule._reshard(stage)


def _all_of(parts: Sequence[Operation]) -> Operation:
    """Parts of an overlapped action, one after the other."""

    def run(walk: Walk) -> None:
        for part in parts:
            part(walk)

    return run


def _wait(works: Sequence[Any]) -> None:
    from penstock.compat.torch import schedules

    schedules._wait_batch_p2p(works)
