"""How much each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.rows import Ints
from penstock.ir.table import Table
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding, Severity

Floats = NDArray[np.float64]

_SLACK = 1e-9  # of the limit: sums of fractions are not exact


def peak_memory(table: Table, costs: Costs | None = None) -> list[float]:
    """The most that each rank holds at once, along its own order.

    An activation is held from F to I or B, a weight stash from I to W. What runs together, and one action by itself,
    takes all it needs before it gives anything back. Without a backward nothing is held.
    """
    held = held_in(table, costs or Costs())
    bounds = table.rows.group_offsets.tolist()
    return [float(held[begin:end].max(initial=0.0)) for begin, end in pairwise(bounds)]


def held_in(table: Table, costs: Costs) -> Floats:
    """What the rank of each group holds while the group runs."""
    rows, num_groups = table.rows, int(table.rows.group_offsets[-1])
    activation, stash = (np.array(costs.per_stage(name, table.stages)) for name in ("activation", "weight_stash"))
    if not table.training:
        return np.zeros(num_groups)

    def total(*parts: tuple[Floats, tuple[Kind, ...]]) -> Floats:
        taken = np.zeros(num_groups)
        for size, kinds in parts:
            at = np.flatnonzero(rows.is_kind(*kinds) & (rows.stage < table.stages))
            taken += np.bincount(rows.group[at], weights=size[rows.stage[at]], minlength=num_groups)
        return taken

    takes = total((activation, (Kind.F,)), (stash, (Kind.I,)))
    gives = total((activation, (Kind.B, Kind.I)), (stash, (Kind.W,)))
    before = np.concatenate(([0.0], np.cumsum(takes - gives)))
    starts = np.repeat(before[rows.group_offsets[:-1]], np.diff(rows.group_offsets))
    return np.asarray(before[:-1] - starts + takes, dtype=np.float64)


def memory(context: Context) -> Iterator[Finding]:
    """No rank holds more than its limit."""
    held, bounds = held_in(context.table, context.costs), context.rows.group_offsets.tolist()
    for rank, limit in enumerate(context.limits or ()):
        of_rank = held[bounds[rank] : bounds[rank + 1]]
        over = np.flatnonzero(of_rank > limit * (1 + _SLACK))
        if len(over):
            yield _over(context, rank, limit, of_rank, over)


def _over(context: Context, rank: int, limit: float, held: Floats, over: Ints) -> Finding:
    step = int(np.argmax(held))
    peak = float(held[step])
    entry = int(np.searchsorted(context.rows.group, context.rows.group_offsets[rank] + step))
    size = _bytes if context.in_bytes else _plain
    message = (
        f"rank {rank} holds {size(peak)} at its peak, {size(peak - limit)} over its limit of {size(limit)}; "
        f"{len(over)} of its {len(held)} steps are over, the first is step {int(over[0])}"
    )
    remedy = "Run backwards earlier, choose a schedule with a lower peak, recompute activations, or raise the limit"
    return context.finding("memory", entry, message, remedy, Severity.MEMORY)


def _plain(size: float) -> str:
    return f"{size:.6g}"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}TiB"
