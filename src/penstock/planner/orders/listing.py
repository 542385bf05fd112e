"""The search for good rules of list scheduling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from penstock.planner.orders.budget import Budget
from penstock.planner.orders.dispatch import Rule
from penstock.planner.orders.rules import Rules
from penstock.planner.orders.shop import Flags
from penstock.planner.orders.workshop import Order, Workshop

_DRAWN = 200
"""Rules that are drawn besides the usual ones."""
_KEPT = 3
"""Rules that are changed further."""
_HEAT = 0.3
"""The loss that is accepted at first when a rule is changed, as a share of a node's time."""


@dataclass
class _Line:
    """A rule that is changed again and again, and the best order that came of it."""

    rule: Rule
    full: Flags
    objective: float
    best: Order


@dataclass
class Listing:
    """List scheduling of one shop."""

    workshop: Workshop
    budget: Budget
    chance: np.random.Generator
    lines: list[_Line] = field(default_factory=list)

    def run(self) -> list[Order]:
        """The best orders of the rules that were tried, the best first; none where one microbatch alone does not fit."""
        with self.budget.part(0.4):
            self._begin()
        self._climb()
        return sorted((line.best for line in self.lines), key=lambda order: order.objective)

    def _fulls(self) -> list[Flags]:
        """All backwards split or all full, as far as there is a choice."""
        shop = self.workshop.shop
        fulls = [np.zeros(self.workshop.cells, dtype=np.int8)] if shop.is_split else []
        return fulls + ([np.ones(self.workshop.cells, dtype=np.int8)] if shop.may_merge or not shop.is_split else [])

    def _begin(self) -> None:
        """Try the first rules and some drawn ones; keep the best that differ in what they take."""
        rules = Rules(self.workshop.shop)
        todo = [(rule, full) for rule in rules.first() for full in self._fulls()]
        todo += [(rules.drawn(self.chance), full) for _ in range(_DRAWN) for full in self._fulls()]
        found: dict[float, tuple[Rule, Flags]] = {}
        worst = math.inf
        for index in self.chance.permutation(len(todo)).tolist():
            rule, full = todo[index]
            objective = self._time(rule, full, worst)
            if 0 <= objective < math.inf and objective not in found:
                found[objective] = rule, full
                worst = sorted(found)[:_KEPT][-1] if len(found) >= _KEPT else math.inf
            if self.budget.over and (found or objective < 0):
                break
        for objective in sorted(found)[:_KEPT]:
            rule, full = found[objective]
            self._time(rule, full)
            self.lines.append(_Line(rule, full, objective, Order(self.workshop.made, full, objective, "list")))

    def _time(self, rule: Rule, full: Flags, bound: float = math.inf) -> float:
        self.budget.spend(1)
        return self.workshop.dispatch(rule, full, bound)

    def _climb(self) -> None:
        """Change the rules in turn; what is a little worse is taken too, less and less."""
        rules, begin = Rules(self.workshop.shop), self.budget.share
        turn = 0
        while self.lines and not self.budget.over:
            line = self.lines[turn % len(self.lines)]
            turn += 1
            rule = rules.changed(line.rule, self.chance)
            left = (self.budget.end - self.budget.share) / max(self.budget.end - begin, 1e-9)
            bound = line.objective + _HEAT * rules.usual * max(left, 0.0) * self.chance.exponential()
            objective = self._time(rule, line.full, bound)
            if 0 <= objective <= bound:
                line.rule, line.objective = rule, objective
                if objective < line.best.objective:
                    line.best = Order(self.workshop.made, line.full, objective, "list")
