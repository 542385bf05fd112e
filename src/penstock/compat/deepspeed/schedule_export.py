"""`as_deepspeed`: our schedules as `PipeSchedule` classes for DeepSpeed's engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from penstock.compat.deepspeed import schedule as ours
from penstock.compat.deepspeed.proof import program_of
from penstock.errors import ScheduleError
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.deepspeed.instructions import Stream, streams
from penstock.passes.merge_backward import MergeBackward
from penstock.schedules.registry import algorithm
from penstock.schedules.registry import schedule as by_name

_THEIRS = "deepspeed.runtime.pipe.schedule"


def as_deepspeed(schedule: Table | str, *, module: ModuleType | None = None, **options: Any) -> type[Any]:
    """Make a `PipeSchedule` class of a schedule with one stage per rank, proved for DeepSpeed's engine when first used for a size.

    - `schedule`: a schedule or program, or a registered name, which fits any number of stages; further options by keyword;
    - `module`: the module whose `PipeSchedule` and instructions are used. Defaults to DeepSpeed's own if it has been imported, because
      its engine takes no others; else ours.

    Split backwards become full ones. DeepSpeed's last stage keeps one loss: there each backward runs right after its
    forward, whatever the order of the schedule; the other stages keep theirs.

    >>> made = as_deepspeed("gpipe")(micro_batches=2, stages=2, stage_id=0)
    >>> [each for step in made for each in step][-4:]
    [BackwardPass(buffer_id=1), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
    """
    name = _check_schedule(schedule, options)
    home = module or sys.modules.get(_THEIRS) or ours

    known: dict[tuple[int, int], Sequence[Stream]] = {}  # no lru_cache, so that the class can be sent to other processes

    def proved(micro_batches: int, stages: int) -> Sequence[Stream]:
        if (micro_batches, stages) not in known:
            if isinstance(schedule, str):
                table: Table = by_name(schedule, stages, micro_batches, **options)
            else:
                table = _fit_sizes(schedule, micro_batches, stages)
            known[micro_batches, stages] = _prove_streams(table)
        return known[micro_batches, stages]

    def stream(self: Any) -> Stream:
        return _pick_stage(proved(self.micro_batches, self.stages), self.stage_id)

    def steps(self: Any) -> Iterator[list[Any]]:
        """The stage's instructions."""
        for step in stream(self):
            yield [getattr(home, each.name)(**({} if each.buffer_id is None else {"buffer_id": each.buffer_id})) for each in step]

    def num_pipe_buffers(self: Any) -> int:
        """The number of buffers that the stream uses."""
        return _num_buffers(stream(self))

    if isinstance(schedule, Table):
        proved(schedule.microbatches, schedule.ranks)
    text = f"Penstock's {name} as DeepSpeed's instructions."
    parts = {"__doc__": text, "__module__": __name__, "steps": steps, "num_pipe_buffers": num_pipe_buffers}
    return type(f"{''.join(part.capitalize() for part in name.split('-'))}Schedule", (home.PipeSchedule,), parts)


def _check_schedule(schedule: Any, options: dict[str, Any]) -> str:
    """Check that the schedule can be expressed in instructions; its name."""
    if isinstance(schedule, str):
        made = algorithm(schedule)
        chunks = options.get("chunks", made.layout.chunks)
        if chunks != 1:
            raise ScheduleError(f"{schedule} places {chunks} stages on a rank, but DeepSpeed's instructions know one")
        strange = sorted(set(options) - {"chunks", "graph", *made.options})
        if strange:
            raise ScheduleError(f"{schedule} has no option {strange[0]!r}; its options: {', '.join(made.options) or 'none'}")
        return schedule
    if not isinstance(schedule, Table):
        raise ScheduleError(f"as_deepspeed takes a Schedule, a Program or the name of a schedule, got {type(schedule).__name__}")
    if options:
        raise ScheduleError(f"option {next(iter(options))!r} goes with the name of a schedule: this one is already made")
    if schedule.stages != schedule.ranks:
        raise ScheduleError(
            f"{schedule!r} places {schedule.stages} stages on {schedule.ranks} ranks, but DeepSpeed's instructions know one each"
        )
    return schedule.name or "written"


def _fit_sizes(table: Table, micro_batches: int, stages: int) -> Table:
    """The schedule for these sizes, made again if it can be."""
    if table.ranks != stages:
        raise ScheduleError(f"{table!r} has {table.ranks} ranks, but the engine has {stages} stages: make it for {stages} ranks")
    if table.microbatches == micro_batches:
        return table
    again = table.remake if isinstance(table, Schedule) else None
    if again is None:
        raise ScheduleError(
            f"{table!r} is for {table.microbatches} microbatches, but the engine runs {micro_batches}: "
            f"set gradient_accumulation_steps to {table.microbatches}, or make the schedule for {micro_batches}"
        )
    return again(micro_batches)


def _prove_streams(table: Table) -> Sequence[Stream]:
    """The streams of all stages, proved for an engine with one loss, one gradient and sends that block."""
    merged = MergeBackward(apart=True).apply(Program.start(table)).schedule()
    found = streams(_one_loss(merged) if table.training else merged)
    program_of(found, table.microbatches, [_num_buffers(stream) for stream in found], name=table.name)
    return found


def _one_loss(schedule: Schedule) -> Schedule:
    """The same with each backward of the last rank right after its forward, where it can always run."""
    rows = [schedule.row(rank) for rank in range(schedule.ranks)]
    last = Rows.join([rows[-1]])
    forward = {microbatch: at for at, microbatch in enumerate(last.microbatch.tolist()) if last.kind[at] == Kind.F}
    place = np.array([forward.get(microbatch, len(last.codes)) for microbatch in last.microbatch.tolist()], dtype=np.int64)
    rows[-1] = rows[-1][np.lexsort((last.kind, place))]  # F comes before B in the order of kinds
    return Schedule.from_rows(Rows.join(rows), schedule.placement, schedule.microbatches, graph=schedule.graph, name=schedule.name)


def _pick_stage(found: Sequence[Stream], stage_id: int) -> Stream:
    """One stage's stream."""
    if not 0 <= stage_id < len(found):
        raise ScheduleError(f"stage_id {stage_id}: there are {len(found)} stages, 0 to {len(found) - 1}")
    return found[stage_id]


def _num_buffers(stream: Stream) -> int:
    """The number of buffers that a stream uses, at least one."""
    return 1 + max((each.buffer_id for step in stream for each in step if each.buffer_id is not None), default=0)
