"""Torch's lowering functions: each applies one of our passes to torch's lists, and leaves its arguments unchanged.

Only `_defer_recv_ops` has no pass behind it. It posts receives late, except before a send to a higher rank: a rule that none of our
receive placements follows.
"""

from __future__ import annotations

import numpy as np

from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
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
    unpack_rows,
)
from penstock.errors import PassError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Rows
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.pass_list import PassList
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard

_ACTIVE_STAGES = 3
"""How many stages of a rank are unsharded at once, as in torch."""


def lower_order(order: Order, placement: Placement) -> DenseOrder:
    """Lower a compute order as `_PipelineScheduleRuntime` does: sharding, reductions, then messages."""
    rows = pack_rows(order)
    at_once = max((len(split_action(action)) for row in order.values() for action in row if action is not None), default=1)
    shard = Shard(lookahead=len(rows.codes), residency=max(_ACTIVE_STAGES, at_once))
    return unpack_rows(PassList.of([shard, ReduceGrad(), SendReceive("paired")]).apply(build_program(rows, placement)).rows)


def _add_reduce_grad(actions: Row, n_microbatches: int) -> list[_Action]:
    """Add REDUCE_GRAD right after a stage's last weight gradient, if the row has all `n_microbatches` of them; drop idle slots."""
    program = build_row_program(actions)
    rows = program.rows
    backwards = np.bincount(rows.stage[rows.is_kind(Kind.B, Kind.W)], minlength=program.stages)
    reduced = ReduceGrad().apply(program).rows
    kept = ~reduced.is_kind(Kind.REDUCE_GRAD) | (backwards[reduced.stage] >= n_microbatches)
    return list(unpack(reduced.keep(kept).codes.tolist()))


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Return whether an action of this kind produces gradients of weights."""
    return action_type in (BACKWARD_WEIGHT, FULL_BACKWARD)


def _add_unshard_reshard(compute_actions: Row, max_active_stages: int = 3) -> list[_Action]:
    """Add UNSHARD as early as `max_active_stages` allow, and RESHARD when a stage is no longer needed or must make room."""
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
    idle = idle_code(num_stages)
    rows = pack_rows(compute_actions, idle)
    placement = build_placement(stage_to_rank, num_stages, len(rows))
    rows = Rows.join([rows.row(rank) if rank < len(rows) else np.zeros(0, dtype=np.int64) for rank in range(placement.ranks)])
    try:
        lowered = SendReceive("paired").apply(build_program(rows, placement)).rows
    except PassError as error:
        raise AssertionError(f"Malformed compute schedule, can't schedule sends/recvs: {error}") from error
    order = unpack_rows(lowered.keep(lowered.codes != idle))
    return {rank: order[rank] for rank in compute_actions}


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
