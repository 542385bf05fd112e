"""Schedules of several stages per rank. The order is data: `pipeline_order`, which subclasses set."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch._utils import generate_stage_to_rank_mapping
from penstock.compat.torch.installed import is_root_input
from penstock.compat.torch.microbatch import TensorChunkSpec
from penstock.compat.torch.orders.actions import _Action
from penstock.compat.torch.orders.lowering import _add_reduce_grad, _add_send_recv
from penstock.compat.torch.orders.tables import DenseOrder, Order, SpacedOrder, _format_pipeline_order, read_csv, write_csv
from penstock.compat.torch.orders.validation import _validate_schedule
from penstock.compat.torch.schedule_classes.base import LossFunction, _PipelineSchedule
from penstock.compat.torch.schedule_classes.p2p import start_batch
from penstock.compat.torch.schedule_classes.runner import StepInputs

Format = Literal["compute_only", "compute_comms"]


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule of several stages per rank. A subclass sets `pipeline_order`, which is proved and lowered before its first step.

    `scale_grads` divides gradients by the number of microbatches, for loss functions that take a mean.
    """

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
    ) -> None:
        super().__init__(n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        self._stages = stages
        self._num_stages: int = stages[0].num_stages
        self.pp_group_size: int = stages[0].group_size
        self.rank: int = stages[0].group_rank
        self._set_stage_ranks(generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages))
        self._stages_forward_initialized = False
        self._stages_backward_initialized = False
        has_loss = loss_fn is not None
        self._should_compute_loss = lambda stage: stage.is_last and has_loss
        self.pipeline_order: SpacedOrder = {}
        self._backward_requires_autograd = self._needs_autograd = backward_requires_autograd
        self._lowered: tuple[SpacedOrder, DenseOrder] | None = None
        if use_full_backward is not None:
            schedule_log.warning("'use_full_backward' is no longer supported and has no effect: leave it out")

    def _set_stage_ranks(self, ranks: dict[int, int]) -> None:
        self.stage_index_to_group_rank = ranks
        for stage in self._stages:
            stage.stage_index_to_group_rank = ranks

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Prove an order and take the placement of stages from it."""
        self._set_stage_ranks(_validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches))

    # Files ------------------------------------------------------------------------------------------------------------

    def _dump_csv(self, filename: str) -> None:
        """Write the order: one row per rank, one cell per action."""
        write_csv(self.pipeline_order, filename)

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:  # noqa: A002 - torch's name
        """Read an order from a file and prove it."""
        if format != "compute_only":
            raise AssertionError(f'format must be "compute_only", got {format}')
        order = read_csv(filename)
        self._validate_and_set_stage_mapping(order)
        self.pipeline_order = order

    # Steps ------------------------------------------------------------------------------------------------------------

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
        inputs = StepInputs(self, args, kwargs, target_mbs, losses, return_outputs, loss_kwargs)
        self._run_order(self._list_actions(), self._initialize_stages, inputs)
        self._update_losses(self._stages, losses)

    def _list_stages(self) -> list[Any]:
        return self._stages

    def _list_actions(self) -> list[_Action]:
        """Return this rank's row with messages and reductions; prove and lower the order if it is new."""
        if self._lowered is None or self._lowered[0] != self.pipeline_order:
            order = {rank: list(row) for rank, row in self.pipeline_order.items()}
            self._validate_and_set_stage_mapping(order)
            reduced = {rank: _add_reduce_grad(row, self._n_microbatches) for rank, row in order.items()}
            self._lowered = order, _add_send_recv(reduced, self.stage_index_to_group_rank.__getitem__, self._num_stages)
        return self._lowered[1][self.rank]

    def log_failure(self, position: int, actions: Sequence[_Action], error: Exception) -> None:
        row = self.pipeline_order.get(self.rank, [])
        before = (action for action in reversed(actions[: position + 1]) if action in row)
        action = next(before, None)
        step = 0 if action is None else row.index(action)
        schedule_log.error(
            "[Rank %s] pipeline schedule %s caught the following exception '%s' at time_step %s when running action %s",
            self.rank,
            type(self).__name__,
            error,
            step,
            actions[position],
        )
        schedule_log.error("%s", _format_pipeline_order(self.pipeline_order, error_step_number=step))

    def start_messages(self, ops: Any, desc: str) -> list[Any]:
        return start_batch(ops)

    # Stages -----------------------------------------------------------------------------------------------------------

    def _initialize_stages(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: dict[str, Any] | None = None) -> None:
        before = self._stages_forward_initialized, self._stages_backward_initialized
        after = self._initialize_pp_stages(self._stages, args, kwargs, target, *before, loss_kwargs=loss_kwargs)
        self._stages_forward_initialized, self._stages_backward_initialized = after
        if after != before:
            self._validate_adjacent_stage_communication()

    def _validate_adjacent_stage_communication(self) -> None:
        """Refuse traced models in which a stage reads from others than the one before it."""
        for stage in self._stages:
            index: int = stage.stage_index
            sources = {info.source for info in stage.args_recv_info.get(0, ()) if not is_root_input(info)}
            targets = {target for all_targets in stage.act_send_info.values() for target in all_targets}
            for what, peers, adjacent in (("recv", sources, {index - 1}), ("send", targets, {index + 1})):
                distant = sorted(peers - adjacent - {None})
                if distant:
                    raise RuntimeError(
                        f"PipelineScheduleMulti only supports adjacent-stage communication, but stage {index} has forward {what} "
                        f"stages {sorted(peers)} with non-adjacent stages {distant}. This commonly indicates skip connections: use "
                        "ScheduleGPipe or Schedule1F1B, or the runtime's own Pipeline"
                    )
