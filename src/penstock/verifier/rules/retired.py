"""Sends are waited for once, and not too many are outstanding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.dependencies import peer_stages
from penstock.ir.kind import SEND_WAITS, SENDS, Kind
from penstock.ir.rows import Ints
from penstock.verifier.context import Context, find_repeated
from penstock.verifier.finding import Finding, Severity


def is_retired(context: Context) -> bool:
    """Whether the program waits for any of its sends; then it waits for all of them."""
    return bool(context.rows.is_kind(*SEND_WAITS).any())


def retired(context: Context) -> Iterator[Finding]:
    """Each send has one WAIT_SEND on its rank, and each WAIT_SEND its send; that the wait comes after it is left to `order`."""
    waits = np.flatnonzero(context.rows.is_kind(*SEND_WAITS) & context.inside & context.along_edge)
    send = context.linker.sends_awaited(waits)
    lost = (send < 0) | (context.rows.rank[send] != context.rows.rank[waits])
    for entry in waits[lost].tolist():
        yield _report_lost(context, entry)
    waits, send = waits[~lost], send[~lost]
    for entry, first in zip(*(ends.tolist() for ends in find_repeated(send, waits)), strict=True):
        message = f"{context.name(entry)} waits for a send that rank {int(context.rows.rank[entry])} has retired in {context.place(first)}"
        yield context.report("retired", entry, message, "Remove one of the two")
    first_sends = np.setdiff1d(_find_first_sends(context), send)
    for entry in first_sends.tolist():
        yield _report_missing(context, entry)


def _find_first_sends(context: Context) -> Ints:
    """The first send of each message; one that is sent again is a finding of `complete`."""
    sends = np.flatnonzero(context.rows.is_kind(*SENDS) & (context.edge >= 0))
    key = context.message[sends] * 2 + (context.rows.kind[sends] == Kind.SEND_B)
    return sends[np.unique(key, return_index=True)[1]]


def _wait_name(context: Context, send: int) -> str:
    return context.name(send).replace("SEND", "WAIT_SEND")


def _report_lost(context: Context, entry: int) -> Finding:
    name, rank = context.name(entry), int(context.rows.rank[entry])
    peer = int(peer_stages(context.rows)[entry])
    message = f"{name} waits for {name.replace('WAIT_', '')} to stage {peer}, which rank {rank} never runs"
    return context.report("retired", entry, message, "Remove it, or name the stage, microbatch and peer of a send of this rank")


def _report_missing(context: Context, send: int) -> Finding:
    name, rank = _wait_name(context, send), int(context.rows.rank[send])
    message = f"rank {rank} never waits for {context.name(send)}, though the program waits for other sends: what it sent is never freed"
    return context.report_missing("retired", rank, name, message, f"Run {name} after {context.place(send)}", beside=send)


def outstanding(context: Context) -> Iterator[Finding]:
    """No rank has more sends outstanding than the limit: sent, and not yet waited for."""
    rows, limit = context.rows, context.max_outstanding_sends
    assert limit is not None
    change = rows.is_kind(*SENDS).astype(np.int64) - rows.is_kind(*SEND_WAITS)
    total = np.concatenate(([0], np.cumsum(change)))
    for rank in range(len(rows)):
        low, high = int(rows.offsets[rank]), int(rows.offsets[rank + 1])
        level = total[low + 1 : high + 1] - total[low]
        over = np.flatnonzero(level > limit)
        if len(over):
            yield _report_excess(context, rank, low + int(over[0]), int(level.max()), limit)


def _report_excess(context: Context, rank: int, entry: int, most: int, limit: int) -> Finding:
    message = (
        f"rank {rank} has up to {most} sends outstanding, but at most {limit} may be; {context.name(entry)} is the first over the limit"
    )
    remedy = f"Place the waits again with the pass wait-send{{outstanding={limit}}}, or raise the limit"
    return context.report("outstanding", entry, message, remedy, Severity.MEMORY)
