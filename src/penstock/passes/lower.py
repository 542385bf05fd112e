"""Lower a schedule to a program by the usual passes."""

from __future__ import annotations

import numpy as np

from penstock.ir.action import Action
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import check_table
from penstock.passes.base import Pass
from penstock.passes.buffers import Buffers
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.offload import Offload
from penstock.passes.pass_list import PassList
from penstock.passes.receive import Placing
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard
from penstock.passes.wait_send import WaitSend

Offloaded = Offload | int | tuple[int, ...] | None
"""The activations that move to host memory: the percentage of each rank's, one percentage per rank, or the pass with all its options."""


def lowering(
    *,
    fsdp: bool = False,
    merge_backward: bool = False,
    offload: Offloaded = None,
    receive: Placing = "paired",
    lookahead: int = 1,
    residency: int | None = None,
    waits: bool = False,
    max_outstanding_sends: int | None = None,
    defer_reduce_grad_wait: bool = False,
    reduce_at_end: bool = False,
) -> PassList:
    """The passes that `lower` runs."""
    passes: list[Pass] = [MergeBackward()] if merge_backward else []
    passes += [] if offload is None else [offload if isinstance(offload, Offload) else Offload(offload)]
    passes += [Shard(lookahead, residency)] if fsdp else []
    if not (waits or defer_reduce_grad_wait or max_outstanding_sends is not None):
        return PassList.of([*passes, ReduceGrad(at_end=reduce_at_end), SendReceive(receive), Buffers()])
    reduce_grad = ReduceGrad("deferred" if defer_reduce_grad_wait else "now", reduce_at_end)
    return PassList.of([*passes, reduce_grad, SendReceive(receive), WaitSend(max_outstanding_sends), Buffers()])


def lower(
    schedule: Schedule,
    *,
    fsdp: bool = False,
    merge_backward: bool = False,
    offload: Offloaded = None,
    receive: Placing = "paired",
    lookahead: int = 1,
    residency: int | None = None,
    waits: bool = False,
    max_outstanding_sends: int | None = None,
    defer_reduce_grad_wait: bool = False,
    reduce_at_end: bool = False,
) -> Program:
    """Return a proved program with sends, receives, gradient reduction and buffer counts; `fsdp` adds sharding.

    `merge_backward` joins each I with a W next to it; `receive` places the receives: `paired`, `just-in-time` or a depth. With
    `fsdp`, a stage is gathered `lookahead` compute actions ahead of its first use, and at most `residency` of a rank's are at once.

    `offload` moves activations to host memory until their backward: the percentage of each rank's activations that move, one percentage
    per rank, or an `Offload` pass. Stages whose activations live longest go first.

    `waits` adds the waits for sends and for reductions that PyTorch 2.15 writes into its programs. Two options change and imply them: no
    rank has more than `max_outstanding_sends` sends that it has not waited for, and `defer_reduce_grad_wait` waits for a reduction only
    before the rank's next one, or at the end. With `reduce_at_end` a rank's gradients are reduced after all its other actions.
    """
    check_table(schedule, "lower")
    passes = lowering(
        fsdp=fsdp,
        merge_backward=merge_backward,
        offload=offload,
        receive=receive,
        lookahead=lookahead,
        residency=residency,
        waits=waits,
        max_outstanding_sends=max_outstanding_sends,
        defer_reduce_grad_wait=defer_reduce_grad_wait,
        reduce_at_end=reduce_at_end,
    )
    return passes.apply(schedule)


def lower_rank(
    schedule: Schedule, rank: int, *, fsdp: bool = False, merge_backward: bool = False, receive: Placing = "just-in-time"
) -> tuple[Action, ...]:
    """One rank's own actions, equal to `lower(...)[rank]`, without building the ranks it has no messages with.

    Only `paired` receives, whose places depend on every rank, take the whole pipeline's time.
    """
    check_table(schedule, "lower_rank")
    if receive == "paired":
        return lower(schedule, fsdp=fsdp, merge_backward=merge_backward, receive=receive)[rank]
    program = _keep_around(schedule, rank)
    for step in lowering(fsdp=fsdp, merge_backward=merge_backward, receive=receive):
        if isinstance(step, SendReceive):
            program = step.place(program)
        elif not isinstance(step, Buffers):
            program = step.apply(program)
    return program[rank]


def _keep_around(schedule: Schedule, rank: int) -> Program:
    """The rank and those it has messages with; the other rows empty."""
    own = set(schedule.placement.stages_of(rank))
    near = own | {stage for edge in schedule.graph.edges if own & set(edge) for stage in edge}
    ranks = {copy[stage] for copy in schedule.placement.copies for stage in near}
    empty = np.zeros(0, dtype=np.int64)
    rows = Rows.join([schedule.row(r) if r in ranks else empty for r in range(schedule.ranks)])
    return Program(
        rows, schedule.placement, schedule.microbatches, graph=schedule.graph, name=schedule.name, lowered=False, slices=schedule.slices
    )
