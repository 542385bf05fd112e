"""Which device of a cluster is which rank of the pipeline.

Devices that can change places without any difference form a group, so that only orders of groups count. If there are few, `find_orders`
scores all of them; else it starts from a few good ones, and exchanges devices and reverses runs of them while that helps. One of the starts
has the least largest load of all orders: dynamic programming over the layers and the number of devices used of each kind finds it. A score
is rough: the load of the slowest rank, if each rank has one stage, and the messages of one microbatch. The bounds and the simulator then
judge the best orders.

With two copies of the model, each stage is on two ranks, of which the slower one counts: a fast device is best off with a fast partner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
_MOST_FOLDED = 4
"""Starts of the search in which partners are near each other."""
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


@dataclass(frozen=True, eq=False)
class Orders:
    """The orders of a cluster's devices, up to devices that can change places without any difference, which are in ascending order.

    >>> from penstock.ir.cluster import Device
    >>> cluster = Cluster([Device(), Device(speed=2.0), Device()])
    >>> Orders(cluster, Placement.linear(3)).count, list(Orders(cluster, Placement.linear(3)).list_all())
    (3, [(0, 2, 1), (0, 1, 2), (1, 0, 2)])
    """

    cluster: Cluster
    placement: Placement
    limits: tuple[float, ...] | None = None
    """The memory limit of each device."""

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """The devices that can change places."""
        return self.cluster.list_groups(self.limits)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {device: place for place, group in enumerate(self.groups) for device in group}

    @property
    def count(self) -> int:
        """How many there are."""
        sizes = [len(group) for group in self.groups]
        return math.factorial(sum(sizes)) // math.prod(map(math.factorial, sizes))

    def list_all(self) -> Iterator[Order]:
        """Every one of them."""
        left = [list(group) for group in self.groups]

        def extend(order: Order) -> Iterator[Order]:
            if len(order) == len(self.cluster):
                yield order
                return
            for group in left:
                if group:
                    device = group.pop(0)
                    yield from extend((*order, device))
                    group.insert(0, device)

        return extend(())

    def rename(self, order: Sequence[int]) -> Order:
        """The same order with the devices of each group in ascending order."""
        left = [iter(sorted(group)) for group in self.groups]
        return tuple(next(left[self._group_of[device]]) for device in order)

    def list_exchanges(self, order: Order) -> list[Order]:
        """Those with two devices exchanged, or two groups of partners, neighbours first.

        >>> from penstock.ir.cluster import Device
        >>> cluster = Cluster([Device(), Device(), Device(speed=2.0)])
        >>> Orders(cluster, Placement.linear(3)).list_exchanges((0, 1, 2))
        [(0, 2, 1), (2, 0, 1)]
        """
        single = [((one,), (other,)) for one, other in combinations(range(len(order)), 2)]
        several = [ranks for ranks in self.placement.partners if len(ranks) > 1]
        swaps = [*single, *((one, other) for one, other in combinations(several, 2) if len(one) == len(other))]
        return self._list_changed(order, (_swap(order, *pair) for pair in sorted(swaps, key=lambda pair: pair[1][0] - pair[0][0])))

    def list_reversals(self, order: Order) -> list[Order]:
        """Those with a run of devices reversed, or a run of partners: they change links at its ends only."""
        runs = [run for run in combinations(range(len(order) + 1), 2) if run[1] - run[0] > 2]
        reversed_runs = [(*order[:first], *order[first:last][::-1], *order[last:]) for first, last in runs]
        partners = self.placement.partners
        if len(partners) < len(order):
            for first, last in (run for run in runs if run[1] <= len(partners)):
                turned = list(order)
                for one, other in zip(partners[first:last], partners[first:last][::-1], strict=True):
                    turned = list(_swap(turned, one, other)) if one < other and len(one) == len(other) else turned
                reversed_runs.append(tuple(turned))
        return self._list_changed(order, reversed_runs)

    def _list_changed(self, order: Order, changed: Iterable[Order]) -> list[Order]:
        """The changed orders that differ from the order; of several copies of the model, those with equally fast partners first."""
        listed = dict.fromkeys(map(self.rename, changed))
        listed.pop(self.rename(order), None)
        return sorted(listed, key=self._count_lost_speed)

    def _count_lost_speed(self, order: Order) -> float:
        """How much faster all ranks would be together if partners were not as slow as the slowest of them."""
        several = (ranks for ranks in self.placement.partners if len(ranks) > 1)
        rates = ([self._rates[order[rank]] for rank in ranks] for ranks in several)
        return sum(rate - min(of_partners) for of_partners in rates for rate in of_partners)

    @cached_property
    def _rates(self) -> list[float]:
        return [device.speeds.rate for device in self.cluster.devices]


def _swap(order: Sequence[int], one: Sequence[int], other: Sequence[int]) -> Order:
    """The order with the devices of some ranks exchanged for those of others."""
    changed = list(order)
    for a, b in zip(one, other, strict=True):
        changed[a], changed[b] = order[b], order[a]
    return tuple(changed)


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
    def orders(self) -> Orders:
        """What there is to score."""
        return Orders(self.cluster, self.placement, self.limits)

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
        there = self._time_messages(float(np.mean([layer.output for layer in self.profile.layers])) / max(len(self.lengths), 1))
        return there + there.T

    @cached_property
    def _exchanges(self) -> Floats:
        """Time in which two devices with a mean stage each exchange the gradients of its copies."""
        there = self._time_messages(sum(layer.gradients for layer in self.profile.layers) / self.placement.stages)
        return np.maximum(there, there.T)

    def _time_messages(self, size: float) -> Floats:
        """Time of a message of this size, by sender (row) and receiver (column)."""
        source, target = np.indices((len(self.cluster),) * 2)
        return Costs(**self.cluster.link_fields).travel(np.full(source.shape, size), source, target)

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
        total = np.zeros(len(orders))
        for ranks in self.placement.copies:
            for before, after in pairwise(ranks):
                if before != after:
                    total += self._hops[orders[:, before], orders[:, after]] / len(self.placement.copies)
        for ranks in self.placement.copies[1:]:
            exchanges = self._exchanges[orders[:, self.placement.copies[0]], orders[:, ranks]]
            total += self.placement.chunks * exchanges.max(axis=1)
        if self._is_chain:
            return total + (self.microbatches - 1) * self.find_loads(orders)
        return total + (self.microbatches - 1) * self._share_work(orders) if len(self.placement.copies) > 1 else total

    def _share_work(self, orders: Ints) -> Floats:
        """The load of every rank if layers could be divided: partners are as fast as the slowest of them."""
        with np.errstate(divide="ignore"):  # if layers take no time
            rates = [len(ranks) / self._times_of_all[orders[:, ranks]].max(axis=1) for ranks in self.placement.partners]
            return np.asarray(1.0 / np.sum(rates, axis=0))

    @cached_property
    def _times_of_all(self) -> Floats:
        """The time of a microbatch on all layers, by device."""
        return np.array([self._runs.on(device).times[False][0, -1] for device in self.cluster.devices])

    def fold(self, first: int) -> Order:
        """An order from this device on in which partners exchange gradients quickly, and then neighbours messages."""
        speeds = [device.speeds for device in self.cluster.devices]
        left, device, device_of = set(range(len(speeds))), first, dict[int, int]()
        for ranks in self.placement.partners:
            device = first if first in left else min(left, key=lambda other: (self._hops[device, other], other))
            near = sorted(left, key=lambda other: (speeds[other] != speeds[device], other != device, self._exchanges[device, other], other))
            device_of.update(zip(ranks, near, strict=False))
            left -= {*near[: len(ranks)]}
        return tuple(device_of[rank] for rank in range(self.placement.ranks))

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
    orders = scores.orders
    if len(orders.groups) == 1:
        return [tuple(range(len(scores.cluster)))]
    starts = list(dict.fromkeys(map(orders.rename, _list_starts(scores))))
    if orders.count <= MOST_ORDERS and orders.count * scores.work <= _MOST_WORK:
        tried = list(dict.fromkeys([*starts, *orders.list_all()]))
    else:
        tried = list(dict.fromkeys(order for start in starts for order in _improve(start, scores)))
    rated = scores.score(np.array(tried, dtype=np.int64))
    return [tried[place] for place in np.argsort(rated, kind="stable")[:most]]


def _list_starts(scores: OrderScores) -> Iterator[Order]:
    """The order with the least load, the order of the cluster, and those by memory, by speed, by node and speed, and with near partners."""
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
    if len(scores.placement.copies) > 1:
        yield from (scores.fold(kind[0]) for kind in scores.kinds[:_MOST_FOLDED])


def list_memory_orders(scores: OrderScores) -> Iterator[Order]:
    """The devices with most memory first, if they differ: in most schedules the first ranks hold most."""
    limits = scores.limits
    if limits is not None and len(set(limits)) > 1:
        yield scores.orders.rename(sorted(range(len(limits)), key=lambda device: -limits[device]))


def _improve(start: Order, scores: OrderScores) -> Iterator[Order]:
    """The orders that exchanges and reversals lead to, the start first, each better than the one before."""
    order, best, orders = start, float(scores.score(np.array([start]))[0]), scores.orders
    yield order
    most = max(1, int(_MOST_WORK / _MOST_ROUNDS / scores.work))
    for _ in range(_MOST_ROUNDS):
        near = [*orders.list_exchanges(order), *orders.list_reversals(order)]
        if not near:
            return
        near = near[:: -(-len(near) // most)]
        rated = scores.score(np.array(near))
        place = int(np.argmin(rated))
        if rated[place] >= best * (1 - 1e-12):
            return
        order, best = near[place], float(rated[place])
        yield order
