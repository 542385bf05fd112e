"""How many slots the program needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir.kind import Kind
from penstock.ir.program import BufferCounts, Program
from penstock.ir.rows import Ints
from penstock.passes.base import Pass
from penstock.text.units import check_count


@dataclass(frozen=True)
class Buffers(Pass):
    """Count slots by liveness: inputs and output gradients of each stage, and messages under way in each channel.

    An input is alive from its receive (or its forward, if nothing is received) to the backward that uses it last; a
    gradient from its receive (or the neighbour's backward on the same rank) to the backward that uses it. A channel gets
    as many slots as messages can be under way at once, so that no send ever waits; `slots` gives every channel that many instead.
    """

    name = "buffers"
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.slots is not None:
            check_count("slots of pass buffers", self.slots, error=PassError)

    def apply(self, program: Program) -> Program:
        if not program.lowered:
            raise PassError("the program has no messages yet: run the pass 'send-receive' first")
        return self._record(program, buffers=BufferCounts(*count_stage_slots(program), self._count_channels(program)))

    def _count_channels(self, program: Program) -> dict[tuple[int, int, Kind], int]:
        counts = count_channel_slots(program)
        return counts if self.slots is None else dict.fromkeys(counts, self.slots)


StageSlots = tuple[dict[int, int], ...]


def count_stage_slots(program: Program) -> tuple[StageSlots, StageSlots]:
    """For each rank and stage the inputs and the output gradients alive at once."""
    rows = program.rows
    ends = rows.is_kind(Kind.B, Kind.I) if program.training else rows.is_kind(Kind.F)
    uses = np.flatnonzero(ends)
    inputs = np.flatnonzero(rows.is_kind(Kind.F))
    starts = _find_arrivals(program, inputs, rows.is_kind(Kind.RECV_F))
    activations = _count_alive(program, starts, rows.stage[inputs], rows.group_starts[uses], rows.stage[uses])
    makers, users = _find_gradients(program)
    gradients = _count_alive(program, makers, rows.stage[users], rows.group_starts[users], rows.stage[users])
    return activations, gradients


def _find_arrivals(program: Program, inputs: Ints, received: np.ndarray) -> Ints:
    """The entry at which each forward's input arrives: its first receive, or the forward itself."""
    links, rows = program.links, program.rows
    at = np.arange(len(rows.codes))
    of_receive = received[links.local.before]
    np.minimum.at(at, links.local.after[of_receive], links.local.before[of_receive])
    return at[inputs]


def _find_gradients(program: Program) -> tuple[Ints, Ints]:
    """Each output gradient's first arrival on its rank, and the backward that uses it."""
    links, rows = program.links, program.rows
    before, after = links.local
    arrives = rows.is_kind(Kind.RECV_B)[before] | (rows.is_kind(Kind.B, Kind.I)[before] & (rows.stage[before] != rows.stage[after]))
    arrives &= rows.is_kind(Kind.B, Kind.I)[after]
    first = np.full(len(rows.codes), len(rows.codes), dtype=np.int64)
    np.minimum.at(first, after[arrives], before[arrives])
    used = np.flatnonzero(first < len(rows.codes))
    return first[used], used


def _count_alive(program: Program, start: Ints, start_stage: Ints, end: Ints, end_stage: Ints) -> StageSlots:
    """The most intervals open at once for each rank and stage; an interval that ends when another starts is still open."""
    rows = program.rows
    at = np.concatenate((start, end))
    change = np.concatenate((np.ones(len(start), dtype=np.int64), -np.ones(len(end), dtype=np.int64)))
    key = rows.rank[at] * program.stages + np.concatenate((start_stage, end_stage))
    order = np.lexsort((-change, at, key))
    key, level = key[order], np.cumsum(change[order])  # every interval closes, so that each key starts from 0
    most: StageSlots = tuple({} for _ in range(len(rows)))
    if len(key):
        firsts = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
        for place, peak in zip(key[firsts].tolist(), np.maximum.reduceat(level, firsts).tolist(), strict=True):
            most[place // program.stages][place % program.stages] = peak
    return most


def count_channel_slots(program: Program) -> dict[tuple[int, int, Kind], int]:
    """Per channel, the most messages that can be sent and not yet used, however long the actions take.

    A sender knows that a message was used when it has itself used a message that the receiver sent afterwards.
    """
    rows, num_ranks = program.rows, len(program.rows)
    deliveries = program.deliveries
    sends, uses = deliveries.sent, deliveries.first  # the first reader takes a message off its channel
    channel = (rows.rank[sends] * num_ranks + rows.rank[uses]) * 2 + (rows.kind[sends] == Kind.SEND_F)
    order = np.lexsort((sends, channel))
    sends, uses = sends[order], uses[order]
    ids, first, index = np.unique(channel[order], return_index=True, return_inverse=True)
    if not len(ids):
        return {}
    span = len(rows.codes)
    through = np.maximum.accumulate(index * span + uses)  # a slot is free again once this and all earlier messages were used
    used = np.searchsorted(through, index * span + _find_known(program, sends, uses), side="right")
    most = np.maximum.reduceat(np.arange(len(sends)) + 1 - used, first)
    return {
        (key // 2 // num_ranks, key // 2 % num_ranks, Kind.SEND_F if key % 2 else Kind.SEND_B): count
        for key, count in zip(ids.tolist(), most.tolist(), strict=True)
    }


def _find_known(program: Program, sends: Ints, uses: Ints) -> Ints:
    """For each message, the last entry of its receiver that its sender knows to be through by then, -1 if it knows of none.

    If a rank uses a message, its sender has finished everything before that send.
    """
    rows, span = program.rows, len(program.rows.codes)
    source, target = rows.rank[sends], rows.rank[uses]
    heard = (target * len(rows) + source) * span + uses  # by the pair that talks back, then by when it is heard
    order = np.argsort(heard)
    back = (target * len(rows) + source)[order]
    latest = np.maximum.accumulate(back * span + sends[order]) % span
    back_channel = source * len(rows) + target
    at = np.searchsorted(heard[order], back_channel * span + sends) - 1
    return np.where((at >= 0) & (back[at] == back_channel), latest[at], -1)
