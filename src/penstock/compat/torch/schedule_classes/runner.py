"""A rank's order as a list of operations on its stages, resolved once and run in every step.

The runtime's own executor keeps values in slots that no program sees. Programs written for torch do see theirs (the stages' caches,
the schedule's posted receives, custom functions in the place of actions), so the operations here are calls on stages. Receives are
waited for before their use, sends at the end of the step.
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
    WAIT_REDUCE_GRAD,
    WAIT_SEND_B,
    WAIT_SEND_F,
    _Action,
    _ComputationType,
    split_action,
)
from penstock.compat.torch.orders.waits import list_waited_stages
from penstock.compat.torch.schedule_classes.p2p import wait_for_works

if TYPE_CHECKING:
    from penstock.compat.torch.schedule_classes.base import _PipelineSchedule

Operation = Callable[["OrderRunner"], None]
"""Takes the runner as its argument instead of keeping it, so that a schedule is freed as soon as nobody refers to it."""
Works = dict[tuple[int, int], list[Any]]
"""Works of messages, by stage and microbatch."""
_BACKWARD = frozenset((FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, SEND_B, RECV_B, REDUCE_GRAD, WAIT_SEND_B, WAIT_REDUCE_GRAD))


@dataclass
class _PipelineContext:
    """What a custom function is given besides its action."""

    schedule_ref: _PipelineSchedule
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


@dataclass
class StepInputs:
    """The inputs of one step, and the schedule that runs it."""

    schedule: Any
    args: list[Any]
    kwargs: list[Any]
    targets: list[Any] | None = None
    losses: list[Any] | None = None
    keep_outputs: bool = True
    loss_kwargs: dict[str, Any] | None = None


_NO_INPUTS = StepInputs(None, [], [])


@dataclass
class OrderSettings:
    """What the operations of an order depend on: when it changes, they are resolved anew."""

    stages: list[Any]
    actions: list[_Action]
    microbatches: int
    scale: int
    """The divisor of the gradients."""
    training: bool
    functions: dict[_ComputationType, Callable[..., Any]]
    """Custom functions, by the kind of action that they replace."""


class OrderRunner:
    """Runs one rank's order, in training or in evaluation."""

    def __init__(self, settings: OrderSettings, forward_receives: Works, backward_receives: Works) -> None:
        self.settings = settings
        self.stages: dict[int, Any] = {stage.stage_index: stage for stage in settings.stages}
        self.inputs = _NO_INPUTS
        self.sends: dict[tuple[bool, int, int], list[Any]] = {}
        """Started sends: by whether they go forward, stage and microbatch."""
        self.abandoned_sends: list[list[Any]] = []
        """The sends of a failed step: referenced so that they are not cancelled."""
        self.forward_receives, self.backward_receives = forward_receives, backward_receives
        self._refuse_missing_stages()
        actions, training = settings.actions, settings.training
        self.split = {index: _list_split_chunks(actions, index) if training else frozenset[int]() for index in self.stages}
        """By stage: the microbatches whose backward this order splits."""
        self.waited_reductions = list_waited_stages(actions) if WAIT_REDUCE_GRAD not in settings.functions else frozenset[int]()
        """Stages whose reduction an action of its own waits for."""
        unused = frozenset[int]() if training else _find_unused_gathers(actions, settings.functions)
        self.operations: list[tuple[int, Operation]] = []
        """What to do, each with the position of its action in the order."""
        for position, action in enumerate(actions):
            operation = None if position in unused else self._resolve(action)
            if operation is not None:
                self.operations.append((position, operation))

    def _refuse_missing_stages(self) -> None:
        for action in self.settings.actions:
            for part in split_action(action):
                if part.stage_index not in self.stages:
                    held = ", ".join(map(str, sorted(self.stages)))
                    raise ValueError(
                        f"this rank's order has {action}, but the rank holds only stages {held}: give it the stages of its row"
                    )

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self, inputs: StepInputs) -> None:
        """Run the operations once."""
        for index, stage in self.stages.items():
            if hasattr(stage, "begin_step"):
                stage.begin_step(self.split[index], self.settings.scale)
        actions = self.settings.actions
        self.inputs, position, failed = inputs, 0, True
        try:
            watched = torch.autograd._profiler_enabled() or schedule_log.isEnabledFor(logging.DEBUG)  # type: ignore[attr-defined]
            for position, operation in self._watch_operations() if watched else self.operations:  # noqa: B007 - read after a failure
                operation(self)
            position = len(actions)
            for works in self.sends.values():
                wait_for_works(works)
            for stage in self.stages.values():
                if hasattr(stage, "finish_sending"):
                    stage.finish_sending()
            failed = False
        except Exception as error:
            if position < len(actions):
                error.add_note(f"in action {actions[position]}, step {position} of {len(actions)} of this rank")
                inputs.schedule.log_failure(position, actions, error)
            raise
        finally:
            self._finish(failed)

    def _watch_operations(self) -> Iterator[tuple[int, Operation]]:
        """Yield every action, also those with nothing to do, each with a range in the profiler and lines in the log."""
        operations = dict(self.operations)
        for position, action in enumerate(self.settings.actions):
            yield position, _watch(position, action, operations.get(position))

    def _finish(self, failed: bool) -> None:
        if failed:
            self._abandon()
        if not self.settings.training and not failed:
            self._reshard()
        self.inputs, self.sends = _NO_INPUTS, {}
        self.forward_receives.clear()
        self.backward_receives.clear()
        for stage in self.stages.values():
            if hasattr(stage, "end_step"):
                stage.end_step(failed)

    def _abandon(self) -> None:
        """Let started sends go out, and leave posted receives to their stages."""
        self.abandoned_sends = list(self.sends.values())
        ours = [stage for stage in self.stages.values() if hasattr(stage, "abandon_step")]
        communicated = any(stage.has_communicated() for stage in ours)
        for stage in ours:
            receives = {
                (kind, microbatch): works
                for kind, posted in enumerate((self.forward_receives, self.backward_receives))
                for (index, microbatch), works in posted.items()
                if index == stage.stage_index
            }
            stage.abandon_step(receives, communicated)

    def _reshard(self) -> None:
        """Free unsharded parameters after an evaluation, which has no backward that would free them."""
        for stage in self.stages.values():
            for module in stage.submod.modules() if isinstance(stage.submod, nn.Module) else ():
                if isinstance(module, FSDPModule):
                    module.reshard()
        self.inputs.schedule.unsharded_stages.clear()

    def count_backward(self, stage: int) -> bool:
        """Count a weight gradient of a stage; return whether it was the step's last."""
        counter = self.inputs.schedule.backward_counter
        counter[stage] += 1
        return bool(counter[stage] == self.settings.microbatches)

    def finish_send(self, stage: int, microbatch: int) -> None:
        """Free the sent activations of a microbatch: its gradient has arrived, so they were received."""
        wait_for_works(self.sends.pop((True, stage, microbatch), ()))

    # Resolving actions ------------------------------------------------------------------------------------------------

    def _resolve(self, action: _Action) -> Operation | None:
        """Return the operation of an action; `None` if there is nothing to do."""
        if action.computation_type in self.settings.functions:
            return _call_custom(action, self.settings.functions[action.computation_type])
        if action.sub_actions is None:
            return self._resolve_part(action)
        parts = [operation for part in action.sub_actions if (operation := self._resolve_part(part)) is not None]
        return _run_in_turn(parts) if parts else None

    def _resolve_part(self, action: _Action) -> Operation | None:  # noqa: PLR0911 - one per kind
        kind, stage = action.computation_type, self.stages[action.stage_index]
        if kind in _BACKWARD and not self.settings.training:
            return None
        if kind in (UNSHARD, RESHARD):
            return _unshard_or_reshard(kind == UNSHARD, stage) if isinstance(stage.submod, FSDPModule) else None
        if kind == REDUCE_GRAD:
            waits = action.stage_index in self.waited_reductions
            return lambda runner: runner.inputs.schedule.start_reduction(stage, waits)
        if kind == WAIT_REDUCE_GRAD:
            if REDUCE_GRAD in self.settings.functions:  # it has done all the work
                return None
            return lambda runner: runner.inputs.schedule.wait_for_reduction(stage)
        microbatch = action.microbatch_index
        if microbatch is None or kind == OVERLAP_F_B:
            raise AssertionError(f"{action=} missing mb_index")
        if kind in (WAIT_SEND_F, WAIT_SEND_B):
            return _wait_for_send(kind == WAIT_SEND_F, stage, microbatch)
        if kind in (SEND_F, SEND_B):
            return _send(kind == SEND_F, stage, microbatch)
        if kind in (RECV_F, RECV_B):
            return _receive(kind == RECV_F, stage, microbatch)
        if kind == FORWARD:
            return self._forward(stage, microbatch)
        if kind in (FULL_BACKWARD, BACKWARD_INPUT):
            return self._backward(stage, microbatch, full=kind == FULL_BACKWARD)
        if kind == BACKWARD_WEIGHT:
            return _backward_weight(stage, microbatch)
        raise ValueError(f"{action=} is unknown or unsupported")

    def _forward(self, stage: Any, microbatch: int) -> Operation:
        index = stage.stage_index
        receives = not stage.is_first and index - 1 not in self.stages
        reader = self.stages.get(index + 1)
        drops_outputs = not self.settings.training and (reader is not None or stage.is_last)

        def forward(runner: OrderRunner) -> None:
            inputs = runner.inputs
            _wait_for_parameters(inputs.schedule, stage)
            if receives:
                _wait_for_input(runner.forward_receives, index, microbatch, "F")
            args, kwargs = inputs.args[microbatch], inputs.kwargs[microbatch]
            output = stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=inputs.keep_outputs)
            more = {} if inputs.loss_kwargs is None else {"loss_kwargs": inputs.loss_kwargs}
            inputs.schedule._maybe_compute_loss(stage, output, inputs.targets, microbatch, **more)
            if reader is not None:
                reader.set_local_fwd_input(output, microbatch)
            if drops_outputs:
                stage.forget_forward(microbatch)

        return forward

    def _backward(self, stage: Any, microbatch: int, full: bool) -> Operation:
        index = stage.stage_index
        receives = not stage.is_last and index + 1 not in self.stages
        reader = self.stages.get(index - 1)

        def backward(runner: OrderRunner) -> None:
            schedule = runner.inputs.schedule
            _wait_for_parameters(schedule, stage)
            if receives:
                _wait_for_input(runner.backward_receives, index, microbatch, "B" if full else "I")
                runner.finish_send(index, microbatch)
            loss = schedule._maybe_get_loss(stage, microbatch)
            last = full and runner.count_backward(index)
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=last)
            if reader is not None:
                reader.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

        return backward


def _list_split_chunks(actions: Sequence[_Action], stage: int) -> frozenset[int]:
    """List the microbatches of a stage whose backward is split."""
    parts = (part for action in actions for part in split_action(action))
    return frozenset(part.microbatch_index or 0 for part in parts if part[:2] == (stage, BACKWARD_INPUT))


def _find_unused_gathers(actions: Sequence[_Action], functions: Container[Any]) -> set[int]:
    """Find the positions of UNSHARD and RESHARD actions around backwards only, which an evaluation leaves out."""
    unused, gathers = set[int](), dict[int, int]()
    for position, action in enumerate(actions):
        if action.computation_type == UNSHARD:
            gathers[action.stage_index] = position
        elif action.computation_type == RESHARD and action.stage_index in gathers:
            unused |= {position, gathers.pop(action.stage_index)}
        elif action.computation_type in functions:
            gathers.clear()
        else:
            for part in split_action(action):
                if part.computation_type == FORWARD:
                    gathers.pop(part.stage_index, None)
    return unused | set(gathers.values())


# Operations -----------------------------------------------------------------------------------------------------------


def _watch(position: int, action: _Action, operation: Operation | None) -> Operation:
    def run(runner: OrderRunner) -> None:
        schedule = runner.inputs.schedule
        schedule.log_action(position, action, done=False)
        with torch.profiler.record_function(schedule.name_range(action)):
            if operation is not None:
                operation(runner)
        schedule.log_action(position, action, done=True)

    return run


def _call_custom(action: _Action, function: Callable[..., Any]) -> Operation:
    def custom(runner: OrderRunner) -> None:
        inputs = runner.inputs
        function(action, _PipelineContext(inputs.schedule, inputs.args, inputs.kwargs, inputs.targets, inputs.losses))

    return custom


def _send(forward: bool, stage: Any, microbatch: int) -> Operation:
    get_ops = stage.get_fwd_send_ops if forward else stage.get_bwd_send_ops
    key, desc = (forward, stage.stage_index, microbatch), "fwd_send" if forward else "bwd_send"

    def send(runner: OrderRunner) -> None:
        runner.sends[key] = runner.inputs.schedule.start_messages(get_ops(microbatch), desc)

    return send


def _wait_for_send(forward: bool, stage: Any, microbatch: int) -> Operation:
    key = forward, stage.stage_index, microbatch

    def wait(runner: OrderRunner) -> None:
        wait_for_works(runner.sends.pop(key, ()))
        if forward and runner.settings.training:
            stage.release_fwd_send_outputs(microbatch)

    return wait


def _receive(forward: bool, stage: Any, microbatch: int) -> Operation:
    get_ops = stage.get_fwd_recv_ops if forward else stage.get_bwd_recv_ops
    key, desc = (stage.stage_index, microbatch), "fwd_recv" if forward else "bwd_recv"

    def receive(runner: OrderRunner) -> None:
        posted = runner.forward_receives if forward else runner.backward_receives
        if key in posted:
            raise AssertionError(f"Recv twice for stage_idx={key[0]} mb_index={microbatch} without executing it in between")
        posted[key] = runner.inputs.schedule.start_messages(get_ops(microbatch), desc)

    return receive


def _wait_for_input(posted: Works, stage: int, microbatch: int, kind: str) -> None:
    if (stage, microbatch) not in posted:
        raise AssertionError(f"Computing {stage}{kind}{microbatch} before receiving input")
    wait_for_works(posted.pop((stage, microbatch)))


def _backward_weight(stage: Any, microbatch: int) -> Operation:
    def backward_weight(runner: OrderRunner) -> None:
        _wait_for_parameters(runner.inputs.schedule, stage)
        stage.backward_weight_one_chunk(microbatch, last_backward=runner.count_backward(stage.stage_index))

    return backward_weight


def _wait_for_parameters(schedule: Any, stage: Any) -> None:
    if isinstance(stage.submod, FSDPModule):
        schedule._assert_unsharded(stage)


def _unshard_or_reshard(unshard: bool, stage: Any) -> Operation:
    return lambda runner: runner.inputs.schedule.unshard(stage) if unshard else runner.inputs.schedule.reshard(stage)


def _run_in_turn(parts: Sequence[Operation]) -> Operation:
    """Run the parts of an overlapped action one after the other."""

    def run(runner: OrderRunner) -> None:
        for part in parts:
            part(runner)

    return run
