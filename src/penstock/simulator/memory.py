"""The memory of each rank over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.memory_ledger import CATEGORIES, Changes, When, list_changes, list_host_changes, sum_static
from penstock.ir.rows import Floats, Ints
from penstock.ir.table import Table

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Curve:
    """A rank's memory: from `times[k]` on it holds `held[category][k]`, on top of the `static` memory that it always holds."""

    times: Floats
    held: dict[str, Floats]
    static: float

    @cached_property
    def total(self) -> Floats:
        """Everything but the static part."""
        return np.asarray(np.sum(list(self.held.values()), axis=0), dtype=np.float64)

    @property
    def peak(self) -> float:
        return self.static + float(self.total.max(initial=0.0))

    @property
    def peak_time(self) -> float:
        """When the peak is first reached."""
        return float(self.times[int(np.argmax(self.total))]) if len(self.times) else 0.0


def build_curves(timeline: Timeline) -> list[Curve]:
    """Every rank's curve: the changes of `ir.memory_ledger` at the times of the timeline."""
    table, costs = timeline.table, timeline.costs
    return _build(timeline, list_changes(table, costs), sum_static(table, costs), CATEGORIES)


def build_host_curves(timeline: Timeline) -> list[Curve]:
    """The host memory of every rank's activations over time."""
    return _build(timeline, list_host_changes(timeline.table, timeline.costs), np.zeros(timeline.ranks), CATEGORIES[:1])


def list_changes_in_order(table: Table, costs: Costs) -> tuple[Changes, Ints]:
    """Every change of memory of a program without sharding, one rank after the other, and the rank of each.

    Their order depends on no times, because the actions of a rank come one after the other.
    """
    changes = list_changes(table, costs)
    rank = table.rows.rank[changes.entry]
    order = np.lexsort((_list_places(table, changes), rank))
    return Changes(changes.category[order], changes.entry[order], changes.when[order], changes.size[order]), rank[order]


def _list_places(table: Table, changes: Changes) -> Ints:
    """Sorts changes at one time: in the order of the row; at an action's end, memory is freed before more is taken."""
    node = table.rows.group[changes.entry] * 4
    return np.where(changes.when == When.ARRIVAL, node - 1, node + 2 * (changes.when == When.END) + (changes.size > 0))


def _build(timeline: Timeline, changes: Changes, fixed: Floats, categories: Sequence[str]) -> list[Curve]:
    rows = timeline.table.rows
    node, at_end, arrives = rows.group[changes.entry], changes.when == When.END, changes.when == When.ARRIVAL
    start = np.where(rows.is_kind(Kind.UNSHARD)[rows.heads], timeline.collective_start, timeline.start)
    end = np.where(rows.is_kind(Kind.COMBINE)[rows.heads], np.maximum(timeline.end, timeline.collective_end), timeline.end)
    time = np.where(at_end, end[node], start[node])
    time[arrives] = timeline.arrive if arrives.any() else 0.0
    place = _list_places(timeline.table, changes)
    rank = rows.rank[changes.entry]
    order = np.lexsort((place, time, rank))
    time, rank, size, category = time[order], rank[order], changes.size[order], changes.category[order]
    bounds = np.searchsorted(rank, np.arange(timeline.ranks + 1))
    curves = []
    for low, high, static in zip(bounds[:-1], bounds[1:], fixed.tolist(), strict=True):
        held = {name: np.cumsum(np.where(category[low:high] == k, size[low:high], 0.0)) for k, name in enumerate(categories)}
        curves.append(Curve(time[low:high], held, static))
    return curves
