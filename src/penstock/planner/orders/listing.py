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
class Line:
    """A rule that is changed again and again, and the best order that came of it."""

    rule: Rule
    full: Flags
    objective: float
    best_rule: Rule
    best: Order


@dataclass
class Listing:
    """List scheduling of one shop. `least` is a bound: what reaches it needs no further search."""

    workshop: Workshop
    budget: Budget
    chance: np.random.Generator
    least: float = 0.0
    lines: list[Line] = field(default_factory=list)

    @property
    def orders(self) -> list[Order]:
        """The best order of each line, the best first."""
        return sorted((line.best for line in self.lines), key=lambda order: order.objective)

    def begin(self, most: int = 100_000) -> None:
        """Try the first rules and some drawn ones; keep the best that differ in what they take. None if no rule fits the memory."""
        rules = Rules(self.workshop.shop)
        todo = [(rule, full) for rule in rules.first() for full in self._fulls()]
        todo += [(rules.drawn(self.chance), full) for _ in range(_DRAWN) for full in self._fulls()]
        found: dict[float, tuple[Rule, Flags]] = {}
        worst = math.inf
        for index in self.chance.permutation(len(todo))[:most].tolist():
            rule, full = todo[index]
            objective = self._time(rule, full, worst)
            if 0 <= objective < math.inf and objective not in found:
                found[objective] = rule, full
                worst = sorted(found)[_KEPT - 1] if len(found) >= _KEPT else math.inf
            if self._is_done(objective) or (self.budget.over and (found or objective < 0)):
                break
        for objective in sorted(found)[:_KEPT]:
            self._add(*found[objective])

    def take_over(self, others: list[Line]) -> None:
        """Begin with the rules of lines that were found for fewer microbatches."""
        microbatches = self.workshop.shop.microbatches
        for line in others:
            rule, fewer = line.best_rule, len(line.full) // self.workshop.shop.stages
            counts = [np.where(each >= fewer, microbatches, each) for each in (rule.most, rule.ahead)]
            self._add(rule._replace(most=counts[0], ahead=counts[1]), np.repeat(line.full[::fewer], microbatches))

    def _add(self, rule: Rule, full: Flags) -> None:
        objective = self._time(rule, full)
        if objective >= 0:
            self.lines.append(Line(rule, full, objective, rule, Order(self.workshop.made, full, objective, "list")))

    def _fulls(self) -> list[Flags]:
        """All backwards split or all full, as far as there is a choice."""
        shop = self.workshop.shop
        fulls = [np.zeros(self.workshop.cells, dtype=np.int8)] if shop.is_split else []
        return fulls + ([np.ones(self.workshop.cells, dtype=np.int8)] if shop.may_merge or not shop.is_split else [])

    def _time(self, rule: Rule, full: Flags, bound: float = math.inf) -> float:
        self.budget.spend(1)
        return self.workshop.dispatch(rule, full, bound)

    def _is_done(self, objective: float) -> bool:
        return 0 <= objective <= self.least * (1 + 1e-9)

    def climb(self) -> None:
        """Change the rules in turn; what is a little worse is taken too, less and less."""
        rules, begin = Rules(self.workshop.shop), self.budget.share
        turn = 0
        while self.lines and not self.budget.over and not self._is_done(min(line.best.objective for line in self.lines)):
            line = self.lines[turn % len(self.lines)]
            turn += 1
            rule = rules.changed(line.rule, self.chance)
            left = (self.budget.end - self.budget.share) / max(self.budget.end - begin, 1e-9)
            bound = line.objective + _HEAT * rules.usual * max(left, 0.0) * self.chance.exponential()
            objective = self._time(rule, line.full, bound)
            if 0 <= objective <= bound:
                line.rule, line.objective = rule, objective
                if objective < line.best.objective:
                    line.best_rule, line.best = rule, Order(self.workshop.made, line.full, objective, "list")
