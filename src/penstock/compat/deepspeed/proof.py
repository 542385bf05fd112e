"""Streams of instructions proved: no deadlock, no buffer used before it is filled or filled while it is needed.

DeepSpeed's sends and receives block. On a line of stages, ranks that block can only wait for each other in pairs, so that
nobody waits for ever exactly where every two neighbours run their exchanges in the same order: the verifier's `rendezvous`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock.compat.deepspeed.blocking import stuck
from penstock.compat.deepspeed.checklist import Duties
from penstock.compat.deepspeed.player import CLOSING, KNOWN, TRAINING, Player
from penstock.errors import PassError, ScheduleError, VerifyError
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.passes.deepspeed import Instruction, Stream
from penstock.verifier.finding import Finding, Severity
from penstock.verifier.proof import Proof
from penstock.verifier.report import report
from penstock.verifier.verify import check, verify

Factory = Callable[..., Any]
"""What makes a stage's schedule: `factory(micro_batches=8, stages=4, stage_id=0)`, as a `PipeSchedule` class does."""


def prove(factory: Factory, *, micro_batches: int, stages: int, strict: bool = True) -> Proof:
    """Prove a schedule of instructions for these sizes, or raise `VerifyError` with every finding.

    `strict` asks for what DeepSpeed's own engine needs: exchanges that meet in order, one loss and one gradient at a time.
    Without it sends return at once, and every buffer has a loss and a gradient of its own.
    """
    program = to_program(factory, micro_batches=micro_batches, stages=stages, strict=strict)
    return verify(program, semantics=_semantics(strict))


def to_program(factory: Factory, *, micro_batches: int, stages: int, strict: bool = True) -> Program:
    """The instructions as a proved program, which can be simulated and drawn; see `prove`."""
    if not callable(factory):
        raise ScheduleError(f"it takes what makes a stage's schedule, such as a PipeSchedule class, got a {type(factory).__name__}")
    if stages < 1:
        raise ScheduleError(f"a pipeline has at least one stage, got stages={stages}")
    made = [factory(micro_batches=micro_batches, stages=stages, stage_id=stage) for stage in range(stages)]
    name = getattr(factory, "__name__", "")
    return program_of([plain(each) for each in made], micro_batches, [each.num_pipe_buffers() for each in made], strict=strict, name=name)


def plain(steps: Iterable[Iterable[Any]]) -> Stream:
    """Any schedule's instructions, ours or DeepSpeed's own, as the values that the passes use."""
    return [[Instruction(each.name, each.kwargs.get("buffer_id")) for each in step] for step in steps]


def unknown(stream: Stream) -> Instruction | None:
    """The first instruction whose meaning is not known."""
    return next((each for step in stream for each in step if each.name not in KNOWN), None)


def program_of(
    streams: Sequence[Stream],
    micro_batches: int,
    buffers: Sequence[int],
    *,
    strict: bool = True,
    labels: bool = True,
    name: str = "",
) -> Program:
    """The proved program of these streams, one a stage; `labels` says whether the last stage needs any for its loss."""
    players = _play(streams, buffers, strict, labels)
    findings = [finding for player in players for finding in player.findings] or list(_closing(streams))
    if findings:
        raise VerifyError(findings, _said(name, streams, micro_batches, findings))
    rows = [player.row for player in players]
    program = Program.from_actions(rows, Placement.linear(len(rows)), microbatches=micro_batches, name=name)
    semantics = _semantics(strict)
    findings = check(program, semantics=semantics) or ([] if strict else list(stuck(program)))
    if findings:
        raise VerifyError(findings, f"{report(program, semantics, findings)}\n\n{_places(players, findings)}")
    return program


def _semantics(strict: bool) -> str:
    return "rendezvous" if strict else "channels"


def _play(streams: Sequence[Stream], buffers: Sequence[int], strict: bool, labels: bool) -> list[Player]:
    """Stage by stage, so that each knows what the one before it sends."""
    training = any(each.name in TRAINING for stream in streams for step in stream for each in step)
    players: list[Player] = []
    for stage, stream in enumerate(streams):
        strange = unknown(stream)
        if strange is not None:
            raise PassError(f"stage {stage}: the meaning of {strange} is not known, so that its stream cannot be proved")
        duties = Duties(stage == 0, stage == len(streams) - 1, training, labels)
        player = Player(stage, buffers[stage], duties, players[-1].sent if players else (), strict)
        player.play(stream)
        players.append(player)
    return players


def _closing(streams: Sequence[Stream]) -> Iterator[Finding]:
    """Every stage closes the batch once, or none does; the tied gradients are summed by all stages together."""
    for name in CLOSING:
        counts = [sum(each.name == name for step in stream for each in step) for stream in streams]
        if set(counts) not in ({0}, {1}):
            stage = next(number for number, count in enumerate(counts) if count != 1)
            severity = Severity.HANG if name == "ReduceTiedGrads" else Severity.WRONG
            message = f"the stages run it {', '.join(map(str, counts))} times"
            step = max(0, len(streams[stage]) - 1)
            yield Finding("closing", severity, stage, step, f"{name}()", message, "Run it once on every stage, at the end of its batch")


def _said(name: str, streams: Sequence[Stream], micro_batches: int, findings: Sequence[Finding]) -> str:
    head = f"{len(findings)} finding{'s'[: len(findings) > 1]} in the instructions of {name or 'a schedule'}"
    lines = [f"{head}, {len(streams)} stages, {micro_batches} microbatches:"]
    lines += [f"{number}. {finding}" for number, finding in enumerate(findings[:_SHOWN], start=1)]
    if len(findings) > _SHOWN:
        lines.append(f"and {len(findings) - _SHOWN} more")
    return "\n".join(lines)


_SHOWN = 20


def _places(players: Sequence[Player], findings: Sequence[Finding]) -> str:
    """Where the actions that findings name stand in the streams."""
    lines = ["The streams were read as a program; where its actions stand in them:"]
    for finding in findings[:_SHOWN]:
        places = players[finding.rank].places
        if finding.step < len(places):
            step, each = places[finding.step]
            lines.append(f"  rank {finding.rank}, step {finding.step} ({finding.action}) is {each} in step {step} of the stream")
    return "\n".join(lines)
