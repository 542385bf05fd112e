"""Activations that are moved to host memory come back once, and the host has room for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.kind import COPIES, Kind
from penstock.ir.memory_ledger import list_host_changes
from penstock.ir.rows import Floats
from penstock.ir.table import Table
from penstock.text.units import Units
from penstock.verifier.context import Context, find_repeated
from penstock.verifier.finding import Finding, Severity

_SLACK = 1e-9  # of the limit: sums of fractions are not exact


def has_copies(context: Context) -> bool:
    """Whether any activation is moved."""
    return bool(context.rows.is_kind(*COPIES).any())


def offload(context: Context) -> Iterator[Finding]:
    """No activation is offloaded twice, and each that is has one RELOAD and a backward; that they are in order is left to `order`."""
    first = {kind: context.find_first(kind) for kind in COPIES}
    for kind in COPIES:
        entries = np.flatnonzero(context.rows.is_kind(kind) & context.inside)
        for entry, other in zip(*(ends.tolist() for ends in find_repeated(context.cell[entries], entries)), strict=True):
            yield _report_twice(context, entry, other)
    moved, back = (first[kind] >= 0 for kind in COPIES)
    for entry in np.sort(first[Kind.OFFLOAD][moved & ~back]).tolist():
        yield _report_lost(context, entry)
    for entry in np.sort(first[Kind.RELOAD][back & ~moved]).tolist():
        message = f"{context.name(entry)} brings back an activation that no OFFLOAD has moved to the host"
        yield context.report("offload", entry, message, "Remove it, or run the OFFLOAD before it")
    unused = moved & (context.find_first(Kind.B, Kind.I) < 0)
    for entry in np.sort(first[Kind.OFFLOAD][unused]).tolist():
        message = f"{context.name(entry)} moves an activation that no backward needs"
        yield context.report("offload", entry, message, "Remove it and its RELOAD", Severity.UNTIDY)


def _report_twice(context: Context, entry: int, first: int) -> Finding:
    what = "moves an activation to the host" if context.rows.kind[entry] == Kind.OFFLOAD else "brings an activation back"
    message = f"{context.name(entry)} {what} a second time: {context.place(first)} does so already"
    return context.report("offload", entry, message, "Remove one of the two")


def _report_lost(context: Context, entry: int) -> Finding:
    name = context.name(entry).replace("OFFLOAD", "RELOAD")
    message = f"{context.name(entry)} moves an activation to the host, and nothing brings it back for its backward"
    return context.report_missing("offload", int(context.rows.rank[entry]), name, message, f"Run {name} before the backward", beside=entry)


def peak_host_memory(table: Table, costs: Costs | None = None) -> list[float]:
    """The most host memory that the activations of each rank take at once, along its own order and at any times."""
    held, bounds = _sum_host_memory(table, costs or Costs()), table.rows.group_offsets.tolist()
    return [float(held[begin:end].max(initial=0.0)) for begin, end in pairwise(bounds)]


def _sum_host_memory(table: Table, costs: Costs) -> Floats:
    """The host memory of each group's rank while the group runs."""
    rows, changes = table.rows, list_host_changes(table, costs)
    change = np.bincount(rows.group[changes.entry], weights=changes.size, minlength=int(rows.group_offsets[-1]))
    total = np.concatenate(([0.0], np.cumsum(change)))
    return np.asarray(total[1:] - np.repeat(total[rows.group_offsets[:-1]], np.diff(rows.group_offsets)), dtype=np.float64)


def host_memory(context: Context) -> Iterator[Finding]:
    """No rank has more on the host than its limit."""
    held, bounds = _sum_host_memory(context.table, context.costs), context.rows.group_offsets.tolist()
    size = Units(in_bytes=True).size if context.in_bytes else "{:.6g}".format
    for rank, limit in enumerate(context.host_limits or ()):
        of_rank = held[bounds[rank] : bounds[rank + 1]]
        if not len(of_rank) or of_rank.max() <= limit * (1 + _SLACK):
            continue
        step = int(np.argmax(of_rank))
        entry = int(np.searchsorted(context.rows.group, bounds[rank] + step))
        peak = float(of_rank[step])
        message = f"rank {rank} has {size(peak)} on the host at its peak, {size(peak - limit)} over its limit of {size(limit)}"
        remedy = "Offload fewer activations, reload them earlier, or raise the limit"
        yield context.report("host memory", entry, message, remedy, Severity.MEMORY)
