"""The programs that a pipeline runs: its schedule for training, and forwards only for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import PassError, ScheduleError
from penstock.ir import codes
from penstock.ir.kind import COPIES, Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.buffers import Buffers
from penstock.passes.lower import lower
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.offload import Offload, move_activations
from penstock.passes.pass_list import PassList
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard
from penstock.passes.vocabulary import Vocabulary, spread_vocabulary
from penstock.text.units import check_count
from penstock.verifier.verify import verify

OffloadChoice = bool | int | Sequence[int] | Offload | None
"""The percentage of each rank's activations to move to host memory, one per rank, or the pass with its options; True for all of them."""


def find_table(source: Any, ranks: int, microbatches: int | None) -> Table:
    """The schedule or program of a plan, schedule, program or name."""
    if microbatches is not None:
        microbatches = check_count("microbatches", microbatches, error=ScheduleError)
    if isinstance(source, str):
        from penstock.schedules.registry import schedule

        if source.lower().endswith((".json", ".csv")):
            raise ScheduleError(f"{source!r} is a file, not the name of a schedule: load it, with penstock.Plan.load, JobPlan.load or load")
        if microbatches is None:
            raise ScheduleError(f"schedule {source!r} by name needs microbatches=")
        source = schedule(source, ranks, microbatches)
    table = source if isinstance(source, Table) else getattr(source, "schedule", None)
    if not isinstance(table, Table):
        raise ScheduleError(f"a pipeline needs a plan, a schedule or a program, got {type(source).__name__}")
    if table.ranks != ranks:
        raise ScheduleError(
            f"the schedule is for {table.ranks} ranks, but there are {ranks}: launch that many, or build the schedule for {ranks}"
        )
    ends = [stage for stage in range(table.stages) if not table.graph.outputs_of(stage)]
    if len(ends) > 1:
        raise ScheduleError(f"no stage reads stages {ends}: only one stage can produce the model's output")
    return table if microbatches is None else rebuild_table(table, microbatches)


def find_spread_ends(table: Table) -> tuple[bool, bool]:
    """Whether a schedule spreads the embedding over the ranks, and the head; refused if a pipeline cannot run it."""
    stages = table.spread_stages
    if not stages:
        return False, False
    obstacle = None
    if table.slices > 1:
        obstacle = f"cuts sequences into {table.slices} slices"
    elif len(table.placement.copies) > 1:
        obstacle = f"runs {len(table.placement.copies)} copies of the model"
    elif table.rows.is_kind(*COPIES).any():
        obstacle = "moves activations to host memory"
    if obstacle is not None:
        raise ScheduleError(
            f"{table.name or 'the schedule'} spreads the vocabulary over the ranks and {obstacle}, which a pipeline cannot run together: "
            "leave one out"
        )
    return 0 in stages, table.stages - 1 in stages


def add_moves(table: Table, choice: OffloadChoice) -> Table:
    """The schedule with copies of activations to host memory, as `Pipeline(offload=)` asks for them."""
    if choice is None:
        return table
    if not isinstance(table, Schedule):
        raise ScheduleError(
            f"offload={choice!r} adds copies of activations to a schedule, but {table.name or 'this'} is a program, which runs as it is: "
            "give the schedule, or lower it with ps.lower(schedule, offload=...)"
        )
    if table.rows.is_kind(*COPIES).any():
        raise ScheduleError(f"offload={choice!r}, but {table.name or 'the schedule'} moves activations already: leave offload= out")
    if choice is False or choice == 0:
        return table
    if isinstance(choice, Offload):
        return move_activations(table, choice)
    shares = (100 if choice is True else choice) if isinstance(choice, int) else tuple(choice)
    return move_activations(table, Offload(shares))


def build_training_program(
    table: Table,
    count: int,
    unsplit: Sequence[int],
    semantics: str = "channels",
    shard: Shard | None = None,
    *,
    reduce_at_end: bool = False,
) -> Program:
    """The program for `count` microbatches, proved for the transport.

    `unsplit` stages run one B; `shard` gathers parameters; `reduce_at_end` reduces gradients after everything else.
    """
    table = rebuild_table(table, count)
    if not table.training:
        raise ScheduleError(f"{table.name or 'the schedule'} has no backward: use eval_step or infer, or another schedule")
    program = Program.start(table)
    if unsplit:
        program = MergeBackward(tuple(unsplit), apart=True).apply(program)
    if not program.lowered:
        program = _lower(program.schedule(), shard, reduce_at_end)
    elif program.buffers is None:
        program = Buffers().apply(program)
    verify(program)
    if semantics != "channels":
        verify(program, semantics=semantics)
    return program


def _lower(schedule: Schedule, shard: Shard | None, reduce_at_end: bool = False) -> Program:
    try:
        if shard is None:
            return lower(schedule, reduce_at_end=reduce_at_end)
        return lower(schedule, fsdp=True, lookahead=shard.lookahead, residency=shard.residency)
    except PassError:
        verify(schedule)  # raises with the place and the reason
        raise


def rebuild_table(table: Table, count: int) -> Table:
    """The same schedule for this number of microbatches; refused if it is known for another number only."""
    if count == table.microbatches:
        return table
    if not isinstance(table, Schedule) or table.remake is None:
        raise ScheduleError(
            f"{count} microbatches, but {table.name or 'the schedule'} is fixed to {table.microbatches}, because it was loaded or "
            "written by hand: use a schedule by name for other counts"
        )
    return table.remake(count)


def forward_program(
    table: Table, count: int, semantics: str = "channels", shard: Shard | None = None, *, placement: Placement | None = None
) -> Program:
    """Forwards in waves, for any number of microbatches: each starts as soon as the one before it can have ended; slice by slice, if cut.

    An edge needs slots for the messages under way and one more to write into: two if each rank has one stage. `placement` is that of the
    stages if it is not the table's, as after losses.
    """
    placement, graph = table.placement if placement is None else placement, table.graph
    stage, microbatch = (axis.ravel() for axis in np.meshgrid(np.arange(table.stages), np.arange(count * table.slices), indexing="ij"))
    rank = placement.ranks_of(stage, microbatch)
    order = np.lexsort((-stage, stage + microbatch, rank))
    entries = np.asarray(codes.pack(stage[order], int(Kind.F), microbatch[order]), dtype=np.int64)
    rows = Rows.sorted_by(entries, rank[order], placement.ranks)
    name = f"{table.name} forward".strip()
    schedule = Schedule.from_rows(rows, placement, count, graph=graph, name=name, slices=table.slices)
    span = max((target - source for source, target in graph.edges), default=1)
    if table.spread_stages:
        ends = Vocabulary(embedding=0 in table.spread_stages, head=table.stages - 1 in table.spread_stages)
        schedule = spread_vocabulary(schedule, vocabulary=ends)
    if semantics != "channels" or table.spread_stages:
        program = _lower(schedule, shard)
        verify(program, semantics=semantics)
        return program
    passes = [SendReceive("just-in-time"), Buffers(slots=span * placement.chunks + 1)]
    program = PassList.of(passes if shard is None else [shard, *passes]).apply(schedule)
    verify(program)
    return program
