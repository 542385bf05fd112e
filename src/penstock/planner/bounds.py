"""Lower bounds: times that no schedule of a placement can beat within its memory."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.planner.bounds_flow import Flow
from penstock.planner.bounds_rank import Share, chains, first_backward, holding, one_machine, shares, work
from penstock.planner.bounds_solved import Alone
from penstock.planner.bounds_terms import Terms
from penstock.planner.effort import Effort
from penstock.planner.exact_scale import common_unit
from penstock.planner.problem import Problem

ROUNDING = 1e-9
"""The share of a time by which sums of fractions may differ."""
ON_FLOW = 0.6
"""The share of the time for the linear programs."""
QUICK: dict[str, Callable[[Share], float]] = {
    "work": work,
    "chains": chains,
    "one machine": one_machine,
    "first backward": first_backward,
    "holding": holding,
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
    """The best lower bound, by which argument, and what each of them gives; infinite where nothing fits the memory."""

    value: float
    name: str
    all: dict[str, float] = field(default_factory=dict)


def lower_bound(problem: Problem, *, seconds: float = 0.0, effort: Effort | None = None) -> Bound:
    """What every schedule of the problem takes at least, as the simulator counts it.

    Some arguments take next to no time. With `seconds`, and with OR-tools installed, linear programs for the ranks and a
    solver for the best of them add to these for as long; with `effort`, for as much work, and equal runs give equal bounds.
    """
    effort = Effort(seconds) if effort is None else effort
    terms = Terms.of(problem)
    if not fits_at_all(terms):
        return Bound(math.inf, "memory", {"memory": math.inf})
    ranks, unit = shares(terms), time_unit(problem)
    found = {name: _rounded(max(rule(share) for share in ranks), unit) for name, rule in QUICK.items()}
    if effort.left > 0 and max(found.values()) > 0 and importlib.util.find_spec("ortools") is not None:
        first = effort.part(ON_FLOW)
        flow = Flow(ranks, max(found.values()), unit, first)
        found["flow"] = _rounded(flow.run(), unit)
        effort.spend(first.spent)
        alone = Alone(flow.best, found["flow"], unit, effort)
        found["one rank"] = _rounded(alone.run(), unit)
        effort.late = effort.late or first.late
    name = max(found, key=lambda each: found[each])
    return Bound(found[name], name, found)


def time_unit(problem: Problem) -> float | None:
    """What all times of the simulator are multiples of, if there is such a thing; overlapped actions may take any time."""
    costs, shape = problem.costs, (problem.stages, problem.microbatches)
    if costs.overlap != 1.0:
        return None
    values = [costs.latency, *costs.per_stage("reduce", problem.stages), *costs.per_stage("optimizer", problem.stages)]
    if costs.bandwidth is not None:
        values += [costs.latency + each / costs.bandwidth for each in costs.table("output", *shape).ravel().tolist()]
    for name in ("f", "i", "w", "b"):
        values += costs.table(name, *shape).ravel().tolist()
    unit = common_unit(values)
    return None if unit is None else float(unit)


def _rounded(value: float, unit: float | None) -> float:
    """Up to the next time that there can be, but for rounding."""
    return value if unit is None else math.ceil(value / unit - 1e-6) * unit


def fits_at_all(terms: Terms) -> bool:
    """Whether each rank can hold one microbatch at a time.

    While a stage of the rank runs it, forward or backward, the microbatch holds its activations on all of the rank's stages up to
    that one, and the message that the stage has received.
    """
    for line in terms.lines:
        for rank in set(line.ranks):
            mine = list(line.stages_of(rank))
            held = np.cumsum(line.activation[mine], axis=0) + np.maximum(line.received[mine], line.returned[mine])
            if held.max() > terms.room[rank]:
                return False
    return all(room >= 0 for room in terms.room)
