"""All names of `torch.distributed.pipelining.schedules`."""

# ruff: noqa: PLR0917 - torch's own signatures
from __future__ import annotations

import inspect
import warnings
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.pipelining import schedules as _torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from penstock.compat.torch import _debug, microbatch, orders, schedule_base
from penstock.compat.torch import stage as stage_names
from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.installed import FINALIZES_BACKWARD, WRITES_WAITS, is_root_input, metadata
from penstock.compat.torch.microbatch import TensorChunkSpec
from penstock.compat.torch.orders import (
    COMPUTE_TYPES,
    DenseOrder,
    Order,
    PipelineActivationLiveness,
    SpacedOrder,
    TorchLowering,
    Type,
    UnshardLookahead,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _format_pipeline_order,
    _simulate_comms_compute,
    _validate_schedule,
    analyze_pipeline_activation_liveness,
    drop_idle,
    list_parts,
    lower_order,
    pack_rows,
    read_csv,
    reduce_grad,
    take_lowered,
    unpack,
    unpack_rows,
    write_csv,
)
from penstock.compat.torch.schedule_base import LossFunction, _batch_p2p, _PipelineContext, _PipelineSchedule, _sorted_batch_p2p
from penstock.errors import ScheduleError, VerifyError, nearest
from penstock.ir.formats.csv_form import refuse_for_torch
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.passes.lower import lower
from penstock.runtime.parallel.fsdp import find_communication_context
from penstock.runtime.torch_internals.lookup import find_private
from penstock.schedules.registry import parse_name, schedule
from penstock.verifier.finding import report
from penstock.verifier.verify import check

__all__ = [
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
]

OptimizedModule: Any = find_private("torch._dynamo.OptimizedModule")
"""The class of a compiled module."""
_OURS = (orders, schedule_base, stage_names, microbatch, metadata)
"""The modules in which names are looked up that torch's module defines but does not export."""
_RENAMED: dict[str, Any] = {
    **{text: kind for kind in Type for text in (kind.name, kind.value)},  # `FORWARD` and `F`, say
    "logger": _debug.schedule_log,
    "_add_wait_send": orders.add_send_waits,
    "_add_wait_send_budget": orders.limit_sends,
    "_assign_pipeline_activation_slots": orders.assign_slots,
    "_resolve_unshard_lookahead": orders.resolve_unshard_lookahead,
    "_validate_send_waits": orders.validate_send_waits,
}


def __getattr__(name: str) -> Any:
    """Look up a name of torch's module that is not exported: our own object, or torch's if we have none."""
    if name in _RENAMED:
        return _RENAMED[name]
    return getattr(next((module for module in _OURS if name in vars(module)), _torch_schedules), name)


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

    def _get_initializer(self) -> Callable[..., None]:
        return self._initialize_stage

    def _list_stages(self) -> list[Any]:
        return [self._stage]

    def _get_pipeline_order(self) -> SpacedOrder | None:
        """Return the order of every rank, if it is known."""
        return None

    def start_messages(self, ops: Any, desc: str) -> list[Any]:
        """Start messages peer by peer: outputs that skip stages go to several ranks."""
        return [work for works in _sorted_batch_p2p(ops, desc=desc).values() for work in works]


class _GeneratedSingle(PipelineScheduleSingle):
    """One of our schedules of one stage per rank."""

    _name: str

    _step_microbatches = _PipelineSchedule._run_order

    def _list_actions(self) -> list[_Action]:
        return _lower_row(self._name, self._num_stages, self._n_microbatches, self._stage.stage_index)

    def _get_pipeline_order(self) -> SpacedOrder | None:
        program = Program.start(schedule(self._name, self._num_stages, self._n_microbatches))
        reduced = reduce_grad(WRITES_WAITS, deferred=False).apply(program).rows
        return {rank: list(row) for rank, row in unpack_rows(reduced).items()}


@lru_cache(maxsize=8)
def _lower_row(name: str, ranks: int, microbatches: int, rank: int) -> list[_Action]:
    return unpack(lower(schedule(name, ranks, microbatches)).row(rank))


class _Phased(_GeneratedSingle):
    """Forwards, then backwards. Logs and profiler ranges name the microbatch alone, as in torch."""

    def name_range(self, action: _Action) -> str:
        phase = {Type.FORWARD: "Forward", Type.FULL_BACKWARD: "Backward"}.get(action.computation_type)
        return super().name_range(action) if phase is None else f"{phase} {action.microbatch_index}"

    def log_action(self, position: int, action: _Action, done: bool) -> None:
        phase = {Type.FORWARD: "Forwarded", Type.FULL_BACKWARD: "Backwarded"}.get(action.computation_type)
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
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, losses: Any = None, *options: Any, **more: Any
    ) -> None:
        if target_mbs is not None or losses is not None:
            raise RuntimeError("Forward-only schedule does not support loss computation")
        with torch.no_grad():
            super()._step_microbatches(arg_mbs, kwarg_mbs, None, None, *options, **more)

    def _maybe_compute_loss(self, *args: Any, **kwargs: Any) -> None:
        """Compute nothing: there is no loss."""

    def _get_pipeline_order(self) -> SpacedOrder | None:
        return None


Format = Literal["compute_only", "compute_comms"]
_OPTIONAL_RULES = ("sharding", "reduction")
"""Rules that an order written by hand may break: only parts of a model may be sharded, and gradients may be reduced elsewhere."""


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

    _step_microbatches = _PipelineSchedule._run_order

    def _get_initializer(self) -> Callable[..., None]:
        return self._initialize_stages

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
        return list(_batch_p2p(ops))

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


class _CustomFunctionProtocol(Protocol):
    def __call__(self, action: _Action, ctx: _PipelineContext) -> None: ...


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """Runs `pipeline_order_with_comms`, which is loaded from a file, lowered from a compute order, or set by a subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = [option.name for option in fields(TorchLowering)]
        self._lowering = TorchLowering(**{name: kwargs.pop(name) for name in names if name in kwargs})
        super().__init__(*args, **kwargs)
        self.unshard_ops: dict[int, list[UnshardHandle]] = defaultdict(list)
        self._proved: DenseOrder | None = None
        self._trained: DenseOrder | None = None
        """The proved order of the last training step, which was searched for missing actions."""
        self._finalized_stages: set[int] = set()
        """Stages that FSDP has resharded in this step when it reduced their gradients."""

    def register_custom_function(self, computation_type: Type, custom_function: _CustomFunctionProtocol) -> None:
        """Run `custom_function(action, context)` in place of the actions of a kind."""
        if computation_type not in COMPUTE_TYPES | {Type.UNSHARD, Type.RESHARD, Type.REDUCE_GRAD, Type.WAIT_REDUCE_GRAD}:
            raise ValueError(
                f"Invalid computation type {computation_type}. Only FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, "
                "OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD and WAIT_REDUCE_GRAD are supported."
            )
        if computation_type in self._comp_type_to_function_map:
            schedule_log.warning("Computation type %s is already registered. Overwriting the existing custom function.", computation_type)
        self._comp_type_to_function_map[computation_type] = custom_function

    # Lowering ---------------------------------------------------------------------------------------------------------

    def _prepare_schedule_with_comms(self, actions: Order, format: Format = "compute_only") -> None:  # noqa: A002 - torch's name
        """Prove an order and take the placement from it; then lower it, or keep it as it is if it has its messages."""
        self._validate_and_set_stage_mapping(actions)
        if format == "compute_comms":
            if any(action is None for row in actions.values() for action in row):
                raise AssertionError("Expected action to be not None: an order with its messages has no idle slots")
            order = {rank: drop_idle(row) for rank, row in actions.items()}
            self.pipeline_order_with_comms = take_lowered(order, self.stage_index_to_group_rank.__getitem__, self._lowering)
        elif format == "compute_only":
            _refuse_messages(actions)
            if self._lowering.defer_reduce_grad_wait:
                self._validate_deferred_gradient_reduction()
            self.pipeline_order_with_comms = lower_order(actions, self._build_placement(), self._lowering)
        else:
            raise NotImplementedError(f"format={format!r} is not implemented")

    _load_actions = _prepare_schedule_with_comms

    def _validate_deferred_gradient_reduction(self) -> None:
        """Refuse to defer the wait for reductions of FSDP stages that share their streams and buffers for communication."""
        owner: dict[int, int] = {}
        for stage in self._stages:
            if isinstance(stage.submod, FSDPModule):
                context = id(find_communication_context(stage.submod))
                if owner.setdefault(context, stage.stage_index) != stage.stage_index:
                    raise ValueError(
                        "defer_reduce_grad_wait does not support FSDP stages that share a communication context. Do not call "
                        f"share_comm_ctx() for stages {owner[context]} and {stage.stage_index}"
                    )

    def _build_placement(self) -> Placement:
        ranks = self.stage_index_to_group_rank
        return Placement.custom([ranks[stage] for stage in range(self._num_stages)], ranks=self.pp_group_size)

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:  # noqa: A002 - torch's name
        """Read an order from a file: a compute order, which is lowered, or one with its messages (`compute_comms`)."""
        if format == "compute_only":
            super()._load_csv(filename)
            self._prepare_schedule_with_comms(self.pipeline_order)
        elif format == "compute_comms":
            self._prepare_schedule_with_comms(read_csv(filename), format=format)
        else:
            raise NotImplementedError(f"format={format!r} is not implemented")

    def _dump_csv(self, filename: str, format: Format = "compute_comms") -> None:  # noqa: A002 - torch's name
        """Write the order with its messages, or the compute order (`compute_only`)."""
        order = self.pipeline_order if format == "compute_only" else getattr(self, "pipeline_order_with_comms", None)
        if order is None:
            raise AssertionError("Must initialize compute_comms schedule before dump_csv")
        write_csv(cast(Order, order), filename)

    def _simulate(self) -> SpacedOrder:
        """Place the order in steps, as if every action took one."""
        return _simulate_comms_compute(self.pipeline_order_with_comms, self.stage_index_to_group_rank.__getitem__, self._num_stages)

    # Running ----------------------------------------------------------------------------------------------------------

    def _list_actions(self) -> list[_Action]:
        order: DenseOrder | None = getattr(self, "pipeline_order_with_comms", None)
        if order is None:
            raise AssertionError("Must call _prepare_schedule_with_comms() before calling _step_microbatches()")
        if order != self._proved:
            self._prove(order)
            self._proved = {rank: list(row) for rank, row in order.items()}
        if self._has_backward and self._trained is not self._proved:
            self._warn_about_missing_actions(order[self.rank])
            self._trained = self._proved
        self.unshard_ops.clear()
        self.unsharded_stages &= self._deferred_stages
        self._finalized_stages.clear()
        return order[self.rank]

    def _prove(self, order: DenseOrder) -> None:
        """Refuse an order that would hang or lose work; if only this rank's row is known, one that leaves out microbatches. An empty
        order is accepted and does nothing."""
        if not any(order.values()):
            return
        if sorted(order) != list(range(self.pp_group_size)):
            _refuse_missing(order[self.rank], [stage.stage_index for stage in self._stages], self._n_microbatches)
            return
        program = Program(pack_rows(order), self._build_placement(), self._n_microbatches, lowered=True)
        findings = [finding for finding in check(program) if finding.rule not in _OPTIONAL_RULES]
        if findings:
            raise VerifyError(findings, report(program, "channels", findings))

    def _warn_about_missing_actions(self, row: list[_Action]) -> None:
        """Warn about a training step without backwards, unless a custom function may run them, and about an order without REDUCE_GRAD: it
        is allowed, but its gradients are easily overlooked."""
        parts = list(list_parts(row))
        trained = {part.stage_index for part in parts if part.computation_type in (Type.FULL_BACKWARD, Type.BACKWARD_INPUT)}
        if not trained and not self._comp_type_to_function_map:
            warnings.warn(
                "the order has no backward, so a step with a loss function trains nothing: call eval(), or add the backwards",
                stacklevel=5,  # the caller of step
            )
        missing = trained - {part.stage_index for part in parts if part.computation_type == Type.REDUCE_GRAD}
        sharded = [stage for stage in self._stages if stage.stage_index in missing and isinstance(stage.submod, FSDPModule)]
        if missing and (sharded or (self.scale_grads and self._n_microbatches > 1)):
            missing_work = "reduced by FSDP" if sharded else f"divided by {self._n_microbatches} although scale_grads=True"
            warnings.warn(
                f"the order has no REDUCE_GRAD for stage {', '.join(map(str, sorted(missing)))}: its gradients are not {missing_work}. "
                f"Add REDUCE_GRAD after the last backward of each stage{'' if sharded else ', or pass scale_grads=False'}",
                stacklevel=5,  # the caller of step
            )

    def log_action(self, position: int, action: _Action, done: bool) -> None:
        if not done:
            schedule_log.debug("_PipelineScheduleRuntime running time_step %d, action %s", position, action)

    def log_failure(self, position: int, actions: Sequence[_Action], error: Exception) -> None:
        schedule_log.error(
            "_PipelineScheduleRuntime caught exception at step %s when running action %s.  Full Schedule:", position, actions[position]
        )
        schedule_log.error("%s", _format_pipeline_order(cast(Order, self.pipeline_order_with_comms), error_step_number=position))

    def _assert_unsharded(self, stage: Any) -> None:
        """Wait for the parameters of a sharded stage."""
        if not isinstance(stage.submod, FSDPModule):
            return
        index = stage.stage_index
        if index in self.unshard_ops:
            for handle in self.unshard_ops.pop(index):
                handle.wait()
            self.unsharded_stages.add(index)
        if index not in self.unsharded_stages:
            raise AssertionError(f"Attempted to compute on sharded stage_idx={index}")

    def unshard(self, stage: Any) -> None:
        """Start to gather a stage's parameters."""
        index = stage.stage_index
        if index in self._deferred_stages:  # it is unsharded since the last step
            self._deferred_stages.remove(index)
            return
        if index in self.unsharded_stages or index in self.unshard_ops:
            raise AssertionError(f"Unsharding the same stage_idx={index} twice")
        for module in stage.submod.modules():
            if isinstance(module, FSDPModule):
                self.unshard_ops[index].append(cast(UnshardHandle, module.unshard(async_op=True)))

    def reshard(self, stage: Any) -> None:
        """Free a stage's gathered parameters."""
        index = stage.stage_index
        if not self._has_backward and index in self.unshard_ops:  # gathered for a custom function that did not use it
            self._assert_unsharded(stage)
        if index in self._finalized_stages:
            self._finalized_stages.remove(index)
            return
        if self._has_backward and not self._finalize_gradients and self.backward_counter[index] == self._n_microbatches:
            self._deferred_stages.add(index)
            return
        if index not in self.unsharded_stages or index in self.unshard_ops:
            raise AssertionError(f"Resharding stage_idx={index} without unsharding, or before that is done")
        for module in stage.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.unsharded_stages.remove(index)

    def start_reduction(self, stage: Any, waits: bool) -> None:
        super().start_reduction(stage, waits)
        if FINALIZES_BACKWARD and self._finalize_gradients and isinstance(stage.submod, FSDPModule):
            self.unsharded_stages.discard(stage.stage_index)
            self._finalized_stages.add(stage.stage_index)


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
        super().__init__(**{name: value for name, value in locals().items() if name not in ("self", "__class__")})
        self.n_local_stages = len(stages)
        self._generated = self._generate_order()
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        self.pipeline_order = self._add_bubbles_to_actions(self._num_stages)
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _generate_rows(self, name: str, microbatches: int | None = None) -> DenseOrder:
        """Generate the rows of one of our schedules for this pipeline, by default for all microbatches, without idle slots."""
        count = self._n_microbatches if microbatches is None else microbatches
        if count < 1:
            raise AssertionError(f"a schedule needs at least one microbatch, got {count}")  # torch's error type
        return unpack_rows(schedule(name, self.pp_group_size, count, chunks=self.n_local_stages).rows)

    @abstractmethod
    def _generate_order(self) -> SpacedOrder:
        """Generate the order of all ranks; refuse counts that the schedule cannot have."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        """Return the row of a rank, with idle slots."""
        return list(self._generated[rank])

    def _add_bubbles_to_actions(self, num_stages_global: int) -> SpacedOrder:
        """Return the order with further idle slots, if the schedule has any."""
        return self.pipeline_order


def _leave_out(function: Callable[..., Any], *names: str) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=[value for name, value in signature.parameters.items() if name not in names])


class ScheduleLoopedBFS(_GeneratedMulti):
    """The whole batch through each stage of a rank in turn, then back."""

    _splits_backward = False

    def __init__(self, stages: list[Any], n_microbatches: int, loss_fn: LossFunction | None = None, *options: Any, **more: Any) -> None:
        super().__init__(stages, n_microbatches, loss_fn, None, None, *options, **more)

    __init__.__signature__ = _leave_out(_GeneratedMulti.__init__, "args_chunk_spec", "kwargs_chunk_spec")  # type: ignore[attr-defined]

    def _generate_order(self) -> SpacedOrder:
        ranks, forwards = self.pp_group_size, self.n_local_stages * self._n_microbatches
        return {
            rank: _add_idle_slots(row, rank, forwards, 2 * (ranks - 1 - rank)) for rank, row in self._generate_rows("looped-bfs").items()
        }


class _Interleaved(_GeneratedMulti):
    """The interleaved schedules, whose microbatches go in rounds. Take any number of microbatches."""

    def _list_rows(self, name: str, multiply_factor: int) -> Iterator[tuple[int, list[_Action], int]]:
        """Yield each rank with its row and the number of forwards before its first pair: 0 for counts that torch refuses, which
        therefore have no idle slots in torch."""
        ranks, chunks, count = self.pp_group_size, self.n_local_stages, self._n_microbatches
        self.number_of_rounds = max(1, count // ranks)
        self.microbatches_per_round = count // self.number_of_rounds
        for rank, row in self._generate_rows(name).items():
            warm_up = (chunks - 1) * self.microbatches_per_round + multiply_factor * (ranks - 1 - rank)
            yield rank, row, 0 if count % self.number_of_rounds else min(warm_up, count * chunks)


class ScheduleInterleaved1F1B(_Interleaved):
    """One forward and one backward in turn, over several stages per rank."""

    _splits_backward = False

    def _generate_order(self) -> SpacedOrder:
        """Idle until the first microbatch arrives, until the first backward can start, and before each backward of the drain."""
        order: SpacedOrder = {}
        for rank, row, warm_up in self._list_rows("interleaved-1f1b", multiply_factor=2):
            gap = self._num_stages + 2 * (self.pp_group_size - 1 - rank) - warm_up - rank
            drain = len(row) - warm_up
            order[rank] = _add_idle_slots(row[:drain], rank, warm_up, gap if warm_up else 0)
            order[rank] += [slot for action in row[drain:] for slot in (None, action)]
        return order


class ScheduleInterleavedZeroBubble(_Interleaved):
    """The interleaved schedule with a split backward, whose weight half fills the drain."""

    def _generate_order(self) -> SpacedOrder:
        """Idle at the start and after the warm-up; `_add_bubbles_to_actions` adds the slots in which a forward would come too early."""
        rows = self._list_rows("interleaved-zb", multiply_factor=1)
        return {rank: _add_idle_slots(row, rank, warm_up, self.pp_group_size - rank - 1 if warm_up else 0) for rank, row, warm_up in rows}

    def _add_bubbles_to_actions(self, num_stages_global: int) -> SpacedOrder:
        """Return the order with an idle slot wherever a forward would run before its input exists."""
        return add_bubbles(self.pipeline_order, num_stages_global)


class _VShaped(_GeneratedMulti):
    """Two stages per rank: one on the way down the V, one on the way up."""

    def _place_on_v(self) -> None:
        if self.n_local_stages != 2:
            raise ValueError(f"{type(self).__name__} requires exactly 2 stages per rank, but got {self.n_local_stages}.")
        self.num_stages = self._num_stages
        self._set_stage_ranks(generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages, style="v"))


class ScheduleZBVZeroBubble(_VShaped):
    """Zero bubble on a V."""

    def _generate_order(self) -> SpacedOrder:
        """Generate the order for at least `2 * ranks - 1` microbatches, and leave idle the slots of those beyond the real count."""
        self._place_on_v()
        count, order = self._n_microbatches, SpacedOrder()
        for rank, row in self._generate_rows("zbv", max(2 * self.pp_group_size - 1, count)).items():
            order[rank] = [*[None] * rank, *(action if (action.microbatch_index or 0) < count else None for action in row)]
        return order


class ScheduleDualPipeV(_VShaped):
    """A forward of one half of the V together with a backward of the other. Needs at least as many microbatches as stages, as in torch."""

    def _generate_order(self) -> SpacedOrder:
        self._place_on_v()
        if self._n_microbatches < self._num_stages:
            raise ValueError(
                "DualPipeV requires at least as many microbatches as stages, but got "
                f"{self._n_microbatches} microbatches and {self._num_stages} stages."
            )
        return {rank: list(row) for rank, row in self._generate_rows("dualpipe-v").items()}


def _add_idle_slots(row: list[_Action], start: int, position: int, gap: int) -> list[_Action | None]:
    """Add idle slots at the start of a row and `gap` of them after its first `position` actions."""
    return [*[None] * start, *row[:position], *[None] * gap, *row[position:]]


def add_bubbles(order: Order, stages: int) -> SpacedOrder:
    """Add an idle slot wherever a forward or a full backward would run before its input exists, in slots of equal length.

    If every remaining action waits for an input that no action produces, the rest is added unchanged.
    """
    spaced: SpacedOrder = {rank: [] for rank in order}
    position = dict.fromkeys(order, 0)
    done: set[tuple[int, Type, int | None] | None] = {None}
    while unfinished := [rank for rank in order if position[rank] < len(order[rank])]:
        slot = {rank: order[rank][position[rank]] for rank in unfinished}
        running = [rank for rank, action in slot.items() if action is None or _find_producer(action, stages) in done] or unfinished
        for rank in unfinished:
            spaced[rank].append(slot[rank] if rank in running else None)
        for rank in running:
            position[rank] += 1
            action = slot[rank]
            if action is not None:
                done.add((action.stage_index, action.computation_type, action.microbatch_index))
    return spaced


def _find_producer(action: _Action, stages: int) -> tuple[int, Type, int | None] | None:
    """Return the action that produces the input of a forward or a full backward; `None` if there is none."""
    stage, kind, microbatch, _ = action
    if kind == Type.FORWARD:
        return (stage - 1, Type.FORWARD, microbatch) if stage else None
    if kind == Type.FULL_BACKWARD:
        return (stage, Type.FORWARD, microbatch) if stage == stages - 1 else (stage + 1, Type.FULL_BACKWARD, microbatch)
    return None


def _check_torch_compile_compatibility(stages: list[Any], schedule_name: str) -> None:
    """Refuse compiled modules, which the split backward cannot look into."""
    for stage in stages:
        for module in stage.submod.modules() if isinstance(stage.submod, nn.Module) else ():
            if isinstance(module, OptimizedModule):
                raise RuntimeError(
                    f"The {schedule_name} schedule is not supported with stage modules that have used torch.compile. "
                    f"Found OptimizedModule in {type(module).__name__}"
                )


# Any of our schedules -------------------------------------------------------------------------------------------------


def as_torch(table: Table | str, stages: Any, n_microbatches: int | None = None, **options: Any) -> _PipelineScheduleRuntime:
    """Build a torch schedule of any of our schedules or programs, on this rank's stages.

    `table` may also be a schedule's name: the schedule is then generated for the stages' pipeline and needs `n_microbatches`. Options are
    those of torch's schedules (`loss_fn`, `scale_grads`, ...).
    """
    if not isinstance(stages, list | tuple) or not stages:
        raise ScheduleError(f"as_torch takes the list of this rank's stages, got {type(stages).__name__}: write [stage] for one")
    table = _find_table(table, stages[0], n_microbatches)
    runtime = _PipelineScheduleRuntime(stages, table.microbatches, **options)
    order = unpack_rows(table.rows)
    if not table.lowered:
        runtime.pipeline_order = {rank: list(row) for rank, row in order.items()}
    runtime._prepare_schedule_with_comms(order, format="compute_comms" if table.lowered else "compute_only")
    return runtime


def _find_table(table: Table | str, stage: Any, count: int | None) -> Table:
    """Return the schedule or program, checked against the pipeline that the stage belongs to; generate it if it is a name."""
    ranks, total = stage.group_size, stage.num_stages
    if isinstance(table, str):
        if count is None:
            raise ScheduleError(f"{table} can be generated for any number of microbatches: pass n_microbatches=")
        is_open = total > ranks and not {"chunks", "waves"} & parse_name(table)[1].keys()
        table = schedule(table, ranks, count, **({"chunks": total // ranks} if is_open else {}))
    if not isinstance(table, Table):
        raise ScheduleError(f"as_torch takes a Schedule, a Program or the name of a schedule, got {type(table).__name__}")
    refuse_for_torch(table)
    if (table.ranks, table.stages) != (ranks, total):
        raise ScheduleError(
            f"{table!r} has {table.ranks} ranks and {table.stages} stages, but these stages belong to a pipeline of {ranks} ranks and "
            f"{total} stages: generate the schedule for {ranks} ranks, or build the stages with num_stages={table.stages}"
        )
    if count not in (None, table.microbatches):
        raise ScheduleError(f"{table!r} is for {table.microbatches} microbatches, not {count}: leave n_microbatches out")
    return table


def _refuse_missing(row: list[_Action], stages: list[int], count: int) -> None:
    """Refuse a row that does not run every stage once for every microbatch."""
    parts = list(list_parts(row))
    for stage in stages:
        microbatches = sorted(part.microbatch_index or 0 for part in parts if part[:2] == (stage, Type.FORWARD))
        if microbatches != list(range(count)):
            raise ScheduleError(
                f"the row runs stage {stage} forward for microbatches {microbatches}, but a step has {count}: run each of 0 to "
                f"{count - 1} once, or build the schedule with another n_microbatches"
            )


def _refuse_messages(actions: Order) -> None:
    for rank, row in actions.items():
        for position, action in enumerate(row):
            if action is not None and not action.is_compute_op:
                raise ValueError(
                    f"Expected compute-only schedule but found communication action '{action}' at rank {rank}, position {position}. "
                    "Communication actions (e.g. SEND_F, RECV_F, etc.) should not be present when format='compute_only'."
                )


_CLASSES: dict[str, Any] = {name.removeprefix("Schedule"): globals()[name] for name in __all__ if "Schedule" in name}


def get_schedule_class(schedule_name: str) -> Any:
    """Return a schedule's class by its name, in upper or lower case."""
    for name, schedule_class in _CLASSES.items():
        if name.lower() == schedule_name.lower():
            return schedule_class
    raise ValueError(f"Unknown schedule name '{schedule_name}': {nearest(schedule_name.removeprefix('Schedule'), _CLASSES)}")
