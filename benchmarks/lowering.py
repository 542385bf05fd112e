"""Generation and full lowering (shard, reduce, send-receive) of every rank, against torch.distributed.pipelining in the same run."""

from __future__ import annotations

from benchmarks.measure import Row, best_of
from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_send_recv, _add_unshard_reshard, _ComputationType

import penstock as ps

PASSES = ps.PassList.parse("shard,reduce-grad,send-receive")
SIZES = ((8, 64, 5.0), (64, 512, 20.0), (16, 4096, 20.0))


def _ours(ranks: int, microbatches: int) -> ps.Program:
    return PASSES.apply(ps.schedule("1f1b", ranks, microbatches))


def _torch(ranks: int, microbatches: int) -> object:
    """The peer's own functions in the order in which its runtime calls them, on the same order of compute actions."""
    kinds = _ComputationType
    rows = {}
    for rank in range(ranks):
        warm_up = min(ranks - rank - 1, microbatches)
        order = [_Action(rank, kinds.FORWARD, m) for m in range(warm_up)]
        for m in range(microbatches - warm_up):
            order += [_Action(rank, kinds.FORWARD, warm_up + m), _Action(rank, kinds.FULL_BACKWARD, m)]
        order += [_Action(rank, kinds.FULL_BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]
        rows[rank] = _add_reduce_grad(_add_unshard_reshard(order), microbatches)
    return _add_send_recv(rows, lambda stage: stage, ranks)


def run() -> list[Row]:
    rows = []
    for ranks, microbatches, wanted in SIZES:
        times = 3 if microbatches < 4096 else 1
        ours, program = best_of(times, lambda: _ours(ranks, microbatches))  # noqa: B023 - called at once
        theirs, _ = best_of(times, lambda: _torch(ranks, microbatches))  # noqa: B023
        actions = len(program.rows.codes)
        rows.append(
            Row(f"generate and lower 1f1b, {ranks} ranks x {microbatches} microbatches ({actions:,} actions)", ours, theirs, wanted)
        )
    return rows
