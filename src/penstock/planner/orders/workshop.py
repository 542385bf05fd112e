"""A problem with all that the loops need, in the form that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.ir.rows import Ints
from penstock.planner.orders.anneal import Bench, Pace
from penstock.planner.orders.dispatch import Floor, Rule
from penstock.planner.orders.engine import loops
from penstock.planner.orders.shop import Flags, Floats, Shop, merged
from penstock.planner.orders.timing import Clock


@dataclass(frozen=True)
class Order:
    """One order of a shop's nodes and what it takes; `full` says which cells have a full backward."""

    nodes: Ints
    full: Flags
    objective: float
    source: str = ""


class Workshop:
    """Times, makes and improves orders of one shop."""

    def __init__(self, shop: Shop, *, plain: bool = False) -> None:
        self.shop = shop
        self.loops = loops(plain)
        self.nodes, self.cells = 3 * shop.stages * shop.microbatches, shop.stages * shop.microbatches
        self.clock, self.spare, self.floor = self._clock(), self._clock(), self._floor()
        self._room = self.ints(self.nodes)
        self._shops: dict[bytes, Shop] = {}

    def _clock(self) -> Clock:
        nodes, shop, ints, floats = self.nodes, self.shop, self.ints, self.floats
        return Clock(
            start=floats(nodes),
            arrive=floats(nodes),
            tail=floats(nodes),
            walk=ints(nodes),
            at=ints(shop.ranks),
            now=floats(shop.ranks),
            stack=ints(shop.ranks),
            queued=ints(shop.ranks),
            lane=floats(shop.ranks),
            free=floats(shop.num_links),
            left=ints(shop.stages),
        )

    def _floor(self) -> Floor:
        shop, ints, floats = self.shop, self.ints, self.floats
        return Floor(
            arrive=floats(self.nodes),
            forwards=ints(shop.stages),
            inputs=ints(shop.stages),
            weights=ints(shop.stages),
            ended=ints(shop.stages),
            now=floats(shop.ranks),
            wake=floats(shop.ranks),
            held=floats(shop.ranks),
            under_way=floats(shop.ranks),
            free=floats(shop.num_links),
            at=ints(shop.ranks),
            begun=floats(shop.ranks),
            lane=floats(shop.ranks),
            left=floats(shop.ranks),
        )

    # Forms ------------------------------------------------------------------------------------------------------------

    def given(self, values: Any) -> Any:
        """An array, or the list that the plain loops are quicker on."""
        return values if self.loops.compiled else values.tolist()

    def ints(self, count: int) -> Any:
        return self.given(np.zeros(count, dtype=np.int64))

    def floats(self, count: int) -> Any:
        return self.given(np.zeros(count))

    def shop_with(self, full: Flags) -> Shop:
        """The shop with these full backwards, its arrays a copy."""
        made = merged(self.shop, full)
        return made._replace(**{name: self.given(column) for name, column in made._asdict().items() if isinstance(column, np.ndarray)})

    def _known_shop(self, full: Flags) -> Shop:
        key = full.tobytes()
        if key not in self._shops:
            self._shops[key] = self.shop_with(full)
        return self._shops[key]

    def leave_free(self, more: Floats) -> None:
        """Lower each rank's limit."""
        self.shop = self.shop._replace(limit=self.shop.limit - more)
        self._shops.clear()

    # Work -------------------------------------------------------------------------------------------------------------

    def time(self, nodes: Ints, full: Flags) -> float:
        """The objective of an order, -1 where a rank waits for ever."""
        return float(self.loops.time_order(self._known_shop(full), self.given(nodes), self.clock))

    def holds(self, nodes: Ints, full: Flags) -> Floats:
        """The most that each rank holds, beyond what it always holds."""
        shop = merged(self.shop, full)
        takes, keeps = shop.takes[nodes], shop.keeps[nodes]
        most = np.zeros(shop.ranks)
        for rank in range(shop.ranks):
            row = slice(shop.bounds[rank], shop.bounds[rank + 1])
            after = np.cumsum(takes[row] + keeps[row])
            most[rank] = max(after.max(initial=0.0), (after - keeps[row]).max(initial=0.0))
        return most

    def dispatch(self, rule: Rule, full: Flags, bound: float = math.inf) -> float:
        """What the order that a rule gives takes, -1 where there is none, infinite if above the bound; `made` has the order.

        With patience, a rank may have waited for a node that it then did not run: timed anew, the order may take less.
        """
        given = rule._replace(base=self.given(rule.base), most=self.given(rule.most), ahead=self.given(rule.ahead))
        return float(self.loops.dispatch(self._known_shop(full), given, self._room, self.floor, bound))

    @property
    def made(self) -> Ints:
        """The order that was dispatched last."""
        return np.array(self._room, dtype=np.int64)

    def annealing(self, order: Order, seed: int) -> Annealing:
        return Annealing(self, order, seed)


class Annealing:
    """An order under local search."""

    def __init__(self, workshop: Workshop, order: Order, seed: int) -> None:
        self.workshop, self.source = workshop, order.source
        self.shop = workshop.shop_with(order.full)
        self.objective = self.best = order.objective
        given, ints, floats, nodes = workshop.given, workshop.ints, workshop.floats, workshop.nodes
        self.bench = Bench(
            order=given(order.nodes.copy()),
            full=self.shop.full,
            best=given(order.nodes.copy()),
            best_full=given(order.full.copy()),
            place=ints(nodes),
            held=floats(nodes),
            critical=ints(nodes),
            backup=ints(nodes),
            moved=ints(nodes),
            begin=floats(nodes),
            end=floats(nodes),
            rest=floats(nodes),
            dice=given(np.array([1 + seed % 2147483646], dtype=np.int64)),
        )

    def run(self, pace: Pace) -> int:
        """Go on with the last order; how often one was timed in full."""
        clocks = self.workshop.clock, self.workshop.spare
        self.best, self.objective, timed = self.workshop.loops.anneal(self.shop, self.bench, clocks, pace, self.best)
        return int(timed)

    @property
    def found(self) -> Order:
        """The best so far."""
        bench = self.bench
        return Order(np.array(bench.best, dtype=np.int64), np.array(bench.best_full, dtype=np.int8), float(self.best), self.source)
