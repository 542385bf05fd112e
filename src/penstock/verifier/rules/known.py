"""Every action is one, and names stages, microbatches and peers that exist."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir import codes
from penstock.ir.dependencies import peer_stages
from penstock.ir.kind import RECEIVES, SEND_WAITS, SENDS, Kind
from penstock.ir.table import Table
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding, Severity
from penstock.verifier.rules.waits import slots_of


def known(context: Context) -> Iterator[Finding]:
    """Stages and microbatches are inside the counts, and messages go along edges of the graph."""
    yield from _check_counts(context)
    yield from _check_edges(context) if context.table.lowered else _report_early_messages(context)
    yield from _check_slots(context)


def _check_counts(context: Context) -> Iterator[Finding]:
    rows, table = context.rows, context.table
    for entry in np.flatnonzero(~context.inside).tolist():
        stage, unit = int(rows.stage[entry]), int(rows.microbatch[entry])
        wrong = [f"stage {stage} of 0..{table.stages - 1}"] if stage >= table.stages else []
        wrong += [f"{context.unit_name(unit)} of {context.units_name}"] if unit >= table.units else []
        message = f"{context.name(entry)} names {' and '.join(wrong)}, which does not exist"
        yield context.report("known", entry, message, "Remove it, or raise the count that the table was made with")


def _check_edges(context: Context) -> Iterator[Finding]:
    rows, peers = context.rows, peer_stages(context.rows)
    named = (context.communicates | rows.is_kind(*SEND_WAITS)) & context.inside
    for entry in np.flatnonzero(named & ~context.along_edge).tolist():
        stage, peer = int(rows.stage[entry]), int(peers[entry])
        up = rows.kind[entry] in (Kind.SEND_F, Kind.RECV_B, Kind.WAIT_SEND_F)
        source, target = (stage, peer) if up else (peer, stage)
        others = context.graph.outputs_of(stage) if up else context.graph.inputs_of(stage)
        what = f"stage {stage} {'is read by' if up else 'reads'} {', '.join(map(str, others)) or 'no stage'}"
        message = f"{context.name(entry)} goes along an edge from stage {source} to stage {target}, but there is none: {what}"
        yield context.report("known", entry, message, "Remove it, name the right peer, or add the edge to the stage graph")


def _report_early_messages(context: Context) -> Iterator[Finding]:
    for entry in np.flatnonzero(context.communicates | context.rows.is_kind(*SEND_WAITS)).tolist():
        message = f"{context.name(entry)} is communication, but this table is not lowered: its compute actions wait for each other directly"
        yield context.report("known", entry, message, "Make the table a lowered Program, or leave the messages to penstock.lower")


def _check_slots(context: Context) -> Iterator[Finding]:
    buffers = slots_of(context)
    for (source, target, kind), count in sorted(buffers.channels.items() if buffers else ()):
        if count < 1:
            message = f"the channel from rank {source} to rank {target} for {kind.name} has {count} slots, so nothing can be sent on it"
            yield context.report_missing("known", source, "", message, "Give it at least 1, or leave it out for as many as needed")


def malformed(table: Table) -> Iterator[Finding]:
    """Report rows that cannot be read as actions; no other rule can run on them."""
    rows = table.rows
    if len(rows) != table.ranks:
        message = f"there are {len(rows)} rows for {table.ranks} ranks"
        yield Finding("known", Severity.WRONG, 0, 0, "", message, "Give one row per rank, an empty one if a rank has nothing to do")
        return
    compute, joined = rows.kind <= Kind.W, codes.is_joined(rows.codes)
    last = np.zeros(len(rows.codes), dtype=np.bool_)
    last[rows.offsets[1:][np.diff(rows.offsets) > 0] - 1] = True
    followed = np.append(compute[1:], False) & ~last
    unreadable = (rows.codes >= 2 * codes.JOIN) | (rows.codes < 0) | (rows.kind == Kind.OVERLAP_F_B) | (rows.kind > max(Kind))
    unreadable |= (rows.peer >= 0) & ~rows.is_kind(*SENDS, *RECEIVES, *SEND_WAITS)
    for flags, what in (
        (unreadable, "is not the code of an action"),
        (joined & ~unreadable & ~(compute & followed), "is joined to the next, but only compute actions of one rank run together"),
    ):
        for entry in np.flatnonzero(flags).tolist():
            rank = int(rows.rank[entry])
            place = entry - int(rows.offsets[rank])
            message = f"entry {place} of the row, {int(rows.codes[entry]):#x}, {what}"
            yield Finding(
                "known", Severity.WRONG, rank, place, "", message, "Build rows from actions, or with penstock.ir.codes.pack and overlap"
            )
