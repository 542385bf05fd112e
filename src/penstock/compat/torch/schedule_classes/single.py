"""Schedules of one stage a rank."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.microbatch import TensorChunkSpec
from penstock.compat.torch.orders.actions import FORWARD, FULL_BACKWARD, _Action
from penstock.compat.torch.orders.generation import single_order, single_program
from penstock.compat.torch.orders.tables import Spaced
from penstock.compat.torch.schedule_classes.base import LossFunction, _PipelineSchedule, takes, unless_none
from penstock.compat.torch.schedule_classes.runner import Feed, Walk


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule of one stage a rank; subclasses say what a step is in `_step_microbatches`.

    `scale_grads` divides gradients by the number of microbatches, for loss functions that take a mean.
    """

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        self._stage = stage
        self._num_stages: int = stage.num_stages
        self._stage_forward_initialized = False
        self._stage_backward_initialized = False
        self.backward_counter: Counter[int] = Counter()
        self._walks: dict[bool, Walk] = {}
        self.pipeline_order: Spaced | None = self._get_pipeline_order()

    def _initialize_stage(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: dict[str, Any] | None = None) -> None:
        self._stage_forward_initialized, self._stage_backward_initialized = self._initialize_pp_stages(
            [self._stage], args, kwargs, target, self._stage_forward_initialized, self._stage_backward_initialized, loss_kwargs=loss_kwargs
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch; on the last stage the outputs, merged."""
        return self._run_step([self._stage], (args, kwargs, target, losses), return_outputs, loss_kwargs)

    def _get_pipeline_order(self) -> Spaced | None:
        """The order of every rank, where it is known."""
        return None

    def _start_p2p(self, ops: Any, desc: str) -> list[Any]:
        """Messages to several ranks, as where an output skips stages, are started rank by rank."""
        from penstock.compat.torch import schedules

        return [work for works in schedules._sorted_batch_p2p(ops, desc=desc).values() for work in works]


class _Named(PipelineScheduleSingle):
    """One of our schedules of one stage a rank."""

    _name: str

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        target = target_mbs[0] if target_mbs is not None and takes(self._initialize_stage, "target") else None
        self._initialize_stage(args[0], kwargs[0], **unless_none(target=target, loss_kwargs=loss_kwargs))
        self.backward_counter.clear()
        self._walk().run(Feed(self, args, kwargs, target_mbs, losses, return_outputs, loss_kwargs))
        self._update_losses(self._stage, losses)

    def _walk(self) -> Walk:
        found = self._walks.get(self._has_backward)
        actions = self._actions() if found is None else found.given
        if found is None or not found.fits(self, [self._stage], actions):
            found = self._walks[self._has_backward] = Walk(self, [self._stage], actions)
        return found

    def _actions(self) -> list[_Action]:
        return single_program(self._name, self._num_stages, self._n_microbatches)[self._stage.stage_index]

    def _get_pipeline_order(self) -> Spaced | None:
        return single_order(self._name, self._num_stages, self._n_microbatches)


class _Phased(_Named):
    """Forwards, then backwards: in logs and in the profiler by the microbatch alone, as torch has them."""

    def _range_name(self, action: _Action) -> str:
        phase = {FORWARD: "Forward", FULL_BACKWARD: "Backward"}.get(action.computation_type)
        return super()._range_name(action) if phase is None else f"{phase} {action.microbatch_index}"

    def _log_action(self, place: int, action: _Action, done: bool) -> None:
        phase = {FORWARD: "Forwarded", FULL_BACKWARD: "Backwarded"}.get(action.computation_type)
        if done and phase is not None:
            schedule_log.debug("[%s] %s microbatch %s", action.stage_index, phase, action.microbatch_index)


class ScheduleGPipe(_Phased):
    """All forwards, then all backwards."""

    _name = "gpipe"


class Schedule1F1B(_Named):
    """One forward and one backward in turn. Any number of microbatches."""

    _name = "1f1b"


class _ScheduleForwardOnly(_Phased):
    """Forwards alone."""

    _name = "inference"

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if target_mbs is not None or losses is not None:
            raise RuntimeError("Forward-only schedule does not support loss computation")
        with torch.no_grad():
            super()._step_microbatches(arg_mbs, kwarg_mbs, return_outputs=return_outputs)

    def _maybe_compute_loss(self, *args: Any, **kwargs: Any) -> None:
        """There is none here."""

    def _get_pipeline_order(self) -> Spaced | None:
        return None
