"""How much each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.ir.costs import Costs
from penstock.ir.dependencies import peer_stages
from penstock.ir.kind import RECEIVES, SEND_WAITS, Kind
from penstock.ir.rows import Ints
from penstock.ir.table import Table
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding, Severity

Floats = NDArray[np.float64]

_SLACK = 1e-9  # of the limit: sums of fractions are not exact


def peak_memory(table: Table, costs: Costs | None = None) -> list[float]:
    """The most that each rank holds at once, along its own order and whatever the times.

    An activation is held from the start of F to the end of I or B, which leaves the weight stash until the end of W; a
    received message from its RECV to the end of what uses it last; a sum of gradients for another rank from the end of the first
    backward that adds to it to the end of the last; a sent message that is waited for, from its SEND to
    its WAIT_SEND; gathered parameters from UNSHARD to RESHARD; and always the shards, or the
    parameters where nothing is sharded. Without a backward no activation is held.
    """
    costs = costs or Costs()
    held, bounds = held_in(table, costs), table.rows.group_offsets.tolist()
    kept = _static(table, costs)  # all that a rank without actions holds
    return [float(held[begin:end].max(initial=least)) for (begin, end), least in zip(pairwise(bounds), kept, strict=True)]


def held_in(table: Table, costs: Costs) -> Floats:
    """What the rank of each group holds while the group runs."""
    takes, gives = _Ledger(table, costs).totals()
    rows = table.rows
    before = np.concatenate(([0.0], np.cumsum(takes - gives)))
    counts = np.diff(rows.group_offsets)
    starts = np.repeat(before[rows.group_offsets[:-1]], counts)
    return np.asarray(before[:-1] - starts + takes + np.repeat(_static(table, costs), counts), dtype=np.float64)


@dataclass(frozen=True)
class _Ledger:
    """What each group takes when it starts and gives back when it ends."""

    table: Table
    costs: Costs

    def totals(self) -> tuple[Floats, Floats]:
        takes, gives = np.zeros(self._groups), np.zeros(self._groups)
        if self.table.training:
            activation, stash = self._table("activation"), self._table("weight_stash")
            self._add(takes, activation, Kind.F)
            self._add(gives, activation, Kind.B)
            self._add(gives, activation - stash, Kind.I)
            self._add(gives, stash, Kind.W)
        parameters = np.repeat(self._column("parameters")[:, None], self.table.microbatches, axis=1)
        self._add(takes, parameters, Kind.UNSHARD)
        self._add(gives, parameters, Kind.RESHARD)
        if self.table.lowered:
            self._messages(takes, gives)
        return takes, gives

    @property
    def _groups(self) -> int:
        return int(self.table.rows.group_offsets[-1])

    def _table(self, name: str) -> Floats:
        return self.costs.table(name, self.table.stages, self.table.microbatches)

    def _column(self, name: str) -> Floats:
        return np.array(self.costs.per_stage(name, self.table.stages))

    def _add(self, total: Floats, size: Floats, kind: Kind) -> None:
        rows, table = self.table.rows, self.table
        at = np.flatnonzero(rows.is_kind(kind) & (rows.stage < table.stages) & (rows.microbatch < table.microbatches))
        total += np.bincount(rows.group[at], weights=size[rows.stage[at], rows.microbatch[at]], minlength=self._groups)

    def _messages(self, takes: Floats, gives: Floats) -> None:
        """Received messages until their last use, and sums of gradients until their last part: each of the size of the output."""
        rows, local, deliveries = self.table.rows, self.table.links.local, self.table.deliveries
        used = np.flatnonzero(rows.is_kind(*RECEIVES)[local.before])
        last = np.full(len(rows.codes), -1, dtype=np.int64)
        np.maximum.at(last, local.before[used], local.after[used])
        receive = np.flatnonzero(last >= 0)
        lower = np.minimum(rows.stage[receive], peer_stages(rows)[receive])
        self._hold(takes, receive, lower)
        self._hold(gives, last[receive], lower)
        sums = np.flatnonzero(deliveries.begun != deliveries.made)
        lower = deliveries.peer[sums]
        self._hold(gives, deliveries.begun[sums], lower, -1)
        self._hold(gives, deliveries.made[sums], lower)
        self._sent(takes, gives)

    def _sent(self, takes: Floats, gives: Floats) -> None:
        """Messages that the sender keeps until its WAIT_SEND; without one a transport owns what it sends."""
        rows, local = self.table.rows, self.table.links.local
        waited = np.flatnonzero(rows.is_kind(*SEND_WAITS)[local.after])
        send, wait = local.before[waited], local.after[waited]
        lower = np.minimum(rows.stage[send], peer_stages(rows)[send])
        self._hold(takes, send, lower)
        self._hold(gives, wait, lower)

    def _hold(self, total: Floats, entries: Ints, stage: Ints, sign: int = 1) -> None:
        """Add the size of a stage's output at each entry."""
        rows = self.table.rows
        size = self._table("output")[stage, rows.microbatch[entries]]
        total += sign * np.bincount(rows.group[entries], weights=size, minlength=self._groups)


def _static(table: Table, costs: Costs) -> list[float]:
    """What each rank keeps throughout."""
    sharded = table.rows.is_kind(Kind.UNSHARD, Kind.RESHARD).any()
    kept = costs.per_stage("shard" if sharded else "parameters", table.stages)
    return [sum(kept[stage] for stage in table.placement.stages_of(rank)) for rank in range(table.ranks)]


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
