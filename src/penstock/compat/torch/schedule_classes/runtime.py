"""Schedules whose order has its messages written out: `pipeline_order_with_comms`, lowered by our passes or set by a subclass."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol, cast

from torch.distributed.fsdp import FSDPModule, UnshardHandle

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.installed import FINALIZES_BACKWARD
from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    COMPUTE_TYPES,
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    WAIT_REDUCE_GRAD,
    _Action,
    _ComputationType,
    split_action,
)
from penstock.compat.torch.orders.lowering import LoweringOptions, lower_order, resolve_unshard_lookahead
from penstock.compat.torch.orders.tables import (
    DenseOrder,
    Order,
    SpacedOrder,
    _format_pipeline_order,
    pack_rows,
    read_csv,
    unpack_rows,
    write_csv,
)
from penstock.compat.torch.orders.validation import _simulate_comms_compute
from penstock.compat.torch.orders.waits import (
    add_send_waits,
    has_send_waits,
    limit_sends,
    refuse_wait_cycles,
    validate_reduction_waits,
    validate_send_waits,
)
from penstock.compat.torch.schedule_classes.multi import Format, PipelineScheduleMulti
from penstock.compat.torch.schedule_classes.runner import _PipelineContext
from penstock.errors import ScheduleError, VerifyError
from penstock.ir.formats.csv_form import refuse_for_torch
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.schedules.registry import schedule
from penstock.verifier.finding import report
from penstock.verifier.verify import check

_BACKWARDS = frozenset((FULL_BACKWARD, BACKWARD_INPUT))
_OPTIONAL_RULES = ("sharding", "reduction")
"""Rules that an order written by hand may break: only parts of a model may be sharded, and gradients may be reduced elsewhere."""


class _CustomFunctionProtocol(Protocol):
    def __call__(self, action: _Action, ctx: _PipelineContext) -> None: ...


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """Runs `pipeline_order_with_comms`, which is loaded from a file, lowered from a compute order, or set by a subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = [option.name for option in fields(LoweringOptions)]
        self._lowering = LoweringOptions(**{name: kwargs.pop(name) for name in names if name in kwargs})
        super().__init__(*args, **kwargs)
        self.unshard_ops: dict[int, list[UnshardHandle]] = defaultdict(list)
        self._proved: DenseOrder | None = None
        self._trained: DenseOrder | None = None
        """The proved order of the last training step, which was searched for missing actions."""
        self._finalized_stages: set[int] = set()
        """Stages that FSDP has resharded in this step when it reduced their gradients."""

    def register_custom_function(self, computation_type: _ComputationType, custom_function: _CustomFunctionProtocol) -> None:
        """Run `custom_function(action, context)` in place of the actions of a kind."""
        if computation_type not in COMPUTE_TYPES | {UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD}:
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
            self.pipeline_order_with_comms = self._take_lowered(actions)
        elif format == "compute_only":
            _refuse_messages(actions)
            if self._lowering.defer_reduce_grad_wait:
                self._validate_deferred_gradient_reduction()
            self.pipeline_order_with_comms = lower_order(actions, self._build_placement(), self._lowering)
        else:
            raise NotImplementedError(f"format={format!r} is not implemented")

    _load_actions = _prepare_schedule_with_comms

    def _take_lowered(self, actions: Order) -> DenseOrder:
        """Check an order that has its messages. Waits may be left out: a step waits for everything at its end."""
        order = {rank: [_refuse_idle(action) for action in row] for rank, row in actions.items()}
        lookahead = resolve_unshard_lookahead(self._lowering.unshard_lookahead, len(order), self._lowering.max_active_stages)
        if set(lookahead) != {self._lowering.max_active_stages}:
            raise ValueError(
                "unshard_lookahead cannot be applied to an already-lowered compute_comms schedule: load the compute-only order instead"
            )
        validate_reduction_waits(order)
        limit, rank_of_stage = self._lowering.max_outstanding_sends, self.stage_index_to_group_rank.__getitem__
        if has_send_waits(order):
            validate_send_waits(order)
            refuse_wait_cycles(order, rank_of_stage)
        elif limit is not None:
            order = add_send_waits(order)
        return order if limit is None else limit_sends(order, rank_of_stage, limit)

    def _validate_deferred_gradient_reduction(self) -> None:
        """Refuse to defer the wait for reductions of FSDP stages that share their streams and buffers for communication."""
        owner: dict[int, int] = {}
        for stage in self._stages:
            if isinstance(stage.submod, FSDPModule):
                context = id(stage.submod._get_fsdp_state()._comm_ctx)
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
            self._warn_about_missing_reductions(order[self.rank])
            self._warn_about_missing_backwards(order[self.rank])
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

    def _warn_about_missing_reductions(self, row: list[_Action]) -> None:
        """Warn about an order without REDUCE_GRAD: it is allowed, but its gradients are easily overlooked."""
        parts = [part for action in row for part in split_action(action)]
        trained = {part.stage_index for part in parts if part.computation_type in _BACKWARDS}
        missing = trained - {part.stage_index for part in parts if part.computation_type == REDUCE_GRAD}
        sharded = [stage for stage in self._stages if stage.stage_index in missing and isinstance(stage.submod, FSDPModule)]
        if not missing or not (sharded or (self.scale_grads and self._n_microbatches > 1)):
            return
        missing_work = "reduced by FSDP" if sharded else f"divided by {self._n_microbatches} although scale_grads=True"
        warnings.warn(
            f"the order has no REDUCE_GRAD for stage {', '.join(map(str, sorted(missing)))}: its gradients are not {missing_work}. Add "
            f"REDUCE_GRAD after the last backward of each stage{'' if sharded else ', or pass scale_grads=False'}",
            stacklevel=5,  # the caller of step
        )

    def _warn_about_missing_backwards(self, row: list[_Action]) -> None:
        """Warn about a training step without backwards, unless a custom function may run them itself."""
        kinds = {part.computation_type for action in row for part in split_action(action)}
        if not kinds & _BACKWARDS and not self._comp_type_to_function_map:
            warnings.warn(
                "the order has no backward, so a step with a loss function trains nothing: call eval(), or add the backwards",
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
        table = schedule(table, ranks, count, **({"chunks": total // ranks} if total > ranks else {}))
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
    parts = [part for action in row for part in split_action(action)]
    for stage in stages:
        microbatches = sorted(part.microbatch_index or 0 for part in parts if part[:2] == (stage, FORWARD))
        if microbatches != list(range(count)):
            raise ScheduleError(
                f"the row runs stage {stage} forward for microbatches {microbatches}, but a step has {count}: run each of 0 to "
                f"{count - 1} once, or build the schedule with another n_microbatches"
            )


def _refuse_idle(action: _Action | None) -> _Action:
    if action is None:
        raise AssertionError("Expected action to be not None: an order with its messages has no idle slots")
    return action


def _refuse_messages(actions: Order) -> None:
    for rank, row in actions.items():
        for position, action in enumerate(row):
            if action is not None and not action.is_compute_op:
                raise ValueError(
                    f"Expected compute-only schedule but found communication action '{action}' at rank {rank}, position {position}. "
                    "Communication actions (e.g. SEND_F, RECV_F, etc.) should not be present when format='compute_only'."
                )
