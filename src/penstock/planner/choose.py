"""Which of the candidates that fit is taken."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.named import Attempt
from penstock.planner.request import SEARCHED, Request
from penstock.planner.setting import Trial
from penstock.simulator.simulate import simulate_many

SCENARIOS = 100
_MOST = 6
"""Candidates that are tried under jitter."""
_EVEN = 1e-12


def choose(fitting: Sequence[Attempt], request: Request) -> tuple[Attempt, dict[int, float]]:
    """The most robust of those that are nearly as quick as the quickest, and the p95 of all that were tried, by their place.

    Nearly is within `near`, and never slower than the quickest named schedule.
    """
    order = sorted(range(len(fitting)), key=lambda place: _trial(fitting[place]).objective)
    close = [place for place in order if _trial(fitting[place]).objective <= _ceiling(fitting, request.near) * (1 + _EVEN)][:_MOST]
    if request.stop():
        return fitting[close[0]], {}
    p95 = {place: robustness(_trial(fitting[place]), request) for place in close}
    return fitting[min(close, key=p95.__getitem__)], p95


def _ceiling(fitting: Sequence[Attempt], near: float) -> float:
    quickest = min(_trial(each).objective for each in fitting)
    named = min((_trial(each).objective for each in fitting if each.name != SEARCHED), default=float("inf"))
    return min(quickest * (1 + near), named)


def robustness(trial: Trial, request: Request) -> float:
    """The makespan that 95 in 100 runs stay under when each time varies."""
    scenarios = simulate_many(trial.timeline.table, trial.setting.costs, scenarios=SCENARIOS, jitter=request.jitter, seed=request.seed)
    return scenarios.p95


def _trial(attempt: Attempt) -> Trial:
    assert attempt.trial is not None
    return attempt.trial
