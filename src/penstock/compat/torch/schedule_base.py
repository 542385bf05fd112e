"""What all schedules share: splitting the batch, the losses, merging the outputs, setting up stages, running an order.

An `OrderRunner` resolves a rank's order once into a list of operations on its stages, and runs it in every step. The runtime's own
executor keeps values in slots that no program sees. Programs written for torch do see theirs (the stages' caches, the schedule's posted
receives, custom functions in the place of actions), so the operations here are calls on stages. Receives are waited for before their use,
sends at the end of the step.
"""

# ruff: noqa: PLR0917 - torch's own signatures
from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules as _torch_schedules

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.installed import HAS_METADATA
from penstock.compat.torch.microbatch import (
    ALONG_BATCH,
    TensorChunkSpec,
    _split_tensor,
    count_rows,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.compat.torch.orders import Type, _Action, _ComputationType, _get_profiler_function_name, list_parts, split_action
from penstock.compat.torch.stage import PipelineStage
from penstock.compat.torch.stage_messages import BatchShare
from penstock.errors import ScheduleError
from penstock.runtime.batch.loss import Loss
from penstock.runtime.torch_internals.autograd import is_profiling

LossFunction = Callable[..., Any]
_TORCH_SCHEDULE: Any = _torch_schedules._PipelineSchedule


@_torch_schedules._PipelineSchedule.register
class _PipelineSchedule(ABC):
    """One rank's part of a schedule, and the stages that it runs on.

    `step` splits the batch, opens the step on the stages and calls `_step_microbatches`, which a subclass implements. For one that
    runs an order of actions this is `_run_order`, whose `OrderRunner` calls back `_maybe_compute_loss` and `_maybe_get_loss`,
    `start_messages`, and the methods that log.
    """

    _needs_autograd = True

    def __init__(
        self,
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self.scale_grads = scale_grads
        self._args_chunk_spec, self._kwargs_chunk_spec, self._output_merge_spec = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        self._has_backward = loss_fn is not None
        self._internal_losses: list[Tensor] = []
        self._loss_positions: dict[int, int] = {}
        """By microbatch: the position in that list of the loss that `_maybe_compute_loss` put there. Custom functions append others."""
        self._shares: dict[int, BatchShare] = {}
        """By microbatch: its share of this step's batch, as far as it is known."""
        self.backward_counter: Counter[int] = Counter()
        """How many weight gradients of each stage this step has computed."""
        self._comp_type_to_function_map: dict[_ComputationType, Callable[..., Any]] = {}
        self.fwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        """Posted receives of activations, by stage and microbatch."""
        self.bwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        """Posted receives of gradients."""
        self.unsharded_stages: set[int] = set()
        self._p2p_initialized = False
        self._finalize_gradients = True
        """Whether this step reduces the gradients of FSDP stages."""
        self._deferred_stages: set[int] = set()
        """FSDP stages whose gradients a later step will reduce; their parameters are still unsharded."""
        self._runners: dict[bool, OrderRunner] = {}
        """The runner of the order in training and in evaluation."""
        schedule_log.info("Using %s", type(self).__name__)

    # Steps ------------------------------------------------------------------------------------------------------------

    def _run_order(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run one step on microbatches: set up the stages, then run this rank's actions on them."""
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        inputs = StepInputs(self, args, kwargs, target_mbs, losses, return_outputs, loss_kwargs)
        stages, actions = self._list_stages(), self._list_actions()
        initialize = self._get_initializer()
        target = target_mbs[0] if target_mbs is not None and takes(initialize, "target") else None
        initialize(args[0], kwargs[0], **unless_none(target=target, loss_kwargs=loss_kwargs))
        self.backward_counter.clear()
        scale = self._n_microbatches if self.scale_grads else 1
        functions = dict(self._comp_type_to_function_map)
        settings = OrderSettings(list(stages), list(actions), self._n_microbatches, scale, self._has_backward, functions)
        runner = self._runners.get(self._has_backward)
        if runner is None or runner.settings != settings:
            runner = self._runners[self._has_backward] = OrderRunner(settings, self.fwd_recv_ops, self.bwd_recv_ops)
        runner.run(inputs)
        self._update_losses(stages, losses)

    @abstractmethod
    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        """Run one step on microbatches."""

    _step_microbatches.__signature__ = inspect.signature(_run_order)  # type: ignore[attr-defined]

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch, or on microbatches as lists; return the merged outputs on the rank of the last stage.

        With `finalize_gradients=False`, FSDP stages keep their gradients and their unsharded parameters: the next step that finalizes
        reduces and scales the gradients of all these steps at once. It has no effect on other stages.
        """
        if self._has_backward and self._needs_autograd and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() requires gradients to be enabled for backward computation; "
                "it should not be used under torch.no_grad() context. Please call eval() instead."
            )
        self._forget_losses()
        stages = self._list_stages()
        for stage in stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._finalize_gradients = finalize_gradients
        split = self._get_microbatch_inputs(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        args_split, kwargs_split, targets = split
        shares = self._share_batch(args_split, kwargs_split) if any(stage.is_first for stage in stages) else {}
        self._shares = ({} if targets is None else _share_rows(count_rows(targets))) or shares
        outputs = (return_outputs,) if takes(self._step_microbatches, "return_outputs") or not return_outputs else ()
        ours = [stage for stage in stages if hasattr(stage, "open_step")]
        for stage in ours:
            stage.open_step(self._n_microbatches if self.scale_grads else 1, shares)
        failed = True
        try:
            self._step_microbatches(args_split, kwargs_split, targets, losses, *outputs, **unless_none(loss_kwargs=loss_kwargs))
            for stage in ours:
                stage.finish_sending()
            failed = False
        finally:
            self._end_step([stage for stage in ours if stage.in_step], failed)
        last = next((stage for stage in stages if stage.is_last), None)
        return None if last is None or not return_outputs or not last.output_chunks else self._merge_outputs(last.output_chunks)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a whole batch forward without keeping a graph; compute the losses if there is a target, and return the outputs."""
        before, self._has_backward = self._has_backward, False
        try:
            with torch.no_grad():
                microbatches = unless_none(arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs)
                return self.step(*args, target=target, losses=losses, **microbatches, **kwargs)
        finally:
            self._has_backward = before

    @staticmethod
    def _end_step(stages: list[Any], failed: bool) -> None:
        """End the step on stages on which no runner has ended it. A step that fails before it communicates does not count."""
        communicated = any(stage.has_communicated() for stage in stages)
        for stage in stages:
            if failed and not communicated:
                stage.abandon_step({}, communicated=False)
            stage.end_step(failed)

    # For subclasses ---------------------------------------------------------------------------------------------------

    def _list_stages(self) -> list[Any]:
        """Return the stages that this rank holds."""
        raise NotImplementedError

    def _list_actions(self) -> Sequence[_Action]:
        """Return this rank's row of the order, with its messages."""
        raise NotImplementedError

    def _get_initializer(self) -> Callable[..., None]:
        """Return the method that sets up the stages for a step on the arguments of its first microbatch."""
        raise NotImplementedError

    # Called by the runner ---------------------------------------------------------------------------------------------

    def start_messages(self, ops: Any, desc: str) -> list[Any]:
        """Start messages and return their works."""
        raise NotImplementedError

    def name_range(self, action: _Action) -> str:
        """Return the name of an action in the profiler."""
        return _get_profiler_function_name(action)

    def log_action(self, position: int, action: _Action, done: bool) -> None:  # noqa: B027 - optional
        """Log an action before or after it runs. Called only when the profiler or debug logging is on."""

    def log_failure(self, position: int, actions: Sequence[_Action], error: Exception) -> None:  # noqa: B027 - optional
        """Log which action of the order has failed."""

    def _assert_unsharded(self, stage: Any) -> None:  # noqa: B027 - optional
        """Wait for a stage's unsharded parameters, if the order has actions that unshard them."""

    def start_reduction(self, stage: Any, waits: bool) -> None:
        """Reduce and scale a stage's gradients; if the order waits for them, only start to. A later step may have been asked to."""
        sharded = isinstance(stage.submod, FSDPModule)
        if sharded and not self._finalize_gradients:
            self._deferred_stages.add(stage.stage_index)
            stage.gradients_deferred = True
            return
        self._deferred_stages.discard(stage.stage_index)
        if sharded and waits:
            stage.start_gradient_reduction()
        else:
            stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)

    def wait_for_reduction(self, stage: Any) -> None:
        """Wait for a stage's gradients, if their reduction was only started."""
        if isinstance(stage.submod, FSDPModule) and self._finalize_gradients:
            stage.wait_for_gradient_reduction(self._n_microbatches if self.scale_grads else 1)

    # Batches ----------------------------------------------------------------------------------------------------------

    def _get_microbatch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any
    ) -> tuple[list[Any], list[Any], list[Any] | None]:
        """Split a batch into microbatches, or check those that were passed as lists."""
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            args_split, kwargs_split = self._split_inputs(args, kwargs)
            return args_split, kwargs_split, None if target is None else self._split_target(target)
        if args:
            raise ValueError("Got microbatches and positional arguments: pass pre-split positional inputs through arg_mbs=...")
        if kwargs:
            raise ValueError(f"Got microbatches and {', '.join(sorted(kwargs))}: pass pre-split keyword inputs through kwarg_mbs=...")
        if target is not None:
            raise ValueError("Got microbatches and a target: pass pre-split targets through target_mbs=...")
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs)
        for name, values, kind in (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict)):
            for microbatch, value in enumerate(values):
                if not isinstance(value, kind):
                    raise TypeError(f"{name} must be a list of {kind.__name__}s, but {name}[{microbatch}] is a {type(value)}")
        return arg_mbs, kwarg_mbs, target_mbs

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        return split_args_kwargs_into_chunks(args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec)

    def _split_target(self, target: Any) -> list[Any]:
        """Split a target along dimension 0; of a tree, every tensor in it."""
        if isinstance(target, Tensor):
            return list(_split_tensor(target, ALONG_BATCH, self._n_microbatches))
        return [chunk for (chunk,) in split_args_kwargs_into_chunks((target,), None, self._n_microbatches)[0]]

    def _share_batch(self, args_split: list[Any], kwargs_split: list[Any]) -> dict[int, BatchShare]:
        """Compute each microbatch's share of the batch from the first stage's arguments."""
        rows = count_rows(args_split, self._args_chunk_spec)
        return _share_rows(count_rows(kwargs_split, self._kwargs_chunk_spec) if rows is None else rows)

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return merge_chunks(output_chunks, self._output_merge_spec)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Check that microbatches are lists of the right length; return empty arguments if there are none."""
        count = self._n_microbatches
        for name, microbatches in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if microbatches is None:
                continue
            if not isinstance(microbatches, list):
                raise TypeError(f"{name} must be a list but got a {type(microbatches)}")
            if len(microbatches) != count:
                raise ValueError(f"Expecting {count} {name} but got {len(microbatches)}")
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but got a {type(losses)}")
        return [()] * count if arg_mbs is None else arg_mbs, [{}] * count if kwarg_mbs is None else kwarg_mbs

    # Losses -----------------------------------------------------------------------------------------------------------

    def _compute_loss(self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None) -> Any:
        assert self._loss_fn is not None
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: list[Any] | None, mb_index: int, loss_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Compute and keep the loss of a microbatch on the last stage; without a target only if the loss function needs none."""
        if not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is not None:
            loss = self._compute_loss(output, target_mbs[mb_index], **unless_none(loss_kwargs=loss_kwargs))
        elif Loss(self._loss_fn, "mean").takes_output_only:
            loss = self._loss_fn(output, **(loss_kwargs or {}))
        elif not self._has_backward:
            return
        else:
            raise TypeError("the loss function takes a target, but step() got none: pass target= on the rank of the last stage")
        self._loss_positions[mb_index] = len(self._internal_losses)
        self._internal_losses.append(loss)
        if target_mbs is not None and not self._shares:  # the program called `_step_microbatches` itself
            self._shares = _share_rows(count_rows(target_mbs))

    def _weigh(self, microbatch: int) -> float:
        """Return how much a microbatch's loss counts: its share of the batch, so that means over uneven microbatches add up to the mean
        over the batch. All count the same without `scale_grads`, in evaluation, and for losses that are sums."""
        share = self._shares.get(microbatch)
        if share is None or share.rows * self._n_microbatches == share.batch_rows or not self.scale_grads or not self._has_backward:
            return 1.0
        return share.rows * self._n_microbatches / share.batch_rows if _takes_mean(self._loss_fn) else 1.0

    def _locate_losses(self) -> dict[int, int]:
        """Return the position of each microbatch's loss. Those that a custom function appended belong to the remaining microbatches,
        in order."""
        positions, count = self._loss_positions, len(self._internal_losses)
        if len(positions) == count:
            return positions
        appended = sorted(set(range(count)) - set(positions.values()))
        return {**dict(zip(sorted(set(range(count)) - set(positions)), appended, strict=False)), **positions}

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        """Return the loss of a microbatch on the last stage; in training weighted, if the microbatches are uneven."""
        losses = self._internal_losses
        if not stage.is_last or self._loss_fn is None or not losses:
            return None
        position = self._locate_losses().get(mb_index, len(losses))
        if position >= len(losses):
            raise RuntimeError(f"Loss for microbatch {mb_index} is not available. Available losses for microbatches: {losses}")
        weight = self._weigh(mb_index)
        return losses[position] if weight == 1 else losses[position] * weight

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Give the caller the losses, in the order of microbatches. This ends a step, so it also waits for pending sends."""
        own = stages if isinstance(stages, list) else [stages]
        for stage in own:
            if hasattr(stage, "finish_sending"):
                stage.finish_sending()
        if losses is not None and any(stage.is_last for stage in own):
            if len(self._internal_losses) != self._n_microbatches:
                raise RuntimeError(f"Expecting {self._n_microbatches} losses but got {len(self._internal_losses)}")
            losses[:] = [self._internal_losses[position] for _, position in sorted(self._locate_losses().items())]
        self._forget_losses()

    def _forget_losses(self) -> None:
        self._internal_losses.clear()
        self._loss_positions.clear()
        self._shares = {}

    # Stages -----------------------------------------------------------------------------------------------------------

    def _initialize_pp_stages(
        self,
        stages: list[Any],
        args: Any,
        kwargs: dict[str, Any] | None,
        target: Any,
        fwd_initialized: bool,
        bwd_initialized: bool,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> tuple[bool, bool]:
        """Set up stages before their first step and when switching between evaluation and training. On the CPU no agreement on shapes
        is needed."""
        if fwd_initialized and self._has_backward == bwd_initialized:
            return fwd_initialized, bwd_initialized
        described = all(
            isinstance(stage, PipelineStage) and stage.use_messages(self._n_microbatches, self._has_backward) for stage in stages
        )
        if described or not HAS_METADATA:
            if not described and not fwd_initialized:
                self._warmup_p2p(stages, self._has_backward, p2p_done=False)
            self._prepare(stages, args, kwargs, target, loss_kwargs)
            return True, self._has_backward
        setup = _TORCH_SCHEDULE._initialize_pp_stages
        more = (loss_kwargs,) if takes(setup, "loss_kwargs") else ()
        initialized: tuple[bool, bool] = setup(self, stages, args, kwargs, target, fwd_initialized, bwd_initialized, *more)
        return initialized

    def _prepare(self, stages: list[Any], args: Any, kwargs: dict[str, Any] | None, target: Any, loss_kwargs: Any) -> None:
        """Call the preparations of stages that use messages. Ours do nothing, but a program's subclasses may override them."""
        nothing = None if HAS_METADATA else ()  # torch 2.11 refuses None
        count, passed = self._n_microbatches, nothing
        for stage in stages:
            prepare = stage._prepare_forward_infra
            more = {"has_backward": self._has_backward} if takes(prepare, "has_backward") else {}
            passed = prepare(count, args if stage.is_first else passed, kwargs, **more)
            passed = nothing if passed is None else passed
        passed = None
        for stage in reversed(stages) if self._has_backward else ():
            prepare = stage._prepare_backward_infra
            options = {"loss_fn": self._loss_fn, "target": target, "received_grad_meta": passed, "loss_kwargs": loss_kwargs}
            passed = prepare(count, **{name: value for name, value in options.items() if takes(prepare, name)})

    def _warmup_p2p(self, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        """Open the connections between ranks, on a torch before 2.15."""
        if HAS_METADATA:
            _TORCH_SCHEDULE._warmup_p2p(self, stages, has_backward, p2p_done)
        else:
            ops = [(stage, op) for stage in stages for op in stage._get_init_p2p_neighbors_ops()]
            wait_for_works(start_batch([op for stage, op in ops if op.group_peer != stage.group_rank]))

    def _initialize_pipeline_distributed_state(self, stages: list[Any], has_backward: bool, initialize_p2p: bool) -> None:
        """Open the connections between ranks, on torch 2.15 and later."""
        _TORCH_SCHEDULE._initialize_pipeline_distributed_state(self, stages, has_backward, initialize_p2p)


def takes(method: Callable[..., Any], name: str) -> bool:
    """Return whether a method takes a parameter: a program may have overridden it with fewer parameters than torch has now."""
    return _has_parameter(getattr(method, "__func__", method), name)


@lru_cache(maxsize=256)
def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters)


def unless_none(**options: Any) -> dict[str, Any]:
    """Leave out the options that are `None`, for methods that a program may have overridden before torch had them."""
    return {name: value for name, value in options.items() if value is not None}


def _share_rows(rows: list[int] | None) -> dict[int, BatchShare]:
    batch_rows = sum(rows or ())
    return {microbatch: BatchShare(count, batch_rows) for microbatch, count in enumerate(rows or ())} if batch_rows else {}


def _takes_mean(loss_fn: LossFunction | None) -> bool:
    """Return whether a loss function takes a mean; one that does not say how it reduces is assumed to."""
    try:
        Loss(loss_fn, "mean").check_own_reduction()
    except ScheduleError:
        return False
    return True


# Running an order, and starting its messages --------------------------------------------------------------------------


Operation = Callable[["OrderRunner"], None]
"""Takes the runner as its argument instead of keeping it, so that a schedule is freed as soon as nothing refers to it."""
Works = dict[tuple[int, int], list[Any]]
"""Works of messages, by stage and microbatch."""
_FORWARD = (Type.FORWARD, Type.SEND_F, Type.RECV_F, Type.WAIT_SEND_F, Type.OVERLAP_F_B, Type.UNSHARD, Type.RESHARD)
"""The kinds of actions that an evaluation runs."""


@dataclass
class _PipelineContext:
    """The second argument of a custom function, after its action."""

    schedule_ref: Any
    arg_mbs: Any = None
    kwarg_mbs: Any = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


@dataclass
class StepInputs(_PipelineContext):
    """The inputs of one step, and the schedule that runs it."""

    keep_outputs: bool = True
    loss_kwargs: dict[str, Any] | None = None


@dataclass
class OrderSettings:
    """The state that the operations of an order depend on: when it changes, they are resolved anew."""

    stages: list[Any]
    actions: list[_Action]
    microbatches: int
    scale: int
    """The divisor of the gradients."""
    training: bool
    functions: dict[Type, Callable[..., Any]]
    """Custom functions, by the kind of action that they replace."""


class OrderRunner:
    """Runs one rank's order, in training or in evaluation."""

    def __init__(self, settings: OrderSettings, forward_receives: Works, backward_receives: Works) -> None:
        self.settings = settings
        self.stages: dict[int, Any] = {stage.stage_index: stage for stage in settings.stages}
        self.inputs = StepInputs(None)
        self.sends: dict[tuple[bool, int, int], list[Any]] = {}
        """Started sends: by whether they go forward, stage and microbatch."""
        self.abandoned_sends: list[list[Any]] = []
        """The sends of a failed step: referenced so that they are not cancelled."""
        self.forward_receives, self.backward_receives = forward_receives, backward_receives
        self._refuse_missing_stages()
        actions, training = settings.actions, settings.training
        halves = [part[:3] for part in list_parts(actions) if part.computation_type == Type.BACKWARD_INPUT] if training else []
        self.split = {index: frozenset(microbatch or 0 for stage, _, microbatch in halves if stage == index) for index in self.stages}
        """By stage: the microbatches whose backward this order splits."""
        waits = () if Type.WAIT_REDUCE_GRAD in settings.functions else list_parts(actions)
        self.waited_reductions = {part.stage_index for part in waits if part.computation_type == Type.WAIT_REDUCE_GRAD}
        """Stages whose reduction an action of its own waits for."""
        unused = set[int]() if training else _find_unused_gathers(actions, settings.functions)
        self.operations: list[tuple[int, Operation]] = []
        """Operations, each with the position of its action in the order."""
        for position, action in enumerate(actions):
            operation = None if position in unused else self._resolve(action)
            if operation is not None:
                self.operations.append((position, operation))

    def _refuse_missing_stages(self) -> None:
        for part in list_parts(self.settings.actions):
            if part.stage_index not in self.stages:
                numbers = ", ".join(map(str, sorted(self.stages)))
                raise ValueError(f"this rank's order has {part}, but the rank holds only stages {numbers}: give it the stages of its row")

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self, inputs: StepInputs) -> None:
        """Run the operations once."""
        for index, stage in self.stages.items():
            if hasattr(stage, "begin_step"):
                stage.begin_step(self.split[index], self.settings.scale)
        actions = self.settings.actions
        self.inputs, position, failed = inputs, 0, True
        try:
            watched = is_profiling() or schedule_log.isEnabledFor(logging.DEBUG)
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
                inputs.schedule_ref.log_failure(position, actions, error)
            raise
        finally:
            self._finish(failed)

    def _watch_operations(self) -> Iterator[tuple[int, Operation]]:
        """Yield every action, also those with nothing to do, each with a range in the profiler and lines in the log."""
        operations = dict(self.operations)
        for position in range(len(self.settings.actions)):
            yield position, partial(OrderRunner._watch, position=position, operation=operations.get(position))

    def _watch(self, position: int, operation: Operation | None) -> None:
        action, schedule = self.settings.actions[position], self.inputs.schedule_ref
        schedule.log_action(position, action, done=False)
        with torch.profiler.record_function(schedule.name_range(action)):
            if operation is not None:
                operation(self)
        schedule.log_action(position, action, done=True)

    def _finish(self, failed: bool) -> None:
        if failed:
            self._abandon()
        if not self.settings.training and not failed:
            self._reshard()
        self.inputs, self.sends = StepInputs(None), {}
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
        self.inputs.schedule_ref.unsharded_stages.clear()

    # Resolving actions ------------------------------------------------------------------------------------------------

    def _resolve(self, action: _Action) -> Operation | None:
        """Return the operation of an action; `None` if there is nothing to do."""
        if action.computation_type in self.settings.functions:
            function = self.settings.functions[action.computation_type]
            return lambda runner: function(action, runner.inputs)
        if action.sub_actions is None:
            return self._resolve_part(action)
        parts = [operation for part in action.sub_actions if (operation := self._resolve_part(part)) is not None]
        return partial(OrderRunner._run_in_turn, parts=parts) if parts else None

    def _resolve_part(self, action: _Action) -> Operation | None:  # noqa: PLR0911 - one per kind
        kind, stage = action.computation_type, self.stages[action.stage_index]
        if kind not in _FORWARD and not self.settings.training:
            return None
        if kind in (Type.UNSHARD, Type.RESHARD):
            method = "unshard" if kind == Type.UNSHARD else "reshard"
            return (lambda runner: getattr(runner.inputs.schedule_ref, method)(stage)) if isinstance(stage.submod, FSDPModule) else None
        if kind == Type.REDUCE_GRAD:
            waits = action.stage_index in self.waited_reductions
            return lambda runner: runner.inputs.schedule_ref.start_reduction(stage, waits)
        if kind == Type.WAIT_REDUCE_GRAD:
            if Type.REDUCE_GRAD in self.settings.functions:  # it has done all the work
                return None
            return lambda runner: runner.inputs.schedule_ref.wait_for_reduction(stage)
        if action.microbatch_index is None or kind == Type.OVERLAP_F_B:
            raise AssertionError(f"{action=} missing mb_index")
        place = {"stage": stage, "microbatch": action.microbatch_index}
        if kind in (Type.WAIT_SEND_F, Type.WAIT_SEND_B):
            return partial(OrderRunner._wait_for_send, forward=kind == Type.WAIT_SEND_F, **place)
        if kind in (Type.SEND_F, Type.SEND_B):
            return partial(OrderRunner._send, forward=kind == Type.SEND_F, **place)
        if kind in (Type.RECV_F, Type.RECV_B):
            return partial(OrderRunner._receive, forward=kind == Type.RECV_F, **place)
        if kind == Type.FORWARD:
            receives = not stage.is_first and stage.stage_index - 1 not in self.stages
            return partial(OrderRunner._forward, **place, receives=receives, reader=self.stages.get(stage.stage_index + 1))
        if kind in (Type.FULL_BACKWARD, Type.BACKWARD_INPUT):
            receives, reader = not stage.is_last and stage.stage_index + 1 not in self.stages, self.stages.get(stage.stage_index - 1)
            return partial(OrderRunner._backward, **place, receives=receives, reader=reader, full=kind == Type.FULL_BACKWARD)
        if kind == Type.BACKWARD_WEIGHT:
            return partial(OrderRunner._backward_weight, **place)
        raise ValueError(f"{action=} is unknown or unsupported")

    # Operations -------------------------------------------------------------------------------------------------------

    def _forward(self, stage: Any, microbatch: int, receives: bool, reader: Any) -> None:
        """Run a forward, on a received input or on that of the stage before; `reader` is the next stage if this rank holds it."""
        inputs = self.inputs
        self._wait_for_parameters(stage)
        if receives:
            _wait_for_input(self.forward_receives, stage.stage_index, microbatch, "F")
        args, kwargs = inputs.arg_mbs[microbatch], inputs.kwarg_mbs[microbatch]
        output = stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=inputs.keep_outputs)
        more = {} if inputs.loss_kwargs is None else {"loss_kwargs": inputs.loss_kwargs}
        inputs.schedule_ref._maybe_compute_loss(stage, output, inputs.target_mbs, microbatch, **more)
        if reader is not None:
            reader.set_local_fwd_input(output, microbatch)
        if not self.settings.training and (reader is not None or stage.is_last):
            stage.forget_forward(microbatch)

    def _backward(self, stage: Any, microbatch: int, receives: bool, reader: Any, full: bool) -> None:
        """Run a backward, whole or for the input; `reader` is the stage before if this rank holds it."""
        index, schedule = stage.stage_index, self.inputs.schedule_ref
        self._wait_for_parameters(stage)
        if receives:
            _wait_for_input(self.backward_receives, index, microbatch, "B" if full else "I")
            wait_for_works(self.sends.pop((True, index, microbatch), ()))  # its gradient has arrived, so the output was received
        loss = schedule._maybe_get_loss(stage, microbatch)
        last = full and self._count_backward(index) == self.settings.microbatches
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=last)
        if reader is not None:
            reader.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def _backward_weight(self, stage: Any, microbatch: int) -> None:
        self._wait_for_parameters(stage)
        last = self._count_backward(stage.stage_index) == self.settings.microbatches
        stage.backward_weight_one_chunk(microbatch, last_backward=last)

    def _count_backward(self, stage: int) -> int:
        """Count a weight gradient of a stage; return how many the step has had."""
        counter: Counter[int] = self.inputs.schedule_ref.backward_counter
        counter[stage] += 1
        return counter[stage]

    def _wait_for_parameters(self, stage: Any) -> None:
        if isinstance(stage.submod, FSDPModule):
            self.inputs.schedule_ref._assert_unsharded(stage)

    def _send(self, stage: Any, microbatch: int, forward: bool) -> None:
        ops = stage.get_fwd_send_ops(microbatch) if forward else stage.get_bwd_send_ops(microbatch)
        works = self.inputs.schedule_ref.start_messages(ops, "fwd_send" if forward else "bwd_send")
        self.sends[forward, stage.stage_index, microbatch] = works

    def _wait_for_send(self, stage: Any, microbatch: int, forward: bool) -> None:
        wait_for_works(self.sends.pop((forward, stage.stage_index, microbatch), ()))
        if forward and self.settings.training:
            stage.release_fwd_send_outputs(microbatch)

    def _receive(self, stage: Any, microbatch: int, forward: bool) -> None:
        posted, key = self.forward_receives if forward else self.backward_receives, (stage.stage_index, microbatch)
        if key in posted:
            raise AssertionError(f"Recv twice for stage_idx={key[0]} mb_index={microbatch} without executing it in between")
        ops = stage.get_fwd_recv_ops(microbatch) if forward else stage.get_bwd_recv_ops(microbatch)
        posted[key] = self.inputs.schedule_ref.start_messages(ops, "fwd_recv" if forward else "bwd_recv")

    def _run_in_turn(self, parts: Sequence[Operation]) -> None:
        """Run the parts of an overlapped action one after the other."""
        for part in parts:
            part(self)


def _wait_for_input(posted: Works, stage: int, microbatch: int, kind: str) -> None:
    if (stage, microbatch) not in posted:
        raise AssertionError(f"Computing {stage}{kind}{microbatch} before receiving input")
    wait_for_works(posted.pop((stage, microbatch)))


def _find_unused_gathers(actions: Sequence[_Action], functions: Container[Any]) -> set[int]:
    """Find the positions of UNSHARD and RESHARD actions around backwards only, which an evaluation leaves out."""
    unused, gathers = set[int](), dict[int, int]()
    for position, action in enumerate(actions):
        if action.computation_type == Type.UNSHARD:
            gathers[action.stage_index] = position
        elif action.computation_type == Type.RESHARD and action.stage_index in gathers:
            unused |= {position, gathers.pop(action.stage_index)}
        elif action.computation_type in functions:
            gathers.clear()
        else:
            for part in split_action(action):
                if part.computation_type == Type.FORWARD:
                    gathers.pop(part.stage_index, None)
    return unused | set(gathers.values())


# Messages -------------------------------------------------------------------------------------------------------------
# `isend`, `irecv` and `batch_isend_irecv` are looked up in `torch.distributed` at every call, and the functions below in
# `penstock.compat.torch.schedules`, because programs and tests replace them there.


def _batch_p2p(p2p_ops: Sequence[Any], desc: str | None = None) -> list[dist.Work]:
    """Start messages: one by one if all are sends or all are receives, so that none waits for another; else as one batch per process
    group."""
    if not p2p_ops:
        return []
    schedule_log.debug("batch_p2p %s%s", f"{desc}, " if desc else "", p2p_ops)
    for function, peer in ((dist.isend, "group_dst"), (dist.irecv, "group_src")):
        if all(op.op == function for op in p2p_ops):
            return [op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}) for op in p2p_ops]
    by_group: dict[str, list[Any]] = {}
    for op in p2p_ops:
        by_group.setdefault(getattr(op.group, "group_name", ""), []).append(op)
    # By name, so that all ranks start the groups in the same order.
    return [work for name in sorted(by_group) for work in dist.batch_isend_irecv(by_group[name])]


def _sorted_batch_p2p(p2p_ops: Sequence[Any], desc: str | None = None) -> dict[int, list[dist.Work]]:
    """Start the messages of each peer as a batch, the lowest rank first; return the works by peer."""
    by_peer: dict[int, list[Any]] = {}
    for op in p2p_ops:
        by_peer.setdefault(op.peer, []).append(op)
    return {peer: _schedules()._batch_p2p(by_peer[peer], desc=desc) for peer in sorted(by_peer)}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    """Wait for all works."""
    for single_work in work:
        single_work.wait()


def _schedules() -> Any:
    from penstock.compat.torch import schedules

    return schedules


def start_batch(ops: Sequence[Any]) -> list[Any]:
    """Start messages by `_batch_p2p`."""
    return list(_schedules()._batch_p2p(ops))


def wait_for_works(works: Sequence[Any]) -> None:
    """Wait for messages by `_wait_batch_p2p`."""
    _schedules()._wait_batch_p2p(works)
