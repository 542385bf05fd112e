"""Gradients are reduced once, when they are whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.kind import Kind
from penstock.ir.rows import Ints, find_first
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding


def is_reduced(context: Context) -> bool:
    """Whether the program reduces at all; then every stage that trains is reduced."""
    return bool(context.rows.is_kind(Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD).any())


def reduction(context: Context) -> Iterator[Finding]:
    """Each rank's stages that train are reduced once, after their last weight gradient; if any reduction is waited for, each is, once."""
    rows, size = context.rows, context.table.ranks * context.table.stages
    key = rows.rank * context.table.stages + rows.stage
    reduces = np.flatnonzero(rows.is_kind(Kind.REDUCE_GRAD) & context.inside)
    trains = np.flatnonzero(rows.is_kind(Kind.B, Kind.W) & context.inside)
    last = np.full(size, -1, dtype=np.int64)
    last[key[trains]] = trains  # of several values for one key the last is kept
    first = find_first(key[reduces], reduces, size)
    for place in np.flatnonzero((last >= 0) & (first < 0)).tolist():
        yield _report_missing(context, *divmod(place, context.table.stages), int(last[place]))
    for entry in reduces.tolist():
        yield from _reduce(context, entry, first[key[entry]], last[key[entry]])
    waits = np.flatnonzero(rows.is_kind(Kind.WAIT_REDUCE_GRAD) & context.inside)
    if len(waits):
        yield from _check_waits(context, waits, find_first(key[waits], waits, size), first, key)


def _check_waits(context: Context, waits: Ints, first_wait: Ints, first_reduce: Ints, key: Ints) -> Iterator[Finding]:
    """`first_wait` and `first_reduce` are tables by rank and stage, which `key` gives for each entry; the order is left to `order`."""
    for entry in waits.tolist():
        name, rank = context.name(entry), int(context.rows.rank[entry])
        if first_reduce[key[entry]] < 0:
            message = f"{name} waits for a reduction that rank {rank} never begins"
            yield context.report("reduction", entry, message, f"Remove it, or run {name.replace('WAIT_', '')} before it")
        elif first_wait[key[entry]] != entry:
            message = f"rank {rank} waits again for the reduction that it has waited for in {context.place(int(first_wait[key[entry]]))}"
            yield context.report("reduction", entry, message, f"Keep one {name}")
    for place in np.flatnonzero((first_reduce >= 0) & (first_wait < 0)).tolist():
        reduce, (rank, stage) = int(first_reduce[place]), divmod(place, context.table.stages)
        name = f"{stage}WAIT_REDUCE_GRAD"
        message = f"rank {rank} never waits for {context.name(reduce)}, though the program waits for other reductions"
        yield context.report_missing("reduction", rank, name, message, f"Run {name} after {context.place(reduce)}", beside=reduce)


def _report_missing(context: Context, rank: int, stage: int, last: int) -> Finding:
    name = f"{stage}REDUCE_GRAD"
    message = f"stage {stage} trains on rank {rank}, but its gradients are never reduced, though those of other stages are"
    remedy = f"Run {name} after {context.name(last)}, step {int(context.rows.step[last])}"
    return context.report_missing("reduction", rank, name, message, remedy, beside=last)


def _reduce(context: Context, entry: int, first: Ints, last: Ints) -> Iterator[Finding]:
    rank, stage, name = int(context.rows.rank[entry]), int(context.rows.stage[entry]), context.name(entry)
    if entry != first:
        message = f"rank {rank} reduces the gradients of stage {stage} again, after {context.place(int(first))}"
        yield context.report("reduction", entry, message, f"Keep one {name}, after the last weight gradient")
    elif last < 0:
        yield context.report("reduction", entry, f"stage {stage} makes no gradients on rank {rank} that {name} could reduce", "Remove it")
    elif entry < last:
        message = (
            f"{name} runs before {context.name(int(last))}, step {int(context.rows.step[last])}: that weight gradient is never reduced"
        )
        yield context.report("reduction", entry, message, f"Move {name} behind step {int(context.rows.step[last])} of rank {rank}")
