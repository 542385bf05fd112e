"""Torch's validator and dry run: our verifier and our walk over torch's orders.

`_validate_schedule` proves all that the verifier proves of a schedule, which is more than torch looks at: microbatches beyond the
count, repeated actions and orders in which ranks wait for each other are refused too. Its error is torch's and begins with
torch's words where torch has any, then comes the verifier's report.
"""

from __future__ import annotations

import json

import numpy as np

from penstock.compat.torch.orders.actions import _COMPUTE, _Action, parts_of
from penstock.compat.torch.orders.tables import (
    Order,
    Spaced,
    StageToRank,
    _format_pipeline_order,
    pack_rows,
    placed_by,
    start_program,
    unpack_rows,
)
from penstock.ir import codes
from penstock.ir.csv_form import write_whole
from penstock.ir.dependencies import Needs
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.steps import walk
from penstock.verifier.report import report
from penstock.verifier.verify import check

_RUNNING = {Kind.B: ("Full Backward", "Forward"), Kind.I: ("Backward Input", "Forward"), Kind.W: ("Backward Weight", "Backward Input")}


def _validate_schedule(actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """The rank of each stage, once the order is proved; `AssertionError` with everything that is wrong where it cannot be."""
    if len(actions) != pp_group_size:
        raise AssertionError(f"Schedule has incorrect number of ranks - expected {pp_group_size}, actual {len(actions)}")
    for rank in range(pp_group_size):
        if rank not in actions:
            raise AssertionError(f"Schedule is missing actions for rank {rank}")
    _refuse_strangers(actions)
    where = _homes(actions)
    placement = Placement.custom([where.get(stage, 0) for stage in range(num_stages)], ranks=pp_group_size)
    rows = pack_rows(actions)
    rows = rows.keep(rows.is_kind(*COMPUTE))
    apart = Rows(rows.codes & ~codes.JOIN, rows.offsets)  # the parts of an overlap run one after the other in torch
    schedule = Schedule.from_rows(apart, placement, num_microbatches)
    findings, words = check(schedule), _torch_words(schedule, actions)
    if findings or words:
        found = f"{report(schedule, 'channels', findings)}\n\n" if findings else ""
        raise AssertionError(f"{words}{found}{_format_pipeline_order(actions)}")
    return where


def _refuse_strangers(actions: Order) -> None:
    for rank, row in actions.items():
        for step, action in enumerate(row):
            if action is not None and not hasattr(action, "computation_type"):
                raise AssertionError(f"Rank {rank}, step {step}: Got an invalid action: {action}, expected instance of _Action")


def _homes(actions: Order) -> dict[int, int]:
    """The rank that each stage's actions are on."""
    where: dict[int, int] = {}
    for rank, row in actions.items():
        for step, action in enumerate(row):
            for part in (action,) if action is None or action.sub_actions is None else action.sub_actions:
                if part is not None and where.setdefault(part.stage_index, rank) != rank:
                    both = f"rank {rank} and rank {where[part.stage_index]}"
                    raise AssertionError(f"Rank {rank}, step {step}: Stage {part.stage_index} is assigned to both {both}")
    return where


def _torch_words(schedule: Schedule, actions: Order) -> str:
    """What torch would say first, if it would say anything."""
    rows, (before, after), missing = schedule.rows, schedule.links.local, schedule.links.missing
    late = rows.group[before] >= rows.group[after]
    own = rows.stage[before] == rows.stage[after]
    wrong = np.append(after[late & own], missing.after[codes.stage_of(missing.code) == rows.stage[missing.after]])
    if len(wrong):
        entry = int(wrong.min())
        what, first = _RUNNING[Kind(int(rows.kind[entry]))]
        return (
            f"Rank {rows.rank[entry]}, step {_steps(actions)[entry]}: Running {what} for stage {rows.stage[entry]}, "
            f"microbatch {rows.microbatch[entry]} without first running {first}\n\n"
        )
    return _torch_counts(schedule)


def _steps(actions: Order) -> list[int]:
    """The step of each compute action as torch counts them, idle slots and all."""
    placed = [(step, action) for rank in range(len(actions)) for step, action in enumerate(actions[rank]) if action is not None]
    return [step for step, action in placed for part in parts_of(action) if part.is_compute_op]


def _torch_counts(schedule: Schedule) -> str:
    rows, count = schedule.rows, schedule.microbatches
    for stage in range(schedule.stages):
        f, b, i, w = (len(np.unique(rows.microbatch[rows.is_kind(kind) & (rows.stage == stage)])) for kind in COMPUTE)
        if f != count:
            return f"Got {f} F microbatches for stage {stage}, expected {count}\n\n"
        if i != w:
            return f"Invalid backward microbatches for stage {stage}: I and W must have equal counts, but got I={i}, W={w}\n\n"
        if b + i != count:
            return f"Invalid backward microbatches for stage {stage}: expected {count} total backwards, but got B={b}, I={i}, W={w}\n\n"
    return ""


# Dry run --------------------------------------------------------------------------------------------------------------


def _simulate_comms_compute(pipeline_order: Order, stage_to_rank: StageToRank, num_stages: int) -> Spaced:
    """Each action in the first step in which it can run if every action takes one; a receive may run in the step of its send."""
    rows = pack_rows(pipeline_order)
    program = start_program(rows, placed_by(stage_to_rank, num_stages, len(rows)), lowered=True)
    local, messages = program.links.local, program.links.messages
    waits = Needs(*(np.concatenate(pair) for pair in zip(local, messages, strict=True)))
    lag = np.append(np.ones(len(local.before)), np.zeros(len(messages.before))).astype(np.int64)
    walked = walk(rows, waits, lag)
    stuck = _unsent(program)
    if stuck or not walked.complete:
        raise ValueError(f"Schedule is not progressing{stuck}:\n{_format_pipeline_order(pipeline_order)}")
    bounds = rows.group_offsets.tolist()
    made = unpack_rows(rows)
    return {rank: _spread(made[rank], walked.step[bounds[rank] : bounds[rank + 1]].tolist()) for rank in sorted(pipeline_order)}


def _unsent(program: Program) -> str:
    """The first action that waits for what never comes: a message, or what a message would carry."""
    rows, missing = program.rows, program.links.missing
    own = (codes.stage_of(missing.code) == rows.stage[missing.after]) & rows.is_kind(*COMPUTE)[missing.after]
    alone = codes.kind_of(missing.code) <= Kind.W  # a stage's own forward, which torch does not ask for either
    found = missing.after[~(own & alone)]
    receives = np.flatnonzero(rows.is_kind(Kind.RECV_F, Kind.RECV_B))
    found = np.append(found, receives[~np.isin(receives, program.links.messages.after)])
    if not len(found):
        return ""
    entry = int(found.min())
    return f": {rows.part_at(entry)} on rank {rows.rank[entry]} waits for what never comes"


def _spread(actions: list[_Action], steps: list[int]) -> list[_Action | None]:
    spaced: list[_Action | None] = []
    for action, step in zip(actions, steps, strict=True):
        spaced += [None] * (step - len(spaced))
        spaced.append(action)
    return spaced


def _dump_chrometrace(schedule: Order, filename: str) -> None:
    """The order as a trace for chrome://tracing or Perfetto: a process a rank, a step a microsecond."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.computation_type in _COMPUTE else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": step,
            "dur": 1,
        }
        for rank in sorted(schedule)
        for step, action in enumerate(schedule[rank])
        if action is not None
    ]
    write_whole(filename, json.dumps({"traceEvents": events}))
