"""Schedules of one stage per rank."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from typing import Any

import torch

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.microbatch import TensorChunkSpec
from penstock.compat.torch.orders.actions import FORWARD, FULL_BACKWARD, _Action
from penstock.compat.torch.orders.generation import generate_single_order, generate_single_program
from penstock.compat.torch.orders.tables import SpacedOrder
from penstock.compat.torch.schedule_classes.base import LossFunction, _PipelineSchedule
from penstock.compat.torch.schedule_classes.p2p import start_by_peer
from penstock.compat.torch.schedule_classes.runner import StepInputs


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule of one stage per rank; subclasses run a step in `_step_microbatches`.

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
        self.pipeline_order: SpacedOrder | None = self._get_pipeline_order()

    def _initialize_stage(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: dict[str, Any] | None = None) -> None:
        self._stage_forward_initialized, self._stage_backward_initialized = self._initialize_pp_stages(
            [self._stage], args, kwargs, target, self._stage_forward_initialized, self._stage_backward_initialized, loss_kwargs=loss_kwargs
        )

    def _list_stages(self) -> list[Any]:
        return [self._stage]

    def _get_pipeline_order(self) -> SpacedOrder | None:
        """Return the order of every rank, if it is known."""
        return None

    def start_messages(self, ops: Any, desc: str) -> list[Any]:
        """Start messages peer by peer: outputs that skip stages go to several ranks."""
        return start_by_peer(ops, desc)


class _GeneratedSingle(PipelineScheduleSingle):
    """One of our schedules of one stage per rank."""

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
        actions = generate_single_program(self._name, self._num_stages, self._n_microbatches)[self._stage.stage_index]
        inputs = StepInputs(self, args, kwargs, target_mbs, losses, return_outputs, loss_kwargs)
        self._run_order(actions, self._initialize_stage, inputs)
        self._update_losses(self._stage, losses)

    def _get_pipeline_order(self) -> SpacedOrder | None:
        return generate_single_order(self._name, self._num_stages, self._n_microbatches)


class _Phased(_GeneratedSingle):
    """Forwards, then backwards. Logs and profiler ranges name the microbatch alone, as in torch."""

    def name_range(self, action: _Action) -> str:
        phase = {FORWARD: "Forward", FULL_BACKWARD: "Backward"}.get(action.computation_type)
        return super().name_range(action) if phase is None else f"{phase} {action.microbatch_index}"

    def log_action(self, position: int, action: _Action, done: bool) -> None:
        phase = {FORWARD: "Forwarded", FULL_BACKWARD: "Backwarded"}.get(action.computation_type)
        if done and phase is not None:
            schedule_log.debug("[%s] %s microbatch %s", action.stage_index, phase, action.microbatch_index)


class ScheduleGPipe(_Phased):
    """All forwards, then all backwards."""

    _name = "gpipe"


class Schedule1F1B(_GeneratedSingle):
    """One forward and one backward in turn. Takes any number of microbatches."""

    _name = "1f1b"


class _ScheduleForwardOnly(_Phased):
    """Forwards only."""

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
        """Compute nothing: there is no loss."""

    def _get_pipeline_order(self) -> SpacedOrder | None:
        return None
