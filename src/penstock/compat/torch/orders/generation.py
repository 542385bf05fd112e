"""The orders of torch's schedules: ours, with the idle slots that torch writes between the actions.

`_get_1f1b_rank_ops` is torch's helper for programs that build rows themselves; no order here needs it.
"""

# ruff: noqa: PLR0917 - torch's own signatures

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache

from penstock.compat.torch.installed import WRITES_WAITS
from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    _Action,
    _ComputationType,
)
from penstock.compat.torch.orders.tables import DenseOrder, Order, SpacedOrder, unpack_rows
from penstock.compat.torch.orders.waits import add_reduction_waits
from penstock.ir.program import Program
from penstock.passes.lower import lower
from penstock.passes.reduce_grad import ReduceGrad
from penstock.schedules.registry import schedule


def generate_single_order(name: str, ranks: int, microbatches: int) -> SpacedOrder:
    """Generate an order of one stage per rank: without idle slots and messages, with REDUCE_GRAD."""
    program = ReduceGrad().apply(Program.start(schedule(name, ranks, microbatches)))
    order: SpacedOrder = {rank: list(row) for rank, row in unpack_rows(program.rows).items()}
    return {rank: add_reduction_waits(row, defer=False) for rank, row in order.items()} if WRITES_WAITS else order


@lru_cache(maxsize=8)
def generate_single_program(name: str, ranks: int, microbatches: int) -> DenseOrder:
    """Generate the same order with its messages."""
    return unpack_rows(lower(schedule(name, ranks, microbatches)).rows)


def _generate_rows(name: str, ranks: int, chunks: int, microbatches: int) -> DenseOrder:
    if microbatches < 1:
        raise AssertionError(f"a schedule needs at least one microbatch, got {microbatches}")  # torch's error type
    return unpack_rows(schedule(name, ranks, microbatches, chunks=chunks).rows)


def count_rounds(ranks: int, microbatches: int) -> tuple[int, int]:
    """Return the number of rounds of torch's interleaved schedules and the number of microbatches per round."""
    rounds = max(1, microbatches // ranks)
    return rounds, microbatches // rounds


def generate_looped_bfs(ranks: int, chunks: int, microbatches: int) -> SpacedOrder:
    order: SpacedOrder = {}
    for rank, row in _generate_rows("looped-bfs", ranks, chunks, microbatches).items():
        order[rank] = _add_idle_slots(row, rank, chunks * microbatches, 2 * (ranks - 1 - rank))
    return order


def generate_interleaved_1f1b(ranks: int, chunks: int, microbatches: int) -> SpacedOrder:
    """Idle until the first microbatch arrives, until the first backward can start, and before each backward of the drain."""
    order: SpacedOrder = {}
    for rank, row in _generate_rows("interleaved-1f1b", ranks, chunks, microbatches).items():
        warm_up = _count_warm_up(rank, ranks, chunks, microbatches, multiply_factor=2)
        gap = chunks * ranks + 2 * (ranks - 1 - rank) - warm_up - rank
        drain = len(row) - warm_up
        order[rank] = _add_idle_slots(row[:drain], rank, warm_up, gap if warm_up else 0)
        order[rank] += [slot for action in row[drain:] for slot in (None, action)]
    return order


def generate_interleaved_zb(ranks: int, chunks: int, microbatches: int) -> SpacedOrder:
    """Idle at the start and after the warm-up; `add_bubbles` adds the slots in which a forward would come too early."""
    order: SpacedOrder = {}
    for rank, row in _generate_rows("interleaved-zb", ranks, chunks, microbatches).items():
        warm_up = _count_warm_up(rank, ranks, chunks, microbatches, multiply_factor=1)
        order[rank] = _add_idle_slots(row, rank, warm_up, ranks - rank - 1 if warm_up else 0)
    return order


def generate_zbv(ranks: int, microbatches: int) -> SpacedOrder:
    """Generate ZBV for at least `2 * ranks - 1` microbatches, and leave idle the slots of microbatches beyond the real count."""
    order: SpacedOrder = {}
    for rank, row in _generate_rows("zbv", ranks, 2, max(2 * ranks - 1, microbatches)).items():
        order[rank] = [*[None] * rank, *(action if (action.microbatch_index or 0) < microbatches else None for action in row)]
    return order


def generate_dualpipe_v(ranks: int, microbatches: int) -> SpacedOrder:
    return {rank: list(row) for rank, row in _generate_rows("dualpipe-v", ranks, 2, microbatches).items()}


def _count_warm_up(rank: int, ranks: int, chunks: int, microbatches: int, multiply_factor: int) -> int:
    """Count the forwards before the first pair; 0 for counts that torch refuses, which therefore have no idle slots in torch."""
    rounds, microbatches_per_round = count_rounds(ranks, microbatches)
    if microbatches % rounds:
        return 0
    return _get_warmup_ops(rank, chunks, microbatches_per_round, ranks, microbatches, multiply_factor)


def _add_idle_slots(row: list[_Action], start: int, position: int, gap: int) -> list[_Action | None]:
    """Add idle slots at the start of a row and `gap` of them after its first `position` actions."""
    return [*[None] * start, *row[:position], *[None] * gap, *row[position:]]


# Rows built by programs -----------------------------------------------------------------------------------------------


def _get_warmup_ops(
    rank: int, n_local_stages: int, microbatches_per_round: int, pp_group_size: int, n_microbatches: int, multiply_factor: int = 2
) -> int:
    """Count the forwards of a rank before its first pair of a forward and a backward."""
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
    """Build one rank's row: warm-up, pairs of a forward and a backward, drain. Each stage takes its microbatches in order.

    The two functions map a position in the row, counted over all three phases, to a stage. With `enable_zero_bubble` the backwards are
    those for the input. From position `num_1f1b_microbatches` of the second phase on, each is followed by the oldest pending backward
    for the weights.
    """
    counts: Counter[tuple[int, _ComputationType]] = Counter()

    def act(stage: int, kind: _ComputationType) -> _Action:
        counts[stage, kind] += 1
        return _Action(stage, kind, counts[stage, kind] - 1)

    # Idle until the first microbatch arrives, and after the warm-up until the first backward can start.
    first_backward = n_local_stages * pp_group_size + 2 * (pp_group_size - 1 - rank)
    idle = pp_group_size - rank - 1 if enable_zero_bubble else first_backward - (warmup_ops + rank)
    row: list[_Action | None] = [None] * rank
    row += [act(forward_stage_index(position), FORWARD) for position in range(warmup_ops)]
    row += [None] * (idle if warmup_ops else 0)

    pending: deque[int] = deque()  # stages whose backward for the weights is still to come
    for position in range(warmup_ops, warmup_ops + fwd_bwd_ops + cooldown_ops):
        if position < warmup_ops + fwd_bwd_ops:
            row.append(act(forward_stage_index(position), FORWARD))
        elif not enable_zero_bubble:
            row.append(None)
        stage = backward_stage_index(position)
        row.append(act(stage, BACKWARD_INPUT if enable_zero_bubble else FULL_BACKWARD))
        if enable_zero_bubble:
            pending.append(stage)
            if position - warmup_ops >= num_1f1b_microbatches:
                row.append(act(pending.popleft(), BACKWARD_WEIGHT))
    row += [act(stage, BACKWARD_WEIGHT) for stage in pending]
    return row


def add_bubbles(order: Order, stages: int) -> SpacedOrder:
    """Add an idle slot wherever a forward or a full backward would run before its input exists, in slots of equal length.

    If every remaining action waits for an input that no action produces, the rest is added unchanged.
    """
    spaced: SpacedOrder = {rank: [] for rank in order}
    position = dict.fromkeys(order, 0)
    done: set[tuple[int, _ComputationType, int | None] | None] = {None}
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


def _find_producer(action: _Action, stages: int) -> tuple[int, _ComputationType, int | None] | None:
    """Return the action that produces the input of a forward or a full backward; `None` if there is none."""
    stage, kind, microbatch, _ = action
    if kind == FORWARD:
        return (stage - 1, FORWARD, microbatch) if stage else None
    if kind == FULL_BACKWARD:
        return (stage, FORWARD, microbatch) if stage == stages - 1 else (stage + 1, FULL_BACKWARD, microbatch)
    return None
