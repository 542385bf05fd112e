"""DeepSpeed's instruction streams as text, and the schedule that a stream stands for.

One `rank N` line per rank, then one line per step: `  4: RecvActivation(buffer_id=0), ForwardPass(buffer_id=0)`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from penstock.errors import FileFormatError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.deepspeed.instructions import Instruction, Stream
from penstock.passes.deepspeed.reader import CLOSING, KINDS, Duties, StreamReader

_RANK = re.compile(r"rank ([0-9]+)")
_STEP = re.compile(r"\s*([0-9]+):\s*(.*)")
_CALL = re.compile(r"([A-Z][A-Za-z]*)\((?:buffer_id=([0-9]+))?\)")


def format_streams(streams: Sequence[Stream]) -> str:
    """The text form; `parse_streams` reads it back."""
    lines: list[str] = []
    for rank, stream in enumerate(streams):
        lines += [f"rank {rank}", *(f"  {number}: {', '.join(map(str, step))}".rstrip() for number, step in enumerate(stream))]
    return "".join(f"{line}\n" for line in lines)


def parse_streams(text: str, file: str = "stream") -> list[Stream]:
    """Every rank's instructions; errors name the line."""
    streams: list[Stream] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if (rank := _RANK.fullmatch(line.strip())) and int(rank[1]) == len(streams):
            streams.append([])
        elif streams and (step := _STEP.fullmatch(line)) and int(step[1]) == len(streams[-1]):
            streams[-1].append([_read_instruction(call, file, number) for call in filter(None, step[2].split(", "))])
        else:
            expected = f"'rank {len(streams)}'" + (f" or step {len(streams[-1])} of rank {len(streams) - 1}" if streams else "")
            raise FileFormatError(file, f"line {number} is {line.strip()!r}, but {expected} comes next")
    if not streams:
        raise FileFormatError(file, "the stream is empty: it starts with 'rank 0'")
    return streams


def _read_instruction(text: str, file: str, line: int) -> Instruction:
    match = _CALL.fullmatch(text.strip())
    if match is None or match[1] not in (("LoadMicroBatch", *KINDS) if match[2] else CLOSING):
        raise FileFormatError(file, f"line {line}: {text.strip()!r} is not an instruction like ForwardPass(buffer_id=0) or OptimizerStep()")
    return Instruction(match[1], int(match[2]) if match[2] else None)


def schedule_of(streams: Sequence[Stream], file: str = "stream") -> Schedule:
    """The order of forwards and backwards: the microbatch in a buffer follows from loads and messages, first in, first out."""
    readers: list[StreamReader] = []
    for rank, stream in enumerate(streams):
        duties = Duties(rank == 0, rank == len(streams) - 1, training=True)
        reader = StreamReader(rank, sys.maxsize, duties, readers[-1].sent if readers else ())
        for step, instructions in enumerate(stream):
            for instruction in instructions:
                rules = [rule for rule, *_ in reader.read(instruction)]
                reason = ""
                if instruction.name == "RecvActivation" and {"place", "microbatch"} & set(rules):
                    reason = "no rank sends what it receives"
                elif instruction.name != "LoadMicroBatch" and instruction.buffer_id not in (None, *reader.holds):
                    reason = "its buffer was never filled"
                if reason:
                    raise FileFormatError(file, f"rank {rank}, step {step}: {instruction} cannot run, {reason}")
                reader.write(instruction, step)
        readers.append(reader)
    rows = [[action for action in reader.row if action.kind in (Kind.F, Kind.B)] for reader in readers]
    return Schedule.from_actions(rows, Placement.linear(len(rows)))
