"""Parameters are gathered when they are used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.rows import Flags, Ints
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding, Severity


def is_sharded(context: Context) -> bool:
    """Whether the program shards at all; then every stage is sharded."""
    return bool(context.rows.is_kind(Kind.UNSHARD, Kind.RESHARD).any())


def sharding(context: Context) -> Iterator[Finding]:
    """Each rank's stages are unsharded when they compute, never unsharded or resharded twice, and sharded at the end."""
    entries, head = _sort_by_stage(context)
    kind, place = context.rows.kind[entries], np.arange(len(entries))
    changes = (kind == Kind.UNSHARD) | (kind == Kind.RESHARD)
    last = np.maximum.accumulate(np.where(changes | head, place, 0))  # the last change up to each entry, else its stage's first entry
    before = np.where(head, -1, np.roll(last, 1))
    before[before >= 0] = np.where(changes[before[before >= 0]], before[before >= 0], -1)  # a stage starts sharded
    unsharded = (before >= 0) & (kind[before] == Kind.UNSHARD)
    wrong = np.flatnonzero(unsharded == (kind == Kind.UNSHARD))
    for at in wrong[np.argsort(entries[wrong])].tolist():
        yield _report_state(context, int(entries[at]), int(entries[before[at]]) if before[at] >= 0 else -1)
    for at in last[np.roll(head, -1)].tolist():
        if kind[at] == Kind.UNSHARD:
            yield _report_open(context, int(entries[at]))


def _sort_by_stage(context: Context) -> tuple[Ints, Flags]:
    """The uses and changes of state, one rank's stage after the other, and whether each is the first of its stage."""
    rows = context.rows
    entries = np.flatnonzero(rows.is_kind(Kind.UNSHARD, Kind.RESHARD, *COMPUTE) & context.inside)
    key = rows.rank[entries] * context.table.stages + rows.stage[entries]
    order = np.argsort(key, kind="stable")
    head = np.ones(len(key), dtype=np.bool_)
    head[1:] = np.diff(key[order]) != 0
    return entries[order], head


def _report_state(context: Context, entry: int, changed: int) -> Finding:
    """An entry that finds its stage in the wrong state, and the last change of that, -1 if there was none."""
    rank, stage, name = int(context.rows.rank[entry]), int(context.rows.stage[entry]), context.name(entry)
    since = "from the start" if changed < 0 else f"since {context.name(changed)} in step {int(context.rows.step[changed])}"
    kind = Kind(int(context.rows.kind[entry]))
    if kind is Kind.UNSHARD:
        message = f"{name} gathers the parameters of stage {stage}, which rank {rank} holds unsharded {since}"
        return context.report("sharding", entry, message, "Remove one of the two, or reshard in between", Severity.UNTIDY)
    if kind is Kind.RESHARD:
        message = f"{name} frees the parameters of stage {stage}, which rank {rank} holds sharded {since}"
        return context.report("sharding", entry, message, "Remove it, or unshard before it", Severity.UNTIDY)
    message = f"{name} uses the parameters of stage {stage}, which rank {rank} holds sharded {since}"
    return context.report("sharding", entry, message, f"Run {stage}UNSHARD before it")


def _report_open(context: Context, entry: int) -> Finding:
    stage, rank = int(context.rows.stage[entry]), int(context.rows.rank[entry])
    message = f"rank {rank} ends with the parameters of stage {stage} unsharded: nothing reshards them after {context.name(entry)}"
    return context.report("sharding", entry, message, f"Run {stage}RESHARD after the last use of stage {stage}", Severity.UNTIDY)
