"""Rows of interleaved schedules for programs that build their own: torch's helpers by their names. Our own schedules come from the zoo."""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    _Action,
    _ComputationType,
)
from penstock.compat.torch.orders.tables import Order, Spaced


def _get_warmup_ops(
    rank: int, n_local_stages: int, microbatches_per_round: int, pp_group_size: int, n_microbatches: int, multiply_factor: int = 2
) -> int:
    """How many forwards of a rank come before its first pair of a forward and a backward."""
    hops = pp_group_size - 1 - rank
    return min((n_local_stages - 1) * microbatches_per_round + multiply_factor * hops, n_microbatches * n_local_stages)


def _get_1f1b_rank_ops(
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Callable[[int], int],
    backward_stage_index: Callable[[int], int],
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> list[_Action | None]:
    """One rank's row: warm-up, pairs of a forward and a backward, drain. Each stage takes its microbatches in order.

    The functions give the stage of a position in the row, counted over all three phases. With `enable_zero_bubble` the backwards are
    for the inputs, and from the position `num_1f1b_microbatches` of the second phase on each is followed by the oldest one for weights.
    """
    seen: Counter[tuple[int, _ComputationType]] = Counter()

    def act(stage: int, kind: _ComputationType) -> _Action:
        seen[stage, kind] += 1
        return _Action(stage, kind, seen[stage, kind] - 1)

    # Idle until the first microbatch comes, and after the warm-up until the first backward comes.
    first_backward = n_local_stages * pp_group_size + 2 * (pp_group_size - 1 - rank)
    idle = pp_group_size - rank - 1 if enable_zero_bubble else first_backward - (warmup_ops + rank)
    row: list[_Action | None] = [None] * rank
    row += [act(forward_stage_index(position), FORWARD) for position in range(warmup_ops)]
    row += [None] * (idle if warmup_ops else 0)

    waiting: deque[int] = deque()  # stages whose backward for the weights is still to come
    for position in range(warmup_ops, warmup_ops + fwd_bwd_ops + cooldown_ops):
        if position < warmup_ops + fwd_bwd_ops:
            row.append(act(forward_stage_index(position), FORWARD))
        elif not enable_zero_bubble:
            row.append(None)
        stage = backward_stage_index(position)
        row.append(act(stage, BACKWARD_INPUT if enable_zero_bubble else FULL_BACKWARD))
        if enable_zero_bubble:
            waiting.append(stage)
            if position - warmup_ops >= num_1f1b_microbatches:
                row.append(act(waiting.popleft(), BACKWARD_WEIGHT))
    row += [act(stage, BACKWARD_WEIGHT) for stage in waiting]
    return row


def add_bubbles(order: Order, stages: int) -> Spaced:
    """The order with an idle slot wherever a forward or a whole backward would run before its input is made, in slots of equal length.

    Where all that is left waits for something that never comes, it is put in as it stands.
    """
    spaced: Spaced = {rank: [] for rank in order}
    at = dict.fromkeys(order, 0)
    done: set[tuple[int, _ComputationType, int | None] | None] = {None}
    while waiting := [rank for rank in order if at[rank] < len(order[rank])]:
        slot = {rank: order[rank][at[rank]] for rank in waiting}
        running = [rank for rank, action in slot.items() if action is None or _input_of(action, stages) in done] or waiting
        for rank in waiting:
            spaced[rank].append(slot[rank] if rank in running else None)
        for rank in running:
            at[rank] += 1
            action = slot[rank]
            if action is not None:
                done.add((action.stage_index, action.computation_type, action.microbatch_index))
    return spaced


def _input_of(action: _Action, stages: int) -> tuple[int, _ComputationType, int | None] | None:
    """What makes the input of a forward or a whole backward."""
    stage, kind, microbatch, _ = action
    if kind == FORWARD:
        return (stage - 1, FORWARD, microbatch) if stage else None
    if kind == FULL_BACKWARD:
        return (stage, FORWARD, microbatch) if stage == stages - 1 else (stage + 1, FULL_BACKWARD, microbatch)
    return None
