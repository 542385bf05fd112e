"""Schedules of several stages a rank: the order is data, `pipeline_order`, that subclasses set."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch._utils import generate_stage_to_rank_mapping
from penstock.compat.torch.microbatch import TensorChunkSpec
from penstock.compat.torch.orders.actions import _Action
from penstock.compat.torch.orders.lowering import _add_reduce_grad, _add_send_recv
from penstock.compat.torch.orders.tables import Actions, Order, Spaced, _format_pipeline_order, read_csv, write_csv
from penstock.compat.torch.orders.validation import _validate_schedule
from penstock.compat.torch.schedule_classes.base import LossFunction, _PipelineSchedule, takes, unless_none
from penstock.compat.torch.schedule_classes.runner import Feed, Walk

Format = Literal["compute_only", "compute_comms"]


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule of several stages a rank. A subclass sets `pipeline_order`; it is proved and lowered before its first step.

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
        self.pipeline_order: Spaced = {}
        self._backward_requires_autograd = self._needs_autograd = backward_requires_autograd
        self.backward_counter: Counter[int] = Counter()
        """How many weight gradients of each stage this step has made."""
        self._walks: dict[bool, Walk] = {}
        self._lowered: tuple[Spaced, Actions] | None = None
        if use_full_backward is not None:
            schedule_log.warning("'use_full_backward' is no longer supported and has no effect: leave it out")

    def _set_stage_ranks(self, ranks: dict[int, int]) -> None:
        self.stage_index_to_group_rank = ranks
        for stage in self._stages:
            stage.stage_index_to_group_rank = ranks

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Prove an order, and take the placement of stages from it."""
        self._set_stage_ranks(_validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches))

    # Files ------------------------------------------------------------------------------------------------------------

    def _dump_csv(self, filename: str) -> None:
        """Write the order: a row a rank, a cell an action."""
        write_csv(self.pipeline_order, filename)

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:  # noqa: A002 - torch's name
        """Read and prove the order of a file."""
        if format != "compute_only":
            raise AssertionError(f'format must be "compute_only", got {format}')
        order = read_csv(filename)
        self._validate_and_set_stage_mapping(order)
        self.pipeline_order = order

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch; on the rank of the last stage the outputs, merged."""
        return self._run_step(self._stages, (args, kwargs, target, losses), return_outputs, loss_kwargs)

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
        actions = self._actions()
        target = target_mbs[0] if target_mbs is not None and takes(self._initialize_stages, "target") else None
        self._initialize_stages(args[0], kwargs[0], **unless_none(target=target, loss_kwargs=loss_kwargs))
        self.backward_counter.clear()
        self._walk(actions).run(Feed(self, args, kwargs, target_mbs, losses, return_outputs, loss_kwargs))
        self._update_losses(self._stages, losses)

    def _walk(self, actions: Sequence[_Action]) -> Walk:
        found = self._walks.get(self._has_backward)
        if found is None or not found.fits(self, self._stages, actions):
            found = self._walks[self._has_backward] = Walk(self, self._stages, actions)
        return found

    def _actions(self) -> list[_Action]:
        """This rank's row of the order, with messages and reductions; proved and lowered when the order is new."""
        if self._lowered is None or self._lowered[0] != self.pipeline_order:
            order = {rank: list(row) for rank, row in self.pipeline_order.items()}
            self._validate_and_set_stage_mapping(order)
            reduced = {rank: _add_reduce_grad(row, self._n_microbatches) for rank, row in order.items()}
            self._lowered = order, _add_send_recv(reduced, self.stage_index_to_group_rank.__getitem__, self._num_stages)
        return self._lowered[1][self.rank]

    def _log_failure(self, place: int, actions: Sequence[_Action], error: Exception) -> None:
        row = self.pipeline_order.get(self.rank, [])
        before = (action for action in reversed(actions[: place + 1]) if action in row)
        action = next(before, None)
        step = 0 if action is None else row.index(action)
        schedule_log.error(
            "[Rank %s] pipeline schedule %s caught the following exception '%s' at time_step %s when running action %s",
            self.rank,
            type(self).__name__,
            error,
            step,
            actions[place],
        )
        schedule_log.error("%s", _format_pipeline_order(self.pipeline_order, error_step_number=step))

    def _start_p2p(self, ops: Any, desc: str) -> list[Any]:
        from penstock.compat.torch import schedules

        return list(schedules._batch_p2p(ops))

    # Stages -----------------------------------------------------------------------------------------------------------

    def _initialize_stages(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: dict[str, Any] | None = None) -> None:
        before = self._stages_forward_initialized, self._stages_backward_initialized
        after = self._initialize_pp_stages(self._stages, args, kwargs, target, *before, loss_kwargs=loss_kwargs)
        self._stages_forward_initialized, self._stages_backward_initialized = after
        if after != before:
            self._validate_adjacent_stage_communication()

    def _validate_adjacent_stage_communication(self) -> None:
        """Refuse traced models whose stages read from farther off than the one before."""
        for stage in self._stages:
            here: int = stage.stage_index
            sources = {info.source for info in stage.args_recv_info.get(0, ()) if not info.is_root_arg}
            targets = {target for all_targets in stage.act_send_info.values() for target in all_targets}
            for what, found, near in (("recv", sources, {here - 1}), ("send", targets, {here + 1})):
                far = sorted(found - near - {None})
                if far:
                    raise RuntimeError(
                        f"PipelineScheduleMulti only supports adjacent-stage communication, but stage {here} has forward {what} "
                        f"stages {sorted(found)} with non-adjacent stages {far}. This commonly indicates skip connections: use "
                        "ScheduleGPipe or Schedule1F1B, or the runtime's own Pipeline"
                    )
