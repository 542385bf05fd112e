"""Peak memory of each rank against its limit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.memory_ledger import CATEGORIES, When, list_changes, sum_static
from penstock.ir.rows import Floats, Ints
from penstock.ir.table import Table
from penstock.text.units import Units
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding, Severity

_SLACK = 1e-9  # of the limit: sums of fractions are not exact


def peak_memory(table: Table, costs: Costs | None = None) -> list[float]:
    """The most that each rank holds at once, along its own order and at any times; `ir.memory_ledger` says what is held.

    A schedule does not say when messages are received: they count in programs only.
    """
    costs = costs or Costs()
    held, bounds = sum_held(table, costs), table.rows.group_offsets.tolist()
    static = sum_static(table, costs).tolist()  # all that a rank without actions holds
    return [float(held[begin:end].max(initial=least)) for (begin, end), least in zip(pairwise(bounds), static, strict=True)]


def sum_held(table: Table, costs: Costs) -> Floats:
    """The memory of each group's rank while the group runs."""
    rows, changes = table.rows, list_changes(table, costs)
    counted = (changes.category != CATEGORIES.index("receive buffers")) | table.lowered
    at_end = changes.when == When.END
    group, groups = rows.group[changes.entry], int(rows.group_offsets[-1])
    at_start, afterwards = (
        np.bincount(group[part], weights=changes.size[part], minlength=groups) for part in (counted & ~at_end, counted & at_end)
    )
    before = np.concatenate(([0.0], np.cumsum(at_start + afterwards)))
    counts = np.diff(rows.group_offsets)
    first = np.repeat(before[rows.group_offsets[:-1]], counts)
    return np.asarray(before[:-1] - first + at_start + np.repeat(sum_static(table, costs), counts), dtype=np.float64)


def memory(context: Context) -> Iterator[Finding]:
    """No rank holds more than its limit."""
    held, bounds = sum_held(context.table, context.costs), context.rows.group_offsets.tolist()
    for rank, limit in enumerate(context.limits or ()):
        of_rank = held[bounds[rank] : bounds[rank + 1]]
        over = np.flatnonzero(of_rank > limit * (1 + _SLACK))
        if len(over):
            yield _report_excess(context, rank, limit, of_rank, over)


def _report_excess(context: Context, rank: int, limit: float, held: Floats, over: Ints) -> Finding:
    step = int(np.argmax(held))
    peak = float(held[step])
    entry = int(np.searchsorted(context.rows.group, context.rows.group_offsets[rank] + step))
    size = Units(in_bytes=True).size if context.in_bytes else "{:.6g}".format
    message = (
        f"rank {rank} holds {size(peak)} at its peak, {size(peak - limit)} over its limit of {size(limit)}; "
        f"{len(over)} of its {len(held)} steps are over, the first is step {int(over[0])}"
    )
    remedy = "Run backwards earlier, choose a schedule with a lower peak, recompute activations, or raise the limit"
    return context.report("memory", entry, message, remedy, Severity.MEMORY)
