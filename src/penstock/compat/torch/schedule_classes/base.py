"""What all schedules share: splitting the batch, the losses, merging the outputs, setting up stages, running an order."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
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
from penstock.compat.torch.orders.actions import _Action, _ComputationType, _get_profiler_function_name
from penstock.compat.torch.schedule_classes.p2p import start_batch, wait_for_works
from penstock.compat.torch.schedule_classes.runner import OrderRunner, OrderSettings, StepInputs
from penstock.compat.torch.stage import PipelineStage
from penstock.compat.torch.stage_classes.messages import BatchShare
from penstock.errors import ScheduleError
from penstock.runtime.batch.loss import Loss

LossFunction = Callable[..., Any]
_TORCH_SCHEDULE: Any = _torch_schedules._PipelineSchedule
_TARGET_CHUNK_SPEC = ALONG_BATCH
"""How targets are split."""


@_torch_schedules._PipelineSchedule.register
class _PipelineSchedule(ABC):
    """One rank's part of a schedule, and the stages that it runs on.

    `step` splits the batch, opens the step on the stages and calls `_step_microbatches`, which a subclass implements. A subclass that
    runs an order of actions calls `_run_order` from there; the `OrderRunner` then calls back `_maybe_compute_loss` and
    `_maybe_get_loss`, `start_messages`, and the methods that log.
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

    @abstractmethod
    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run one step on microbatches."""

    def _list_stages(self) -> list[Any]:
        """Return the stages that this rank holds."""
        raise NotImplementedError

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

    def _run_order(self, actions: Sequence[_Action], initialize: Callable[..., None], inputs: StepInputs) -> None:
        """Set up the stages by `initialize`, then run this rank's actions on them."""
        target = inputs.targets[0] if inputs.targets is not None and takes(initialize, "target") else None
        initialize(inputs.args[0], inputs.kwargs[0], **unless_none(target=target, loss_kwargs=inputs.loss_kwargs))
        self.backward_counter.clear()
        settings = OrderSettings(
            list(self._list_stages()),
            list(actions),
            self._n_microbatches,
            self._n_microbatches if self.scale_grads else 1,
            self._has_backward,
            dict(self._comp_type_to_function_map),
        )
        runner = self._runners.get(self._has_backward)
        if runner is None or runner.settings != settings:
            runner = self._runners[self._has_backward] = OrderRunner(settings, self.fwd_recv_ops, self.bwd_recv_ops)
        runner.run(inputs)

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
            return list(_split_tensor(target, _TARGET_CHUNK_SPEC, self._n_microbatches))
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
        held = stages if isinstance(stages, list) else [stages]
        for stage in held:
            if hasattr(stage, "finish_sending"):
                stage.finish_sending()
        if losses is not None and any(stage.is_last for stage in held):
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
        if all(isinstance(stage, PipelineStage) and stage.use_messages(self._n_microbatches, self._has_backward) for stage in stages):
            self._prepare(stages, args, kwargs, target, loss_kwargs)
            return True, self._has_backward
        if not HAS_METADATA:
            if not fwd_initialized:
                self._warmup_p2p(stages, self._has_backward, p2p_done=False)
            self._prepare(stages, args, kwargs, target, loss_kwargs)
            return True, self._has_backward
        setup = _TORCH_SCHEDULE._initialize_pp_stages
        more = (loss_kwargs,) if takes(setup, "loss_kwargs") else ()
        initialized: tuple[bool, bool] = setup(self, stages, args, kwargs, target, fwd_initialized, bwd_initialized, *more)
        return initialized

    def _prepare(self, stages: list[Any], args: Any, kwargs: dict[str, Any] | None, target: Any, loss_kwargs: Any) -> None:
        """Call the preparations of stages that use messages. Ours do nothing, but a program's subclasses may override them."""
        count, passed = self._n_microbatches, None
        for stage in stages:
            prepare = stage._prepare_forward_infra
            more = {"has_backward": self._has_backward} if takes(prepare, "has_backward") else {}
            passed = prepare(count, args if stage.is_first else passed, kwargs, **more)
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
