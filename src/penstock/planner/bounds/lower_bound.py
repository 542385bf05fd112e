"""The lower bound of a problem: the best of several arguments."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bounds.link_bounds import bound_links
from penstock.planner.bounds.rank_bounds import (
    RankTerms,
    bound_chains,
    bound_first_backward,
    bound_holding,
    bound_one_machine,
    bound_work,
    list_rank_terms,
)
from penstock.planner.bounds.solver_bounds import FlowBound, OneRankSolver
from penstock.planner.bounds.terms import Terms
from penstock.planner.bounds.whole_numbers import common_unit
from penstock.planner.budget import SolverBudget
from penstock.planner.problem import Problem

ROUNDING = 1e-9
"""Relative error of sums of fractions."""
ON_FLOW = 0.6
"""Share of the budget for the linear programs."""
QUICK: dict[str, Callable[[RankTerms], float]] = {
    "work": bound_work,
    "chains": bound_chains,
    "one machine": bound_one_machine,
    "first backward": bound_first_backward,
    "holding": bound_holding,
}
"""The bounds that need no solver; each holds for every rank."""


def check_bound(bound: float, objective: float, name: str) -> None:
    """Stop at a bound that a schedule within the memory limit beats: a mistake in the planner itself, so an `AssertionError`."""
    if bound > objective * (1 + ROUNDING):
        raise AssertionError(
            f"internal error: the bound {name!r} says that nothing takes less than {bound!r}, but there is a legal schedule that takes "
            f"{objective!r}; please report this with the arguments of the plan"
        )


@dataclass(frozen=True)
class Bound:
    """The best lower bound, the argument that gives it, and the values of all arguments; infinite if nothing fits the memory."""

    value: float
    name: str
    all: dict[str, float] = field(default_factory=dict)

    @classmethod
    def best_of(cls, values: dict[str, float]) -> Bound:
        name = max(values, key=values.__getitem__)
        return cls(values[name], name, values)


def lower_bound(problem: Problem, *, seconds: float = 0.0, budget: SolverBudget | None = None) -> Bound:
    """The least time of any schedule of the problem, as the simulator counts it.

    The quick arguments take next to no time. With `seconds`, and with OR-tools installed, linear programs for the ranks and
    CP-SAT for the best of them run for that long; with a `budget` that counts work, equal runs give equal bounds.
    """
    budget = SolverBudget(seconds) if budget is None else budget
    terms = Terms.of(problem)
    if not fits_one_microbatch(terms):
        return Bound(math.inf, "memory", {"memory": math.inf})
    ranks, unit = list_rank_terms(terms), find_time_unit(problem)
    values = {name: _round_up(max(rule(rank_terms) for rank_terms in ranks), unit) for name, rule in QUICK.items()}
    if problem.costs.contention != "independent":
        values["links"] = _round_up(bound_links(terms), unit)
    if budget.left > 0 and max(values.values()) > 0 and importlib.util.find_spec("ortools") is not None:
        first = budget.part(ON_FLOW)
        flow = FlowBound(ranks, max(values.values()), unit, first)
        values["flow"] = _round_up(flow.run(), unit)
        budget.spend(first.spent)
        values["one rank"] = _round_up(OneRankSolver(flow.best, values["flow"], unit, budget).run(), unit)
        budget.late = budget.late or first.late
    return Bound.best_of(values)


def find_time_unit(problem: Problem) -> float | None:
    """The unit that all times of the simulator are multiples of, if there is one; overlapped actions may take any time."""
    costs, shape = problem.costs, (problem.stages, problem.units)
    if costs.overlap != 1.0:
        return None
    values = [*costs.per_stage("reduce", problem.stages), *costs.per_stage("optimizer", problem.stages)]
    for table in (*problem.hops, *(costs.table(name, *shape) for name in ("f", "i", "w", "b"))):
        values += np.unique(table).tolist()
    unit = common_unit(values)
    return None if unit is None else float(unit)


def _round_up(value: float, unit: float | None) -> float:
    """Round up to the next possible time, allowing for rounding errors."""
    return value if unit is None else math.ceil(value / unit - 1e-6) * unit


def fits_one_microbatch(terms: Terms) -> bool:
    """Whether each rank can hold one microbatch at a time.

    While a stage of the rank runs it, forward or backward, the microbatch holds its activations on all of the rank's stages up
    to that one, and the message that the stage has received. If it is cut into slices, that holds for the last of them, and all
    others are held too.
    """
    for copy in terms.copies:
        for rank in set(copy.ranks):
            stages = list(copy.stages_of(rank))
            held = _add_slices(copy.activation[stages], copy.slices).cumsum(axis=0)
            held = held + np.maximum(copy.received[stages], copy.returned[stages])[:, copy.slices - 1 :: copy.slices]
            if held.max() > terms.room[rank]:
                return False
    return all(room >= 0 for room in terms.room)


def _add_slices(table: Floats, slices: int) -> Floats:
    """Add up the columns of the slices of each microbatch."""
    return np.asarray(table.reshape(len(table), -1, slices).sum(axis=2))
