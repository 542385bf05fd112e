"""Torch's lowering functions: each applies one of our passes to torch's lists, and leaves its arguments unchanged.

Only `_defer_recv_ops` has no pass behind it. It posts receives late, except before a send to a higher rank: a rule that none of our
receive placements follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np

from penstock.compat.torch.installed import WRITES_WAITS
from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    _Action,
    _ComputationType,
    split_action,
    unpack,
)
from penstock.compat.torch.orders.tables import (
    DenseOrder,
    Order,
    Row,
    StageToRank,
    build_placement,
    build_program,
    build_row_program,
    idle_code,
    pack_rows,
    restore_waits,
    unpack_rows,
    wait_code,
)
from penstock.compat.torch.orders.waits import add_reduction_waits, add_send_waits, limit_sends
from penstock.errors import PassError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Rows
from penstock.passes.base import Pass
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.pass_list import PassList
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard

UnshardLookahead = Literal["full", "auto"] | tuple[int, ...]


@dataclass(frozen=True)
class LoweringOptions:
    """The options of torch's schedules for how a compute order is lowered."""

    max_active_stages: int = 3
    """How many stages of a rank are unsharded at once."""
    unshard_lookahead: UnshardLookahead = "full"
    """How many stages, counted from the one that computes, are unsharded ahead of their use: as many as may be (`full`), fewer on the
    first ranks (`auto`), or one number per rank."""
    defer_reduce_grad_wait: bool = False
    """Wait for a stage's reduced gradients only before the rank's next reduction, or at the end."""
    max_outstanding_sends: int | None = None
    """How many sends a rank has under way at most."""
    defer_pp_recv: bool = False
    """Post receives right before their use."""

    def __post_init__(self) -> None:
        limit: Any = self.max_outstanding_sends
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise ValueError(f"max_outstanding_sends must be a non-negative integer, got {limit!r}")

    @property
    def writes_waits(self) -> bool:
        """Whether the lowered order has waits: in torch it has since 2.15; before, where an option places them."""
        return WRITES_WAITS or self.defer_reduce_grad_wait or self.max_outstanding_sends is not None


def lower_order(order: Order, placement: Placement, options: LoweringOptions) -> DenseOrder:
    """Lower a compute order as `_PipelineScheduleRuntime` does: sharding, reductions, messages, then waits."""
    lookahead = resolve_unshard_lookahead(options.unshard_lookahead, len(order), options.max_active_stages)
    _refuse_many_at_once(order, options.max_active_stages)
    passes: list[Pass] = [ReduceGrad()]
    if set(lookahead) == {options.max_active_stages}:
        rows = pack_rows(order)
        passes = [Shard(lookahead=len(rows.codes), residency=options.max_active_stages), *passes]
    else:
        rows = pack_rows({rank: _unshard_ahead(row, options.max_active_stages, lookahead[rank]) for rank, row in order.items()})
    lowered = unpack_rows(PassList.of(passes).apply(build_program(rows, placement)).rows)
    if options.writes_waits:
        lowered = {rank: drop_idle(add_reduction_waits(row, options.defer_reduce_grad_wait)) for rank, row in lowered.items()}
    lowered = _add_messages(lowered, placement)
    if options.writes_waits:
        lowered = add_send_waits(lowered)
    rank_of_stage = placement.copies[0].__getitem__
    if options.defer_pp_recv:
        lowered = _defer_recv_ops(lowered, rank_of_stage)
    if options.max_outstanding_sends is not None:
        lowered = limit_sends(lowered, rank_of_stage, options.max_outstanding_sends)
    return lowered


def _refuse_many_at_once(order: Order, most: int) -> None:
    for row in order.values():
        for action in row:
            stages = {part.stage_index for part in split_action(action)} if action is not None else set[int]()
            if len(stages) > most:
                raise ValueError(
                    f"Atomic action {action} requires {len(stages)} stages, exceeding max_active_stages={most}: pass "
                    f"max_active_stages={len(stages)} or more"
                )


def resolve_unshard_lookahead(unshard_lookahead: UnshardLookahead, num_pp_ranks: int, max_active_stages: int) -> tuple[int, ...]:
    """Return how many stages each rank unshards ahead. With `auto`, a rank that has longer to wait for its first input unshards more."""
    if not _is_count(max_active_stages):
        raise ValueError(f"max_active_stages must be a positive integer, got {max_active_stages!r}")
    if unshard_lookahead == "full":
        return (max_active_stages,) * num_pp_ranks
    if unshard_lookahead == "auto":
        return tuple(min(rank + 2, max_active_stages) for rank in range(num_pp_ranks))
    if not isinstance(unshard_lookahead, tuple):
        raise ValueError(f"unshard_lookahead must be 'full', 'auto', or a tuple of {num_pp_ranks} integers, got {unshard_lookahead!r}")
    if len(unshard_lookahead) != num_pp_ranks:
        raise ValueError(f"unshard_lookahead tuple length must equal the pipeline degree ({num_pp_ranks}), got {len(unshard_lookahead)}")
    for rank, lookahead in enumerate(unshard_lookahead):
        if not _is_count(lookahead) or lookahead > max_active_stages:
            raise ValueError(
                f"unshard_lookahead[{rank}] must be an integer within [1, max_active_stages={max_active_stages}], got {lookahead!r}"
            )
    return unshard_lookahead


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _unshard_ahead(row: Row, residency: int, lookahead: int) -> list[_Action]:
    """Add UNSHARD for the next `lookahead` stages of a row, and RESHARD for stages that are not among the next `residency`."""
    actions = drop_idle(row)
    sharded: list[_Action] = []
    unsharded: dict[int, None] = {}
    for position, action in enumerate(actions):
        upcoming = _list_next_stages(actions, position, residency)
        for stage in [stage for stage in unsharded if stage not in upcoming]:
            del unsharded[stage]
            sharded.append(_Action(stage, RESHARD))
        for stage in _list_next_stages(actions, position, lookahead):
            if stage not in unsharded:
                unsharded[stage] = None
                sharded.append(_Action(stage, UNSHARD))
        sharded.append(action)
    return sharded + [_Action(stage, RESHARD) for stage in unsharded]


def _list_next_stages(actions: list[_Action], position: int, count: int) -> list[int]:
    """List the next stages that compute, at least `count` of them if there are; those of an overlapped action together."""
    stages: dict[int, None] = {}
    for action in islice(actions, position, None):
        stages.update(dict.fromkeys(part.stage_index for part in split_action(action)))
        if len(stages) >= count:
            break
    return list(stages)


def drop_idle(row: Row) -> list[_Action]:
    return [action for action in row if action is not None]


def _add_reduce_grad(actions: Row, n_microbatches: int, defer_reduce_grad_wait: bool = False) -> list[_Action]:
    """Add REDUCE_GRAD right after a stage's last weight gradient, if the row has all `n_microbatches` of them; drop idle slots.

    Where torch writes waits into its orders, or if they are deferred, WAIT_REDUCE_GRAD is added too.
    """
    program = build_row_program(actions)
    rows = program.rows
    backwards = np.bincount(rows.stage[rows.is_kind(Kind.B, Kind.W)], minlength=program.stages)
    reduced = ReduceGrad().apply(program).rows
    kept = ~reduced.is_kind(Kind.REDUCE_GRAD) | (backwards[reduced.stage] >= n_microbatches)
    row = list(unpack(reduced.keep(kept).codes.tolist()))
    return drop_idle(add_reduction_waits(row, defer_reduce_grad_wait)) if WRITES_WAITS or defer_reduce_grad_wait else row


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Return whether an action of this kind produces gradients of weights."""
    return action_type in (BACKWARD_WEIGHT, FULL_BACKWARD)


def _add_unshard_reshard(compute_actions: Row, max_active_stages: int = 3, *, unshard_lookahead: int | None = None) -> list[_Action]:
    """Add UNSHARD as early as `max_active_stages` allow, and RESHARD when a stage is no longer needed or must make room.

    With `unshard_lookahead`, only so many of the next stages are unsharded ahead of their use.
    """
    if unshard_lookahead is not None and unshard_lookahead != max_active_stages:
        _refuse_many_at_once({0: compute_actions}, max_active_stages)
        return _unshard_ahead(compute_actions, max_active_stages, unshard_lookahead)
    at_once = max((len({part.stage_index for part in split_action(action)}) for action in compute_actions if action is not None), default=1)
    shard = Shard(lookahead=len(compute_actions), residency=max(max_active_stages, at_once))
    return list(unpack(shard.apply(build_row_program(compute_actions)).row(0).tolist()))


def _merge_bw(compute_actions: Row) -> list[_Action]:
    """Merge an I and the W right behind it, of the same stage and microbatch, into one B."""
    return list(unpack(MergeBackward().apply(build_row_program(compute_actions)).row(0).tolist()))


def _add_send_recv(compute_actions: Order, stage_to_rank: StageToRank, num_stages: int) -> DenseOrder:
    """Add each send behind the action whose result it sends, and its receive in the same turn when ranks take turns.

    An idle slot counts as a turn.
    """
    placement = build_placement(stage_to_rank, num_stages, max(compute_actions, default=-1) + 1)
    try:
        order = _add_messages(compute_actions, placement)
    except PassError as error:
        raise AssertionError(f"Malformed compute schedule, can't schedule sends/recvs: {error}") from error
    return {rank: order[rank] for rank in compute_actions}


def _add_messages(order: Order, placement: Placement) -> DenseOrder:
    """Add sends and receives by our pass; idle slots, which it drops, and waits count as turns."""
    stages = placement.stages
    idle, wait = idle_code(stages), wait_code(stages)
    rows = pack_rows(order, idle, wait)
    rows = Rows.join([rows.row(rank) if rank < len(rows) else np.zeros(0, dtype=np.int64) for rank in range(placement.ranks)])
    lowered = SendReceive("paired").apply(build_program(rows, placement)).rows
    return restore_waits(unpack_rows(lowered.keep(lowered.codes != idle)), order, stages)


_RECEIVE_FOR = {FORWARD: RECV_F, FULL_BACKWARD: RECV_B, BACKWARD_INPUT: RECV_B}


def _defer_recv_ops(actions: Order, stage_to_rank: StageToRank) -> DenseOrder:
    """Move each receive to right before its use; but before a send to a higher rank, put all receives from that rank first."""
    return {rank: _defer_receives(rank, row, stage_to_rank) for rank, row in actions.items()}


def _defer_receives(rank: int, row: Row, stage_to_rank: StageToRank) -> list[_Action]:
    deferred: list[_Action] = []
    source_of: dict[_Action, int] = {}
    """Receives not placed yet, and the rank that each receives from."""
    for action in row:
        if action is None:
            continue
        kind = action.computation_type
        if kind in (RECV_F, RECV_B):
            source_of[action] = stage_to_rank(action.stage_index + (-1 if kind == RECV_F else 1))
            continue
        if kind in (SEND_F, SEND_B):
            target = stage_to_rank(action.stage_index + (1 if kind == SEND_F else -1))
            due = [receive for receive, source in source_of.items() if source == target] if rank < target else []
        else:
            due = [receive for receive in _list_receives(action) if receive in source_of]
        for receive in due:
            del source_of[receive]
        deferred += [*due, action]
    if source_of:
        raise AssertionError(f"Malformed input schedule on rank {rank}: no action uses the values received by {list(source_of)}")
    return deferred


def _list_receives(action: _Action) -> list[_Action]:
    """List the receives that an action waits for if its inputs come from other ranks."""
    kinds = ((part, _RECEIVE_FOR.get(part.computation_type)) for part in split_action(action))
    return [_Action(part.stage_index, kind, part.microbatch_index) for part, kind in kinds if kind is not None]
