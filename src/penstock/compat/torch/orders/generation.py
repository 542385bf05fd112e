"""The orders of torch's schedules: ours, with the idle slots that torch writes between the actions."""

from __future__ import annotations

from functools import lru_cache

from penstock.compat.torch.orders.actions import _Action, unpack
from penstock.compat.torch.orders.tables import Actions, Spaced, unpack_rows
from penstock.ir.program import Program
from penstock.passes.lower import lower
from penstock.passes.reduce_grad import ReduceGrad
from penstock.schedules.registry import schedule


def single_order(name: str, ranks: int, microbatches: int) -> Spaced:
    """One stage a rank, without idle slots, with the reductions."""
    made = ReduceGrad().apply(Program.start(schedule(name, ranks, microbatches)))
    return {rank: list(row) for rank, row in unpack_rows(made.rows).items()}


@lru_cache(maxsize=8)
def single_program(name: str, ranks: int, microbatches: int) -> Actions:
    """The same with messages."""
    return unpack_rows(lower(schedule(name, ranks, microbatches)).rows)


def _rows(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[_Action]]:
    if microbatches < 1:
        raise AssertionError(f"a schedule needs at least one microbatch, got {microbatches}")  # torch's type
    made = schedule(name, ranks, microbatches, chunks=chunks)
    return [list(unpack(made.row(rank).tolist())) for rank in range(ranks)]


def rounds_of(ranks: int, microbatches: int) -> tuple[int, int]:
    """How many rounds torch's interleaved schedules take, and how many microbatches a round."""
    rounds = max(1, microbatches // ranks)
    return rounds, microbatches // rounds


def looped_bfs_order(ranks: int, chunks: int, microbatches: int) -> Spaced:
    order: Spaced = {}
    for rank, row in enumerate(_rows("looped-bfs", ranks, chunks, microbatches)):
        order[rank] = _with_gap(row, rank, chunks * microbatches, 2 * (ranks - 1 - rank))
    return order


def _warm_up(rank: int, ranks: int, chunks: int, microbatches: int, hop: int) -> int | None:
    """How many forwards come before the first backward's; None for counts that torch does not take, which have no slots of torch's."""
    rounds, each = rounds_of(ranks, microbatches)
    return None if microbatches % rounds else min((chunks - 1) * each + hop * (ranks - 1 - rank), chunks * microbatches)


def interleaved_1f1b_order(ranks: int, chunks: int, microbatches: int) -> Spaced:
    """Idle until the first microbatch comes, until the first backward comes, and before each backward of the drain."""
    order: Spaced = {}
    for rank, row in enumerate(_rows("interleaved-1f1b", ranks, chunks, microbatches)):
        warm_up = _warm_up(rank, ranks, chunks, microbatches, hop=2) or 0
        gap = chunks * ranks + 2 * (ranks - 1 - rank) - warm_up - rank
        drain = len(row) - warm_up
        order[rank] = _with_gap(row[:drain], rank, warm_up, gap if warm_up else 0)
        order[rank] += [slot for action in row[drain:] for slot in (None, action)]
    return order


def interleaved_zb_order(ranks: int, chunks: int, microbatches: int) -> Spaced:
    """Idle as in the interleaved order; `add_bubbles` adds the slots in which a forward would be too early."""
    spaced: Spaced = {}
    for rank, row in enumerate(_rows("interleaved-zb", ranks, chunks, microbatches)):
        warm_up = _warm_up(rank, ranks, chunks, microbatches, hop=1) or 0
        spaced[rank] = _with_gap(row, rank, warm_up, ranks - rank - 1 if warm_up else 0)
    return spaced


def zbv_order(ranks: int, microbatches: int) -> Spaced:
    """Built for at least 2p-1 microbatches; the slots of those that there are not are idle."""
    order: Spaced = {}
    for rank, row in enumerate(_rows("zbv", ranks, 2, max(2 * ranks - 1, microbatches))):
        order[rank] = _with_gap([], rank, 0, 0) + [action if (action.microbatch_index or 0) < microbatches else None for action in row]
    return order


def dualpipe_v_order(ranks: int, microbatches: int) -> Spaced:
    return {rank: list(row) for rank, row in enumerate(_rows("dualpipe-v", ranks, 2, microbatches))}


def _with_gap(row: list[_Action], before: int, at: int, gap: int) -> list[_Action | None]:
    """The row with idle slots at its start and after its first actions."""
    return [*[None] * before, *row[:at], *[None] * gap, *row[at:]]
