"""Lower a schedule to a program by the usual passes."""

from __future__ import annotations

import numpy as np

from penstock.ir.action import Action, unpack_row
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.passes.base import Pass
from penstock.passes.buffers import Buffers
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.pass_list import PassList
from penstock.passes.receive import Placing
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard


def lowering(
    *,
    fsdp: bool = False,
    merge_backward: bool = False,
    receive: Placing = "paired",
    lookahead: int = 1,
    residency: int | None = None,
) -> PassList:
    """The passes that `lower` runs."""
    passes: list[Pass] = [MergeBackward()] if merge_backward else []
    passes += [Shard(lookahead, residency)] if fsdp else []
    return PassList.of([*passes, ReduceGrad(), SendReceive(receive), Buffers()])


def lower(
    schedule: Schedule,
    *,
    fsdp: bool = False,
    merge_backward: bool = False,
    receive: Placing = "paired",
    lookahead: int = 1,
    residency: int | None = None,
) -> Program:
    """Return a proved program with sends, receives, gradient reduction and buffer counts; `fsdp` adds sharding.

    `merge_backward` joins each I with a W next to it; `receive` places the receives: `paired`, `just-in-time` or a depth. With
    `fsdp`, a stage is gathered `lookahead` compute actions ahead of its first use, and at most `residency` of a rank's are at once.
    """
    passes = lowering(fsdp=fsdp, merge_backward=merge_backward, receive=receive, lookahead=lookahead, residency=residency)
    return passes.apply(schedule)


def lower_rank(
    schedule: Schedule, rank: int, *, fsdp: bool = False, merge_backward: bool = False, receive: Placing = "just-in-time"
) -> tuple[Action, ...]:
    """One rank's own actions, equal to `lower(...)[rank]`, without building the ranks it has no messages with.

    Only `paired` receives, whose places depend on every rank, take the whole pipeline's time.
    """
    if receive == "paired":
        return lower(schedule, fsdp=fsdp, merge_backward=merge_backward, receive=receive)[rank]
    program = _around(schedule, rank)
    for step in lowering(fsdp=fsdp, merge_backward=merge_backward, receive=receive):
        if isinstance(step, SendReceive):
            program = step.place(program)
        elif not isinstance(step, Buffers):
            program = step.apply(program)
    return unpack_row(program.row(rank))


def _around(schedule: Schedule, rank: int) -> Program:
    """The rank and those it has messages with; the other rows empty."""
    own = set(schedule.placement.stages_of(rank))
    near = own | {stage for edge in schedule.graph.edges if own & set(edge) for stage in edge}
    ranks = {copy[stage] for copy in schedule.placement.copies for stage in near}
    empty = np.zeros(0, dtype=np.int64)
    rows = Rows.join([schedule.row(r) if r in ranks else empty for r in range(schedule.ranks)])
    return Program(rows, schedule.placement, schedule.microbatches, graph=schedule.graph, name=schedule.name, lowered=False)
