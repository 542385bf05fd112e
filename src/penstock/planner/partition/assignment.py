"""Which device of a cluster is which rank of the pipeline.

Devices that can change places without any difference form a group, so that only orders of groups count. If there are few, `find_orders`
scores all of them; else it starts from a few good ones, and exchanges devices and reverses runs of them while that helps. One of the starts
has the least largest load of all orders: dynamic programming over the layers and the number of devices used of each kind finds it. A score
is rough: the load of the slowest rank, if each rank has one stage, and the messages of one microbatch. The bounds and the simulator then
judge the best orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import TypeVar

import numpy as np

from penstock.ir.cluster import Cluster
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.planner.partition.layer_runs import LayerRuns, PeakMoment, memory_over
from penstock.planner.profile import Profile

MOST_ORDERS = 50_000
"""Up to this many orders, all are scored; there are 40,320 of 8 devices that all differ."""
_MOST_WORK = 4e8
"""Numbers that are looked at to score orders; beyond that, not all of them are tried."""
_MOST_CELLS = 3e7
"""Cells of the dynamic programme over layers and devices; beyond that it is left out."""
_MOST_ROUNDS = 100
"""Changes that a start is improved by, at most."""
_EVEN = 1e-9
"""Parts of the rows that differ by less are equal."""

Order = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """The device that each rank is: `devices[k]` is rank k; and how the rows of a spread vocabulary are shared out over them.

    >>> from penstock.ir.cluster import Device
    >>> Assignment(Cluster([Device("a"), Device("b"), Device("c")]), (2, 0, 1)).arrange("abc")
    ('c', 'a', 'b')
    """

    whole: Cluster
    """The cluster as it is described."""
    devices: Order
    parts: tuple[float, ...] = ()
    """The part of a spread vocabulary's rows that each device takes, in the order of the cluster; equal parts if it is empty."""

    @property
    def rows(self) -> tuple[float, ...]:
        """The part of the rows that each rank takes; empty if these are equal."""
        return self.arrange(self.parts) if self.parts else ()

    def take_rows(self, rows: Sequence[float]) -> Assignment:
        """The same devices, with these parts of the rows by rank."""
        are_equal = max(rows) - min(rows) < _EVEN
        return replace(self, parts=() if are_equal else tuple(rows[self.devices.index(device)] for device in range(len(rows))))

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster with its devices in the order of the ranks."""
        return self.whole.assign(self.devices)

    def arrange(self, values: Sequence[T]) -> tuple[T, ...]:
        """Values per device in the order of the ranks."""
        return tuple(values[device] for device in self.devices)


# Orders ---------------------------------------------------------------------------------------------------------------


def count_orders(groups: Sequence[Sequence[int]]) -> int:
    """How many orders of devices differ.

    >>> count_orders([(0, 1), (2, 3, 4, 5)])
    15
    """
    return math.factorial(sum(map(len, groups))) // math.prod(math.factorial(len(group)) for group in groups)


def list_orders(groups: Sequence[Sequence[int]]) -> Iterator[Order]:
    """Every order that differs, the devices of each group in ascending order."""
    left = [list(group) for group in groups]

    def extend(order: Order) -> Iterator[Order]:
        if not any(left):
            yield order
        for group in left:
            if group:
                device = group.pop(0)
                yield from extend((*order, device))
                group.insert(0, device)

    return extend(())


def rename(order: Sequence[int], groups: Sequence[Sequence[int]]) -> Order:
    """The same order with the devices of each group in ascending order, as `list_orders` has it."""
    group_of = {device: place for place, group in enumerate(groups) for device in group}
    left = [iter(sorted(group)) for group in groups]
    return tuple(next(left[group_of[device]]) for device in order)


# Scores ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OrderScores:
    """Scores orders of a cluster's devices for one placement of a model: about how long a step takes, to compare orders with."""

    profile: Profile
    placement: Placement
    cluster: Cluster
    microbatches: int
    limits: tuple[float, ...] | None = None
    """The memory limit of each device."""
    lengths: tuple[int, ...] = ()

    @cached_property
    def _runs(self) -> LayerRuns:
        return LayerRuns(self.profile, self.lengths)

    @cached_property
    def kinds(self) -> list[Order]:
        """The devices that take and hold the same."""
        kinds: dict[object, list[int]] = {}
        for place, device in enumerate(self.cluster.devices):
            limit = None if self.limits is None else self.limits[place]
            kinds.setdefault((device.speeds, limit), []).append(place)
        return [tuple(kind) for kind in kinds.values()]

    @cached_property
    def tables(self) -> list[Floats]:
        """By kind, the time of a microbatch on every run of layers, infinite if it does not fit."""
        held = self._runs.sum_held(False, PeakMoment(0, (1,), (0,), kept_gradients=(1,)).by_stage[0]) + self._runs.reserves[False]
        tables = []
        for kind in self.kinds:
            times = self._runs.on(self.cluster.devices[kind[0]]).times[False]
            tables.append(times if self.limits is None else np.where(memory_over(held, self.limits[kind[0]]) > 0, np.inf, times))
        return tables

    @cached_property
    def kind_of(self) -> Ints:
        """The kind of each device."""
        kind_of = {device: number for number, kind in enumerate(self.kinds) for device in kind}
        return np.array([kind_of[device] for device in range(len(self.cluster))], dtype=np.int64)

    @cached_property
    def _hops(self) -> Floats:
        """Time of a mean message from one device to another and of the gradient back."""
        size = float(np.mean([layer.output for layer in self.profile.layers])) / max(len(self.lengths), 1)
        links = Costs(**self.cluster.link_fields)
        source, target = np.indices((len(self.cluster),) * 2)
        there = links.travel(np.full(source.shape, size), source, target)
        return there + there.T

    @property
    def work(self) -> float:
        """About how many numbers are looked at to score one order."""
        return float(self.placement.stages * len(self.profile) ** 2) if self._is_chain else float(self.placement.stages)

    @property
    def _is_chain(self) -> bool:
        """Whether each rank has one stage."""
        return self.placement.chunks == 1 and len(self.placement.copies) == 1

    def score(self, orders: Ints) -> Floats:
        """One score per row of devices."""
        ranks = self.placement.copies[0]
        total = np.zeros(len(orders))
        for before, after in pairwise(ranks):
            if before != after:
                total += self._hops[orders[:, before], orders[:, after]]
        return total + (self.microbatches - 1) * self.find_loads(orders) if self._is_chain else total

    def find_loads(self, orders: Ints) -> Floats:
        """The load of the slowest rank with the best cuts, if each has one stage; infinite if nothing fits."""
        kinds, same = np.unique(self.kind_of[orders], axis=0, return_inverse=True)
        tables, layers = np.array(self.tables), self._runs.layers
        total = np.full((len(kinds), layers + 1), np.inf)
        total[:, 0] = 0.0
        for stage in range(orders.shape[1]):
            before, total = total, np.full_like(total, np.inf)
            for first in range(layers):
                reached = np.maximum(before[:, first, None], tables[kinds[:, stage], first, first + 1 :])
                np.minimum(total[:, first + 1 :], reached, out=total[:, first + 1 :])
        return np.asarray(total[same.reshape(-1), -1])


# The order of the least load ------------------------------------------------------------------------------------------


def assign_chain(tables: Sequence[Floats], counts: Sequence[int]) -> tuple[float, tuple[int, ...]] | None:
    """The least largest load of stages in a row over all orders of devices, and the kind of the device of each stage.

    `tables` has the times of every run of layers per kind, and `counts` the number of devices of each kind. None if nothing fits, or if
    there are too many states.
    """
    ends = len(tables[0])
    if math.prod(count + 1 for count in counts) * len(tables) * ends**2 > _MOST_CELLS:
        return None
    empty = np.tril(np.ones((ends, ends), dtype=np.bool_))
    costs = [np.where(empty, np.inf, table) for table in tables]
    start = np.full(ends, np.inf)
    start[0] = 0.0
    best: dict[tuple[int, ...], Floats] = {(0,) * len(counts): start}
    choices: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
    for used in product(*(range(count + 1) for count in counts)):
        if used in best:
            continue
        totals, firsts = [], []
        for kind, count in enumerate(used):
            before = (*used[:kind], count - 1, *used[kind + 1 :])
            table = np.maximum(best[before][:, None], costs[kind]) if count else np.full((ends, ends), np.inf)
            firsts.append(np.argmin(table, axis=0))
            totals.append(table[firsts[-1], np.arange(ends)])
        kinds = np.argmin(totals, axis=0)
        best[used] = np.min(totals, axis=0)
        choices[used] = kinds, np.array(firsts)[kinds, np.arange(ends)]
    load = float(best[tuple(counts)][-1])
    if not math.isfinite(load):
        return None
    order: list[int] = []
    used, end = tuple(counts), ends - 1
    while any(used):
        kinds, firsts_of = choices[used]
        kind, end = int(kinds[end]), int(firsts_of[end])
        order.append(kind)
        used = (*used[:kind], used[kind] - 1, *used[kind + 1 :])
    return load, tuple(order[::-1])


# The search -----------------------------------------------------------------------------------------------------------


def find_orders(scores: OrderScores, most: int) -> list[Order]:
    """The best orders of the devices, the best first, by their scores; of equal scores, those that the search starts from come first."""
    groups = scores.cluster.list_groups(scores.limits)
    if len(groups) == 1:
        return [tuple(range(len(scores.cluster)))]
    starts = list(dict.fromkeys(rename(order, groups) for order in _list_starts(scores)))
    count = count_orders(groups)
    if count <= MOST_ORDERS and count * scores.work <= _MOST_WORK:
        orders = list(dict.fromkeys([*starts, *list_orders(groups)]))
    else:
        orders = list(dict.fromkeys(order for start in starts for order in _improve(start, groups, scores)))
    rated = scores.score(np.array(orders, dtype=np.int64))
    return [orders[place] for place in np.argsort(rated, kind="stable")[:most]]


def _list_starts(scores: OrderScores) -> Iterator[Order]:
    """The order with the least load, the order of the cluster, and those by memory, by speed, and by node and speed."""
    cluster = scores.cluster
    chain = assign_chain(scores.tables, [len(kind) for kind in scores.kinds])
    if chain is not None:
        left = [iter(kind) for kind in scores.kinds]
        yield tuple(next(left[kind]) for kind in chain[1])
    yield tuple(range(len(cluster)))
    yield from list_memory_orders(scores)
    times = [float(scores.tables[int(kind)][0, 1:].min()) for kind in scores.kind_of]
    nodes = [cluster.nodes.index(device.node) for device in cluster.devices]
    for sign in (1, -1):
        yield tuple(sorted(range(len(cluster)), key=lambda device: sign * times[device]))
        yield tuple(sorted(range(len(cluster)), key=lambda device: (nodes[device], sign * times[device])))


def list_memory_orders(scores: OrderScores) -> Iterator[Order]:
    """The devices with most memory first, if they differ: in most schedules the first ranks hold most."""
    limits = scores.limits
    if limits is not None and len(set(limits)) > 1:
        yield tuple(sorted(range(len(limits)), key=lambda device: -limits[device]))


def list_exchanges(order: Order, groups: Sequence[Sequence[int]]) -> list[Order]:
    """The orders with two devices of different groups exchanged, neighbours first.

    >>> list_exchanges((0, 1, 2), [(0, 1), (2,)])
    [(0, 2, 1), (2, 0, 1)]
    """
    group_of = {device: place for place, group in enumerate(groups) for device in group}
    pairs = sorted(combinations(range(len(order)), 2), key=lambda pair: pair[1] - pair[0])
    exchanged = []
    for one, other in pairs:
        if group_of[order[one]] != group_of[order[other]]:
            changed = list(order)
            changed[one], changed[other] = order[other], order[one]
            exchanged.append(rename(changed, groups))
    return list(dict.fromkeys(exchanged))


def _list_reversals(order: Order, groups: Sequence[Sequence[int]]) -> list[Order]:
    """The orders with a run of devices reversed: they change links at its two ends only."""
    runs = combinations(range(len(order) + 1), 2)
    return list(dict.fromkeys(rename((*order[:a], *order[a:b][::-1], *order[b:]), groups) for a, b in runs if b - a > 2))


def _improve(start: Order, groups: Sequence[Sequence[int]], scores: OrderScores) -> Iterator[Order]:
    """The orders that exchanges and reversals lead to, the start first, each better than the one before."""
    order, best = start, float(scores.score(np.array([start]))[0])
    yield order
    most = max(1, int(_MOST_WORK / _MOST_ROUNDS / scores.work))
    for _ in range(_MOST_ROUNDS):
        near = [other for other in (*list_exchanges(order, groups), *_list_reversals(order, groups)) if other != order]
        near = near[:: -(-len(near) // most)]
        rated = scores.score(np.array(near))
        place = int(np.argmin(rated))
        if rated[place] >= best * (1 - 1e-12):
            return
        order, best = near[place], float(rated[place])
        yield order
