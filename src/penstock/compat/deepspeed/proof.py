"""Streams of instructions proved, and our schedules as proved streams.

A proof says that there is no deadlock, and that no buffer is used before it is filled or filled while it is needed.

DeepSpeed's sends and receives block. On a line of stages, ranks that block can only wait for each other in pairs, so there is no
deadlock exactly if every two neighbours run their exchanges in the same order: the verifier's `rendezvous`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from penstock.compat.deepspeed import schedule as ours
from penstock.errors import PassError, ScheduleError, VerifyError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.steps import walk
from penstock.ir.table import Table
from penstock.passes.deepspeed.instructions import Instruction, Stream
from penstock.passes.deepspeed.instructions import streams as write_streams
from penstock.passes.deepspeed.reader import CLOSING, KNOWN, TRAINING, Duties, StreamReader
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.send_receive import SendReceive
from penstock.schedules.registry import parse_name
from penstock.schedules.registry import schedule as by_name
from penstock.text.numbers import format_count
from penstock.verifier.finding import Finding, Severity, report
from penstock.verifier.proof import Proof
from penstock.verifier.verify import check, verify

Factory = Callable[..., Any]
"""Makes a stage's schedule: `factory(micro_batches=8, stages=4, stage_id=0)`, as a `PipeSchedule` class does."""
_DEEPSPEED_MODULE = "deepspeed.runtime.pipe.schedule"
_SHOWN = 20
"""The number of findings that a message shows."""


def prove(factory: Factory, *, micro_batches: int, stages: int, strict: bool = True) -> Proof:
    """Prove a schedule of instructions for these sizes, or raise `VerifyError` with every finding.

    `strict` requires what DeepSpeed's own engine needs: exchanges that meet in order, one loss and one gradient at a time.
    Without it sends return at once, and every buffer has a loss and a gradient of its own.
    """
    program = to_program(factory, micro_batches=micro_batches, stages=stages, strict=strict)
    return verify(program, semantics=_choose_semantics(strict))


def to_program(factory: Factory, *, micro_batches: int, stages: int, strict: bool = True) -> Program:
    """Make a proved program of the instructions, to be simulated and drawn; see `prove`."""
    if not callable(factory):
        raise ScheduleError(f"give a function that makes a stage's schedule, such as a PipeSchedule class, got a {type(factory).__name__}")
    if stages < 1:
        raise ScheduleError(f"a pipeline has at least one stage, got stages={stages}")
    schedules = [factory(micro_batches=micro_batches, stages=stages, stage_id=stage) for stage in range(stages)]
    name = getattr(factory, "__name__", "")
    return build_program(
        [to_plain(schedule) for schedule in schedules],
        micro_batches,
        [schedule.num_pipe_buffers() for schedule in schedules],
        strict=strict,
        name=name,
    )


def to_plain(steps: Iterable[Iterable[Any]]) -> Stream:
    """The instructions of any schedule, ours or DeepSpeed's own, as the values that the passes use."""
    return [[Instruction(instruction.name, instruction.kwargs.get("buffer_id")) for instruction in step] for step in steps]


def find_unknown(stream: Stream) -> Instruction | None:
    """The first instruction whose meaning is not known."""
    return next((instruction for step in stream for instruction in step if instruction.name not in KNOWN), None)


def build_program(
    streams: Sequence[Stream],
    micro_batches: int,
    buffers: Sequence[int],
    *,
    strict: bool = True,
    labels: bool = True,
    name: str = "",
) -> Program:
    """The proved program of these streams, one per stage; `labels` says whether the last stage needs labels for its loss."""
    for stage, stream in enumerate(streams):
        strange = find_unknown(stream)
        if strange is not None:
            raise PassError(f"stage {stage}: the meaning of {strange} is not known, so its stream cannot be proved")
    training = any(instruction.name in TRAINING for stream in streams for step in stream for instruction in step)
    readers = _read(streams, buffers, strict, labels, training)
    findings = [finding for reader in readers for finding in reader.findings] or list(_check_closing(streams))
    if findings:
        raise VerifyError(findings, _describe(name, streams, micro_batches, findings))
    program = _join(readers, micro_batches, name)
    semantics = _choose_semantics(strict)
    findings = check(program, semantics=semantics) or ([] if strict else list(find_blocked(program)))
    if findings:
        raise VerifyError(findings, f"{report(program, semantics, findings)}\n\n{_describe_places(readers, findings)}")
    return program


def build_unproved_program(
    streams: Sequence[Stream], micro_batches: int, buffers: Sequence[int], *, training: bool, labels: bool
) -> Program:
    """The program of streams with instructions of unknown meaning, which are passed over.

    If the other instructions make no sense by themselves, it has the microbatches in their order, all forwards first.
    """
    known = [[[instruction for instruction in step if instruction.name in KNOWN] for step in stream] for stream in streams]
    readers = _read(known, buffers, False, labels, training)
    findings = [finding for reader in readers for finding in reader.findings]
    lost = next((finding for finding in findings if finding.rule == "place"), None)
    if lost is not None:
        raise ScheduleError(f"{lost.action} on stage {lost.rank} {lost.message.removeprefix('it ')}")
    forwards = [sorted(action.microbatch or 0 for action in reader.row if action.kind is Kind.F) for reader in readers]
    if not findings and all(numbers == list(range(micro_batches)) for numbers in forwards):
        return _join(readers, micro_batches, "")
    return SendReceive("just-in-time").apply(Program.start(by_name("gpipe" if training else "inference", len(streams), micro_batches)))


def _choose_semantics(strict: bool) -> str:
    return "rendezvous" if strict else "channels"


def _read(streams: Sequence[Stream], buffers: Sequence[int], strict: bool, labels: bool, training: bool) -> list[StreamReader]:
    """Read the streams stage by stage, so that each reader knows what the previous stage sends."""
    readers: list[StreamReader] = []
    for stage, stream in enumerate(streams):
        duties = Duties(stage == 0, stage == len(streams) - 1, training, labels)
        reader = StreamReader(stage, buffers[stage], duties, readers[-1].sent if readers else (), strict)
        reader.read_stream(stream)
        readers.append(reader)
    return readers


def _join(readers: Sequence[StreamReader], micro_batches: int, name: str) -> Program:
    return Program.from_actions([reader.row for reader in readers], Placement.linear(len(readers)), microbatches=micro_batches, name=name)


def _check_closing(streams: Sequence[Stream]) -> Iterator[Finding]:
    """Every stage closes the batch once, or none does; all stages sum the tied gradients together."""
    for name in CLOSING:
        counts = [sum(instruction.name == name for step in stream for instruction in step) for stream in streams]
        if set(counts) not in ({0}, {1}):
            stage = next(number for number, count in enumerate(counts) if count != 1)
            severity = Severity.HANG if name == "ReduceTiedGrads" else Severity.WRONG
            message = f"the stages run it {', '.join(map(str, counts))} times"
            step = max(0, len(streams[stage]) - 1)
            yield Finding("closing", severity, stage, step, f"{name}()", message, "Run it once on every stage, at the end of its batch")


def find_blocked(program: Program) -> Iterator[Finding]:
    """The ranks that wait forever if receives block and sends do not, each with the receive where it stops.

    The verifier's channels let a receive return at once and computation wait for the data; an instruction that receives waits itself.
    """
    rows, messages = program.rows, program.links.messages
    reached = walk(rows, messages)
    heads = rows.group_offsets[:-1] + reached.done
    for rank in np.flatnonzero(heads < rows.group_offsets[1:]).tolist():
        receive = int(heads[rank])  # no action of a stream has parts, so groups are entries
        send = int(messages.before[messages.after == receive][0])
        other, step = int(rows.rank[send]), int(rows.step[send])
        what, place = str(rows.action_at(send)), f"step {step} of rank {other}"
        yield Finding(
            "deadlock",
            Severity.HANG,
            rank,
            int(rows.step[receive]),
            str(rows.action_at(receive)),
            f"it waits for {what}, which is {place}, which has come as far as its step {int(reached.done[other])}",
            f"Let rank {other} run {what} before what it waits for, or receive later on rank {rank}",
            program,
        )


def _describe(name: str, streams: Sequence[Stream], micro_batches: int, findings: Sequence[Finding]) -> str:
    head = f"{len(findings)} finding{'s'[: len(findings) > 1]} in the instructions of {name or 'a schedule'}"
    lines = [f"{head}, {format_count(len(streams), 'stage')}, {format_count(micro_batches, 'microbatch')}:"]
    lines += [f"{number}. {finding}" for number, finding in enumerate(findings[:_SHOWN], start=1)]
    if len(findings) > _SHOWN:
        lines.append(f"and {len(findings) - _SHOWN} more")
    return "\n".join(lines)


def _describe_places(readers: Sequence[StreamReader], findings: Sequence[Finding]) -> str:
    """Where the actions of the findings stand in the streams."""
    lines = ["The streams were read as a program; where its actions stand in them:"]
    for finding in findings[:_SHOWN]:
        places = readers[finding.rank].places
        if finding.step < len(places):
            step, instruction = places[finding.step]
            lines.append(f"  rank {finding.rank}, step {finding.step} ({finding.action}) is {instruction} in step {step} of the stream")
    return "\n".join(lines)


# Our schedules ---------------------------------------------------------------------------------------------------------


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
    home = module or sys.modules.get(_DEEPSPEED_MODULE) or ours

    known: dict[tuple[int, int], Sequence[Stream]] = {}  # no lru_cache, so that the class can be sent to other processes

    def prove_once(micro_batches: int, stages: int) -> Sequence[Stream]:
        if (micro_batches, stages) not in known:
            if isinstance(schedule, str):
                table: Table = by_name(schedule, stages, micro_batches, **options)
            else:
                table = _fit_sizes(schedule, micro_batches, stages)
            known[micro_batches, stages] = _prove_streams(table)
        return known[micro_batches, stages]

    def stream(self: Any) -> Stream:
        ours.check_sizes(self)
        return prove_once(self.micro_batches, self.stages)[int(self.stage_id)]

    def steps(self: Any) -> Iterator[list[Any]]:
        """The stage's instructions."""
        for step in stream(self):
            yield [
                getattr(home, instruction.name)(**({} if instruction.buffer_id is None else {"buffer_id": instruction.buffer_id}))
                for instruction in step
            ]

    def num_pipe_buffers(self: Any) -> int:
        """The number of buffers that the stream uses."""
        return _count_buffers(stream(self))

    if isinstance(schedule, Table):
        prove_once(schedule.microbatches, schedule.ranks)
    text = f"Penstock's {name} as DeepSpeed's instructions."
    parts = {"__doc__": text, "__module__": __name__, "steps": steps, "num_pipe_buffers": num_pipe_buffers}
    return type(f"{''.join(part.capitalize() for part in name.split('-'))}Schedule", (home.PipeSchedule,), parts)


def _check_schedule(schedule: Any, options: dict[str, Any]) -> str:
    """Check that the schedule can be expressed in instructions; its name."""
    if isinstance(schedule, str):
        entry, written = parse_name(schedule)
        chunks = {**written, **options}.get("chunks", entry.layout.chunks)
        if chunks != 1:
            raise ScheduleError(f"{schedule} places {chunks} stages on a rank, but DeepSpeed's instructions know one")
        unknown = sorted({*written, *options} - {"chunks", "graph", *entry.options})
        if unknown:
            raise ScheduleError(f"{schedule} has no option {unknown[0]!r}; its options: {', '.join(entry.options) or 'none'}")
        return entry.name
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
    streams = write_streams(_pair_last_rank(merged) if table.training else merged)
    build_program(streams, table.microbatches, [_count_buffers(stream) for stream in streams], name=table.name)
    return streams


def _pair_last_rank(schedule: Schedule) -> Schedule:
    """The same with each backward of the last rank right after its forward, where it can always run."""
    rows = [schedule.row(rank) for rank in range(schedule.ranks)]
    last = Rows.join([rows[-1]])
    forward = {microbatch: at for at, microbatch in enumerate(last.microbatch.tolist()) if last.kind[at] == Kind.F}
    place = np.array([forward.get(microbatch, len(last.codes)) for microbatch in last.microbatch.tolist()], dtype=np.int64)
    rows[-1] = rows[-1][np.lexsort((last.kind, place))]  # F comes before B in the order of kinds
    return Schedule.from_rows(Rows.join(rows), schedule.placement, schedule.microbatches, graph=schedule.graph, name=schedule.name)


def _count_buffers(stream: Stream) -> int:
    """The number of buffers that a stream uses, at least one."""
    return 1 + max((instruction.buffer_id for step in stream for instruction in step if instruction.buffer_id is not None), default=0)
