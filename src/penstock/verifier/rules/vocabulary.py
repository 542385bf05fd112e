"""A spread vocabulary: every rank has its share of the work, and all ranks join the same collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from penstock.ir import codes
from penstock.ir.kind import JOINS, SHARES, SPREAD, Kind
from penstock.ir.rows import Ints
from penstock.verifier.context import Context, find_repeated, ordinal, position_in
from penstock.verifier.finding import Finding, Severity


def is_spread(context: Context) -> bool:
    """Whether embedding or head are spread over the ranks."""
    return bool(context.rows.is_kind(*SPREAD).any())


def vocabulary(context: Context) -> Iterator[Finding]:
    """Every rank runs S and, if anything trains, T once per microbatch, of the embedding (stage 0), the head (the last stage) or both."""
    rows, last = context.rows, context.table.stages - 1
    spread = rows.is_kind(*SPREAD) & context.inside
    if not last:
        entry = int(np.flatnonzero(spread)[0])
        message = f"{context.name(entry)} is part of a spread vocabulary, but there is one stage: embedding and head cannot be told apart"
        yield context.report("vocabulary", entry, message, "Use at least two stages, or leave the vocabulary on the stage")
        return
    for entry in np.flatnonzero(spread & (rows.stage != 0) & (rows.stage != last)).tolist():
        message = f"{context.name(entry)} names stage {int(rows.stage[entry])}, which has no share of the vocabulary"
        yield context.report("vocabulary", entry, message, f"Name stage 0 for the embedding, or stage {last} for the head")
    for stage in (0, last):
        if not (spread & (rows.stage == stage)).any():
            continue
        for kind in SHARES if context.table.training else (Kind.S,):
            yield from _check_each(context, "vocabulary", stage, kind)
    if not context.table.training:
        for entry in np.flatnonzero(rows.is_kind(Kind.T) & context.inside).tolist():
            message = f"{context.name(entry)} makes weight gradients, but nothing here trains"
            yield context.report("vocabulary", entry, message, "Remove it")


def joined(context: Context) -> Iterator[Finding]:
    """Every rank joins each collective once, and all join them in the same order: they share one communicator."""
    rows, stages = context.rows, context.table.stages
    spread = rows.is_kind(*SPREAD) & context.inside
    missing = False
    for stage in dict.fromkeys((0, stages - 1)) if stages > 1 else ():
        if not (spread & (rows.stage == stage)).any():
            continue
        needed = JOINS if context.table.training or stage else (Kind.COMBINE,)
        for kind in needed:
            for finding in _check_each(context, "joined", stage, kind):
                missing = True
                yield finding
        for kind in set(JOINS) - set(needed):
            for entry in np.flatnonzero(spread & rows.is_kind(kind) & (rows.stage == stage)).tolist():
                missing = True
                message = f"{context.name(entry)} brings gradients, but nothing here trains"
                yield context.report("joined", entry, message, "Remove it on every rank")
    if not missing:
        yield from _check_orders(context)


def _check_each(context: Context, rule: str, stage: int, kind: Kind) -> Iterator[Finding]:
    """One action of the kind on every rank for every microbatch."""
    rows, units, ranks = context.rows, context.table.units, context.table.ranks
    entries = np.flatnonzero(rows.is_kind(kind) & context.inside & (rows.stage == stage))
    key = rows.rank[entries] * units + rows.microbatch[entries]
    for entry, first in zip(*(ends.tolist() for ends in find_repeated(key, entries)), strict=True):
        message = f"{context.name(entry)} runs twice on rank {int(rows.rank[entry])}: it is also {context.place(first)}"
        yield context.report(rule, entry, message, "Remove one of the two")
    for place in np.flatnonzero(np.bincount(key, minlength=ranks * units) == 0).tolist():
        yield _report_missing(context, kind, stage, *divmod(place, units))


def _report_missing(context: Context, kind: Kind, stage: int, rank: int, unit: int) -> Finding:
    name = context.name_of(kind, stage, unit)
    layer = "embedding" if stage == 0 else "head"
    if kind in JOINS:
        message = f"rank {rank} never joins {name}, so no rank gets what it brings"
        finding = context.report_missing("joined", rank, name, message, f"Run {name} on rank {rank} too: every rank joins every collective")
        return replace(finding, severity=Severity.HANG)
    what = "made" if kind is Kind.S else "trained"
    message = f"the {layer} is spread over the ranks, but rank {rank} never runs {name}: its share is never {what}"
    return context.report_missing("vocabulary", rank, name, message, f"Run {name} on rank {rank}")


def _check_orders(context: Context) -> Iterator[Finding]:
    """For each rank, the first collective that it joins in another place than rank 0."""
    rows = context.rows
    entries = np.flatnonzero(rows.is_kind(*JOINS) & context.inside)
    rank, place = rows.rank[entries], position_in(rows.rank[entries])
    first: Ints = entries[rank == 0]
    expected = first[np.minimum(place, len(first) - 1)]
    wrong = np.flatnonzero(_plain(context, entries) != _plain(context, expected))
    for at in wrong[np.unique(rank[wrong], return_index=True)[1]].tolist():
        entry, other = int(entries[at]), int(expected[at])
        message = (
            f"the {ordinal(int(place[at]) + 1)} collective that rank {int(rank[at])} joins is {context.name(entry)}, "
            f"but rank 0 joins {context.name(other)} ({context.place(other)}): no rank gets beyond it"
        )
        yield context.report("joined", entry, message, "Join the collectives in the same order on every rank", Severity.HANG)


def _plain(context: Context, entries: Ints) -> Ints:
    return np.asarray(context.rows.codes[entries] & ~codes.JOIN, dtype=np.int64)
