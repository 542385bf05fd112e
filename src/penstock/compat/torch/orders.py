"""Torch's orders: for each rank a list of `_Action`s, `None` for an idle slot; their text forms, and what is done with them.

All of the work is done on the packed tables of `penstock.ir`, to and from which torch's actions and lists are translated here. Torch's
lowering functions each apply one of our passes, and leave their arguments unchanged. Two have no pass behind them. `_defer_recv_ops` posts
receives late, except before a send to a higher rank: a rule that none of our receive placements follows. Where a rank could wait for one
of several sends, `limit_sends` chooses as torch does, which is another one than our `wait-send{outstanding=N}` would choose. Waits that do
not fit are refused in torch's words.

`_validate_schedule` proves everything that the verifier proves of a schedule, which is more than torch checks: microbatches beyond
the count, repeated actions and orders in which ranks wait for each other are refused too. It raises torch's error type. The
message begins with torch's own words if torch would refuse the order as well; the verifier's report follows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.installed import WRITES_WAITS
from penstock.errors import ActionError, PassError
from penstock.ir import codes
from penstock.ir.action import Action, unpack_row
from penstock.ir.dependencies import Needs
from penstock.ir.formats.csv_form import split_slices, write_whole
from penstock.ir.kind import COMPUTE, COPIES, RECEIVES, SEND_WAITS, SENDS, SPREAD, Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.ir.steps import walk
from penstock.passes.base import Pass
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.pass_list import PassList
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard
from penstock.passes.wait_send import WaitSend
from penstock.verifier.finding import report
from penstock.verifier.verify import check


class _ComputationType(str, Enum):  # noqa: UP042 - torch's base classes: its members print by name
    """The kind of an action, under torch's names. The value is its text form and the name of our `Kind`."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        try:
            return _ComputationType(action)
        except ValueError as error:
            raise RuntimeError(f"Invalid computation type {action}") from error


Type = _ComputationType
_TYPES = {kind: _ComputationType(kind.name) for kind in Kind if kind not in (*COPIES, *SPREAD)}
_KINDS = {kind.name: int(kind) for kind in _TYPES}
COMPUTE_TYPES = frozenset(_TYPES[kind] for kind in _TYPES if kind.is_compute)
_WITHOUT_MICROBATCH = frozenset(_TYPES[kind] for kind in _TYPES if not kind.has_microbatch)


class _Action(NamedTuple):
    """One thing that one rank does: a tuple as in torch, equal to torch's field by field."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[_Action, ...] | None = None

    def __str__(self) -> str:
        return self.__repr__()

    def __repr__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(repr, self.sub_actions))}){self.computation_type.value}"
        microbatch = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{microbatch}"

    @property
    def is_compute_op(self) -> bool:
        return self.computation_type in COMPUTE_TYPES

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """Parse the text that `repr` prints; blank text gives `None`. Text behind an action, as in `1F0junk`, is refused.

        Only the number of slices is passed over, which Penstock's files have behind their first action (`0F0 slices=4`), as torch does:
        slices count as microbatches in such a file.
        """
        if not action_string.strip():
            return None
        try:
            return _convert(Action.parse(split_slices(action_string)[0]))
        except ActionError as error:
            raise RuntimeError(f"Invalid action string: {error}") from error


@lru_cache
def _get_profiler_function_name(action: _Action) -> str:
    return f"PP:{action}"


def _convert(action: Action) -> _Action:
    """Convert one of our actions to torch's; refuse what torch does not have.

    That is copies to host memory, the actions of a spread vocabulary, slices, and edges that skip stages.
    """
    if action.kind in COPIES:
        raise ActionError(f"{action} moves activations between device and host, which torch's orders cannot express")
    if action.kind in SPREAD:
        raise ActionError(f"{action} is part of a vocabulary that is spread over the ranks, which torch's orders cannot express")
    if action.slice is not None:
        raise ActionError(
            f"{action} is for a slice of a microbatch, which torch's orders cannot express: give one number for both, "
            "microbatch x slices + slice, as files of Schedule.to_csv do"
        )
    if action.peer is not None:
        raise ActionError(f"{action} crosses an edge that skips stages, which torch's orders cannot express")
    parts = tuple(map(_convert, action.sub_actions)) or None
    return _Action(action.stage, _TYPES[action.kind], action.microbatch, parts)


def split_action(action: _Action) -> tuple[_Action, ...]:
    """Return the sub-actions of an action, or the action itself if it has none."""
    return (action,) if action.sub_actions is None else tuple(action.sub_actions)


def list_parts(row: Sequence[_Action | None]) -> Iterator[_Action]:
    """Yield the actions of a row, overlapped ones part by part, without idle slots."""
    return (part for action in row if action is not None for part in split_action(action))


def pack(action: _Action) -> tuple[int, ...]:
    """Pack an action into its codes, one per sub-action."""
    if action.sub_actions is None:
        return (_pack_one(action),)
    return codes.overlap(*map(_pack_one, action.sub_actions))


def _pack_one(action: _Action) -> int:
    stage, kind, microbatch, _ = action
    without_microbatch = kind in _WITHOUT_MICROBATCH
    if stage < 0 or (microbatch is None) != without_microbatch or kind == _ComputationType.OVERLAP_F_B:
        needs = "no microbatch" if without_microbatch else "a microbatch"
        raise RuntimeError(f"{action} is not a valid action: it needs a stage of at least 0 and {needs}")
    return int(codes.pack(stage, _KINDS[kind.value], microbatch or 0))


def unpack(row: Ints) -> list[_Action]:
    """Unpack a row of codes into actions; joined codes become one OVERLAP_F_B."""
    return list(map(_convert, unpack_row(row)))


# Orders ---------------------------------------------------------------------------------------------------------------

Row = Sequence[_Action | None]
Order = Mapping[int, Row]
"""An order as an argument: for each rank its row, with or without idle slots."""
DenseOrder = dict[int, list[_Action]]
"""An order without idle slots."""
SpacedOrder = dict[int, list[_Action | None]]
"""An order with idle slots."""
StageToRank = Callable[[int], int]


def pack_row(row: Row, idle: int | None = None) -> Ints:
    """Pack one rank's row. Idle slots are left out, or become the code `idle`."""
    slots = ((() if idle is None else (idle,)) if action is None else pack(action) for action in row)
    return np.array([code for slot in slots for code in slot], dtype=np.int64)


def pack_rows(order: Order, idle: int | None = None) -> Rows:
    """Pack the row of every rank. Ranks that the order does not name get an empty row."""
    return Rows.join([pack_row(order.get(rank, ()), idle) for rank in range(max(order, default=-1) + 1)])


def unpack_rows(rows: Rows) -> DenseOrder:
    """Unpack rows into an order."""
    return {rank: unpack(rows.row(rank)) for rank in range(len(rows))}


def build_row_program(row: Row) -> Program:
    """Build a program of one rank's row, as if that rank held the whole pipeline: passes on single rows take it so."""
    rows = Rows.join([pack_row(row)])
    return build_program(rows, Placement.custom([0] * (int(rows.stage.max(initial=0)) + 1)))


def build_program(rows: Rows, placement: Placement, lowered: bool = False) -> Program:
    """Build a program of the rows, with as many microbatches as they name."""
    return Program(rows, placement, int(rows.microbatch.max(initial=0)) + 1, lowered=lowered)


def build_placement(stage_to_rank: StageToRank, stages: int, ranks: int) -> Placement:
    """Build the placement that torch's function from stages to ranks describes."""
    rank_of_stage = [stage_to_rank(stage) for stage in range(stages)]
    return Placement.custom(rank_of_stage, ranks=max(ranks, *(rank + 1 for rank in rank_of_stage)))


def find_stage_ranks(order: Order) -> dict[int, int]:
    """Find the rank that runs each stage; a stage on two ranks is refused."""
    rank_of_stage: dict[int, int] = {}
    for rank, row in order.items():
        for step, action in enumerate(row):
            for part in list_parts((action,)):
                if rank_of_stage.setdefault(part.stage_index, rank) != rank:
                    both = f"rank {rank} and rank {rank_of_stage[part.stage_index]}"
                    raise AssertionError(f"Rank {rank}, step {step}: Stage {part.stage_index} is assigned to both {both}")
    return rank_of_stage


def drop_idle(row: Row) -> list[_Action]:
    return [action for action in row if action is not None]


# Files and text -------------------------------------------------------------------------------------------------------


def read_csv(filename: str) -> SpacedOrder:
    """Read an order with its idle slots from a CSV file."""
    with open(filename, newline="", encoding="utf-8") as file:
        return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


def write_csv(order: Order, filename: str) -> None:
    """Write an order to a CSV file, whole or not at all: one row per rank, one cell per action, an empty cell per idle slot."""
    lines = [",".join("" if action is None else str(action) for action in row) for row in order.values()]
    write_whole(filename, "".join(f"{line}\r\n" for line in lines))


def _format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """Format an order as a table of one line per step and one column per rank; the line of `error_step_number` is marked."""
    columns = [["" if action is None else str(action) for action in pipeline_order[rank]] for rank in sorted(pipeline_order)]
    steps = max(map(len, columns), default=0)
    labels = [f"Step {step:0{len(str(steps - 1))}}" for step in range(steps)]
    label_width = len(labels[0]) if labels else 0
    widths = [max(label_width, *map(len, column), 0) for column in columns]
    header = " " * (label_width + 2) + " ".join(f"{f'Rank {rank}':<{width}}" for rank, width in enumerate(widths))
    lines = [header]
    for step, label in enumerate(labels):
        cells = (f"{column[step] if step < len(column) else '':<{width}}" for column, width in zip(columns, widths, strict=True))
        lines.append(f"{label}: {' '.join(cells)}{' <-- ERROR HERE' if step == error_step_number else ''}")
    return "\n".join(lines) + "\n"


# Lowering -------------------------------------------------------------------------------------------------------------


_REDUCE, _WAIT_REDUCE = Type.REDUCE_GRAD, Type.WAIT_REDUCE_GRAD
_SENDS = (Type.SEND_F, Type.SEND_B)
_SEND_OF = dict(zip((Type.WAIT_SEND_F, Type.WAIT_SEND_B), _SENDS, strict=True))
UnshardLookahead = Literal["full", "auto"] | tuple[int, ...]


@dataclass(frozen=True)
class TorchLowering:
    """The options of torch's schedules for how a compute order is lowered."""

    max_active_stages: int = 3
    """How many stages of a rank are unsharded at once."""
    unshard_lookahead: UnshardLookahead = "full"
    """How many stages, counted from the one that computes, are unsharded ahead of their use: as many as may be (`full`), fewer on the
    first ranks (`auto`), or one number per rank."""
    defer_reduce_grad_wait: bool = False
    """Wait for a stage's reduced gradients only before the rank's next reduction, or at the end."""
    max_outstanding_sends: int | None = None
    """How many sends a rank has under way at most."""
    defer_pp_recv: bool = False
    """Post receives right before their use."""

    def __post_init__(self) -> None:
        limit: Any = self.max_outstanding_sends
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise ValueError(f"max_outstanding_sends must be a non-negative integer, got {limit!r}")

    @property
    def writes_waits(self) -> bool:
        """Whether the lowered order has waits: in torch it has since 2.15; before, if an option places them."""
        return WRITES_WAITS or self.defer_reduce_grad_wait or self.max_outstanding_sends is not None


def lower_order(order: Order, placement: Placement, options: TorchLowering) -> DenseOrder:
    """Lower a compute order as `_PipelineScheduleRuntime` does: sharding, reductions, messages, then waits."""
    lookahead = resolve_unshard_lookahead(options.unshard_lookahead, len(order), options.max_active_stages)
    _refuse_many_at_once(order, options.max_active_stages)
    passes: list[Pass] = [reduce_grad(options.writes_waits, options.defer_reduce_grad_wait), SendReceive("paired")]
    passes += [WaitSend()] if options.writes_waits else []
    if set(lookahead) == {options.max_active_stages}:
        rows = pack_rows(order)
        passes = [Shard(lookahead=len(rows.codes), residency=options.max_active_stages), *passes]
    else:
        rows = pack_rows({rank: _unshard_ahead(row, options.max_active_stages, lookahead[rank]) for rank, row in order.items()})
    lowered = unpack_rows(PassList.of(passes).apply(build_program(rows, placement)).rows)
    rank_of_stage = placement.copies[0].__getitem__
    if options.defer_pp_recv:
        lowered = _defer_recv_ops(lowered, rank_of_stage)
    if options.max_outstanding_sends is not None:
        lowered = limit_sends(lowered, rank_of_stage, options.max_outstanding_sends)
    return lowered


def reduce_grad(waits: bool, deferred: bool) -> ReduceGrad:
    """Return the pass that adds REDUCE_GRAD, with WAIT_REDUCE_GRAD if orders have waits."""
    return ReduceGrad("none" if not waits else "deferred" if deferred else "now")


def take_lowered(order: DenseOrder, rank_of_stage: StageToRank, options: TorchLowering) -> DenseOrder:
    """Check an order that has its messages. Waits may be left out: a step waits for everything at its end."""
    lookahead = resolve_unshard_lookahead(options.unshard_lookahead, len(order), options.max_active_stages)
    if set(lookahead) != {options.max_active_stages}:
        raise ValueError(
            "unshard_lookahead cannot be applied to an already-lowered compute_comms schedule: load the compute-only order instead"
        )
    _validate_reduction_waits(order)
    limit = options.max_outstanding_sends
    if any(part.computation_type in _SEND_OF for row in order.values() for part in list_parts(row)):
        validate_send_waits(order)
        _refuse_deadlocks(_build_lowered(order, rank_of_stage))
    elif limit is not None:
        order = add_send_waits(order)
    return order if limit is None else limit_sends(order, rank_of_stage, limit)


def _refuse_many_at_once(order: Order, most: int) -> None:
    for row in order.values():
        for action in row:
            stages = {part.stage_index for part in split_action(action)} if action is not None else set[int]()
            if len(stages) > most:
                raise ValueError(
                    f"Atomic action {action} requires {len(stages)} stages, exceeding max_active_stages={most}: pass "
                    f"max_active_stages={len(stages)} or more"
                )


def resolve_unshard_lookahead(unshard_lookahead: UnshardLookahead, num_pp_ranks: int, max_active_stages: int) -> tuple[int, ...]:
    """Return how many stages each rank unshards ahead. With `auto`, a rank that has longer to wait for its first input unshards more."""
    if not _is_count(max_active_stages):
        raise ValueError(f"max_active_stages must be a positive integer, got {max_active_stages!r}")
    if unshard_lookahead == "full":
        return (max_active_stages,) * num_pp_ranks
    if unshard_lookahead == "auto":
        return tuple(min(rank + 2, max_active_stages) for rank in range(num_pp_ranks))
    if not isinstance(unshard_lookahead, tuple):
        raise ValueError(f"unshard_lookahead must be 'full', 'auto', or a tuple of {num_pp_ranks} integers, got {unshard_lookahead!r}")
    if len(unshard_lookahead) != num_pp_ranks:
        raise ValueError(f"unshard_lookahead tuple length must equal the pipeline degree ({num_pp_ranks}), got {len(unshard_lookahead)}")
    for rank, lookahead in enumerate(unshard_lookahead):
        if not _is_count(lookahead) or lookahead > max_active_stages:
            raise ValueError(
                f"unshard_lookahead[{rank}] must be an integer within [1, max_active_stages={max_active_stages}], got {lookahead!r}"
            )
    return unshard_lookahead


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _unshard_ahead(row: Row, residency: int, lookahead: int) -> list[_Action]:
    """Add UNSHARD for the next `lookahead` stages of a row, and RESHARD for stages that are not among the next `residency`."""
    actions = drop_idle(row)
    sharded: list[_Action] = []
    unsharded: dict[int, None] = {}
    for position, action in enumerate(actions):
        upcoming = _list_next_stages(actions, position, residency)
        for stage in [stage for stage in unsharded if stage not in upcoming]:
            del unsharded[stage]
            sharded.append(_Action(stage, Type.RESHARD))
        for stage in _list_next_stages(actions, position, lookahead):
            if stage not in unsharded:
                unsharded[stage] = None
                sharded.append(_Action(stage, Type.UNSHARD))
        sharded.append(action)
    return sharded + [_Action(stage, Type.RESHARD) for stage in unsharded]


def _list_next_stages(actions: list[_Action], position: int, count: int) -> list[int]:
    """List the next stages that compute, at least `count` of them if there are; those of an overlapped action together."""
    stages: dict[int, None] = {}
    for action in islice(actions, position, None):
        stages.update(dict.fromkeys(part.stage_index for part in split_action(action)))
        if len(stages) >= count:
            break
    return list(stages)


def _add_reduce_grad(actions: Row, n_microbatches: int, defer_reduce_grad_wait: bool = False) -> list[_Action]:
    """Add REDUCE_GRAD right after a stage's last weight gradient, if the row has all `n_microbatches` of them; drop idle slots.

    Where torch writes waits into its orders, or if they are deferred, WAIT_REDUCE_GRAD is added too.
    """
    program = build_row_program(actions)
    rows = program.rows
    backwards = np.bincount(rows.stage[rows.is_kind(Kind.B, Kind.W)], minlength=program.stages)
    reduced = ReduceGrad().apply(program).rows
    reduced = reduced.keep(~reduced.is_kind(Kind.REDUCE_GRAD) | (backwards[reduced.stage] >= n_microbatches))
    waits = reduce_grad(WRITES_WAITS or defer_reduce_grad_wait, defer_reduce_grad_wait)
    return unpack(waits.add_waits(reduced, program.stages).codes)


def _add_unshard_reshard(compute_actions: Row, max_active_stages: int = 3, *, unshard_lookahead: int | None = None) -> list[_Action]:
    """Add UNSHARD as early as `max_active_stages` allow, and RESHARD when a stage is no longer needed or must make room.

    With `unshard_lookahead`, only so many of the next stages are unsharded ahead of their use.
    """
    if unshard_lookahead is not None and unshard_lookahead != max_active_stages:
        _refuse_many_at_once({0: compute_actions}, max_active_stages)
        return _unshard_ahead(compute_actions, max_active_stages, unshard_lookahead)
    at_once = max((len({part.stage_index for part in split_action(action)}) for action in compute_actions if action is not None), default=1)
    shard = Shard(lookahead=len(compute_actions), residency=max(max_active_stages, at_once))
    return unpack(shard.apply(build_row_program(compute_actions)).row(0))


def _merge_bw(compute_actions: Row) -> list[_Action]:
    """Merge an I and the W right behind it, of the same stage and microbatch, into one B."""
    return unpack(MergeBackward().apply(build_row_program(compute_actions)).row(0))


def _add_send_recv(compute_actions: Order, stage_to_rank: StageToRank, num_stages: int) -> DenseOrder:
    """Add each send behind the action whose result it sends, and its receive in the same turn when ranks take turns.

    An idle slot counts as a turn.
    """
    placement = build_placement(stage_to_rank, num_stages, max(compute_actions, default=-1) + 1)
    idle = int(codes.pack(num_stages, int(Kind.RESHARD)))  # an action of a stage beyond the last, without dependencies
    rows = pack_rows(compute_actions, idle)
    rows = Rows(rows.codes, np.pad(rows.offsets, (0, placement.ranks - len(rows)), mode="edge"))
    try:
        lowered = SendReceive("paired").place(build_program(rows, placement)).rows
    except PassError as error:
        raise AssertionError(f"Malformed compute schedule, can't schedule sends/recvs: {error}") from error
    order = unpack_rows(lowered.keep(lowered.codes != idle))
    return {rank: order[rank] for rank in compute_actions}


_RECEIVE_FOR = {Type.FORWARD: Type.RECV_F, Type.FULL_BACKWARD: Type.RECV_B, Type.BACKWARD_INPUT: Type.RECV_B}


def _defer_recv_ops(actions: Order, stage_to_rank: StageToRank) -> DenseOrder:
    """Move each receive to right before its use; but before a send to a higher rank, put all receives from that rank first."""
    return {rank: _defer_receives(rank, row, stage_to_rank) for rank, row in actions.items()}


def _defer_receives(rank: int, row: Row, stage_to_rank: StageToRank) -> list[_Action]:
    deferred: list[_Action] = []
    source_of: dict[_Action, int] = {}
    """Receives not placed yet, and the rank that each receives from."""
    for action in row:
        if action is None:
            continue
        kind = action.computation_type
        if kind in (Type.RECV_F, Type.RECV_B):
            source_of[action] = stage_to_rank(action.stage_index + (-1 if kind == Type.RECV_F else 1))
            continue
        if kind in (Type.SEND_F, Type.SEND_B):
            target = stage_to_rank(action.stage_index + (1 if kind == Type.SEND_F else -1))
            due = [receive for receive, source in source_of.items() if source == target] if rank < target else []
        else:
            due = [receive for receive in _list_receives(action) if receive in source_of]
        for receive in due:
            del source_of[receive]
        deferred += [*due, action]
    if source_of:
        raise AssertionError(f"Malformed input schedule on rank {rank}: no action uses the values received by {list(source_of)}")
    return deferred


def _list_receives(action: _Action) -> list[_Action]:
    """List the receives that an action waits for if its inputs come from other ranks."""
    kinds = ((part, _RECEIVE_FOR.get(part.computation_type)) for part in split_action(action))
    return [_Action(part.stage_index, kind, part.microbatch_index) for part, kind in kinds if kind is not None]


# Waits -----------------------------------------------------------------------------------------------------------------


def _validate_reduction_waits(order: Order) -> None:
    """Refuse reductions and waits that do not alternate on a rank. An order without any such wait is accepted."""
    for rank, row in order.items():
        parts = [part for part in list_parts(row) if part.computation_type in (_REDUCE, _WAIT_REDUCE)]
        if all(part.computation_type == _REDUCE for part in parts):
            continue
        pending: int | None = None
        for part in parts:
            if part.computation_type == _REDUCE:
                if pending is not None:
                    raise ValueError(
                        f"Rank {rank} cannot start REDUCE_GRAD for stage {part.stage_index} while stage {pending} has a pending reduction: "
                        f"put {pending}WAIT_REDUCE_GRAD before it"
                    )
                pending = part.stage_index
            else:
                if pending != part.stage_index:
                    reason = "without a pending reduction" if pending is None else f"but stage {pending} has the pending reduction"
                    raise ValueError(f"Rank {rank} has WAIT_REDUCE_GRAD for stage {part.stage_index}, {reason}")
                pending = None
        if pending is not None:
            raise ValueError(f"Stage {pending} at rank {rank} has REDUCE_GRAD without WAIT_REDUCE_GRAD")


def add_send_waits(comm_actions: Order) -> DenseOrder:
    """Add a wait for each send: of activations after their backward on this rank, which needs the receiver's answer; else at the end."""
    for row in comm_actions.values():
        sends = [part for part in list_parts(row) if part.computation_type in _SENDS]
        if len(set(sends)) < len(sends):
            raise AssertionError(f"Duplicate pipeline send {next(send for send in sends if sends.count(send) > 1)}")
    rank_of_stage = find_stage_ranks(comm_actions)
    lowered = WaitSend().place(_build_lowered(comm_actions, lambda stage: rank_of_stage.get(stage, 0)))
    return {rank: row for rank, row in unpack_rows(lowered.rows).items() if rank in comm_actions}


def _build_lowered(order: Order, stage_to_rank: StageToRank) -> Program:
    rows = pack_rows(order)
    return build_program(rows, build_placement(stage_to_rank, int(rows.stage.max(initial=0)) + 1, len(rows)), lowered=True)


def validate_send_waits(comm_actions: Order) -> None:
    """Refuse an order in which a send has no wait after it, or a wait no send before it."""
    for rank, row in comm_actions.items():
        pending: dict[_Action, bool] = {}
        """Whether each send of the row is still to be waited for."""
        for part in list_parts(row):
            kind = part.computation_type
            if (kind in _SENDS or kind in _SEND_OF) and part.microbatch_index is None:
                raise ValueError(f"{'Send' if kind in _SENDS else 'Wait'} action {part} at rank {rank} has no microbatch index")
            if kind in _SENDS:
                if part in pending:
                    raise ValueError(f"Duplicate pipeline send {part} at rank {rank}")
                pending[part] = True
            elif kind in _SEND_OF:
                send = part._replace(computation_type=_SEND_OF[kind])
                if not pending.get(send):
                    raise ValueError(f"Pipeline wait {part} at rank {rank} has no pending send")
                pending[send] = False
        if missing := [str(send) for send, waits in pending.items() if waits]:
            raise ValueError(f"Pipeline sends at rank {rank} have no matching wait: {', '.join(missing)}")


def _refuse_deadlocks(program: Program) -> None:
    findings = [finding for finding in check(program) if finding.rule == "deadlock"]
    if findings:
        raise ValueError(
            "Pipeline sends, receives, and waits form a cycle: move each wait behind the actions that its receiver needs\n\n"
            + report(program, "channels", findings)
        )


def limit_sends(comm_actions: Order, stage_to_rank: StageToRank, max_outstanding_sends: int) -> DenseOrder:
    """Move waits forward so that no rank has more than `max_outstanding_sends` sends under way; refuse an order that cannot be kept so.

    Before a send that would exceed the limit, the rank waits for an earlier one: if possible one whose receive must have been posted by
    then, else any for which waiting cannot block its own receiver.
    """
    validate_send_waits(comm_actions)
    program = _build_lowered(comm_actions, stage_to_rank)
    _refuse_deadlocks(program)
    rows = program.rows
    waits = np.flatnonzero(rows.is_kind(*SEND_WAITS))
    number_of_send = {send: number for number, send in enumerate(program.linker.sends_awaited(waits).tolist())}
    number_of_wait = {wait: number for number, wait in enumerate(waits.tolist())}
    graph = _WaitGraph(program, waits, list(number_of_send))
    place = np.arange(len(rows.codes))
    """The entry before which each entry is put: itself, unless it is a wait that moves."""
    for rank in range(len(rows)):
        pending: list[int] = []
        for entry in range(rows.offsets[rank], rows.offsets[rank + 1]):
            if entry in number_of_wait and place[entry] == entry:
                pending.remove(number_of_wait[entry])
            elif entry in number_of_send:
                if len(pending) >= max_outstanding_sends:
                    chosen = graph.choose(pending, entry)
                    if chosen is None:
                        sends = [rows.part_at(list(number_of_send)[number]) for number in pending]
                        raise ValueError(
                            f"Cannot satisfy max_outstanding_sends={max_outstanding_sends} on pipeline rank {rank} before "
                            f"{rows.part_at(entry)}. Outstanding: {', '.join(map(str, sends))}. Increase the limit or change the schedule."
                        )
                    pending.remove(chosen)
                    graph.move(chosen, entry)
                    place[waits[chosen]] = entry
                pending.append(number_of_send[entry])
    moved = place != np.arange(len(place))
    schedule_log.debug("%d waits moved to keep %d sends under way on each rank", moved.sum(), max_outstanding_sends)
    limited = Rows(rows.codes[np.lexsort((~moved, place))], rows.offsets)
    return {rank: row for rank, row in unpack_rows(limited).items() if rank in comm_actions}


class _WaitGraph:
    """What comes before what when a wait lasts until the message is received: each rank's actions in their order, each send before its
    receive, and each receive before the action that follows the wait for it. Waits are numbered; other actions are entries."""

    def __init__(self, program: Program, waits: Ints, sends: list[int]) -> None:
        rows, messages = program.rows, program.links.messages
        heads = np.flatnonzero(rows.heads & ~rows.is_kind(*SEND_WAITS))
        same_rank = rows.rank[heads[1:]] == rows.rank[heads[:-1]]
        befores, afters = np.append(heads[:-1][same_rank], messages.before), np.append(heads[1:][same_rank], messages.after)
        self.after: list[list[int]] = [[] for _ in rows.codes]
        """By entry: the entries that must come later."""
        for before, after in zip(befores.tolist(), afters.tolist(), strict=True):
            self.after[before].append(after)
        receive_of = dict(zip(messages.before.tolist(), messages.after.tolist(), strict=True))
        for entry in np.flatnonzero(rows.is_kind(*SENDS)).tolist():
            if entry not in receive_of:
                raise ValueError(f"Pipeline send {rows.part_at(entry)} of rank {rows.rank[entry]} has no matching receive")
        self.receive = [receive_of[send] for send in sends]
        """By number of a wait: the receive of the message."""
        self.next: dict[int, int] = {}
        """By number of a wait: the entry that follows it, unless it ends its row."""
        for number, (wait, position) in enumerate(zip(waits.tolist(), np.searchsorted(heads, waits).tolist(), strict=True)):
            if position < len(heads) and rows.rank[heads[position]] == rows.rank[wait]:
                self.move(number, int(heads[position]))

    def move(self, number: int, before: int) -> None:
        """Put a wait before an entry, instead of where it was."""
        self._remove(number)
        self.next[number] = before
        self.after[self.receive[number]].append(before)

    def _remove(self, number: int) -> int | None:
        """Take a wait away; return the entry that followed it."""
        following = self.next.pop(number, None)
        if following is not None:
            self.after[self.receive[number]].remove(following)
        return following

    def choose(self, pending: list[int], before: int) -> int | None:
        """Choose the wait to put before an entry; `None` if every one might last forever."""
        stalling: int | None = None
        for number in pending:
            following = self._remove(number)
            receive = self.receive[number]
            safe = not self._reaches(before, receive)
            posted = safe and self._reaches(receive, before)
            if following is not None:
                self.move(number, following)
            if posted:
                return number
            if safe and stalling is None:
                stalling = number
        return stalling

    def _reaches(self, first: int, last: int) -> bool:
        """Return whether one entry must come before another, or is that entry."""
        seen, open_ends = {first}, [first]
        while open_ends:
            entry = open_ends.pop()
            if entry == last:
                return True
            for later in self.after[entry]:
                if later not in seen:
                    seen.add(later)
                    open_ends.append(later)
        return False


# Validation and dry run: by our verifier and our step walk ------------------------------------------------------------


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
    placement = build_placement(lambda stage: rank_of_stage.get(stage, 0), num_stages, pp_group_size)
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
    rows = pack_rows(pipeline_order)
    program = build_program(rows, build_placement(stage_to_rank, num_stages, len(rows)), lowered=True)
    local, together = program.links.local, (program.links.messages, program.links.retired)
    waits = Needs(*map(np.concatenate, zip(local, *together, strict=True)))
    walked = walk(rows, waits, (np.arange(len(waits.before)) < len(local.before)).astype(np.int64))
    reason = _describe_missing_input(program)
    if reason or not walked.complete:
        raise ValueError(f"Schedule is not progressing{reason}:\n{_format_pipeline_order(pipeline_order)}")
    bounds = rows.group_offsets.tolist()
    actions = unpack_rows(rows)
    return {rank: _spread(actions[rank], walked.step[bounds[rank] : bounds[rank + 1]].tolist()) for rank in sorted(pipeline_order)}


def _describe_missing_input(program: Program) -> str:
    """Describe the first action that waits for a message, its receiver or a value behind a message that never comes; else nothing."""
    rows, missing = program.rows, program.links.missing
    same_stage = (codes.stage_of(missing.code) == rows.stage[missing.after]) & rows.is_kind(*COMPUTE)[missing.after]
    compute = codes.kind_of(missing.code) <= Kind.W  # torch does not ask for a stage's own forward either
    waiting = missing.after[~(same_stage & compute)]
    for kinds, partners in ((RECEIVES, program.links.messages), (SEND_WAITS, program.links.retired)):
        waiting = np.append(waiting, np.setdiff1d(np.flatnonzero(rows.is_kind(*kinds)), partners.after))
    if not len(waiting):
        return ""
    entry = int(waiting.min())
    return f": {rows.part_at(entry)} on rank {rows.rank[entry]} waits for an action that never runs"


def _spread(actions: list[_Action], steps: list[int]) -> list[_Action | None]:
    """Place actions at their steps, with idle slots between them."""
    spaced: list[_Action | None] = []
    for action, step in zip(actions, steps, strict=True):
        spaced += [None] * (step - len(spaced))
        spaced.append(action)
    return spaced


def _dump_chrometrace(schedule: Order, filename: str) -> None:
    """Write an order as a trace for chrome://tracing or Perfetto: one process per rank, one microsecond per step."""
    slots = [(rank, step, action) for rank in sorted(schedule) for step, action in enumerate(schedule[rank]) if action is not None]
    category = {True: "computation", False: "communication"}
    events = [
        {"name": str(action), "cat": category[action.is_compute_op], "ph": "X", "pid": rank, "tid": rank, "ts": step, "dur": 1}
        for rank, step, action in slots
    ]
    write_whole(filename, json.dumps({"traceEvents": events}))


# Activation liveness: how long each microbatch's activations live, and how few slots of memory can hold them ----------


Granularity = Literal["microbatch", "stage_microbatch"]
_Value = TypeVar("_Value")
Key = tuple[int, int]
"""A stage and a microbatch."""
Interval = tuple[int, int]
"""The positions of the first and the last action in which activations live, both included."""


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """Slots for the activations of one rank's stages; activations that live at the same time have different ones.

    Slots are numbers, not memory: allocate one buffer for each, large enough for all activations that share it.
    """

    pp_rank: int
    granularity: Granularity
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[Key, int]
    num_slots: int
    _activation_lifetime_by_stage_and_microbatch: Mapping[Key, Interval] = field(repr=False)
    __hash__ = None  # type: ignore[assignment]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """Return the slot of a microbatch's activations on a stage."""
        return self._look_up(self.slot_by_stage_and_microbatch, "slot", stage_index, microbatch_index)

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> Interval:
        """Return the positions, in the order that was analyzed, of the first and last action in which the activations live."""
        return self._look_up(self._activation_lifetime_by_stage_and_microbatch, "lifetime", stage_index, microbatch_index)

    def _look_up(self, values: Mapping[Key, _Value], what: str, stage: int, microbatch: int) -> _Value:
        if (stage, microbatch) not in values:
            raise ValueError(
                f"No activation {what} exists for stage {stage}, microbatch {microbatch}: stages {list(self.stage_indices)} and "
                f"{self.num_microbatches} microbatches were analyzed"
            )
        return values[stage, microbatch]


def analyze_pipeline_activation_liveness(
    schedule: Any, *, pp_rank: int, stage_indices: Sequence[int], granularity: Granularity
) -> PipelineActivationLiveness:
    """Find the lifetime of each microbatch's activations on some stages of a rank, and assign slots to them.

    Activations live from their forward to their full backward, or to their backward for the weights if it is split. With
    `granularity="microbatch"` those of all the stages live together, from the first forward to the last backward.
    """
    if granularity not in ("microbatch", "stage_microbatch"):
        raise ValueError(f"Unsupported activation granularity: {granularity}. Use 'microbatch' or 'stage_microbatch'")
    stages = tuple(stage_indices)
    if not stages:
        raise ValueError("stage_indices must not be empty")
    if len(set(stages)) != len(stages):
        raise ValueError(f"stage_indices must be unique, got {list(stages)}")
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if pp_rank not in order:
        raise ValueError(f"Rank {pp_rank} is not present in the pipeline schedule, which has ranks {sorted(order)}")
    count: int = schedule._n_microbatches
    lifetimes = _find_lifetimes(order[pp_rank], stages, count)
    if granularity == "microbatch":
        for microbatch in range(count):
            together = [lifetimes[stage, microbatch] for stage in stages]
            whole = min(start for start, _ in together), max(end for _, end in together)
            lifetimes.update(dict.fromkeys(((stage, microbatch) for stage in stages), whole))
        of_microbatch, num_slots = assign_slots([lifetimes[stages[0], microbatch] for microbatch in range(count)])
        slots = {key: of_microbatch[key[1]] for key in lifetimes}
    else:
        assigned, num_slots = assign_slots(list(lifetimes.values()))
        slots = dict(zip(lifetimes, assigned, strict=True))
    return PipelineActivationLiveness(pp_rank, granularity, stages, count, MappingProxyType(slots), num_slots, MappingProxyType(lifetimes))


def _find_lifetimes(row: Row, stages: Sequence[int], count: int) -> dict[Key, Interval]:
    """Find the lifetime of each microbatch on each stage; refuse a row in which one does not begin and end once."""
    positions: dict[Any, dict[Key, int]] = {
        kind: {} for kind in (Type.FORWARD, Type.FULL_BACKWARD, Type.BACKWARD_INPUT, Type.BACKWARD_WEIGHT)
    }
    for position, action in enumerate(row):
        for part in list_parts((action,)):
            if part.stage_index not in stages or part.computation_type not in positions:
                continue
            if part.microbatch_index is None or not 0 <= part.microbatch_index < count:
                raise ValueError(f"Action {part} has a microbatch outside [0, {count})")
            key = part.stage_index, part.microbatch_index
            if key in positions[part.computation_type]:
                raise ValueError(f"Activation lifetime {key} has multiple {part.computation_type.name} actions")
            positions[part.computation_type][key] = position
    starts, inputs, weights = positions[Type.FORWARD], positions[Type.BACKWARD_INPUT], positions[Type.BACKWARD_WEIGHT]
    if both := positions[Type.FULL_BACKWARD].keys() & weights.keys():
        raise ValueError(f"Activation lifetimes have multiple release actions: {sorted(both)}")
    ends = {**positions[Type.FULL_BACKWARD], **weights}
    expected = [(stage, microbatch) for stage in sorted(stages) for microbatch in range(count)]
    for name, present in (("Forward", starts), ("Backward release", ends)):
        if missing := [key for key in expected if key not in present]:
            raise ValueError(f"{name} actions do not match tracked activations; missing={missing}")
    if unsplit := sorted(weights.keys() - inputs.keys()):
        raise ValueError(f"Activation lifetimes have weight backward without input backward: {unsplit}")
    for key in expected:
        if ends[key] < starts[key]:
            raise ValueError(f"Activation lifetime {key} ends before its forward")
    return {key: (starts[key], ends[key]) for key in expected}


def assign_slots(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """Assign the lowest free slot to each interval, in the order in which they begin; return the slots and how many there are."""
    slots = [0] * len(intervals)
    used: list[tuple[int, int]] = []
    """The end and the slot of each interval that has begun."""
    free: list[int] = []
    count = 0
    for index in sorted(range(len(intervals)), key=lambda k: (intervals[k], k)):
        start, end = intervals[index]
        while used and used[0][0] < start:
            heappush(free, heappop(used)[1])
        if not free:
            heappush(free, count)
            count += 1
        slots[index] = heappop(free)
        heappush(used, (end, slots[index]))
    return slots, count
