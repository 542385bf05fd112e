"""The exact solver: the best order of a problem with proof, or the best found and a bound when the budget is spent."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass

from penstock.errors import MissingExtraError
from penstock.ir.schedule import Schedule
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.budget import SolverBudget, solve_within
from penstock.planner.exact.instance import Instance
from penstock.planner.exact.model import SolverModel, add_hint, build_schedule
from penstock.planner.problem import Problem

CLOSE = 1e-6
"""An objective within this share of a bound is optimal: times are rounded to whole numbers for the solver."""
ON_BOUNDS = 0.2
"""Share of the budget that goes into a bound first, which tells the solver earlier that it is done."""
MOST_WORKERS = 8


@dataclass(frozen=True)
class Solved:
    """The result of the solver. `objective` is the simulated one of `schedule`; `bound` holds even if there is no schedule."""

    schedule: Schedule | None
    objective: float
    bound: float
    proven: bool
    """Whether the schedule is optimal among the orders of single actions."""
    infeasible: bool
    """Whether no schedule fits the memory."""


def solve(
    problem: Problem,
    *,
    seconds: float = math.inf,
    budget: SolverBudget | None = None,
    start: Schedule | None = None,
    workers: int | None = None,
) -> Solved:
    """Search for the optimal order within the budget, starting from `start`.

    With a `budget` that counts work, and one worker, equal runs give equal results. The result is `start` if it fits and
    nothing better was found. Overlapped actions are not searched: if they take less than their sum, nothing is proven.
    """
    if importlib.util.find_spec("ortools") is None:
        raise MissingExtraError("the exact solver", "OR-tools", "solve")
    budget = SolverBudget(seconds) if budget is None else budget
    first = budget.part(ON_BOUNDS)
    bound = lower_bound(problem, budget=first).value
    budget.spend(first.spent)
    if bound == math.inf:
        return Solved(None, math.inf, math.inf, proven=False, infeasible=True)
    search = _ExactSearch(problem, bound, workers or min(MOST_WORKERS, os.cpu_count() or 1))
    if start is not None:
        search.consider(start)
    search.run(budget)
    return search.result()


class _ExactSearch:
    """The best so far, and the solver's runs."""

    def __init__(self, problem: Problem, bound: float, workers: int) -> None:
        self.problem, self.bound, self.workers = problem, bound, workers
        self.instance = Instance.of(problem)
        self.best: Schedule | None = None
        self.objective = math.inf
        self.infeasible = False

    @property
    def proven(self) -> bool:
        return self.objective <= self.bound * (1 + CLOSE)

    def result(self) -> Solved:
        return Solved(self.best, self.objective, min(self.bound, self.objective), self.proven, self.infeasible)

    def consider(self, schedule: Schedule) -> list[float]:
        """Keep the schedule if it is the best that fits; returns each rank's memory over its limit."""
        timeline = self.problem.evaluate(schedule)
        if self.problem.fits(timeline) and self.problem.objective(timeline) < self.objective:
            self.best, self.objective = schedule, self.problem.objective(timeline)
        return [max(0.0, peak - limit) for peak, limit in zip(timeline.peak_memory, self.problem.limits, strict=True)]

    def run(self, budget: SolverBudget) -> None:
        """Solve; if the solution holds more in receive buffers than the model says, solve again with that much less room."""
        less = [0.0] * self.problem.ranks
        while not self.proven and not self.infeasible and not budget.over:
            over = self._solve(less, budget)
            if over is None or not any(over):
                return
            less = [before + more for before, more in zip(less, over, strict=True)]

    def _solve(self, less: list[float], budget: SolverBudget) -> list[float] | None:
        """One run of the solver; None if it found nothing."""
        from ortools.sat.python import cp_model

        whole = not any(less)
        model = SolverModel(self.instance.with_less_room(less), *self._range())
        if self.best is not None:
            add_hint(model, self.best)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = self.workers
        status = solve_within(solver, model.cp, budget, budget)
        if status == cp_model.INFEASIBLE:
            self.infeasible = whole and self.best is None
            return None
        if whole and status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN) and self.problem.costs.overlap >= 1:
            self.bound = max(self.bound, solver.best_objective_bound * float(self.instance.time))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return self.consider(build_schedule(self.problem, model.list_done(solver)))

    def _range(self) -> tuple[int, int]:
        """The least and the latest possible end, in units."""
        unit, horizon = float(self.instance.time), self.instance.horizon
        least = math.floor(self.bound / unit + CLOSE)
        most = horizon if self.best is None else min(horizon, math.floor(self.objective * (1 + CLOSE) / unit) + 1)
        return min(least, most), most
