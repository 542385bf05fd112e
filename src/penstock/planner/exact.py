"""The exact solver: the best order of a problem, with proof, or the best found and a bound when time is up."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass

from penstock.errors import MissingExtraError
from penstock.ir.schedule import Schedule
from penstock.planner.bounds import lower_bound
from penstock.planner.effort import Effort, solve_within
from penstock.planner.exact_instance import Instance
from penstock.planner.exact_model import Model
from penstock.planner.exact_order import hint, schedule_of
from penstock.planner.problem import Problem

CLOSE = 1e-6
"""An objective so near to a bound, as a share of it, is the optimum: times are rounded to whole numbers for the solver."""
ON_BOUNDS = 0.2
"""The share of the time that goes into a bound first; with it the solver knows earlier when it is done."""
MOST_WORKERS = 8


@dataclass(frozen=True)
class Solved:
    """What the solver found. `objective` is the simulated one of `schedule`; `bound` holds whether or not anything was found."""

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
    effort: Effort | None = None,
    start: Schedule | None = None,
    workers: int | None = None,
) -> Solved:
    """Look for the optimal order for so long, from `start` on.

    With an `effort` that counts work, and one worker, equal runs find the same.

    The result is `start` where nothing better was found and it fits. Overlapped actions are not looked for: where they take
    less than their sum, nothing is proven.
    """
    if importlib.util.find_spec("ortools") is None:
        raise MissingExtraError("the exact solver", "OR-tools", "solve")
    effort = Effort(seconds) if effort is None else effort
    first = effort.part(ON_BOUNDS)
    bound = lower_bound(problem, effort=first).value
    effort.spend(first.spent)
    if bound == math.inf:
        return Solved(None, math.inf, math.inf, proven=False, infeasible=True)
    search = _Search(problem, bound, workers or min(MOST_WORKERS, os.cpu_count() or 1))
    if start is not None:
        search.consider(start)
    search.run(effort)
    return search.result()


class _Search:
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
        """Keep the schedule if it is the best that fits; by how much each rank is over its limit."""
        timeline = self.problem.evaluate(schedule)
        if self.problem.fits(timeline) and self.problem.objective(timeline) < self.objective:
            self.best, self.objective = schedule, self.problem.objective(timeline)
        return [max(0.0, peak - limit) for peak, limit in zip(timeline.peak_memory, self.problem.limits, strict=True)]

    def run(self, effort: Effort) -> None:
        """Solve; where what was found holds more in receive buffers than the model says, again with as much less room."""
        less = [0.0] * self.problem.ranks
        while not self.proven and not self.infeasible and not effort.over:
            over = self._solve(less, effort)
            if over is None or not any(over):
                return
            less = [before + more for before, more in zip(less, over, strict=True)]

    def _solve(self, less: list[float], effort: Effort) -> list[float] | None:
        """One run; None if it found nothing."""
        from ortools.sat.python import cp_model

        whole = not any(less)
        model = Model(self.instance.with_less_room(less), *self._range())
        if self.best is not None:
            hint(model, self.best)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = self.workers
        status = solve_within(solver, model.cp, effort, effort)
        if status == cp_model.INFEASIBLE:
            self.infeasible = whole and self.best is None
            return None
        if whole and status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN) and self.problem.costs.overlap >= 1:
            self.bound = max(self.bound, solver.best_objective_bound * float(self.instance.time))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return self.consider(schedule_of(self.problem, model.done(solver)))

    def _range(self) -> tuple[int, int]:
        """The least and the most that the end can be, in units."""
        unit, horizon = float(self.instance.time), self.instance.horizon
        least = math.floor(self.bound / unit + CLOSE)
        most = horizon if self.best is None else min(horizon, math.floor(self.objective * (1 + CLOSE) / unit) + 1)
        return min(least, most), most
