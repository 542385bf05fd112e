"""Waits of ranks: for data that another rank has not sent, collectives that it has not joined, sends and slots that it has not taken."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.ir import codes
from penstock.ir.dependencies import message_code
from penstock.ir.kind import RECEIVES, SEND_WAITS, SENDS, Kind
from penstock.ir.program import BufferCounts
from penstock.ir.rows import Flags, Ints, find_first
from penstock.verifier.context import Context, position_in


class Waits(NamedTuple):
    """`after[k]` waits for `before[k]`; if that is -1, forever, for the code `never[k]`. `slot[k]`: for a slot, not for data."""

    before: Ints
    after: Ints
    never: Ints
    slot: Flags


def slots_of(context: Context) -> BufferCounts | None:
    """The slot counts that the proof has to respect, if there are any."""
    buffers = getattr(context.table, "buffers", None)
    return buffers if context.semantics == "channels" and isinstance(buffers, BufferCounts) and buffers.channels else None


def waits(context: Context) -> Waits:
    """Everything that any action of the table waits for."""
    parts = [_list_data_waits(context), _list_meeting_waits(context), _find_missing(context), _list_retirements(context)]
    buffers = slots_of(context)
    if buffers is not None:
        parts.append(_list_slot_waits(context, buffers))
    return Waits(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _list_data_waits(context: Context) -> Waits:
    before, after = context.table.links.data
    return Waits(before, after, np.zeros(len(after), dtype=np.int64), np.zeros(len(after), dtype=np.bool_))


def _list_meeting_waits(context: Context) -> Waits:
    """What a collective makes is there when every rank has joined it."""
    before, after = context.table.links.meetings.list_waits(context.rows.rank)
    return Waits(before, after, np.zeros(len(after), dtype=np.int64), np.zeros(len(after), dtype=np.bool_))


def _list_retirements(context: Context) -> Waits:
    """A WAIT_SEND waits until the receive of its message is posted; forever, if there is none."""
    rows = context.rows
    waits = np.flatnonzero(rows.is_kind(*SEND_WAITS) & context.inside) if context.table.lowered else np.zeros(0, dtype=np.int64)
    send = context.linker.sends_awaited(waits) if len(waits) else waits
    real = (send >= 0) & (rows.rank[send] == rows.rank[waits]) & (context.edge[send] >= 0)
    waits, send = waits[real], send[real]
    return Waits(_list_receive_waits(context)[send], waits, _receive_codes(context, send), np.zeros(len(waits), dtype=np.bool_))


def _find_missing(context: Context) -> Waits:
    """Data that another rank should send but never does. A missing action of the rank itself is left to `complete`."""
    after, code = context.table.links.missing
    maker = context.placement.ranks_of(codes.stage_of(code), codes.microbatch_of(code))
    far = maker != context.home[after]
    after, code = after[far], code[far]
    return Waits(np.full(len(after), -1, dtype=np.int64), after, code, np.zeros(len(after), dtype=np.bool_))


def _list_slot_waits(context: Context, buffers: BufferCounts) -> Waits:
    """With c slots in a channel, its k-th send waits until the receive of message k - c is posted."""
    sends = np.flatnonzero(context.rows.is_kind(*SENDS) & (context.channel >= 0))
    sends = sends[np.argsort(context.channel[sends], kind="stable")]
    channel = context.channel[sends]
    ids, group = np.unique(channel, return_inverse=True)
    count = np.array([_count(context, buffers, ident) for ident in ids.tolist()], dtype=np.int64)[group]
    waiting = np.flatnonzero(position_in(channel) >= count)
    after, earlier = sends[waiting], sends[waiting - count[waiting]]
    return Waits(_list_receive_waits(context)[earlier], after, _receive_codes(context, earlier), np.ones(len(after), dtype=np.bool_))


def _count(context: Context, buffers: BufferCounts, channel: int) -> int:
    """The slots of a channel; one that has no count has as many as there are messages."""
    source, target = divmod(channel // 2, context.table.ranks)
    count = buffers.channels.get((source, target, Kind.SEND_B if channel % 2 else Kind.SEND_F))
    return len(context.rows.codes) if count is None else max(count, 1)  # fewer than 1 is a finding of its own


def _list_receive_waits(context: Context) -> Ints:
    """For each entry that is a send with a receive, that receive; else -1."""
    sent, received = context.table.links.messages
    return find_first(sent, received, len(context.rows.codes))


def _receive_codes(context: Context, sends: Ints) -> Ints:
    """The code of the receive that belongs to each send."""
    rows, (low, high) = context.rows, context.graph.edge_table[context.edge[sends]].T
    forward = rows.kind[sends] == Kind.SEND_F
    stage, other = np.where(forward, high, low), np.where(forward, low, high)
    return message_code(np.where(forward, *RECEIVES), stage, other, rows.microbatch[sends])
