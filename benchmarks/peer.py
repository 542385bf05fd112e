"""What torch.distributed.pipelining does before a step: its own generation, lowering, validation and simulation of an order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_send_recv, _add_unshard_reshard, _ComputationType

import penstock as ps

Orders = dict[int, list[Any]]

MULTI: dict[str, Any] = {
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipe-v": pipelining.ScheduleDualPipeV,
}
"""Our names, and torch's classes of the same order with two stages a rank."""


def whole(name: str, ranks: int, microbatches: int) -> Callable[[], Any]:
    """Its constructor: generates, validates and lowers the orders of all ranks."""
    return _constructor(MULTI[name], ranks, microbatches)


def generation(name: str, ranks: int, microbatches: int) -> Callable[[], Any]:
    """The same without validation and lowering."""
    nothing = {"_prepare_schedule_with_comms": lambda *_, **__: None}
    return _constructor(type("OrderAlone", (MULTI[name],), nothing), ranks, microbatches)


def _constructor(kind: Any, ranks: int, microbatches: int) -> Callable[[], Any]:
    stage = mock.create_autospec(PipelineStage, instance=True)  # the constructors read no more of a stage than this
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod, stage.has_backward = 0, ranks, 2 * ranks, None, True
    return lambda: kind([stage, stage], microbatches, loss_fn=lambda output, target: output)


def one_f_one_b(ranks: int, microbatches: int) -> Orders:
    """The order of compute actions of 1F1B in its own actions, as its runtime wants it."""
    kinds = _ComputationType
    rows = {}
    for rank in range(ranks):
        warm_up = min(ranks - rank - 1, microbatches)
        order = [_Action(rank, kinds.FORWARD, m) for m in range(warm_up)]
        for m in range(microbatches - warm_up):
            order += [_Action(rank, kinds.FORWARD, warm_up + m), _Action(rank, kinds.FULL_BACKWARD, m)]
        order += [_Action(rank, kinds.FULL_BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]
        rows[rank] = order
    return rows


def lower(rows: Orders, ranks: int, microbatches: int) -> Any:
    """Its own passes in the order in which its runtime calls them."""
    lowered = {rank: _add_reduce_grad(_add_unshard_reshard(row), microbatches) for rank, row in rows.items()}
    return _add_send_recv(lowered, lambda stage: stage, ranks)


def validate(rows: Orders, ranks: int, microbatches: int) -> Any:
    return schedules._validate_schedule(rows, ranks, ranks, microbatches)


def simulate(rows: Orders, ranks: int) -> Any:
    """Its simulation, which ends in an error if an order hangs."""
    return schedules._simulate_comms_compute(rows, lambda stage: stage, ranks)


def actions_of(program: ps.Program) -> Orders:
    """A program of ours in torch's actions."""
    return {rank: [_Action.from_str(str(action)) for action in program[rank]] for rank in range(program.ranks)}
