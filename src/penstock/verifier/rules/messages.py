"""Every message that is needed is sent once and received once, and no other is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.action import unpack_code
from penstock.ir.dependencies import message_code
from penstock.ir.kind import SENDS, Kind
from penstock.ir.rows import Flags, Ints
from penstock.verifier.context import Context, repeated
from penstock.verifier.finding import Finding

_OTHER_END = {Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B}
_FORWARD = (Kind.SEND_F, Kind.RECV_F)


def once_each(context: Context) -> Iterator[Finding]:
    """The part of `complete` that is about messages."""
    crosses = _crosses(context)
    for kind in _OTHER_END:
        needed = crosses & _carries(context, kind in _FORWARD) if kind in _FORWARD or context.table.training else np.zeros_like(crosses)
        entries = np.flatnonzero(context.rows.is_kind(kind) & (context.edge >= 0))
        count = np.bincount(context.message[entries], minlength=len(needed))
        yield from _lacking(context, kind, np.flatnonzero(needed & (count == 0)))
        yield from (_needless(context, entry) for entry in entries[~needed[context.message[entries]]].tolist())
        if (count > 1).any():
            yield from repeats(context, context.message[entries], entries)


def _crosses(context: Context) -> Flags:
    """For each edge and microbatch, whether its ends are on two ranks; stages of one rank exchange nothing."""
    microbatch = np.arange(context.table.microbatches)
    source, target = (context.placement.ranks_of(context.edges[:, end, None], microbatch) for end in (0, 1))
    return np.not_equal(source, target).ravel()


def _carries(context: Context, forward: bool) -> Flags:
    """For each edge and microbatch, whether it has a message of its own: not if the message of a farther reader on the rank carries it."""
    carries = np.ones((len(context.edges), context.table.microbatches), dtype=np.bool_)
    edge, _, microbatch = context.linker.shared(forward)
    carries[edge, microbatch] = False
    return carries.ravel()


def _lacking(context: Context, kind: Kind, missing: Ints) -> Iterator[Finding]:
    """Messages that lack this end, each shown beside the compute action that makes or uses its data."""
    if len(missing):
        beside = context.first(Kind.F) if kind in _FORWARD else context.first(Kind.B, Kind.I)
        yield from (_lacks(context, kind, message, beside) for message in missing.tolist())


def _lacks(context: Context, kind: Kind, message: int, beside: Ints) -> Finding:
    edge, microbatch = divmod(message, context.table.microbatches)
    source, target = context.graph.edges[edge] if kind in _FORWARD else context.graph.edges[edge][::-1]
    here, there, verb = (source, target, "sends") if kind in SENDS else (target, source, "receives")
    rank, other = (context.placement.rank_of(stage, microbatch) for stage in (here, there))
    what = "activations" if kind in _FORWARD else "gradients"
    text = f"rank {rank} never {verb} the {what} of microbatch {microbatch} from stage {source} to stage {target}"
    remedy = f"Add it; its other end is {_name(_OTHER_END[kind], there, here, microbatch)} on rank {other}"
    near = int(beside[here * context.table.microbatches + microbatch])
    return context.absence("complete", rank, _name(kind, here, there, microbatch), text, remedy, beside=near)


def _name(kind: Kind, stage: int, other: int, microbatch: int) -> str:
    at = (np.array([value], dtype=np.int64) for value in (stage, other, microbatch))
    return str(unpack_code(int(message_code(kind, *at)[0])))


def _needless(context: Context, entry: int) -> Finding:
    reason = "nothing here trains, so there are no gradients"
    if context.away[entry] == context.home[entry]:
        reason = f"both ends are on rank {int(context.home[entry])}, and stages of one rank exchange nothing"
    return context.finding("complete", entry, f"{context.name(entry)} is a message that nobody needs: {reason}", "Remove both its ends")


def repeats(context: Context, keys: Ints, entries: Ints) -> Iterator[Finding]:
    """Report entries whose key an earlier entry has."""
    for entry, first in zip(*(ends.tolist() for ends in repeated(keys, entries)), strict=True):
        message = f"{context.name(entry)} runs twice: it is also {context.place(first)}"
        yield context.finding("complete", entry, message, "Remove one of the two")
