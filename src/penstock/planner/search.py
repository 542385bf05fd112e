"""The order search: list scheduling by many rules, then local search on the orders that come of it and on the named ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.kind import Kind
from penstock.ir.schedule import Schedule
from penstock.planner.bounds import check_bound, lower_bound
from penstock.planner.orders.budget import Budget
from penstock.planner.orders.listing import Listing
from penstock.planner.orders.named import named_schedules, one_at_a_time
from penstock.planner.orders.patterns import Weaving
from penstock.planner.orders.polishing import Polishing
from penstock.planner.orders.ready import get_ready
from penstock.planner.orders.shop import order_of, schedule_of, shop_of
from penstock.planner.orders.workshop import Order, Workshop
from penstock.planner.problem import Problem

Progress = Callable[[Schedule, float], None]

_EVEN = 1e-9
"""Objectives so near to each other, as a share of them, are the same."""
_LISTING = 0.4
"""The share of the time for list scheduling."""
_WEAVING = 0.15
"""And then, of what is left, for patterns."""
_MANY = 5000
"""Actions from which on rules and patterns are looked for with fewer microbatches."""
_ENOUGH = 3
"""So many a rank."""
_ROUNDS, _FEW = 6, 30
"""How often memory is left to received messages, where they need more than was left, and the rules that are tried to see it."""


@dataclass(frozen=True)
class Found:
    """The best order of a search; `schedule` is None and `objective` infinite where none was found that fits the memory."""

    schedule: Schedule | None
    objective: float
    source: str = ""
    """What it grew from: `list`, or the name of a schedule."""
    rounds: float = 0.0
    """How many orders were timed, a try of a move counted as a part of one."""
    late: bool = False
    """Whether the seconds were over before the rounds, so that another run may find something else."""


def search(
    problem: Problem,
    *,
    seconds: float | None = None,
    rounds: float | None = None,
    seed: int = 0,
    start: Sequence[Schedule] | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Found:
    """Find a good order within `seconds`, 3 by default, or within about as many `rounds`, with which the same seed gives the same result.

    With both, the rounds count and the seconds only stop it early, which `Found.late` tells.

    `start` are schedules to begin with, the named ones of the placement unless given; the result is never worse than the best of
    them that fits the memory. `progress` is told of every schedule that is better than all before; `stop` ends the search early.
    """
    get_ready()
    budget = Budget(3.0 if seconds is None and rounds is None else seconds, rounds, stop)
    run = _Search(problem, budget, seed, progress)
    run.begin(named_schedules(problem) if start is None else start)
    if not budget.over:
        run.improve()
    return Found(run.best, run.objective, run.source, budget.spent, budget.late)


class _Search:
    """The best so far, as the simulator has it."""

    def __init__(self, problem: Problem, budget: Budget, seed: int, progress: Progress | None) -> None:
        self.problem, self.budget, self.progress = problem, budget, progress
        self.chance = np.random.default_rng(seed)
        self.least = lower_bound(problem).value
        self.best: Schedule | None = None
        self.objective, self.source = math.inf, ""
        self.starts: list[Order] = []
        self.sampled: list[Order] = []
        self.reserve = np.zeros(problem.ranks)
        self.over = np.zeros(problem.ranks)
        """By how much the last order that was considered is over each limit."""
        self.budget.enough = math.isinf(self.least)

    def begin(self, schedules: Iterable[Schedule]) -> None:
        """Consider what is known already, and if none of it fits what holds least."""
        for schedule in schedules:
            self._check(schedule)
            self._start(schedule)
            if self.budget.over and (self.best is not None or self.budget.stop()):
                return
        if self.best is None:
            self._start(one_at_a_time(self.problem.placement, self.problem.microbatches))

    def _start(self, schedule: Schedule) -> None:
        """Consider a schedule; if it fits, local search may begin with it."""
        if self._consider(schedule, schedule.name):
            shop = shop_of(self.problem)
            nodes, full = order_of(shop, schedule)
            is_free = shop.may_merge or not shop.is_split
            self.starts.append(Order(nodes, full if is_free else np.zeros_like(full), math.inf, schedule.name))

    def _check(self, schedule: Schedule) -> None:
        problem = self.problem
        if schedule.placement.copies != problem.placement.copies or schedule.microbatches != problem.microbatches:
            wanted = f"{problem.placement.describe()}, {problem.microbatches} microbatches"
            raise ScheduleError(f"{schedule!r} cannot begin a search for {wanted}")
        if not problem.split and schedule.rows.is_kind(Kind.I, Kind.W).any():
            raise ScheduleError(f"{schedule!r} splits its backwards, which the problem does not allow")

    def improve(self) -> None:
        """List scheduling, patterns, then local search."""
        is_listed = len(self.problem.placement.copies) == 1
        with self.budget.part(_LISTING):
            hand = self._listed() if is_listed else []
        workshop = self._workshop(self.problem)
        hand += [Order(each.nodes, each.full, workshop.time(each.nodes, each.full), each.source) for each in self.starts]
        hand = _different(hand, 3)
        with self.budget.part(_WEAVING):
            woven = Weaving(self.sample, workshop, self.budget, self.chance).run(self.sampled) if self.sampled else []
        hand += [order for order in _different(woven, 1) if self._accept(order)]
        Polishing(workshop, self.budget, self.chance, self._accept, lambda: self.over).run(hand)

    def _workshop(self, problem: Problem) -> Workshop:
        return Workshop(shop_of(problem, self.reserve.tolist()))

    def _listed(self) -> list[Order]:
        """Orders by list scheduling that fit."""
        if self._receives:
            self._leave_room()
        return [order for order in self._list() if self._accept(order)]

    def _leave_room(self) -> None:
        """Leave as much memory to received messages as they take in orders of this kind."""
        for _ in range(_ROUNDS):
            listing = Listing(self._workshop(self.problem), self.budget, self.chance)
            listing.begin(_FEW)
            if not listing.orders or self._accept(listing.orders[0]):
                return
            self.reserve += self.over

    def _list(self) -> list[Order]:
        """List scheduling, of fewer microbatches first where there are many."""
        short = shortened(self.problem)
        self.sample = self._workshop(short or self.problem)
        listing = Listing(self.sample, self.budget, self.chance, self.least if short is None else 0.0)
        with self.budget.part(0.4 if short is None else 0.3):
            listing.begin()
        with self.budget.part(1.0 if short is None else 0.6):
            listing.climb()
        self.sampled = listing.orders[:2]
        if short is None:
            return listing.orders
        whole = Listing(self._workshop(self.problem), self.budget, self.chance, self.least)
        whole.take_over(listing.lines)
        whole.climb()
        return whole.orders

    @property
    def _receives(self) -> bool:
        """Whether received messages take memory."""
        problem = self.problem
        return problem.memory_limit is not None and bool(np.any(problem.costs.table("output", problem.stages, problem.microbatches)))

    def _accept(self, order: Order) -> bool:
        """Consider an order; whether it fits."""
        return self._consider(schedule_of(self.problem, order.nodes, order.full), order.source)

    def _consider(self, schedule: Schedule, source: str) -> bool:
        """Keep the schedule if it is the best that fits; whether it fits."""
        timeline = self.problem.evaluate(schedule)
        self.budget.spend(1)
        if not self.problem.fits(timeline):
            self.over = np.maximum(0.0, np.array(timeline.peak_memory) - np.array(self.problem.limits))
            return False
        objective = self.problem.objective(timeline)
        check_bound(self.least, objective, "of the search")
        if objective < self.objective * (1 - _EVEN) or self.best is None:
            self.best, self.objective, self.source = schedule, objective, source
            self.budget.enough = objective <= self.least * (1 + _EVEN)
            if self.progress is not None:
                self.progress(schedule, objective)
        return True


def shortened(problem: Problem) -> Problem | None:
    """The problem with fewer microbatches, enough to show how it goes, where that saves much time."""
    enough = max(12, _ENOUGH * problem.ranks)
    costs = problem.costs
    differ = any(isinstance(value, tuple) and any(isinstance(each, tuple) for each in value) for value in vars(costs).values())
    if differ or 3 * problem.stages * problem.microbatches < _MANY or problem.microbatches < 1.5 * enough:
        return None
    return replace(problem, microbatches=enough)


def _different(orders: list[Order], most: int) -> list[Order]:
    """The best of the orders that run at all, without those that take the same time as one before."""
    kept: dict[float, Order] = {}
    for order in sorted(orders, key=lambda order: order.objective):
        kept.setdefault(order.objective, order)
    return [order for order in kept.values() if order.objective >= 0][:most]
