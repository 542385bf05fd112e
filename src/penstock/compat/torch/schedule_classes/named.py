"""Torch's schedules of several stages per rank, by their names. Orders and lowering are ours."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from penstock.compat.torch._utils import generate_stage_to_rank_mapping
from penstock.compat.torch.microbatch import TensorChunkSpec
from penstock.compat.torch.orders.actions import _Action
from penstock.compat.torch.orders.generation import (
    add_bubbles,
    count_rounds,
    generate_dualpipe_v,
    generate_interleaved_1f1b,
    generate_interleaved_zb,
    generate_looped_bfs,
    generate_zbv,
)
from penstock.compat.torch.orders.lowering import UnshardLookahead
from penstock.compat.torch.orders.tables import SpacedOrder
from penstock.compat.torch.schedule_classes.base import LossFunction
from penstock.compat.torch.schedule_classes.runtime import _PipelineScheduleRuntime


class _GeneratedMulti(_PipelineScheduleRuntime):
    """A schedule whose order follows from the counts.

    The constructor calls `_generate_order`, then `_calculate_single_rank_operations` for each rank, which a
    program's subclass may override to give another row.
    """

    _splits_backward = True

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: UnshardLookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
    ) -> None:
        if self._splits_backward:
            _check_torch_compile_compatibility(stages, type(self).__name__)
        super().__init__(
            stages=stages,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            max_active_stages=max_active_stages,
            unshard_lookahead=unshard_lookahead,
            defer_reduce_grad_wait=defer_reduce_grad_wait,
            max_outstanding_sends=max_outstanding_sends,
        )
        self.n_local_stages = len(stages)
        self._generated = self._generate_order()
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        self.pipeline_order = self._add_bubbles_to_actions(self._num_stages)
        self._prepare_schedule_with_comms(self.pipeline_order)

    @abstractmethod
    def _generate_order(self) -> SpacedOrder:
        """Generate the order of all ranks; refuse counts that the schedule cannot have."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        """Return the row of a rank, with idle slots."""
        return list(self._generated[rank])

    def _add_bubbles_to_actions(self, num_stages_global: int) -> SpacedOrder:
        """Return the order with further idle slots, if the schedule has any."""
        return self.pipeline_order


class ScheduleLoopedBFS(_GeneratedMulti):
    """The whole batch through each stage of a rank in turn, then back."""

    _splits_backward = False

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: UnshardLookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            max_active_stages=max_active_stages,
            unshard_lookahead=unshard_lookahead,
            defer_reduce_grad_wait=defer_reduce_grad_wait,
            max_outstanding_sends=max_outstanding_sends,
        )

    def _generate_order(self) -> SpacedOrder:
        return generate_looped_bfs(self.pp_group_size, self.n_local_stages, self._n_microbatches)


class ScheduleInterleaved1F1B(_GeneratedMulti):
    """One forward and one backward in turn, over several stages per rank. Takes any number of microbatches."""

    _splits_backward = False

    def _generate_order(self) -> SpacedOrder:
        self.number_of_rounds, self.microbatches_per_round = count_rounds(self.pp_group_size, self._n_microbatches)
        return generate_interleaved_1f1b(self.pp_group_size, self.n_local_stages, self._n_microbatches)


class ScheduleInterleavedZeroBubble(_GeneratedMulti):
    """The interleaved schedule with a split backward, whose weight half fills the drain. Takes any number of microbatches."""

    def _generate_order(self) -> SpacedOrder:
        self.number_of_rounds, self.microbatches_per_round = count_rounds(self.pp_group_size, self._n_microbatches)
        return generate_interleaved_zb(self.pp_group_size, self.n_local_stages, self._n_microbatches)

    def _add_bubbles_to_actions(self, num_stages_global: int) -> SpacedOrder:
        """Return the order with an idle slot wherever a forward would run before its input exists."""
        return add_bubbles(self.pipeline_order, num_stages_global)


class _VShaped(_GeneratedMulti):
    """Two stages per rank: one on the way down the V, one on the way up."""

    def _generate_order(self) -> SpacedOrder:
        if self.n_local_stages != 2:
            raise ValueError(f"{type(self).__name__} requires exactly 2 stages per rank, but got {self.n_local_stages}.")
        self.num_stages = self._num_stages
        self._set_stage_ranks(generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages, style="v"))
        return self._generate_v()

    @abstractmethod
    def _generate_v(self) -> SpacedOrder:
        """Generate the order of all ranks."""


class ScheduleZBVZeroBubble(_VShaped):
    """Zero bubble on a V."""

    def _generate_v(self) -> SpacedOrder:
        return generate_zbv(self.pp_group_size, self._n_microbatches)


class ScheduleDualPipeV(_VShaped):
    """A forward of one half of the V together with a backward of the other. Needs at least as many microbatches as stages, as in torch."""

    def _generate_v(self) -> SpacedOrder:
        if self._n_microbatches < self._num_stages:
            raise ValueError(
                "DualPipeV requires at least as many microbatches as stages, but got "
                f"{self._n_microbatches} microbatches and {self._num_stages} stages."
            )
        return generate_dualpipe_v(self.pp_group_size, self._n_microbatches)


def _check_torch_compile_compatibility(stages: list[Any], schedule_name: str) -> None:
    """Refuse compiled modules, which the split backward cannot look into."""
    for stage in stages:
        for module in stage.submod.modules() if isinstance(stage.submod, nn.Module) else ():
            if isinstance(module, OptimizedModule):
                raise RuntimeError(
                    f"The {schedule_name} schedule is not supported with stage modules that have used torch.compile. "
                    f"Found OptimizedModule in {type(module).__name__}"
                )
