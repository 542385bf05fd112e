"""All the work and every message is there, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.dependencies import message_code
from penstock.ir.kind import COMPUTE, SENDS, Kind
from penstock.ir.rows import Flags, Ints
from penstock.verifier.context import Context, find_repeated
from penstock.verifier.finding import Finding


def complete(context: Context) -> Iterator[Finding]:
    """Each stage and microbatch has one forward and, if anything trains, one backward; each message is sent once and received once."""
    entries = {kind: np.flatnonzero(context.rows.is_kind(kind) & context.inside) for kind in COMPUTE}
    size = context.table.stages * context.table.units
    counts = {kind: np.bincount(context.cell[entries[kind]], minlength=size) for kind in COMPUTE}
    yield from _check_forwards(context, counts[Kind.F])
    if context.table.training:
        yield from _check_backwards(context, counts)
    for kind in COMPUTE:
        if (counts[kind] > 1).any():
            yield from repeats(context, context.cell[entries[kind]], entries[kind])
    if context.table.lowered:
        yield from once_each(context)


def _check_forwards(context: Context, count: Ints) -> Iterator[Finding]:
    missing = np.flatnonzero(count == 0)
    beside = context.find_first(Kind.B, Kind.I, Kind.W) if len(missing) else missing
    for cell in missing.tolist():
        stage, unit = divmod(cell, context.table.units)
        name, rank = context.name_of(Kind.F, stage, unit), context.placement.rank_of(stage, unit)
        message = f"stage {stage} has no F for {context.unit_name(unit)} of {context.units_name}"
        yield context.report_missing("complete", rank, name, message, f"Run {name} on rank {rank}", beside=int(beside[cell]))


def _check_backwards(context: Context, counts: dict[Kind, Ints]) -> Iterator[Finding]:
    full, of_input, of_weights = (counts[kind] > 0 for kind in (Kind.B, Kind.I, Kind.W))
    good = np.where(full, ~of_input & ~of_weights, of_input & of_weights)
    wrong = np.flatnonzero(~good)
    first = {kind: context.find_first(kind) for kind in COMPUTE} if len(wrong) else {}
    for cell in wrong.tolist():
        there = {kind: int(table[cell]) for kind, table in first.items() if table[cell] >= 0}
        yield _report_double(context, there) if Kind.B in there else _report_absent(context, cell, there)


def _report_double(context: Context, there: dict[Kind, int]) -> Finding:
    """A full backward and a part of it as well."""
    full, part = there[Kind.B], there[Kind.I] if Kind.I in there else there[Kind.W]
    name = context.name(full)
    message = f"{context.name(part)} is a part of the backward that {name} ({context.place(full)}) runs as a whole"
    return context.report("complete", part, message, f"Keep {name}, or the I and W in its place, not both")


def _report_absent(context: Context, cell: int, there: dict[Kind, int]) -> Finding:
    """No backward, or only half of a split one; `there` is the first entry of each kind that is there."""
    stage, unit = divmod(cell, context.table.units)
    rank, both = context.placement.rank_of(stage, unit), context.name_of(Kind.B, stage, unit)
    halves = [kind for kind in (Kind.I, Kind.W) if kind in there]
    if not halves:
        message = f"stage {stage} has no backward for {context.unit_name(unit)}, though other actions train"
        remedy = f"Run {both}, or {context.name_of(Kind.I, stage, unit)} and {context.name_of(Kind.W, stage, unit)}, on rank {rank}"
        return context.report_missing("complete", rank, both, message, remedy, beside=there.get(Kind.F, -1))
    half, name = halves[0], context.name_of(Kind.W if halves[0] is Kind.I else Kind.I, stage, unit)
    message = f"stage {stage} runs {context.name(there[half])} but never {name}: a split backward needs both I and W"
    return context.report_missing(
        "complete", rank, name, message, f"Run {name} on rank {rank}, or {both} in place of both", beside=there[half]
    )


_OTHER_END = {Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B}
_FORWARD = (Kind.SEND_F, Kind.RECV_F)


def once_each(context: Context) -> Iterator[Finding]:
    """The part of `complete` that is about messages."""
    crosses = _crosses(context)
    for kind in _OTHER_END:
        needed = crosses & _carries(context, kind in _FORWARD) if kind in _FORWARD or context.table.training else np.zeros_like(crosses)
        entries = np.flatnonzero(context.rows.is_kind(kind) & (context.edge >= 0))
        count = np.bincount(context.message[entries], minlength=len(needed))
        yield from _report_lacking(context, kind, np.flatnonzero(needed & (count == 0)))
        yield from (_report_needless(context, entry) for entry in entries[~needed[context.message[entries]]].tolist())
        if (count > 1).any():
            yield from repeats(context, context.message[entries], entries)


def _crosses(context: Context) -> Flags:
    """For each edge and microbatch, whether its ends are on two ranks; stages of one rank exchange nothing."""
    microbatch = np.arange(context.table.units)
    source, target = (context.placement.ranks_of(context.graph.edge_table[:, end, None], microbatch) for end in (0, 1))
    return np.not_equal(source, target).ravel()


def _carries(context: Context, forward: bool) -> Flags:
    """For each edge and microbatch, whether it has a message of its own: not if the message of a farther reader on the rank carries it."""
    carries = np.ones((len(context.graph.edge_table), context.table.units), dtype=np.bool_)
    edge, _, microbatch = context.linker.find_shared(forward)
    carries[edge, microbatch] = False
    return carries.ravel()


def _report_lacking(context: Context, kind: Kind, missing: Ints) -> Iterator[Finding]:
    """Messages that lack this end, each shown beside the compute action that makes or uses its data."""
    if len(missing):
        beside = context.find_first(Kind.F) if kind in _FORWARD else context.find_first(Kind.B, Kind.I)
        yield from (_lacks(context, kind, message, beside) for message in missing.tolist())


def _lacks(context: Context, kind: Kind, message: int, beside: Ints) -> Finding:
    edge, unit = divmod(message, context.table.units)
    source, target = context.graph.edges[edge] if kind in _FORWARD else context.graph.edges[edge][::-1]
    here, there, verb = (source, target, "sends") if kind in SENDS else (target, source, "receives")
    rank, other = (context.placement.rank_of(stage, unit) for stage in (here, there))
    what = "activations" if kind in _FORWARD else "gradients"
    text = f"rank {rank} never {verb} the {what} of {context.unit_name(unit)} from stage {source} to stage {target}"
    remedy = f"Add it; its other end is {_name(context, _OTHER_END[kind], there, here, unit)} on rank {other}"
    near = int(beside[here * context.table.units + unit])
    return context.report_missing("complete", rank, _name(context, kind, here, there, unit), text, remedy, beside=near)


def _name(context: Context, kind: Kind, stage: int, other: int, unit: int) -> str:
    return str(context.rows.action_for(int(message_code(kind, *map(np.asarray, (stage, other, unit))))))


def _report_needless(context: Context, entry: int) -> Finding:
    reason = "nothing here trains, so there are no gradients"
    if context.away[entry] == context.home[entry]:
        reason = f"both ends are on rank {int(context.home[entry])}, and stages of one rank exchange nothing"
    return context.report("complete", entry, f"{context.name(entry)} is a message that no rank needs: {reason}", "Remove both its ends")


def repeats(context: Context, keys: Ints, entries: Ints) -> Iterator[Finding]:
    """Report entries whose key an earlier entry has."""
    for entry, first in zip(*(ends.tolist() for ends in find_repeated(keys, entries)), strict=True):
        message = f"{context.name(entry)} runs twice: it is also {context.place(first)}"
        yield context.report("complete", entry, message, "Remove one of the two")
