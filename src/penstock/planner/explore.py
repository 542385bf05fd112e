"""Look for a plan: time the named schedules, search orders, bound what is possible."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from penstock.errors import MissingExtraError
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.bounds.lower_bound import Bound, lower_bound
from penstock.planner.bounds.overall import OverallBound
from penstock.planner.bounds.spread_bound import bound_spread
from penstock.planner.budget import SolverBudget, count_rounds
from penstock.planner.candidate import Candidate
from penstock.planner.named_schedules import (
    NamedSchedule,
    can_be_spread,
    list_candidates,
    list_every_cut,
    list_searchable_problems,
    one_at_a_time,
    reassign,
    recut,
    share_again,
    shift_lengths,
    shift_rows,
    time_named,
    try_settings,
)
from penstock.planner.offload import OffloadProblem, is_held_back, make_roomy_problem, offload, time_without_limit
from penstock.planner.partition.cut import count_stage_layers
from penstock.planner.problem import Problem
from penstock.planner.profile import Profile
from penstock.planner.request import SEARCHED, Progress, Request
from penstock.simulator.simulate import simulate

if TYPE_CHECKING:
    from penstock.planner.order_search.search import SearchResult

_MOST_SEARCHED, _SEARCHED_CELLS = 8, 1_000
"""Problems that get a first, short search; and on a cluster the cells of further ones, up to three times as many."""
_FINALISTS, _CLOSE = 2, 0.03
"""How many of them get a longer one: the best, and others that are slower by at most that share."""
_FIRST_SHARE, _PROOF_SHARE = 0.35, 0.25
"""Shares of the seconds: for the short searches, and for the bound and the exact solver. The rest is for the longer searches."""
_MOST_PROOF = 20.0
"""Most seconds of work for bound and solver: neither can be stopped half-way."""
_SMALL = 200
"""The exact solver is tried up to this many compute actions."""
_RECUT, _NEARLY = 4, 0.05
"""Named schedules whose cuts are shifted: the fastest, and others that are slower by at most that share."""
_HOPEFUL, _FEW_SETTINGS = 0.5, 60
"""Schedules that fit and are slower than the fastest by more than that share are timed on so few settings of a small cluster."""
_OFFLOADED, _OFFLOAD_COST = 6, 12
"""Schedules that are made to fit with activations on the host, and how often each is timed."""
_PLURAL = re.compile(r"\((e?s)\)")
"""The marked ending of a step that is counted."""
_NAMED_SHARE, _SPREAD_SHARE = 0.5, 0.75
"""Share of the seconds for the named schedules if orders are searched too; the second if a vocabulary may be spread under them as well."""
_STARTING = 4
"""The least cost of a search, in orders that are timed as named ones are."""
_HASTE = 0.5
"""A step starts only if this share of its expected time is left."""
_SMALL_ORDER = 4096
"""An order of so few cells (stages times microbatches) takes some hundredths of a second, and is timed without an estimate of that."""
LEAST_SECONDS = 5.0
"""Named schedules with orders that small may take so long, however few seconds a plan has, so that it is the same on slower machines."""
_EVEN = 1e-9


@dataclass
class Explorer:
    """Everything that was tried so far."""

    request: Request
    candidates: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Schedules that were not tried at all, and why."""
    notes: list[str] = field(default_factory=list)
    best: Candidate | None = None
    """The fastest that fits."""
    _bounds: dict[object, Bound] = field(default_factory=dict)
    _copies: int = 1
    """The most copies of the model that a problem had."""
    _tried: list[tuple[NamedSchedule, Profile, list[Candidate]]] = field(default_factory=list)
    """The named schedules that were timed, and what came of each."""
    _cut_short: list[str] = field(default_factory=list)
    """Steps that were left out or not finished; those that are counted mark their plural: "search(es) unfinished"."""
    _timed: tuple[float, int] = (0.0, 0)
    """Seconds that timing named schedules took so far, and the cells of those schedules."""
    _start: float = field(default_factory=time.monotonic)

    @property
    def fitting(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.fits]

    # Bounds -----------------------------------------------------------------------------------------------------------

    def bound_of(self, problem: Problem) -> Bound:
        """The best known bound of a problem."""
        self._copies = max(self._copies, len(problem.placement.copies))
        if problem.key not in self._bounds:
            shares = {}  # the other arguments know nothing of S and T
            if problem.is_spread:
                ways = {"ways with shares": bound_spread(problem, not problem.split)} if problem.barrier else {}
                shares = {"work with shares": problem.work, **ways}
            self._bounds[problem.key] = Bound.best_of({"work": problem.work, **lower_bound(problem).all, **shares})
        return self._bounds[problem.key]

    def bound_if_in_time(self, problem: Problem) -> Bound | None:
        """The best bound of a problem; None if it is unknown and too late to compute it."""
        if problem.key not in self._bounds and self.is_too_late_for("candidate(s) without a bound", problem.cells):
            return None
        return self.bound_of(problem)

    def _add_bounds(self, problem: Problem, proved: dict[str, float]) -> None:
        self._bounds[problem.key] = Bound.best_of({**self.bound_of(problem).all, **proved})

    def bound_overall(self) -> float:
        """A bound of every plan, however the layers are cut, placed, ordered and recomputed."""
        request = self.request
        limits = None if request.offload else request.limits  # the arguments count what is held from F to I, which may be elsewhere
        rest = limits, request.recompute, request.barrier, request.split
        kinds = [(profile, self._copies, slices) for profile in request.profiles for slices in request.slices]
        kinds += [(profile, 1, 1) for profile in request.spread_profiles]
        bounds = [
            OverallBound(
                profile, request.count_microbatches(profile), request.ranks, copies, *rest, slices, request.least_slice, request.cluster
            )
            for profile, copies, slices in kinds
        ]
        return min(bound.value() for bound in bounds)

    # Time -------------------------------------------------------------------------------------------------------------

    def seconds_left(self, share: float = 1.0) -> float:
        """Seconds left of a share of them; with `seconds=0` the named schedules take as long as they need."""
        return math.inf if not self.request.seconds else self._start + share * self.request.seconds - time.monotonic()

    def is_too_late_for(self, what: str, cells: float, share: float = 1.0) -> bool:
        """Whether timing so many cells would take longer than the seconds that are left; noted as `what` then."""
        late = self._is_late(cells, share)
        if late:
            self._cut_short.append(what)
        return late

    @property
    def _named_share(self) -> float:
        """The share of the seconds for the named schedules; small ones without a spread vocabulary may start until the end."""
        if not self.request.searches:
            return 1.0
        return _SPREAD_SHARE if self.request.spread_profiles else _NAMED_SHARE

    def _is_late(self, cells: float, share: float) -> bool:
        seconds, timed = self._timed
        return cells > _SMALL_ORDER and self.seconds_left(share) < _HASTE * cells * seconds / max(timed, 1)

    def _is_over(self, what: str, cells: float, share: float) -> bool:
        least = LEAST_SECONDS / self.request.seconds if self.request.seconds and cells <= _SMALL_ORDER else 0.0
        if self.seconds_left(max(share, least)) < 0:
            self._cut_short.append(what)
            return True
        return self.request.stop() or self.is_too_late_for(what, cells, share)

    def _is_over_with_a_plan(self, cells: float, share: float) -> bool:
        """Whether the present named schedule is to be left as it is: the time is up, and something fits."""
        return self.best is not None and self._is_over("named schedule(s) unfinished", cells, share)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Leave what the block takes out of the seconds."""
        before = time.monotonic()
        yield
        self._start += time.monotonic() - before

    def note_what_was_cut_short(self) -> None:
        if self._cut_short:
            steps = ", ".join(_format_steps(what, count) for what, count in Counter(self._cut_short).items())
            self.notes.append(f"stopped after {self.request.seconds:g} s; {steps}, so another run may find a different plan")

    def _count_rounds(self, share: float, cells: int) -> float:
        """The rounds of a share of the seconds, in orders of so many cells."""
        rounds = self.request.rounds
        return share * rounds if rounds is not None else count_rounds(share * self.request.seconds, cells)

    # The three parts --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.time_named()
        if self.request.searches and self.request.seconds > 0:
            self.search()
        self.prove()

    def time_named(self) -> None:
        """Time every named schedule at every microbatch size."""
        request = self.request
        usable, self.refused = list_candidates(request.names, request.ranks, len(request.profile), request.slices, request.no_slices)
        todo = sorted(((named, profile) for profile in request.profiles for named in usable), key=partial(order_by_effort, request))
        spread = [
            (named, profile)
            for profile in request.spread_profiles
            for named in usable
            if can_be_spread(named) and named.placement.stages <= count_stage_layers(profile)
        ]
        with self._uncounted():  # loads the compiled simulator before anything is measured
            simulate(lower(one_at_a_time(Placement.linear(1), 1)), Costs())
        share = self._named_share
        tried_least = False
        for done, (named, profile) in enumerate(chain(todo, self._list_by_promise(spread))):
            if request.stop():
                return
            cells = named.placement.stages * request.count_microbatches(profile) * named.slices
            until = share if profile.shares or cells > _SMALL_ORDER else 1.0
            if self.best is None and request.searches and not tried_least and self._is_late(cells, until):
                self.try_one_at_a_time()
                tried_least = True
            if (self.best is not None or tried_least) and self._is_over("named schedule(s) not timed", cells, until):
                continue
            if named.slices > 1 and self.best is not None and self.seconds_left(share) < 0:
                self._cut_short.append("schedule(s) with slices not timed")
                continue
            self._tell("timing", done, len(todo) + len(spread), named.name)
            before = time.monotonic()
            is_over = partial(self._is_over_with_a_plan, cells, until)
            candidates = time_named(named, profile, request, self._is_slow, is_over)
            for candidate in candidates:
                self._add(candidate)
            self._tried += [] if profile.shares else [(named, profile, candidates)]
            self._timed = self._timed[0] + time.monotonic() - before, self._timed[1] + cells
        if request.cluster is not None:
            self._try_settings()
        if request.offload and request.limits is not None:
            self._try_offload(share)
        if self.best is None and request.searches and not tried_least:
            self.try_one_at_a_time()
        self._recut()

    def _list_by_promise(self, spread: list[tuple[NamedSchedule, Profile]]) -> Iterator[tuple[NamedSchedule, Profile]]:
        """The schedules to try with a spread vocabulary, small ones in the order of their times without it: there may be time for few."""
        plain: dict[str, float] = {}
        for candidate in self.candidates:
            plain[candidate.name] = min(plain.get(candidate.name, math.inf), candidate.time_or_inf)
        yield from sorted(spread, key=lambda pair: (order_by_effort(self.request, pair), plain.get(pair[0].name, math.inf)))

    def _try_offload(self, share: float) -> None:
        """Move activations to the host under the fastest schedules that memory holds back, until some of them fit."""
        free = self._list_held_back(share)
        fitting = 0
        for candidate in sorted(free, key=lambda candidate: candidate.time_or_inf):
            if fitting == _OFFLOADED or (self.best is not None and candidate.time_or_inf > self.best.time_or_inf * (1 + self.request.near)):
                return
            if self._is_over("schedule(s) not tried with offload", _OFFLOAD_COST * candidate.problem.cells, share):
                return
            if (moved := offload(candidate, self.request)) is not None:
                self._add(moved)
                fitting += 1

    def _list_held_back(self, share: float) -> list[Candidate]:
        """The named schedules that memory holds back, each timed without a limit."""
        request, free = self.request, []
        for named, profile, candidates in self._tried:
            even = request.make_problems(profile, named.placement, (False,) * named.placement.stages, named.slices, moves=True)
            if not is_held_back(candidates, even):
                continue
            if self._is_over("schedule(s) not tried with offload", sum(problem.cells for problem in even), share):
                break
            if (timed := time_without_limit(named, profile, request)) is not None:
                free.append(timed)
        return free

    def _try_settings(self) -> None:
        """On a small cluster, time the schedules on the best orders of the devices and cuts, those that do not fit yet too."""
        share = self._named_share
        named = [candidate for candidate in self.candidates if candidate.timed is not None and candidate.name != SEARCHED]
        plain = [candidate for candidate in named if candidate.slices == 1 and not candidate.vocabulary]
        for candidate in sorted(plain, key=lambda candidate: (not candidate.fits, candidate.time_or_inf)):
            is_over = partial(self._is_over, "devices not exchanged", candidate.problem.cells, share)
            if self.best is not None and candidate.fits and candidate.time_or_inf > self.best.time_or_inf * (1 + _HOPEFUL):
                better = try_settings(candidate, self.request, is_over, _FEW_SETTINGS)
            else:
                better = try_settings(candidate, self.request, is_over)
            if better is not candidate:
                self._add(better, candidate.place)

    def _recut(self) -> None:
        """Shift the cuts under the fastest that fit."""
        best, share = self.best, self._named_share
        for candidate in sorted(self.fitting, key=lambda candidate: candidate.time_or_inf)[:_RECUT]:
            if best is None or candidate.time_or_inf > best.time_or_inf * (1 + _NEARLY):
                continue
            better = reassign(candidate, self.request, partial(self._is_over, "devices not exchanged", candidate.problem.cells, share))
            better = recut(better, partial(self._is_over, "cuts not shifted", candidate.problem.cells, share))
            better = shift_rows(share_again(better), partial(self._is_over, "rows not shifted", candidate.problem.cells, share))
            if candidate.slices > 1:
                is_over = partial(self._is_over, "lengths of slices not shifted", candidate.problem.cells, share)
                better = shift_lengths(better, self.request.granularity, is_over)
            if better is not candidate:
                self._add(better, candidate.place)

    def search(self) -> None:
        """Search orders on the most promising problems, then longer on the best of them."""
        from penstock.planner.order_search.search import compile_loops

        todo = self._list_promising()
        if todo and not self.request.stop():
            self._tell("preparing", 0, 1, "the search is compiled once per machine")
            with self._uncounted():
                compile_loops()
        total = len(todo) + _FINALISTS
        begin = 1 - self.seconds_left() / self.request.seconds
        short = _FIRST_SHARE / max(len(todo), 1)
        searching = 1 - _PROOF_SHARE - begin  # the share of the real seconds that is left for it
        results = []
        for place, problem in enumerate(todo):
            end = begin + searching * (place + 1) / len(todo) * _FIRST_SHARE / (1 - _PROOF_SHARE)
            results.append(self._search(problem, short, end, (place, total)))
        best = sorted((candidate for candidate in results if candidate is not None), key=lambda result: result.time_or_inf)[:_FINALISTS]
        final = [candidate for candidate in best if candidate.time_or_inf <= best[0].time_or_inf * (1 + _CLOSE)]
        moves = self.request.offload and self.request.limits is not None
        longer = (1 - _FIRST_SHARE - _PROOF_SHARE) / max(len(final) + moves, 1)
        for place, candidate in enumerate(final):
            end = 1 - _PROOF_SHARE * (len(final) - place)
            self._search(candidate.problem, longer, end, (len(todo) + place, total), [candidate.schedule])
        if moves:
            self._search_with_moves(longer, (total, total))

    def _list_promising(self) -> list[Problem]:
        """The problems to search first: those with the lowest bounds, but one of each placement before others of the same."""
        worth = []
        for problem in self._list_worth_searching():
            worth.append(problem)
            if self.request.stop() or self.is_too_late_for("setting(s) not considered", problem.cells, 1 - _PROOF_SHARE):
                break
        worth.sort(key=lambda problem: self.bound_of(problem).value)
        first = {problem.placement.copies: problem for problem in reversed(worth)}
        own = [problem for problem in worth if first[problem.placement.copies] is problem]
        most = _MOST_SEARCHED
        if self.request.cluster is not None:  # they differ by the order of the devices too
            most = max(most, min(3 * most, _SEARCHED_CELLS // max((problem.cells for problem in worth), default=1)))
        return [*own, *(problem for problem in worth if first[problem.placement.copies] is not problem)][:most]

    def prove(self) -> None:
        """Bound the problem of the best candidate; solve it exactly if it is small."""
        best = self.best
        if best is None:
            return
        problem, cells = best.problem, best.problem.cells
        self.bound_of(problem)
        work = min(self._count_rounds(_PROOF_SHARE, cells) / count_rounds(1.0, cells), _MOST_PROOF)
        if self.request.stop() or work <= 0 or not self.request.seconds or self._is_proved(best):
            return
        if self.is_too_late_for("linear program(s) not tried", 2 * cells):
            return
        self._tell("bounding", 0, 1, problem.describe())
        budget = SolverBudget(self.seconds_left() / 2, work / 2)
        self._add_bounds(problem, lower_bound(problem, budget=budget).all)
        if budget.late:
            self._cut_short.append("linear program(s) unfinished")
        plain = problem.slices == 1 and not best.offloaded and not best.vocabulary
        if plain and 3 * cells <= _SMALL and not self._is_proved(best) and not self.request.stop():
            self._solve(best, work / 2)

    # Steps ------------------------------------------------------------------------------------------------------------

    def _tell(self, phase: str, done: int, total: int, what: str) -> None:
        best = (None, "") if self.best is None else (self.best.objective, self.best.name)
        self.request.tell(Progress(phase, done, total, what, *best))

    def _is_slow(self, problem: Problem) -> bool:
        """Whether its work alone takes longer than the best; one that is just as slow may still be more robust."""
        return self.best is not None and problem.work > self.best.time_or_inf * (1 + self.request.near)

    def _is_proved(self, candidate: Candidate) -> bool:
        return candidate.time_or_inf <= self.bound_of(candidate.problem).value * (1 + _EVEN)

    def _add(self, candidate: Candidate, place: int | None = None) -> None:
        """Add a candidate, at the end or in the place of one that it improves on."""
        candidate = replace(candidate, place=len(self.candidates) if place is None else place)
        self.candidates[candidate.place : candidate.place + 1] = [candidate]
        self.request.found(candidate)
        if candidate.timed is not None:
            self._copies = max(self._copies, len(candidate.problem.placement.copies))
        if candidate.fits and (self.best is None or candidate.time_or_inf < self.best.time_or_inf):
            self.best = candidate

    def _list_worth_searching(self) -> Iterator[Problem]:
        """Problems that could beat the best: those of the placements, those that a named schedule needed to fit, and small ones."""
        seen: set[object] = set()
        named = (candidate.problem for candidate in self.fitting if not candidate.offloaded and not candidate.vocabulary)
        for problem in chain(list_searchable_problems(self.request), named, list_every_cut(self.request)):
            if problem.key in seen or self._is_slow(problem):
                continue
            seen.add(problem.key)
            if not self._cannot_win(problem):
                yield problem

    def _cannot_win(self, problem: Problem) -> bool:
        return self.best is not None and self.bound_of(problem).value >= self.best.time_or_inf * (1 - _EVEN)

    def _search(
        self, problem: Problem, share: float, end: float, steps: tuple[int, int], start: list[Schedule] | None = None
    ) -> Candidate | None:
        """Search one problem for a share of the rounds, until a share of the seconds at most; the result if it fits.

        `steps` are the steps done before, and their total.
        """
        if self.request.stop() or self._cannot_win(problem):
            return None
        if self.is_too_late_for("setting(s) not searched", _STARTING * problem.cells, end):
            return None
        what = problem.describe()

        def tell_improved(_: Schedule, objective: float) -> None:
            if self.best is None or objective < self.best.time_or_inf:
                self.request.tell(Progress("searching", *steps, what, objective, SEARCHED))

        self._tell("searching", *steps, what)
        result = self._run_search(problem, share, end, [*(start or ()), *self._list_starts(problem)], tell_improved)
        if result.schedule is None:
            return None
        candidate = Candidate.time(SEARCHED, problem, result.schedule)
        if candidate.fits:
            self._add_searched(candidate)
        return candidate if candidate.fits else None

    def _search_with_moves(self, share: float, steps: tuple[int, int]) -> None:
        """Search orders of the best problem that hold more than the limits, and move activations under the result."""
        best = self.best
        if best is None or best.vocabulary or self.request.stop() or self._is_proved(best):
            return
        problem, order = make_roomy_problem(best, self.request)
        if self.is_too_late_for("setting(s) not searched", _STARTING * problem.cells, 1 - _PROOF_SHARE):
            return
        self._tell("searching", *steps, best.problem.describe())
        result = self._run_search(problem, share, 1 - _PROOF_SHARE, [order])
        if result.schedule is None or result.objective >= best.time_or_inf:
            return
        free = OffloadProblem.of(best.problem, self.request)
        moved = offload(Candidate.time(SEARCHED, free, result.schedule), self.request)
        if moved is not None and moved.time_or_inf < best.time_or_inf:
            self._add_searched(moved)

    def _run_search(
        self, problem: Problem, share: float, end: float, start: list[Schedule], improved: Callable[[Schedule, float], None] | None = None
    ) -> SearchResult:
        """Search for a share of the rounds, until a share of the seconds at most."""
        from penstock.planner.order_search.search import search

        result = search(
            problem,
            seconds=max(self.seconds_left(end), 0.0),
            rounds=self._count_rounds(share, problem.cells),
            seed=self.request.seed,
            start=start,
            progress=improved,
            stop=self.request.stop,
        )
        if result.late:
            self._cut_short.append("search(es) unfinished")
        return result

    def _add_searched(self, candidate: Candidate) -> None:
        """Add a searched order, in place of an earlier one on the same problem if it is better."""
        searched = [other for other in self.candidates if other.name == SEARCHED and other.timed is not None]
        same = next((other for other in searched if other.problem.key == candidate.problem.key), None)
        if same is None:
            self._add(candidate)
        elif not same.fits or candidate.time_or_inf < same.time_or_inf:
            self._add(candidate, same.place)

    def try_one_at_a_time(self) -> None:
        """Time the order that holds least, if no named schedule fits: if this does not fit either, nothing does."""
        for problem in list_searchable_problems(self.request):
            order = one_at_a_time(problem.placement, problem.microbatches, SEARCHED, problem.slices)
            self._add(Candidate.time(SEARCHED, problem, order))

    def _list_starts(self, problem: Problem) -> list[Schedule]:
        """Orders that were timed on the same placement, whatever the partition: the fastest of each name, those that fit first."""
        shape = problem.placement.copies, problem.microbatches, problem.slices
        timed = [
            candidate
            for candidate in self.candidates
            if candidate.timed is not None and not candidate.offloaded and not candidate.vocabulary
        ]
        same = [candidate for candidate in timed if (candidate.problem.placement.copies, candidate.microbatches, candidate.slices) == shape]
        starts: dict[str, Schedule] = {}
        for candidate in sorted(same, key=lambda candidate: (not candidate.fits, candidate.time_or_inf)):
            starts.setdefault(candidate.name, candidate.schedule)
        return list(starts.values())

    def _solve(self, best: Candidate, work: float) -> None:
        """Solve exactly from the best on, with that many seconds of work."""
        from penstock.planner.exact import solve

        self._tell("solving", 0, 1, best.problem.describe())
        try:
            budget = SolverBudget(max(self.seconds_left(), 0.0), work)
            solved = solve(best.problem, budget=budget, start=best.schedule, workers=1)
        except MissingExtraError as error:
            self.notes.append(str(error))
            return
        if budget.late:
            self._cut_short.append("solver unfinished")
        self._add_bounds(best.problem, {"solver": solved.bound})
        if solved.schedule is not None:
            candidate = Candidate.time(SEARCHED, best.problem, solved.schedule)
            if candidate.fits and candidate.time_or_inf < best.time_or_inf and self.request.searches:
                self._add_searched(candidate)


def order_by_effort(request: Request, pair: tuple[NamedSchedule, Profile]) -> tuple[int, int, bool]:
    """The sort key of named schedules, large ones by the time that they take; small ones keep their order."""
    named, profile = pair
    cells = named.placement.stages * request.count_microbatches(profile) * named.slices
    return (cells, len(named.placement.copies), not named.is_fixed) if cells > _SMALL_ORDER else (0, 0, False)


def _format_steps(what: str, count: int) -> str:
    """
    >>> _format_steps("search(es) unfinished", 2), _format_steps("search(es) unfinished", 1), _format_steps("solver unfinished", 1)
    ('2 searches unfinished', '1 search unfinished', 'solver unfinished')
    """
    ending = "" if count == 1 else r"\1"
    return f"{count} {_PLURAL.sub(ending, what)}" if _PLURAL.search(what) else what
