"""If no plan fits: by how much, on which rank, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from penstock.errors import PlanError
from penstock.planner.candidate import Candidate, Verdict, summarize_verdicts
from penstock.planner.explore import Explorer, order_by_effort
from penstock.planner.named_schedules import list_candidates, list_searchable_problems, one_at_a_time, time_named
from penstock.planner.problem import SLACK
from penstock.planner.request import SEARCHED, Request
from penstock.text.numbers import format_count

_MORE_RANKS = (1.25, 1.5, 2, 3, 4)
_NEAR_ENOUGH = 0.01
"""How far above a limit that does not fit the advised one may be, as a share of it."""
_MOST_CELLS = 100_000
"""Cells (stages times microbatches) of the named schedules that are timed for advice."""
_FEW = 2
"""Microbatches that show the peak memory of one microbatch at a time, however many there are."""


def check_static_memory(request: Request) -> None:
    """Refuse before anything is timed if parameters, gradients and optimizer are larger than the memory: then no partition fits."""
    limits, units = request.limits, request.units
    if limits is None:
        return
    static = [layer.static for layer in request.profile.layers]
    total, largest = sum(static), max(static[1:-1] if request.spread_profiles else static)
    if total > sum(limits) * (1 + SLACK):
        reason = (
            f"the layers keep {units.size(total)} for parameters, gradients and optimizer, but {_describe_limits(request)} "
            f"have {units.size(sum(limits))} in all"
        )
        fewest = math.ceil(total / limits[0]) if limits[0] > 0 else math.inf
        counts = [math.ceil(fewest * factor) for factor in (1.0, *_MORE_RANKS)] if fewest <= len(static) else []
    elif largest > max(limits) * (1 + SLACK):
        place = static.index(largest)
        name = request.profile.layers[place].name or f"layer {place}"
        reason = (
            f"{name} alone keeps {units.size(largest)} for parameters, gradients and optimizer, and no rank has more than "
            f"{units.size(max(limits))}: cut the layer into smaller ones, or take a higher limit"
        )
        counts = []  # more ranks do not make the layer smaller
    else:
        return
    raise PlanError("\n".join([f"no plan fits: {reason}", *_write_remedies(_list_hardware(Explorer(request), _Trials(), counts))]))


def make_refusal(explorer: Explorer) -> PlanError:
    """The error with the nearest candidates and the remedies."""
    tried = summarize_verdicts(explorer.candidates) if explorer.candidates else "none of the schedules is possible here"
    lines = [f"no plan fits: {tried}, on {_describe_limits(explorer.request)}"]
    lines += [f"  {line}" for line in _describe_nearest(explorer)]
    return PlanError("\n".join([*lines, *_write_remedies(_list_remedies(explorer))]))


def _write_remedies(remedies: Iterator[str]) -> list[str]:
    lines = [f"  {line}" for line in remedies]
    return ["what would fit (each tried):", *lines] if lines else ["nothing that was tried fits"]


def _describe_limits(request: Request) -> str:
    limits = [request.units.size(_add_headroom(request, limit)) for limit in request.limits or ()]
    if not limits:
        return f"{format_count(request.ranks, 'rank')} without a memory limit"
    free = f", {100 * request.headroom:.3g}% of it kept free," if request.headroom else ""
    if len(set(limits)) == 1:
        return f"{format_count(request.ranks, 'rank')} with a memory limit of {limits[0]} each{free}"
    return f"{format_count(request.ranks, 'rank')} with limits of {', '.join(limits)}{free}"


def _add_headroom(request: Request, limit: float) -> float:
    """A limit as the user gives it, with the headroom that is kept free."""
    return limit / (1 - request.headroom)


def _describe_nearest(explorer: Explorer) -> Iterator[str]:
    """The candidate that is least over its limit, or why there is none."""
    units = explorer.request.units
    timed = [candidate for candidate in explorer.candidates if candidate.timed is not None]
    if timed:
        nearest = min(timed, key=lambda candidate: candidate.excess or 0.0)
        limit = nearest.problem.limits[nearest.peak_rank or 0]
        yield (
            f"nearest is {nearest.describe()}: rank {nearest.peak_rank} holds {units.size(nearest.peak or 0.0)}, "
            f"{units.size(nearest.excess or 0.0)} over its limit of {units.size(limit)}"
        )
    too_large = [candidate for candidate in explorer.candidates if candidate.verdict == Verdict.TOO_LARGE]
    if too_large:
        yield f"{Verdict.TOO_LARGE}: {_name_all(too_large)}"
    refused = {candidate.name: candidate.reason for candidate in explorer.candidates if candidate.verdict == Verdict.REFUSED}
    yield from (f"{name}: {reason}" for name, reason in (refused | explorer.refused).items())


def _name_all(candidates: list[Candidate]) -> str:
    names = list(dict.fromkeys(candidate.name for candidate in candidates))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    reason = next((candidate.reason for candidate in candidates if candidate.reason), "")
    return f"{shown} ({reason})" if reason else shown


# Remedies -------------------------------------------------------------------------------------------------------------


def _list_remedies(explorer: Explorer) -> Iterator[str]:
    """Settings that would fit, found by trying."""
    request, trials = explorer.request, _Trials()
    if not request.recompute:
        fitting = trials.find_fitting(replace(request, recompute=True))
        if fitting is not None:
            yield f"recompute=True: {_describe_fit(request, fitting)}"
    fitting = trials.find_fitting(*_list_smaller_microbatches(request))
    if fitting is not None:
        count = f"{fitting.microbatches} of them (scaled from the profile)"
        yield f"microbatches of {fitting.microbatch}, {count}: {_describe_fit(request, fitting)}"
    yield from _list_hardware(explorer, trials, [int(request.ranks * factor) for factor in _MORE_RANKS])


def _list_hardware(explorer: Explorer, trials: _Trials, counts: list[int]) -> Iterator[str]:
    """The first of these numbers of ranks that would do, and the lowest limit."""
    request = explorer.request
    fitting = trials.find_fitting(*_list_more_ranks(request, counts))
    if fitting is not None:
        yield f"{format_count(fitting.problem.ranks, 'rank')}: {_describe_fit(request, fitting)}"
    lowest = trials.find_lowest_limit(explorer)
    if lowest is not None:
        limit, fitting = lowest
        yield f"a memory limit of {request.units.size(_add_headroom(request, limit), up=True)}: {fitting.describe()}"


def _describe_fit(request: Request, candidate: Candidate) -> str:
    size, limit = request.units.size, candidate.problem.limits[candidate.peak_rank or 0]
    return f"{candidate.describe()}, {size(candidate.peak or 0.0)} of {size(limit)} on rank {candidate.peak_rank}"


def _list_smaller_microbatches(request: Request) -> Iterator[Request]:
    """Half the microbatch size, a quarter and so on, for the same batch."""
    size = request.profiles[0].microbatch
    while size % 2 == 0:
        size //= 2
        yield replace(request, profiles=(request.profile.at(size),))


def _list_more_ranks(request: Request, counts: list[int]) -> Iterator[Request]:
    limits = request.limits or ()
    for ranks in counts if len(set(limits)) == 1 and request.cluster is None else ():
        if request.ranks < ranks <= len(request.profile):
            yield replace(request, ranks=ranks, limits=limits[:1] * ranks)


@dataclass
class _Trials:
    """Tries what would fit; named schedules are timed while there are cells left for them."""

    cells_left: float = _MOST_CELLS

    def find_fitting(self, *requests: Request) -> Candidate | None:
        """A candidate of the first request that has one: a named schedule, else one microbatch at a time if orders may be searched."""
        for request in requests:
            named = self._time_named(request, 0 if request.searches else 1)
            least = _hold_least(request) if request.searches else ()
            fitting = next((candidate for candidate in chain(named, least) if candidate.fits), None)
            if fitting is not None:
                return fitting
        return None

    def _time_named(self, request: Request, at_least: int = 0) -> Iterator[Candidate]:
        """The named schedules, the smallest first, while cells are left; and that many in any case."""
        usable, _ = list_candidates(request.names, request.ranks, len(request.profile), request.slices, request.no_slices)
        pairs = ((named, profile) for profile in request.profiles for named in usable)
        for place, (named, profile) in enumerate(sorted(pairs, key=partial(order_by_effort, request))):
            cells = named.placement.stages * request.count_microbatches(profile) * named.slices
            if request.stop() or (cells > self.cells_left and place >= at_least):
                return
            for candidate in time_named(named, profile, request, lambda problem: False):
                if candidate.timed is not None:
                    self.cells_left -= cells
                    yield candidate

    def find_lowest_limit(self, explorer: Explorer) -> tuple[float, Candidate] | None:
        """About the lowest equal limit of all ranks that something fits within, and the candidate that does.

        If orders may be searched, the order that holds least is cut and timed at each limit. Else the named schedule that holds
        least without a limit is cut for the moments at which it peaks, and timed only at the limits that its partition fits.
        """
        request = explorer.request

        def limit_to(limit: float) -> Request:
            return replace(request, limits=(limit,) * request.ranks)

        def hold_least_within(limit: float) -> Candidate | None:
            return next((candidate for candidate in _hold_least(limit_to(limit)) if candidate.fits), None)

        if request.searches:
            free = min(_hold_least(limit_to(math.inf)), key=_find_peak, default=None)
            return None if free is None else _bisect(request, free, hold_least_within)
        timed = [candidate for candidate in explorer.candidates if candidate.timed is not None]
        free = min([*timed, *self._time_named(limit_to(math.inf), at_least=0 if timed else 1)], key=_find_peak, default=None)
        if free is None:
            return None
        problem, order = free.problem, free
        moments = free.list_moments(range(problem.ranks))

        def cut_within(limit: float) -> Candidate | None:
            assert problem.profile is not None
            options: dict[str, Any] = {"lengths": problem.lengths, "assignment": problem.assignment}
            cut = limit_to(limit).cut(problem.profile, problem.placement, problem.recompute, moments, **options)
            candidate = order.retime(replace(problem.recut(cut.sizes), memory_limit=(limit,) * problem.ranks)) if cut.fits else None
            return candidate if candidate is not None and candidate.fits else None

        return _bisect(request, free, cut_within)


def _hold_least(request: Request) -> Iterator[Candidate]:
    """One microbatch at a time on every problem: no order holds less, and a few microbatches show its peak memory."""
    for problem in list_searchable_problems(request):
        few = problem.shorten(min(problem.microbatches, _FEW * len(problem.placement.copies)))
        short = Candidate.time(SEARCHED, few, one_at_a_time(few.placement, few.microbatches, SEARCHED, few.slices))
        yield replace(short, microbatches=problem.microbatches)


def _find_peak(candidate: Candidate) -> float:
    return max(candidate.timeline.peak_memory)


def _bisect(request: Request, free: Candidate, try_limit: Callable[[float], Candidate | None]) -> tuple[float, Candidate]:
    """The lowest limit, between the request's and the peak of a candidate without one."""
    low, high, best = min(request.limits or (0.0,)), _find_peak(free), free
    while high > low * (1 + _NEAR_ENOUGH) and not request.stop():
        middle = (low + high) / 2
        candidate = try_limit(middle)
        if candidate is None:
            low = middle
        else:
            high, best = middle, candidate
    peak = _find_peak(best)
    return (peak, best) if peak < high and try_limit(peak) is not None else (high, best)
