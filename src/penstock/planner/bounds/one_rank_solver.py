"""Bounds by CP-SAT: one rank alone, its actions in one piece each, with lags, heads, tails and memory.

The rules are those of the linear program, whose actions may run in parts. The solver is asked whether the rank can end by a
given time; if it cannot, that time is a bound. Times and sizes are rounded down to whole numbers, which keeps every schedule
possible: its starts can be rounded down too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from penstock.ir.memory_ledger import LIFETIMES, When
from penstock.planner.bounds.linear_program import list_precedences
from penstock.planner.bounds.rank_bounds import KINDS, NAMES, ActionKey, RankTerms
from penstock.planner.budget import SolverBudget, solve_within
from penstock.planner.whole_numbers import floor_units, unit_for

TIME_STEPS = 2**16
SIZE_STEPS = 2**12
FIRST = 0.03
"""The first step above the known bound, as a share of it."""
CLOSE = 1e-4
"""The search stops at this relative difference."""

Starts = dict[ActionKey, list[Any]]
"""Start variables of the k-th action of each kind."""


@dataclass
class OneRankSolver:
    """Raises a known bound by solving one rank exactly."""

    rank_terms: RankTerms
    value: float
    unit: float | None
    """The unit that all times are multiples of, if there is one."""
    budget: SolverBudget

    def __post_init__(self) -> None:
        rank_terms = self.rank_terms
        self.kinds: list[ActionKey] = [(at, stage, name) for at, stage in rank_terms.parts for name in KINDS]
        self.order = list_precedences(rank_terms)
        self.time = unit_for([*(self.rank_terms.least_time(kind) for kind in self.kinds), *(pair.lag for pair in self.order)], TIME_STEPS)
        self.size = unit_for([size for at, stage in rank_terms.parts for size in rank_terms.least_sizes(at, stage).values()], SIZE_STEPS)

    def run(self) -> float:
        """Try later ends until one is possible or the budget is spent; then bisect."""
        step, high = FIRST * self.value, math.inf
        while not self.budget.over:
            tried = self._between_units(min(self.value + step, (self.value + high) / 2))
            if not self.value < tried < high or high - self.value < CLOSE * self.value:
                break
            refused = self._refuses(tried)
            if refused:
                self.value, step = tried, 2 * step
            elif refused is None:
                step /= 4
            else:
                high = tried
        return self.value

    def _between_units(self, end: float) -> float:
        """Half a unit after a possible time: if it is refused, the next unit is a bound."""
        return end if self.unit is None else (math.floor(end / self.unit) + 0.5) * self.unit

    def _refuses(self, end: float) -> bool | None:
        """Whether the rank cannot end by then; None if half of the remaining budget did not suffice."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        starts = self._starts(model, end)
        if starts is None:
            return True
        self._order(model, starts)
        self._hold(model, starts, math.floor(Fraction(end) / self.time) + 1)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        status = solve_within(solver, model, self.budget.part(0.5), self.budget)
        if status == cp_model.INFEASIBLE:
            return True
        return False if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None

    # The rules --------------------------------------------------------------------------------------------------------

    def _starts(self, model: Any, end: float) -> Starts | None:
        """Start variables between the earliest and the latest start; None if a latest start is before the earliest."""
        starts: Starts = {}
        for kind in self.kinds:
            starts[kind] = []
            early, rest = self.rank_terms.early_of(kind), self.rank_terms.rest_of(kind)
            for first, follows in zip(early.tolist(), rest.tolist(), strict=True):
                low, high = floor_units(first, self.time), math.floor(Fraction(end - follows) / self.time)
                if high < low:
                    return None
                starts[kind].append(model.new_int_var(low, high, ""))
        return starts

    def _order(self, model: Any, starts: Starts) -> None:
        lane = []
        for kind, own in starts.items():
            takes = floor_units(self.rank_terms.least_time(kind), self.time)
            lane += [model.new_fixed_size_interval_var(start, takes, "") for start in own]
            for before, after in pairwise(own):
                model.add(after >= before + takes)
        model.add_no_overlap(lane)
        for pair in self.order:
            for before, after in zip(starts[pair.before], starts[pair.after], strict=True):
                model.add(after >= before + floor_units(pair.lag, self.time))

    def _hold(self, model: Any, starts: Starts, longest: int) -> None:
        if self.rank_terms.room == math.inf:
            return
        self._wait(model, starts)
        intervals: list[Any] = []
        sizes: list[int] = []
        for at, stage in self.rank_terms.parts:
            held = {name: floor_units(size, self.size) for name, size in self.rank_terms.least_sizes(at, stage).items()}
            keys = {kind: (at, stage, name) for kind, name in NAMES.items()}
            takes = {kind: floor_units(self.rank_terms.least_time(key), self.time) for kind, key in keys.items()}
            for own in zip(*(starts[key] for key in keys.values()), strict=True):
                begins = dict(zip(keys, own, strict=True))
                for size, begin, when, end in LIFETIMES:
                    if held[size]:
                        start = begins[begin] + (takes[begin] if when is When.END else 0)
                        length = model.new_int_var(0, longest, "")
                        intervals.append(model.new_interval_var(start, length, begins[end] + takes[end], ""))
                        sizes.append(held[size])
        model.add_cumulative(intervals, sizes, floor_units(self.rank_terms.room, self.size))

    def _wait(self, model: Any, starts: Starts) -> None:
        for forward, gradient, most in self.rank_terms.list_waits():
            takes = floor_units(self.rank_terms.least_time(gradient), self.time)
            for before, after in zip(starts[gradient], starts[forward][most:], strict=False):
                model.add(after >= before + takes)
