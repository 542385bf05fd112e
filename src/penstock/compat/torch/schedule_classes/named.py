"""Torch's schedules of several stages a rank, by their names. Orders and lowering are ours."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from penstock.compat.torch._rank_ops import add_bubbles
from penstock.compat.torch._utils import generate_stage_to_rank_mapping
from penstock.compat.torch.microbatch import TensorChunkSpec
from penstock.compat.torch.orders.actions import _Action
from penstock.compat.torch.orders.generation import (
    dualpipe_v_order,
    interleaved_1f1b_order,
    interleaved_zb_order,
    looped_bfs_order,
    rounds_of,
    zbv_order,
)
from penstock.compat.torch.orders.tables import Spaced
from penstock.compat.torch.schedule_classes.base import LossFunction
from penstock.compat.torch.schedule_classes.runtime import _PipelineScheduleRuntime


class _Ruled(_PipelineScheduleRuntime):
    """Whose order follows from the counts, rank by rank: a subclass may give another row for a rank."""

    def _set_order(self, order: Spaced) -> None:
        self._ruled = order
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        """The row of a rank, with idle slots."""
        return list(self._ruled[rank])


class ScheduleLoopedBFS(_Ruled):
    """The whole batch through each stage of a rank in turn, then back."""

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        super().__init__(
            stages=stages,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )
        self.n_local_stages = len(stages)
        self._set_order(looped_bfs_order(self.pp_group_size, len(stages), n_microbatches))
        self._prepare_schedule_with_comms(self.pipeline_order)


class _Interleaved(_Ruled):
    """What the interleaved schedules and those on a V share: their arguments."""

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
    ) -> None:
        self._check_stages(stages)
        self.pp_group_size = stages[0].group_size
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
        )
        self.n_local_stages = len(stages)
        self._make_order()
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _check_stages(self, stages: list[Any]) -> None:
        """Refuse stages that the schedule cannot run."""

    def _make_order(self) -> None:
        self.number_of_rounds, self.microbatches_per_round = rounds_of(self.pp_group_size, self._n_microbatches)


class ScheduleInterleaved1F1B(_Interleaved):
    """One forward and one backward in turn, over several stages a rank. Any number of microbatches."""

    def _make_order(self) -> None:
        super()._make_order()
        self._set_order(interleaved_1f1b_order(self.pp_group_size, self.n_local_stages, self._n_microbatches))


class ScheduleInterleavedZeroBubble(_Interleaved):
    """The interleaved schedule with its backward split, the weights' half filling the drain. Any number of microbatches."""

    def _check_stages(self, stages: list[Any]) -> None:
        _check_torch_compile_compatibility(stages, type(self).__name__)

    def _make_order(self) -> None:
        super()._make_order()
        self._set_order(interleaved_zb_order(self.pp_group_size, self.n_local_stages, self._n_microbatches))
        self.pipeline_order = self._add_bubbles_to_actions(self._num_stages)

    def _add_bubbles_to_actions(self, num_stages_global: int) -> Spaced:
        """The order with an idle slot wherever a forward would run before its input is made."""
        return add_bubbles(self.pipeline_order, num_stages_global)


class _OnAV(_Interleaved):
    """Two stages a rank, on the way down and on the way up."""

    def _check_stages(self, stages: list[Any]) -> None:
        _check_torch_compile_compatibility(stages, type(self).__name__)

    def _make_order(self) -> None:
        if self.n_local_stages != 2:
            raise ValueError(f"{type(self).__name__} requires exactly 2 stages per rank, but got {self.n_local_stages}.")
        self.num_stages = self._num_stages
        self._set_stage_ranks(generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages, style="v"))


class ScheduleZBVZeroBubble(_OnAV):
    """Zero bubble on a V."""

    def _make_order(self) -> None:
        super()._make_order()
        self._set_order(zbv_order(self.pp_group_size, self._n_microbatches))


class ScheduleDualPipeV(_OnAV):
    """A forward of one half of the V together with a backward of the other. At least as many microbatches as stages, as in torch."""

    def _make_order(self) -> None:
        super()._make_order()
        if self._n_microbatches < self._num_stages:
            raise ValueError(
                "DualPipeV requires at least as many microbatches as stages, but got "
                f"{self._n_microbatches} microbatches and {self._num_stages} stages."
            )
        self._set_order(dualpipe_v_order(self.pp_group_size, self._n_microbatches))


def _check_torch_compile_compatibility(stages: list[Any], schedule_name: str) -> None:
    """Refuse compiled modules, into which the split backward cannot look."""
    for stage in stages:
        for module in stage.submod.modules() if isinstance(stage.submod, nn.Module) else ():
            if isinstance(module, OptimizedModule):
                raise RuntimeError(
                    f"The {schedule_name} schedule is not supported with stage modules that have used torch.compile. "
                    f"Found OptimizedModule in {type(module).__name__}"
                )
