"""What every schedule of torch's kind shares: splitting, losses, merging, setting stages up."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as _torch_schedules
from torch.utils._pytree import tree_leaves

from penstock.compat.torch._actions import _Action, _get_profiler_function_name
from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.microbatch import _ALONG_BATCH, TensorChunkSpec, _split_tensor, merge_chunks, split_args_kwargs_into_chunks
from penstock.compat.torch.stage import PipelineStage
from penstock.errors import ScheduleError
from penstock.runtime.batch.loss import Loss

LossFunction = Callable[..., Any]
_TARGET_CHUNK_SPEC = _ALONG_BATCH
"""How targets are split."""


@_torch_schedules._PipelineSchedule.register
class _PipelineSchedule(ABC):
    """One rank's part of a schedule, and the stages it runs it on."""

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
        self._loss_places: dict[int, int] = {}
        """The place in that list of each microbatch whose loss `_maybe_compute_loss` has made; custom functions append theirs alone."""
        self._weights: list[float] | None = None
        """How much each microbatch's loss counts in this step, once that is known."""
        schedule_log.info("Using %s", type(self).__name__)

    # To be had by subclasses ------------------------------------------------------------------------------------------

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

    @abstractmethod
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch."""

    def eval(self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """Run a whole batch forward: the outputs, and the losses where there is a target. Nothing is kept for a backward."""
        before, self._has_backward = self._has_backward, False
        try:
            with torch.no_grad():
                return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = before

    def _run_step(self, stages: Sequence[Any], given: tuple[Any, ...], return_outputs: bool, loss_kwargs: Any) -> Any:
        """What both kinds of schedule do in a step; `given` is the arguments, the keyword arguments, the target and the losses."""
        args, kwargs, target, losses = given
        if self._has_backward and self._needs_autograd and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() requires gradients to be enabled for backward computation; "
                "it should not be used under torch.no_grad() context. Please call eval() instead."
            )
        self._forget_losses()
        for stage in stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        args_split, kwargs_split = self._split_inputs(args, kwargs)
        targets = None if target is None else self._split_target(target)
        outputs = (return_outputs,) if takes(self._step_microbatches, "return_outputs") or not return_outputs else ()
        self._weights = None if targets is None else self._weigh(targets)
        ours = [stage for stage in stages if hasattr(stage, "_open_step")]
        for stage in ours:
            stage._open_step(self._n_microbatches if self.scale_grads else 1)
        failed = True
        try:
            self._step_microbatches(args_split, kwargs_split, targets, losses, *outputs, **unless_none(loss_kwargs=loss_kwargs))
            for stage in ours:
                stage._finish_sending()
            failed = False
        finally:
            self._end_step([stage for stage in ours if stage._in_step], failed)
        last = next((stage for stage in stages if stage.is_last), None)
        return None if last is None or not return_outputs or not last.output_chunks else self._merge_outputs(last.output_chunks)

    @staticmethod
    def _end_step(stages: list[Any], failed: bool) -> None:
        """The step is over for stages that no walk has ended it for. A step that has failed before it said anything has not been."""
        talked = any(stage._talked() for stage in stages)
        for stage in stages:
            if failed and not talked:
                stage._give_up({}, talked=False)
            stage._end_step(failed)

    _needs_autograd = True

    # What a step says of itself --------------------------------------------------------------------------------------

    def _range_name(self, action: _Action) -> str:
        """The name of an action in the profiler."""
        return _get_profiler_function_name(action)

    def _log_action(self, place: int, action: _Action, done: bool) -> None:  # noqa: B027 - nothing unless a subclass says more
        """Log an action before and after it, if that is asked for."""

    def _log_failure(self, place: int, actions: Sequence[_Action], error: Exception) -> None:  # noqa: B027 - as above
        """Log where in its order a step has failed."""

    # Batches ----------------------------------------------------------------------------------------------------------

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        return split_args_kwargs_into_chunks(args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec)

    def _split_target(self, target: Any) -> list[Any]:
        """The target of each microbatch: along dimension 0, and of a tree every tensor."""
        if isinstance(target, Tensor):
            return list(_split_tensor(target, _TARGET_CHUNK_SPEC, self._n_microbatches))
        return [each for (each,) in split_args_kwargs_into_chunks((target,), None, self._n_microbatches)[0]]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return merge_chunks(output_chunks, self._output_merge_spec)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Microbatches as lists of the right length, empty ones for those that were not given."""
        count = self._n_microbatches
        for name, given in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if given is None:
                continue
            if not isinstance(given, list):
                raise TypeError(f"{name} must be a list but got a {type(given)}")
            if len(given) != count:
                raise ValueError(f"Expecting {count} {name} but got {len(given)}")
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
        """Keep the loss of a microbatch, if this is where it is computed; without a target only if the function can do without."""
        if not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is not None:
            loss = self._compute_loss(output, target_mbs[mb_index], **unless_none(loss_kwargs=loss_kwargs))
        elif Loss(self._loss_fn, "mean").takes_output_only:
            loss = self._loss_fn(output, **(loss_kwargs or {}))
        elif not self._has_backward:
            return
        else:
            raise TypeError("the loss function takes a target, but the step was given none: pass target= where the last stage is")
        self._loss_places[mb_index] = len(self._internal_losses)
        self._internal_losses.append(loss)
        if self._weights is None:
            self._weights = self._weigh(target_mbs)

    def _weigh(self, targets: list[Any] | None) -> list[float]:
        """How much each microbatch's loss counts: by its share of the targets' rows, so that means over uneven microbatches add up to
        the mean over the batch. All the same without `scale_grads`, without targets, and for losses that are sums."""
        even = [1.0] * self._n_microbatches
        if targets is None or not self.scale_grads or not self._has_backward:
            return even
        sizes = [_rows_of(target) for target in targets]
        if len(sizes) != len(even) or len(set(sizes)) == 1 or None in sizes or not takes_mean(self._loss_fn):
            return even
        total = sum(size or 0 for size in sizes)
        return [(size or 0) * len(sizes) / total for size in sizes] if total else even

    def _place_losses(self) -> dict[int, int]:
        """The place of each microbatch's loss. Those that were put into the list by hand are of the microbatches left, in order."""
        places, count = self._loss_places, len(self._internal_losses)
        if len(places) == count:
            return places
        by_hand = sorted(set(range(count)) - set(places.values()))
        return {**dict(zip(sorted(set(range(count)) - set(places)), by_hand, strict=False)), **places}

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        """The loss of a microbatch, where it was computed; in training weighted, if the microbatches are uneven."""
        losses = self._internal_losses
        if not stage.is_last or self._loss_fn is None or not losses:
            return None
        place = self._place_losses().get(mb_index, len(losses))
        if place >= len(losses):
            raise RuntimeError(f"Loss for microbatch {mb_index} is not available. Available losses for microbatches: {losses}")
        weight = 1.0 if self._weights is None else self._weights[mb_index]
        return losses[place] if weight == 1 else losses[place] * weight

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Give the caller the losses, in the order of microbatches. It ends a step, so that nothing may be left to be sent."""
        held = stages if isinstance(stages, list) else [stages]
        for stage in held:
            if hasattr(stage, "_finish_sending"):
                stage._finish_sending()
        if losses is not None and any(stage.is_last for stage in held):
            if len(self._internal_losses) != self._n_microbatches:
                raise RuntimeError(f"Expecting {self._n_microbatches} losses but got {len(self._internal_losses)}")
            losses[:] = [self._internal_losses[place] for _, place in sorted(self._place_losses().items())]
        self._forget_losses()

    def _forget_losses(self) -> None:
        self._internal_losses.clear()
        self._loss_places.clear()
        self._weights = None

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
        """Set stages up before their first step, and when evaluation and training take turns. Those on the host need no agreement."""
        if fwd_initialized and self._has_backward == bwd_initialized:
            return fwd_initialized, bwd_initialized
        if all(isinstance(stage, PipelineStage) and stage._use_frames(self._n_microbatches, self._has_backward) for stage in stages):
            self._prepare(stages, args, kwargs, target, loss_kwargs)
            return True, self._has_backward
        setup = _torch_schedules._PipelineSchedule._initialize_pp_stages
        return setup(self, stages, args, kwargs, target, fwd_initialized, bwd_initialized, loss_kwargs)  # type: ignore[arg-type]

    def _prepare(self, stages: list[Any], args: Any, kwargs: dict[str, Any] | None, target: Any, loss_kwargs: Any) -> None:
        """Have stages prepared that need no agreement: nothing is left to do, except for those that programs have derived from ours."""
        count, passed = self._n_microbatches, None
        for stage in stages:
            prepare = stage._prepare_forward_infra
            more = {"has_backward": self._has_backward} if takes(prepare, "has_backward") else {}
            passed = prepare(count, args if stage.is_first else passed, kwargs, **more)
        passed = None
        for stage in reversed(stages) if self._has_backward else ():
            prepare = stage._prepare_backward_infra
            given = {"loss_fn": self._loss_fn, "target": target, "received_grad_meta": passed, "loss_kwargs": loss_kwargs}
            passed = prepare(count, **{name: value for name, value in given.items() if takes(prepare, name)})

    def _warmup_p2p(self, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        _torch_schedules._PipelineSchedule._warmup_p2p(self, stages, has_backward, p2p_done)  # type: ignore[arg-type]


def takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a method that a program may have overridden, with fewer parameters than torch has now, takes this one."""
    return _has_parameter(getattr(method, "__func__", method), name)


@lru_cache(maxsize=256)
def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == name or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)


def unless_none(**options: Any) -> dict[str, Any]:
    """Options for a method that a program may have overridden before torch had them: left out unless given."""
    return {name: value for name, value in options.items() if value is not None}


def _rows_of(target: Any) -> int | None:
    """How many rows a microbatch's target has: the length of its first tensor along the batch."""
    if isinstance(target, Tensor):
        return len(target) if target.dim() else None
    return next((len(leaf) for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim()), None)


def takes_mean(loss_fn: LossFunction | None) -> bool:
    """Whether a loss function is one that takes a mean, as far as it says."""
    try:
        Loss(loss_fn, "mean").check_own_reduction()
    except ScheduleError:
        return False
    return True
