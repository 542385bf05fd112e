"""Patterns that repeat with every microbatch, taken from orders and searched for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.ir.rows import Ints
from penstock.planner.orders.budget import Budget
from penstock.planner.orders.shop import Flags
from penstock.planner.orders.weave import Loom, lay
from penstock.planner.orders.workshop import Order, Workshop

_SHARES = (0.5, 0.4, 0.6)
"""Where in an order its pattern is looked for."""
_LONG = 40_000
"""The most changes that are tried on one pattern."""
_HOT, _COOL = 1.0, 0.02
"""The loss that is accepted at first, as a share of a node's time, and the part of it that is at last."""
_PRICE = 20.0
"""What an activation over the limit costs, in times of a node."""
_WORK = 1_000_000
"""Nodes times tries between two looks at the clock."""


def pattern_of(workshop: Workshop, order: Order, share: float = 0.5) -> tuple[Ints, Ints]:
    """The threads of an order and how far each is behind: what each rank does from a share of the time on."""
    shop = workshop.shop
    stages, microbatches = shop.stages, shop.microbatches
    workshop.time(order.nodes, order.full)
    starts = np.asarray(workshop.clock.start).reshape(3 * stages, microbatches)
    moment = share * float(starts.max())
    nearest = np.minimum((starts < moment).sum(axis=1), microbatches - 1)
    place = np.empty(workshop.nodes, dtype=np.int64)
    place[order.nodes] = np.arange(workshop.nodes)
    turn = place.reshape(3 * stages, microbatches)[np.arange(3 * stages), nearest]
    thread = []
    for rank in range(shop.ranks):
        held = shop.stage_of[shop.stage_at[rank] : shop.stage_at[rank + 1]]
        items = np.concatenate([kind * stages + held for kind in range(3)])
        thread.append(items[np.argsort(turn[items], kind="stable")])
    return np.concatenate(thread), -nearest


@dataclass
class Weaving:
    """The search for patterns in one shop, and their orders in another that may have more microbatches."""

    workshop: Workshop
    whole: Workshop
    budget: Budget
    chance: np.random.Generator

    def run(self, orders: list[Order]) -> list[Order]:
        """A pattern from each order, as long as there is time; those that keep within the memory."""
        found: list[Order] = []
        for place, order in enumerate(orders):
            if self.budget.over:
                break
            with self.budget.part(1 / (len(orders) - place)):
                found += self._woven(order, _SHARES[place % len(_SHARES)])
        return found

    def _woven(self, order: Order, share: float) -> list[Order]:
        """The best pattern that grows from an order, if it fits."""
        pattern = Pattern(self.workshop, *pattern_of(self.workshop, order, share), order.full, int(self.chance.integers(2**31)))
        tries, tried = min(1000, max(50, _WORK // self.workshop.nodes)), 0
        begin, end = self.budget.share, self.budget.end
        while not self.budget.over and tried < _LONG:
            done = max(tried / _LONG, (self.budget.share - begin) / max(end - begin, 1e-9))
            pattern.run(tries, _HOT * _COOL ** min(done, 1.0))
            self.budget.spend(tries)
            tried += tries
        if math.isinf(pattern.best):
            return []
        whole, microbatches = self.whole, self.workshop.shop.microbatches
        full = order.full if whole is self.workshop else np.repeat(order.full[::microbatches], whole.shop.microbatches)
        nodes = pattern.laid(whole)
        objective = whole.time(nodes, full)
        fits = objective >= 0 and not (whole.holds(nodes, full) > whole.shop.limit).any()
        return [Order(nodes, full, objective, order.source)] if fits else []


class Pattern:
    """A pattern under local search."""

    def __init__(self, workshop: Workshop, thread: Ints, behind: Ints, full: Flags, seed: int) -> None:
        self.workshop = workshop
        self.shop = workshop.shop_with(full)
        self.loom = Loom(
            thread=workshop.given(thread.copy()),
            behind=workshop.given(behind.copy()),
            best=workshop.given(thread.copy()),
            best_behind=workshop.given(behind.copy()),
            kept=workshop.given(thread.copy()),
            kept_behind=workshop.given(behind.copy()),
            order=workshop.ints(workshop.nodes),
            over=workshop.floats(workshop.shop.ranks),
            dice=workshop.given(np.array([1 + seed % 2147483646], dtype=np.int64)),
        )
        self.best = self.cost = math.inf
        self.usual = float(np.mean(workshop.shop.duration)) or 1.0
        self.price = _PRICE * self.usual / (float(np.mean(workshop.shop.activation)) or 1.0)

    def run(self, tries: int, heat: float) -> None:
        self.best, self.cost = self.workshop.loops.weave(
            self.shop, self.loom, self.workshop.clock, tries, heat * self.usual, self.price, self.best
        )

    def laid(self, whole: Workshop) -> Ints:
        """The best pattern as an order of a workshop with as many microbatches or more."""
        order = np.zeros(whole.nodes, dtype=np.int64)
        best = self.loom._replace(thread=self.loom.best, behind=self.loom.best_behind, order=order)
        for rank in range(whole.shop.ranks):
            lay(whole.shop, best, rank)
        return order
