"""Torch's lowering functions, each one of our passes on torch's lists.

They leave what they are given as it is. `_defer_recv_ops` alone has no pass of ours behind it: it posts receives late except
where a rank is about to send to a higher one, a rule of its own that no other placement of receives follows.
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
    parts_of,
    unpack,
)
from penstock.compat.torch.orders.tables import (
    Actions,
    Order,
    Row,
    StageToRank,
    idle_code,
    pack_row,
    pack_rows,
    placed_by,
    row_program,
    start_program,
    unpack_rows,
)
from penstock.errors import PassError
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard


def _row_as_program(row: Row) -> Program:
    return row_program(Rows.join([pack_row(row)]))


def _actions_of(program: Program) -> list[_Action]:
    return list(unpack(program.row(0).tolist()))


def _add_reduce_grad(actions: Row, n_microbatches: int) -> list[_Action]:
    """REDUCE_GRAD right after a stage's last weight gradient, once all `n_microbatches` have theirs; idle slots go."""
    program = _row_as_program(actions)
    rows = program.rows
    made = np.bincount(rows.stage[rows.is_kind(Kind.B, Kind.W)], minlength=program.stages)
    reduced = ReduceGrad().apply(program).rows
    whole = ~reduced.is_kind(Kind.REDUCE_GRAD) | (made[reduced.stage] >= n_microbatches)
    return list(unpack(reduced.keep(whole).codes.tolist()))


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Whether an action of this kind makes gradients of weights."""
    return action_type in (BACKWARD_WEIGHT, FULL_BACKWARD)


def _add_unshard_reshard(compute_actions: Row, max_active_stages: int = 3) -> list[_Action]:
    """UNSHARD as early as `max_active_stages` allow, RESHARD when a stage is not wanted any more or must make room."""
    program = _row_as_program(compute_actions)
    at_once = max((len({part.stage_index for part in parts_of(action)}) for action in compute_actions if action is not None), default=1)
    shard = Shard(lookahead=len(compute_actions), residency=max(max_active_stages, at_once))
    return _actions_of(shard.apply(program))


def _merge_bw(compute_actions: Row) -> list[_Action]:
    """An I and the W right behind it, of the same stage and microbatch, as one B."""
    return _actions_of(MergeBackward().apply(_row_as_program(compute_actions)))


def _add_send_recv(compute_actions: Order, stage_to_rank: StageToRank, num_stages: int) -> Actions:
    """Sends behind what they send, and each receive at the moment of its send when ranks take turns; an idle slot is a turn."""
    idle = idle_code(num_stages)
    rows = pack_rows(compute_actions, idle)
    placement = placed_by(stage_to_rank, num_stages, len(rows))
    rows = Rows.join([rows.row(rank) if rank < len(rows) else np.zeros(0, dtype=np.int64) for rank in range(placement.ranks)])
    try:
        lowered = SendReceive("paired").apply(start_program(rows, placement)).rows
    except PassError as error:
        raise AssertionError(f"Malformed compute schedule, can't schedule sends/recvs: {error}") from error
    order = unpack_rows(lowered.keep(lowered.codes != idle))
    return {rank: order[rank] for rank in compute_actions}


_USES = {FORWARD: RECV_F, FULL_BACKWARD: RECV_B, BACKWARD_INPUT: RECV_B}


def _defer_recv_ops(actions: Order, stage_to_rank: StageToRank) -> Actions:
    """Each receive right before its use; but before a send to a higher rank, all receives from that rank come first."""
    return {rank: _deferred(rank, row, stage_to_rank) for rank, row in actions.items()}


def _deferred(rank: int, row: Row, stage_to_rank: StageToRank) -> list[_Action]:
    made: list[_Action] = []
    waiting: dict[_Action, int] = {}
    """Receives to come, each with the rank it is from."""
    for action in row:
        if action is None:
            continue
        kind = action.computation_type
        if kind in (RECV_F, RECV_B):
            waiting[action] = stage_to_rank(action.stage_index + (-1 if kind == RECV_F else 1))
            continue
        if kind in (SEND_F, SEND_B):
            target = stage_to_rank(action.stage_index + (1 if kind == SEND_F else -1))
            due = [receive for receive, source in waiting.items() if source == target] if rank < target else []
        else:
            due = [receive for receive in _received(action) if receive in waiting]
        for receive in due:
            del waiting[receive]
        made += [*due, action]
    if waiting:
        raise AssertionError(f"Malformed input schedule on rank {rank}: nothing uses what is received by {list(waiting)}")
    return made


def _received(action: _Action) -> list[_Action]:
    """The receives that an action uses, if its inputs come from other ranks."""
    found = ((part, _USES.get(part.computation_type)) for part in parts_of(action))
    return [_Action(part.stage_index, kind, part.microbatch_index) for part, kind in found if kind is not None]
