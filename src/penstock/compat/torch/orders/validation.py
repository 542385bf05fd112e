"""Torch's validator and dry run, by our verifier and our step walk.

`_validate_schedule` proves everything that the verifier proves of a schedule, which is more than torch checks: microbatches beyond
the count, repeated actions and orders in which ranks wait for each other are refused too. It raises torch's error type. The
message begins with torch's own words if torch would refuse the order as well; the verifier's report follows.
"""

from __future__ import annotations

import json

import numpy as np

from penstock.compat.torch.orders.actions import COMPUTE_TYPES, WAIT_SEND_F, WAITS, _Action, split_action
from penstock.compat.torch.orders.tables import (
    Order,
    SpacedOrder,
    StageToRank,
    _format_pipeline_order,
    build_placement,
    build_program,
    pack_rows,
    restore_waits,
    unpack_rows,
    wait_code,
)
from penstock.ir import codes
from penstock.ir.dependencies import Needs
from penstock.ir.formats.csv_form import write_whole
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.ir.steps import walk
from penstock.verifier.finding import report
from penstock.verifier.verify import check

_RUNNING = {Kind.B: ("Full Backward", "Forward"), Kind.I: ("Backward Input", "Forward"), Kind.W: ("Backward Weight", "Backward Input")}


def _validate_schedule(actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """Prove an order and return the rank of each stage; an `AssertionError` lists everything that is wrong."""
    if len(actions) != pp_group_size:
        raise AssertionError(f"Schedule has incorrect number of ranks - expected {pp_group_size}, actual {len(actions)}")
    for rank in range(pp_group_size):
        if rank not in actions:
            raise AssertionError(f"Schedule is missing actions for rank {rank}")
    _refuse_foreign_objects(actions)
    rank_of_stage = find_stage_ranks(actions)
    placement = Placement.custom([rank_of_stage.get(stage, 0) for stage in range(num_stages)], ranks=pp_group_size)
    rows = pack_rows(actions)
    rows = rows.keep(rows.is_kind(*COMPUTE))
    separate = Rows(rows.codes & ~codes.JOIN, rows.offsets)  # torch runs the parts of an overlap one after the other
    schedule = Schedule.from_rows(separate, placement, num_microbatches)
    findings, torch_message = check(schedule), _describe_torch_error(schedule, actions)
    if findings or torch_message:
        verifier_report = f"{report(schedule, 'channels', findings)}\n\n" if findings else ""
        raise AssertionError(f"{torch_message}{verifier_report}{_format_pipeline_order(actions)}")
    return rank_of_stage


def _refuse_foreign_objects(actions: Order) -> None:
    for rank, row in actions.items():
        for step, action in enumerate(row):
            if action is not None and not hasattr(action, "computation_type"):
                raise AssertionError(f"Rank {rank}, step {step}: Got an invalid action: {action}, expected instance of _Action")


def find_stage_ranks(actions: Order) -> dict[int, int]:
    """Find the rank that runs each stage; a stage on two ranks is refused."""
    rank_of_stage: dict[int, int] = {}
    for rank, row in actions.items():
        for step, action in enumerate(row):
            for part in (action,) if action is None or action.sub_actions is None else action.sub_actions:
                if part is not None and rank_of_stage.setdefault(part.stage_index, rank) != rank:
                    both = f"rank {rank} and rank {rank_of_stage[part.stage_index]}"
                    raise AssertionError(f"Rank {rank}, step {step}: Stage {part.stage_index} is assigned to both {both}")
    return rank_of_stage


def _describe_torch_error(schedule: Schedule, actions: Order) -> str:
    """Return the message that torch would raise; empty if torch would accept the order."""
    rows, (before, after), missing = schedule.rows, schedule.links.local, schedule.links.missing
    late = rows.group[before] >= rows.group[after]
    same_stage = rows.stage[before] == rows.stage[after]
    wrong = np.append(after[late & same_stage], missing.after[codes.stage_of(missing.code) == rows.stage[missing.after]])
    if len(wrong):
        entry = int(wrong.min())
        running, first = _RUNNING[Kind(int(rows.kind[entry]))]
        return (
            f"Rank {rows.rank[entry]}, step {_number_steps(actions)[entry]}: Running {running} for stage {rows.stage[entry]}, "
            f"microbatch {rows.microbatch[entry]} without first running {first}\n\n"
        )
    return _describe_wrong_counts(schedule)


def _number_steps(actions: Order) -> list[int]:
    """Return the step of each compute action, counted as torch does, with idle slots."""
    steps = [(step, action) for rank in range(len(actions)) for step, action in enumerate(actions[rank]) if action is not None]
    return [step for step, action in steps for part in split_action(action) if part.is_compute_op]


def _describe_wrong_counts(schedule: Schedule) -> str:
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


def _simulate_comms_compute(pipeline_order: Order, stage_to_rank: StageToRank, num_stages: int) -> SpacedOrder:
    """Place each action in the first step in which it can run, if every action takes one step; a receive may share the step of its send."""
    rows = pack_rows(pipeline_order, wait=wait_code(num_stages))
    program = build_program(rows, build_placement(stage_to_rank, num_stages, len(rows)), lowered=True)
    local, messages = program.links.local, program.links.messages
    waits = Needs(*(np.concatenate(pair) for pair in zip(local, messages, strict=True)))
    lag = np.append(np.ones(len(local.before)), np.zeros(len(messages.before))).astype(np.int64)
    sends = _list_awaited_receives(pipeline_order, rows, num_stages)
    waits = Needs(np.append(waits.before, sends[:, 0]), np.append(waits.after, sends[:, 1]))
    walked = walk(rows, waits, np.append(lag, np.zeros(len(sends), dtype=np.int64)))
    reason = _describe_missing_input(program)
    if reason or not walked.complete:
        raise ValueError(f"Schedule is not progressing{reason}:\n{_format_pipeline_order(pipeline_order)}")
    bounds = rows.group_offsets.tolist()
    actions = restore_waits(unpack_rows(rows), pipeline_order, num_stages)
    return {rank: _spread(actions[rank], walked.step[bounds[rank] : bounds[rank + 1]].tolist()) for rank in sorted(pipeline_order)}


def _list_awaited_receives(order: Order, rows: Rows, stages: int) -> Ints:
    """List pairs of entries: a receive, and the wait for its send, which lasts until the receive is posted."""
    entry_of = {code: entry for entry, code in enumerate(rows.codes.tolist())}
    places = iter(np.flatnonzero(rows.codes == wait_code(stages)).tolist())
    pairs: list[tuple[int, int]] = []
    for rank in sorted(order):
        for action in order[rank]:
            if action is None or action.computation_type not in WAITS:
                continue
            place = next(places)
            if action.microbatch_index is not None:
                kind, distance = (Kind.RECV_F, 1) if action.computation_type == WAIT_SEND_F else (Kind.RECV_B, -1)
                receive = entry_of.get(int(codes.pack(action.stage_index + distance, int(kind), action.microbatch_index)))
                if receive is None:
                    raise ValueError(f"Schedule is not progressing: nobody receives what {action} on rank {rank} waits for")
                pairs.append((receive, place))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _describe_missing_input(program: Program) -> str:
    """Describe the first action that waits for a message, or for a value behind a message, that never comes; empty if none does."""
    rows, missing = program.rows, program.links.missing
    same_stage = (codes.stage_of(missing.code) == rows.stage[missing.after]) & rows.is_kind(*COMPUTE)[missing.after]
    compute = codes.kind_of(missing.code) <= Kind.W  # torch does not ask for a stage's own forward either
    waiting = missing.after[~(same_stage & compute)]
    receives = np.flatnonzero(rows.is_kind(Kind.RECV_F, Kind.RECV_B))
    waiting = np.append(waiting, receives[~np.isin(receives, program.links.messages.after)])
    if not len(waiting):
        return ""
    entry = int(waiting.min())
    return f": the input of {rows.part_at(entry)} on rank {rows.rank[entry]} never arrives"


def _spread(actions: list[_Action], steps: list[int]) -> list[_Action | None]:
    """Place actions at their steps, with idle slots between them."""
    spaced: list[_Action | None] = []
    for action, step in zip(actions, steps, strict=True):
        spaced += [None] * (step - len(spaced))
        spaced.append(action)
    return spaced


def _dump_chrometrace(schedule: Order, filename: str) -> None:
    """Write an order as a trace for chrome://tracing or Perfetto: one process per rank, one microsecond per step."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.computation_type in COMPUTE_TYPES else "communication",
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
