"""Which device of a cluster is which rank of the pipeline.

Devices that can change places without any difference form a group, so that only orders of groups count. If there are few, `find_orders`
scores all of them; else it starts from a few good ones and exchanges devices while that helps. One of those has the least largest load of
all orders: dynamic programming over the layers and the number of devices used of each kind finds it. A score is rough: the load of the
slowest rank, exactly if each rank has one stage, and the messages of one microbatch. The bounds and the simulator then judge the best
orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import TypeVar

import numpy as np

from penstock.ir.cluster import Cluster
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.planner.partition.layer_runs import LayerRuns, memory_over
from penstock.planner.profile import Profile

MOST_ORDERS = 50_000
"""Up to this many orders, all are scored; there are 40,320 of 8 devices that all differ."""
_MOST_CELLS = 3e7
"""Cells of the dynamic programme over layers and devices; beyond that it is left out."""
_STEP, _STEPS = 0.01, 600
"""Loads that orders are scored with: each larger than the one before by this share, and their number."""
_MOST_ROUNDS = 200
"""Exchanges that a start is improved by, at most."""

Order = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """The device that each rank is: `devices[k]` is rank k.

    >>> from penstock.ir.cluster import Device
    >>> Assignment(Cluster([Device("a"), Device("b"), Device("c")]), (2, 0, 1)).arrange("abc")
    ('c', 'a', 'b')
    """

    whole: Cluster
    """The cluster as it is described."""
    devices: Order

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
        held = self._runs.sum_held(False, 1, 0) + self._runs.reserves[False]
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

    @cached_property
    def _even_load(self) -> float:
        """The load of every rank if the work could be shared without regard to layers."""
        whole = [float(self._runs.on(device).times[False][0, -1]) for device in self.cluster.devices]
        return 1 / sum(1 / time for time in whole) if min(whole) > 0 else 0.0

    def _find_ends(self, load: float) -> Ints:
        """The last layer that a stage within the load can end with, by the kind of its device (row) and its first layer (column).

        That is the layer before the first if not even one fits.
        """
        ends = np.arange(self._runs.layers + 1)
        longer = ends[None, :] > ends[:, None]
        return np.array([np.where(longer & (table <= load), ends[None, :], ends[:, None]).max(axis=1) for table in self.tables])

    def score(self, orders: Ints) -> Floats:
        """One score per row of devices."""
        ranks = self.placement.copies[0]
        total = np.zeros(len(orders))
        for before, after in pairwise(ranks):
            if before != after:
                total += self._hops[orders[:, before], orders[:, after]]
        if self.placement.chunks > 1 or len(self.placement.copies) > 1:
            return total
        return total + (self.microbatches - 1) * self._find_loads(orders)

    def _find_loads(self, orders: Ints) -> Floats:
        """The load of the slowest rank with the best cuts, up to a step; infinite if nothing fits."""
        loads, kinds, last = np.full(len(orders), np.inf), self.kind_of[orders], self._runs.layers
        left, load = np.arange(len(orders)), self._even_load * (1 - _STEP / 2)
        for _ in range(_STEPS):
            ends, load = self._find_ends(load), load * (1 + _STEP)
            at, fits = np.zeros(len(left), dtype=np.int64), np.ones(len(left), dtype=np.bool_)
            for stage in range(self.placement.stages):  # as many layers as it can, but one for each later stage
                reached = np.minimum(ends[kinds[left, stage], at], last - (self.placement.stages - 1 - stage))
                fits &= reached > at
                at = reached
            done = fits & (at == last)
            loads[left[done]] = load
            left = left[~done]
            if not len(left) or not load:
                break
        return loads


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
    groups = scores.cluster.list_groups()
    if len(groups) == 1:
        return [tuple(range(len(scores.cluster)))]
    starts = list(dict.fromkeys(rename(order, groups) for order in _list_starts(scores)))
    if count_orders(groups) <= MOST_ORDERS:
        orders = list(dict.fromkeys([*starts, *list_orders(groups)]))
    else:
        orders = list(dict.fromkeys(order for start in starts for order in _improve(start, groups, scores.score)))
    rated = scores.score(np.array(orders, dtype=np.int64))
    return [orders[place] for place in np.argsort(rated, kind="stable")[:most]]


def _list_starts(scores: OrderScores) -> Iterator[Order]:
    """The order with the least load, the order of the cluster, and those by memory and by speed."""
    cluster = scores.cluster
    chain = assign_chain(scores.tables, [len(kind) for kind in scores.kinds])
    if chain is not None:
        left = [iter(kind) for kind in scores.kinds]
        yield tuple(next(left[kind]) for kind in chain[1])
    yield tuple(range(len(cluster)))
    yield from list_memory_orders(scores)
    times = [float(scores.tables[int(kind)][0, 1:].min()) for kind in scores.kind_of]
    yield tuple(sorted(range(len(cluster)), key=times.__getitem__))
    yield tuple(sorted(range(len(cluster)), key=times.__getitem__, reverse=True))


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


def _improve(start: Order, groups: Sequence[Sequence[int]], score: Callable[[Ints], Floats]) -> Iterator[Order]:
    """The orders that exchanging two devices leads to, the start first, each better than the one before."""
    order, best = start, float(score(np.array([start]))[0])
    yield order
    for _ in range(_MOST_ROUNDS):
        near = list_exchanges(order, groups)
        rated = score(np.array(near))
        place = int(np.argmin(rated))
        if rated[place] >= best * (1 - 1e-12):
            return
        order, best = near[place], float(rated[place])
        yield order
