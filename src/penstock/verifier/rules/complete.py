"""All the work is there, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.rows import Ints
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding
from penstock.verifier.rules.messages import once_each, repeats


def complete(context: Context) -> Iterator[Finding]:
    """Each stage and microbatch has one forward and, if anything trains, one backward; each message is sent once and received once."""
    entries = {kind: np.flatnonzero(context.rows.is_kind(kind) & context.inside) for kind in COMPUTE}
    size = context.table.stages * context.table.microbatches
    counts = {kind: np.bincount(context.cell[entries[kind]], minlength=size) for kind in COMPUTE}
    yield from _forwards(context, counts[Kind.F])
    if context.table.training:
        yield from _backwards(context, counts)
    for kind in COMPUTE:
        if (counts[kind] > 1).any():
            yield from repeats(context, context.cell[entries[kind]], entries[kind])
    if context.table.lowered:
        yield from once_each(context)


def _forwards(context: Context, count: Ints) -> Iterator[Finding]:
    missing = np.flatnonzero(count == 0)
    beside = context.first(Kind.B, Kind.I, Kind.W) if len(missing) else missing
    for cell in missing.tolist():
        stage, microbatch = divmod(cell, context.table.microbatches)
        name, rank = f"{stage}F{microbatch}", context.placement.rank_of(stage, microbatch)
        message = f"stage {stage} has no F for microbatch {microbatch} of 0..{context.table.microbatches - 1}"
        yield context.absence("complete", rank, name, message, f"Run {name} on rank {rank}", beside=int(beside[cell]))


def _backwards(context: Context, counts: dict[Kind, Ints]) -> Iterator[Finding]:
    full, of_input, of_weights = (counts[kind] > 0 for kind in (Kind.B, Kind.I, Kind.W))
    good = np.where(full, ~of_input & ~of_weights, of_input & of_weights)
    wrong = np.flatnonzero(~good)
    first = {kind: context.first(kind) for kind in COMPUTE} if len(wrong) else {}
    for cell in wrong.tolist():
        there = {kind: int(table[cell]) for kind, table in first.items() if table[cell] >= 0}
        yield _twofold(context, there) if Kind.B in there else _absent(context, cell, there)


def _twofold(context: Context, there: dict[Kind, int]) -> Finding:
    """A full backward and a part of it as well."""
    full, part = there[Kind.B], there[Kind.I] if Kind.I in there else there[Kind.W]
    name = context.name(full)
    message = f"{context.name(part)} is a part of the backward that {name} ({context.place(full)}) runs as a whole"
    return context.finding("complete", part, message, f"Keep {name}, or the I and W in its place, not both")


def _absent(context: Context, cell: int, there: dict[Kind, int]) -> Finding:
    """No backward, or only half of a split one; `there` is the first entry of each kind that is there."""
    stage, microbatch = divmod(cell, context.table.microbatches)
    rank, both = context.placement.rank_of(stage, microbatch), f"{stage}B{microbatch}"
    halves = [kind for kind in (Kind.I, Kind.W) if kind in there]
    if not halves:
        message = f"stage {stage} has no backward for microbatch {microbatch}, though other actions train"
        remedy = f"Run {both}, or {stage}I{microbatch} and {stage}W{microbatch}, on rank {rank}"
        return context.absence("complete", rank, both, message, remedy, beside=there.get(Kind.F, -1))
    half, name = halves[0], f"{stage}{'W' if halves[0] is Kind.I else 'I'}{microbatch}"
    message = f"stage {stage} runs {context.name(there[half])} but never {name}: a split backward needs both I and W"
    return context.absence("complete", rank, name, message, f"Run {name} on rank {rank}, or {both} in place of both", beside=there[half])
