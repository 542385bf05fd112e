"""The order search: list scheduling by many rules, then local search on its orders and on the named schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bounds.lower_bound import check_bound, lower_bound
from penstock.planner.budget import SearchBudget
from penstock.planner.named_schedules import list_named_schedules, one_at_a_time
from penstock.planner.order_search.annealing import Annealing, AnnealOptions, LocalSearch
from penstock.planner.order_search.dispatch import DispatchRule
from penstock.planner.order_search.dispatch_rules import RuleSearch
from penstock.planner.order_search.evaluator import Evaluator, Order
from penstock.planner.order_search.flat_problem import build_schedule, flatten, read_order
from penstock.planner.order_search.patterns import Pattern, PatternSearch
from penstock.planner.problem import Problem
from penstock.text.numbers import format_count

Improved = Callable[[Schedule, float], None]

_EVEN = 1e-9
"""Objectives within this relative difference are equal."""
_ON_RULES = 0.4
"""Share of the budget for list scheduling."""
_ON_PATTERNS = 0.15
"""Share of the rest for patterns."""
_MANY = 5000
"""From this many actions on, rules and patterns are searched with fewer microbatches."""
_ENOUGH = 3
"""Microbatches per rank then."""
_ROUNDS, _FEW = 6, 30
"""How often memory is reserved for received messages, and how many rules are tried to see how much they need."""


@dataclass(frozen=True)
class SearchResult:
    """The best order of a search; `schedule` is None and `objective` infinite if none fits the memory."""

    schedule: Schedule | None
    objective: float
    source: str = ""
    """Its origin: `list`, or the name of a schedule."""
    rounds: float = 0.0
    """How many orders were timed, a try of a move counted as a part of one."""
    late: bool = False
    """Whether the seconds ran out before the rounds, so that another run may give another result."""


def search(
    problem: Problem,
    *,
    seconds: float | None = None,
    rounds: float | None = None,
    seed: int = 0,
    start: Sequence[Schedule] | None = None,
    progress: Improved | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Search for a good order within `seconds` (default 3), or within about `rounds` timed orders: then equal seeds give equal results.

    With both, the rounds count and the seconds only stop the search early, which `SearchResult.late` reports. `start` are the
    schedules to begin with, by default the named ones of the placement; the result is never worse than the best of them that
    fits the memory. `progress` is called with every schedule that is better than all before; `stop` ends the search early.
    """
    compile_loops()
    budget = SearchBudget(3.0 if seconds is None and rounds is None else seconds, rounds, stop)
    run = _OrderSearch(problem, budget, seed, progress)
    run.begin(list_named_schedules(problem) if start is None else start)
    if not budget.over:
        run.improve()
    return SearchResult(run.best, run.objective, run.source, budget.spent, budget.late)


class _OrderSearch:
    """The best schedule so far, as the simulator times it."""

    def __init__(self, problem: Problem, budget: SearchBudget, seed: int, progress: Improved | None) -> None:
        self.problem, self.budget, self.progress = problem, budget, progress
        self.chance = np.random.default_rng(seed)
        self.least = lower_bound(problem).value
        self.best: Schedule | None = None
        self.objective, self.source = math.inf, ""
        self.starts: list[Order] = []
        self.sampled: list[Order] = []
        self.reserve = np.zeros(problem.ranks)
        self.over = np.zeros(problem.ranks)
        """Memory of the last refused schedule over each limit."""
        self.budget.enough = math.isinf(self.least)

    def begin(self, schedules: Iterable[Schedule]) -> None:
        """Consider the starting schedules, and if none of them fits the order that holds least."""
        for schedule in schedules:
            self._check(schedule)
            self._add_start(schedule)
            if self.budget.over and (self.best is not None or self.budget.stop()):
                return
        if self.best is None:
            self._add_start(one_at_a_time(self.problem.placement, self.problem.microbatches, slices=self.problem.slices))

    def _add_start(self, schedule: Schedule) -> None:
        """Consider a schedule; if it fits, local search may start from it."""
        if self._consider(schedule, schedule.name):
            flat = flatten(self.problem)
            nodes, full = read_order(flat, schedule)
            is_free = flat.may_merge or not flat.is_split
            self.starts.append(Order(nodes, full if is_free else np.zeros_like(full), math.inf, schedule.name))

    def _check(self, schedule: Schedule) -> None:
        problem = self.problem
        shape = problem.placement.copies, problem.microbatches, problem.slices
        if (schedule.placement.copies, schedule.microbatches, schedule.slices) != shape:
            slices = f" of {problem.slices} slices" if problem.slices > 1 else ""
            expected = f"{problem.placement.describe()}, {format_count(problem.microbatches, 'microbatch')}{slices}"
            raise ScheduleError(f"{schedule!r} cannot begin a search for {expected}")
        if not problem.split and schedule.rows.is_kind(Kind.I, Kind.W).any():
            raise ScheduleError(f"{schedule!r} splits its backwards, which the problem does not allow")

    def improve(self) -> None:
        """List scheduling, patterns, then local search."""
        with self.budget.part(_ON_RULES):
            pool = self._list_schedule() if len(self.problem.placement.copies) == 1 else []
        evaluator = self._get_evaluator(self.problem)
        pool += [replace(order, objective=evaluator.time(order.nodes, order.full)) for order in self.starts]
        pool = _pick_different(pool, 3)
        with self.budget.part(_ON_PATTERNS):
            alike = self.sampled if self.problem.slices == 1 else []  # slices do not repeat: each takes another time
            repeating = PatternSearch(self.sample, evaluator, self.budget, self.chance).run(alike) if alike else []
        pool += [order for order in _pick_different(repeating, 1) if self._accept(order)]
        LocalSearch(evaluator, self.budget, self.chance, self._accept, lambda: self.over).run(pool)

    def _get_evaluator(self, problem: Problem) -> Evaluator:
        return Evaluator(flatten(problem, self.reserve.tolist()))

    def _list_schedule(self) -> list[Order]:
        """Orders by list scheduling that fit."""
        problem = self.problem
        if problem.memory_limit is not None and np.any(problem.costs.table("output", problem.stages, problem.units)):
            self._leave_room()  # received messages take memory
        return [order for order in self._search_rules() if self._accept(order)]

    def _leave_room(self) -> None:
        """Reserve as much memory for received messages as they take in orders of this kind."""
        for _ in range(_ROUNDS):
            rules = RuleSearch(self._get_evaluator(self.problem), self.budget, self.chance)
            rules.begin(_FEW)
            if not rules.orders or self._accept(rules.orders[0]):
                return
            self.reserve += self.over

    def _search_rules(self) -> list[Order]:
        """Search dispatch rules, with fewer microbatches first if there are many."""
        short = shorten(self.problem)
        self.sample = self._get_evaluator(short or self.problem)
        rules = RuleSearch(self.sample, self.budget, self.chance, self.least if short is None else 0.0)
        with self.budget.part(0.4 if short is None else 0.3):
            rules.begin()
        with self.budget.part(1.0 if short is None else 0.6):
            rules.climb()
        self.sampled = rules.orders[:2]
        if short is None:
            return rules.orders
        whole = RuleSearch(self._get_evaluator(self.problem), self.budget, self.chance, self.least)
        whole.take_over(rules.tracks)
        whole.climb()
        return whole.orders

    def _accept(self, order: Order) -> bool:
        """Consider an order; returns whether it fits."""
        return self._consider(build_schedule(self.problem, order.nodes, order.full), order.source)

    def _consider(self, schedule: Schedule, source: str) -> bool:
        """Keep the schedule if it is the best that fits; returns whether it fits."""
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


def shorten(problem: Problem) -> Problem | None:
    """The problem with fewer microbatches, enough to be representative, if that saves much time; else None."""
    enough = max(12, _ENOUGH * problem.ranks)
    differs = bool(problem.costs.differing) or problem.slices > 1
    if differs or 3 * problem.stages * problem.microbatches < _MANY or problem.microbatches < 1.5 * enough:
        return None
    return replace(problem, microbatches=enough)


def _pick_different(orders: list[Order], most: int) -> list[Order]:
    """The best orders without deadlock, each with another objective."""
    by_objective: dict[float, Order] = {}
    for order in sorted(orders, key=lambda order: order.objective):
        by_objective.setdefault(order.objective, order)
    return [order for order in by_objective.values() if order.objective >= 0][:most]


@cache
def compile_loops() -> None:
    """Run every loop once; compiling them takes some seconds the first time after an installation."""
    evaluator = Evaluator(flatten(Problem(Placement.linear(2), 2, Costs())))
    full, counts = np.zeros(evaluator.cells, dtype=np.int8), np.full(2, 2)
    objective = evaluator.dispatch(DispatchRule(np.zeros(6), 1.0, counts, counts, 0.0, 0.0), full)
    order = Order(evaluator.last_order, full, objective)
    evaluator.time(order.nodes, full)
    Annealing(evaluator, order, 0).run(AnnealOptions(0.0, 0.5, 1, 1, 0.5, tries=1))
    Pattern.read(evaluator, order, 0.5, 0).run(1, 1.0)
