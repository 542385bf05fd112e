"""Local search on several orders: a turn for each, then more for those that keep up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.planner.orders.anneal import Pace
from penstock.planner.orders.budget import Budget
from penstock.planner.orders.shop import Floats
from penstock.planner.orders.workshop import Order, Workshop


class Manner(NamedTuple):
    """How a turn goes about it: the loss that is accepted at first, as a share of a node's time, and then as `Pace` has it."""

    heat: float
    on_critical: float
    reach: int
    choices: int
    sweeps: float


_LONG = 1000
"""The most tries of one turn for each node."""
_COOL = 0.03
"""The part of the first loss that is accepted at last."""
_MANNERS = (
    Manner(0.15, 0.9, 40, 8, 0.05),
    Manner(0.3, 0.9, 15, 3, 0.3),
    Manner(1.0, 0.6, 100, 20, 0.02),
    Manner(0.05, 0.9, 40, 1, 0.05),
    Manner(0.5, 0.9, 15, 8, 0.3),
)
"""What the turns change between: no one of them is the best for all problems."""
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
    over: Callable[[], Floats]
    """By how much the last order that was not accepted is over each limit."""

    def run(self, orders: list[Order]) -> None:
        hand = list(orders)
        with self.budget.part(_FIRST):
            for place in range(len(hand)):
                self._turn(hand, place, 1 / (len(hand) - place), place)
        turn = 0
        while hand and not self.budget.over:
            hand.sort(key=lambda order: order.objective)
            place = 0 if self.chance.random() < 0.6 else int(self.chance.integers(len(hand)))
            self._turn(hand, place, 0.5, turn)
            turn += 1

    def _turn(self, hand: list[Order], place: int, share: float, turn: int) -> None:
        """Improve one order of the hand for a share of what is left; what is no worse and is accepted replaces it."""
        found = self._annealed(hand[place], share, turn)
        if found.objective < hand[place].objective:
            if self.accept(found):
                hand[place] = found
            else:
                self.workshop.leave_free(self.over())

    def _annealed(self, order: Order, share: float, turn: int) -> Order:
        shop = self.workshop.shop
        usual = float(np.mean(shop.duration)) or 1.0
        manner = _MANNERS[turn % len(_MANNERS)]
        nodes = self.workshop.nodes
        tries, tried = min(1000, max(50, _WORK // nodes), _LONG * nodes // 10), 0
        annealing = self.workshop.annealing(order, int(self.chance.integers(2**31)))
        with self.budget.part(share) as (begin, end):
            while not self.budget.over and tried < _LONG * nodes:
                done = max(tried / (_LONG * nodes), (self.budget.share - begin) / max(end - begin, 1e-9))
                pace = Pace(tries, manner.heat * usual * _COOL ** min(done, 1.0), *manner[1:])
                self.budget.spend(annealing.run(pace) + _TRY * tries)
                tried += tries
        return annealing.found
