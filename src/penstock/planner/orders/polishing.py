"""Local search on several orders: a turn for each, then more for those that keep up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.planner.orders.anneal import Pace
from penstock.planner.orders.budget import Budget
from penstock.planner.orders.workshop import Order, Workshop

_HEATS = (0.15, 0.3, 1.0, 0.05, 0.5)
"""The loss that is accepted at first, as a share of a node's time."""
_LONG = 1000
"""The most tries of one turn for each node."""
_COOL = 0.03
"""The part of it that is accepted at last."""
_REACHES = (40, 15, 100)
_ON_CRITICAL = (0.9, 0.9, 0.6)
_CHOICES = (8, 3, 20, 1)
_SWEEPS = (0.05, 0.3, 0.02)
_WORK = 6_000_000
"""Nodes times tries between two looks at the clock: some hundredths of a second."""
_TRY = 0.05
"""What a try counts for, in orders timed in full."""
_FIRST = 0.4
"""The share of the time for the first turns."""


@dataclass
class Polishing:
    """The orders in hand, and what is left of the budget; `accept` tells whether an order is all right as a whole."""

    workshop: Workshop
    budget: Budget
    chance: np.random.Generator
    accept: Callable[[Order], bool]

    def run(self, orders: list[Order]) -> None:
        hand = list(orders)
        with self.budget.part(_FIRST):
            for place in range(len(hand)):
                self._turn(hand, place, 1 / (len(hand) - place), place)
        turn = 0
        while hand and not self.budget.over:
            hand.sort(key=lambda order: order.objective)
            place = 0 if self.chance.random() < 0.5 else int(self.chance.integers(min(len(hand), 4)))
            self._turn(hand, place, 0.25 if turn < 4 else 0.5, turn)
            turn += 1

    def _turn(self, hand: list[Order], place: int, share: float, turn: int) -> None:
        """Improve one order of the hand for a share of what is left; what is no worse and is accepted replaces it."""
        found = self._annealed(hand[place], share, turn)
        if found.objective < hand[place].objective and self.accept(found):
            hand[place] = found

    def _annealed(self, order: Order, share: float, turn: int) -> Order:
        shop = self.workshop.shop
        usual = float(np.mean(shop.duration)) or 1.0
        hot = _HEATS[turn % len(_HEATS)] * usual
        nodes = self.workshop.nodes
        tries, tried = int(min(5000, max(50, _WORK // nodes), _LONG * nodes // 10)), 0
        manner = Pace(tries, hot, *(each[turn % len(each)] for each in (_ON_CRITICAL, _REACHES, _CHOICES, _SWEEPS)))
        annealing = self.workshop.annealing(order, int(self.chance.integers(2**31)))
        with self.budget.part(share) as (begin, end):
            while not self.budget.over and tried < _LONG * nodes:
                done = max(tried / (_LONG * nodes), (self.budget.share - begin) / max(end - begin, 1e-9))
                pace = manner._replace(heat=hot * _COOL ** min(done, 1.0))
                self.budget.spend(annealing.run(pace) + _TRY * tries)
                tried += tries
        return annealing.found
