"""Which of the candidates that fit is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.planner.named import Attempt
from penstock.planner.request import SEARCHED, Request
from penstock.planner.setting import Trial
from penstock.simulator.simulate import simulate_many

SCENARIOS = 100
_MOST = 6
"""Candidates that are tried under jitter."""
_EVEN, _SAME = 1e-12, 1e-9
_PART = 0.05
"""What a scenario takes, as a part of timing the same order for the first time."""
NOISE = 0.01
"""The share of a p95 below which a difference may come of the scenarios drawn: about two standard errors of a hundred of them."""


def choose(
    fitting: Sequence[Attempt], request: Request, is_too_late_for: Callable[[str, float], bool] = lambda what, cells: False
) -> tuple[Attempt, dict[int, float]]:
    """The quickest, or one nearly as quick that is more robust by more than it is slower; and the p95 of those tried, by place.

    Nearly is within `near`, and never slower than the quickest named schedule. Of equally quick ones the first has fewest stages.
    `is_too_late_for` tells whether no time is left to time so many cells.
    """
    order = sorted(range(len(fitting)), key=lambda place: _trial(fitting[place]).objective)
    close = [place for place in order if _trial(fitting[place]).objective <= _ceiling(fitting, request.near) * (1 + _EVEN)][:_MOST]
    trials = {place: _trial(fitting[place]) for place in close}
    least = trials[close[0]].objective
    even = [place for place in close if trials[place].objective <= least * (1 + _SAME)]
    first = min(even, key=lambda place: trials[place].setting.placement.stages)
    cells = sum(trial.setting.cells for trial in trials.values())
    if request.stop() or is_too_late_for("robustness was not measured", _PART * SCENARIOS * cells):
        return fitting[first], {}
    p95 = {place: robustness(trial, request) for place, trial in trials.items()}
    steady = min(close, key=p95.__getitem__)
    gained, lost = p95[first] - p95[steady], trials[steady].objective - trials[first].objective
    return fitting[steady if gained > max(lost, NOISE * p95[first]) else first], p95


def _ceiling(fitting: Sequence[Attempt], near: float) -> float:
    quickest = min(_trial(each).objective for each in fitting)
    named = min((_trial(each).objective for each in fitting if each.name != SEARCHED), default=float("inf"))
    return min(quickest * (1 + near), named)


def robustness(trial: Trial, request: Request) -> float:
    """The makespan that 95 in 100 runs stay under when each time varies, or without a barrier the longest rank span."""
    scenarios = simulate_many(trial.timeline.table, trial.setting.costs, scenarios=SCENARIOS, jitter=request.jitter, seed=request.seed)
    return scenarios.p95 if request.barrier else float(np.quantile(scenarios.spans, 0.95))


def _trial(attempt: Attempt) -> Trial:
    assert attempt.trial is not None
    return attempt.trial
