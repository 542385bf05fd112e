"""Where no plan fits: by how much, where, and what would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import PlanError
from penstock.planner.explore import Explorer
from penstock.planner.named import Attempt, Verdict
from penstock.planner.problem import SLACK
from penstock.planner.request import SEARCHED, Case, Request
from penstock.planner.setting import Trial
from penstock.planner.units import Units

_MORE_RANKS = (1.25, 1.5, 2, 3, 4)
_NEAR_ENOUGH = 0.01
"""How much more than a limit that does not fit the advised one may be, as a share of it."""


def check_static(request: Request) -> None:
    """Refuse at once what no partition can fit: parameters, gradients and optimizer that are larger than the memory there is."""
    limits, units = request.limits, Units.of(request)
    if limits is None:
        return
    static = [layer.static for layer in request.profile.layers]
    total, largest = sum(static), max(static)
    if total > sum(limits) * (1 + SLACK):
        even = len(set(limits)) == 1 and limits[0] > 0
        least = _as_given(request, total / request.ranks)
        fewest = f", or at least {math.ceil(total / limits[0])} ranks" if even else ""
        raise PlanError(
            f"no plan fits: the layers keep {units.size(total)} for parameters, gradients and optimizer, but {_limits(request, units)} "
            f"have {units.size(sum(limits))} in all. Take limits of at least {units.size(least, up=True)} per rank"
            f"{fewest}, and more for activations"
        )
    if largest > max(limits) * (1 + SLACK):
        place = static.index(largest)
        name = request.profile.layers[place].name or f"layer {place}"
        raise PlanError(
            f"no plan fits: {name} alone keeps {units.size(largest)} for parameters, gradients and optimizer, and no rank has more than "
            f"{units.size(max(limits))}. Cut the layer into smaller ones, or take a higher limit"
        )


def refusal(explorer: Explorer) -> PlanError:
    """The error that says everything."""
    request, units = explorer.request, Units.of(explorer.request)
    lines = [f"no plan fits: {len(explorer.attempts)} candidates on {_limits(request, units)}"]
    lines += [f"  {line}" for line in _nearest(explorer, units)]
    found = list(_remedies(explorer, units))
    lines += ["what would fit (each tried):", *(f"  {line}" for line in found)] if found else ["nothing that was tried fits"]
    return PlanError("\n".join(lines))


def _limits(request: Request, units: Units) -> str:
    limits = [units.size(_as_given(request, limit)) for limit in request.limits or ()]
    free = f", {request.headroom:.3g} of it kept free," if request.headroom else ""
    if len(set(limits)) == 1:
        return f"{request.ranks} ranks with a memory limit of {limits[0]} each{free}"
    return f"{request.ranks} ranks with limits of {', '.join(limits)}{free}"


def _as_given(request: Request, limit: float) -> float:
    """A limit with the headroom that is kept free of it."""
    return limit / (1 - request.headroom)


def _nearest(explorer: Explorer, units: Units) -> Iterator[str]:
    """The candidate that is least over its limit, or why there is none."""
    timed = [each.trial for each in explorer.attempts if each.trial is not None]
    if timed:
        trial = min(timed, key=lambda each: each.excess)
        rank = trial.worst_rank
        yield (
            f"nearest is {label(trial)}: rank {rank} holds {units.size(trial.timeline.peak_memory[rank])}, "
            f"{units.size(trial.excess)} over its limit of {units.size(trial.setting.problem.limits[rank])}"
        )
    for verdict in (Verdict.TOO_LARGE, Verdict.REFUSED):
        of_kind = [each for each in explorer.attempts if each.verdict is verdict]
        if of_kind:
            yield f"{verdict}: {_names(of_kind)}"
    for name, reason in explorer.refused.items():
        yield f"{name}: {reason}"


def _names(attempts: list[Attempt]) -> str:
    names = list(dict.fromkeys(each.name for each in attempts))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    reason = next((each.reason for each in attempts if each.reason), "")
    return f"{shown} ({reason})" if reason else shown


def _remedies(explorer: Explorer, units: Units) -> Iterator[str]:
    """What would fit, found by trying."""
    request = explorer.request
    if not request.recompute:
        found = _first_fitting(replace(request, recompute=True))
        if found is not None:
            yield f"recompute=True: {_said(found, units)}"
    found = next(filter(None, (_first_fitting(replace(request, cases=(case,))) for case in _smaller(request))), None)
    if found is not None:
        size = found.setting.profile.microbatch
        yield f"microbatches of {size}, {found.setting.microbatches} of them (taken in proportion): {_said(found, units)}"
    found = next(filter(None, (_first_fitting(more) for more in _more_ranks(request))), None)
    if found is not None:
        yield f"{found.setting.placement.ranks} ranks: {_said(found, units)}"
    least = _least(explorer)
    if least is not None:
        limit, trial = _lowest(request, max(least.timeline.peak_memory), least)
        yield f"a memory limit of {units.size(_as_given(request, limit), up=True)}: {label(trial)}"


def _first_fitting(request: Request) -> Trial | None:
    """Any candidate that fits, without a search."""
    explorer = Explorer(replace(request, tell=lambda progress: None))
    done = explorer.request.stop
    explorer.request = replace(explorer.request, stop=lambda: done() or explorer.best is not None)
    explorer.time_named()
    return explorer.best


def _smaller(request: Request) -> Iterator[Case]:
    """Half the microbatch size, a quarter and so on, for the same batch."""
    case = request.cases[0]
    size, count = case.profile.microbatch, case.microbatches
    while size % 2 == 0:
        size, count = size // 2, count * 2
        yield Case(request.profile.at(size), count)


def _more_ranks(request: Request) -> Iterator[Request]:
    limits = request.limits or ()
    if len(set(limits)) != 1:
        return
    for times in _MORE_RANKS:
        ranks = int(request.ranks * times)
        if request.ranks < ranks <= len(request.profile):
            yield replace(request, ranks=ranks, limits=limits[:1] * ranks)


def _least(explorer: Explorer) -> Trial | None:
    """What holds least of everything that was asked for, as it was tried and as it would be without a limit."""
    request = explorer.request
    free = Explorer(replace(request, limits=(float("inf"),) * request.ranks, near=float("inf"), tell=lambda progress: None))
    free.time_named()
    if request.searches:
        free.try_one_at_a_time()
    timed = [each.trial for each in (*explorer.attempts, *free.attempts) if each.trial is not None]
    return min(timed, key=lambda trial: max(trial.timeline.peak_memory), default=None)


def _lowest(request: Request, limit: float, trial: Trial) -> tuple[float, Trial]:
    """The least limit of all ranks that something fits within, and what does: by halving, from what holds least without a limit."""
    low, high = min(request.limits or (0.0,)), limit
    while high > low * (1 + _NEAR_ENOUGH) and not request.stop():
        middle = (low + high) / 2
        found = _within(request, middle)
        if found is None:
            low = middle
        else:
            high, trial = middle, found
    held = max(trial.timeline.peak_memory)
    return (held, trial) if held < high and _within(request, held) is not None else (high, trial)


def _within(request: Request, limit: float) -> Trial | None:
    """What fits within a limit; where orders may be searched for, one microbatch at a time holds least."""
    names = (SEARCHED,) if request.searches else request.names
    return _first_fitting(replace(request, limits=(limit,) * request.ranks, names=names))


def _said(trial: Trial, units: Units) -> str:
    rank = trial.worst_rank
    held, limit = trial.timeline.peak_memory[rank], trial.setting.problem.limits[rank]
    return f"{label(trial)}, {units.size(held)} of {units.size(limit)} on rank {rank}"


def label(trial: Trial) -> str:
    """A schedule and its setting in a few words."""
    setting = trial.setting
    again = sum(setting.recompute)
    recomputed = f", {again} of {len(setting.recompute)} stages recomputed" if again else ""
    return f"{trial.name} ({setting.placement.kind}, {setting.microbatches} microbatches of {setting.profile.microbatch}{recomputed})"
