"""Look for a plan: time the named schedules, search for orders, bound what is possible."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.errors import MissingExtraError
from penstock.ir.action import Action
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.bounds_overall import Overall
from penstock.planner.effort import Effort, rounds_in
from penstock.planner.families import Family, families, searchable_placements
from penstock.planner.named import Attempt, Cutter, Verdict, attempts
from penstock.planner.recut import recut
from penstock.planner.request import SEARCHED, Case, Progress, Request
from penstock.planner.setting import Setting, Trial
from penstock.simulator.simulate import simulate

_MOST_SEARCHED = 8
"""Settings that get a first, short search."""
_FINALISTS, _CLOSE = 2, 0.03
"""Of these, the ones that get a longer one: the best, and others that are not slower by more than that share."""
_FIRST_SHARE, _PROOF_SHARE = 0.35, 0.25
"""Of the seconds: for the short searches, and for the bound and the exact solver. The rest is for the longer searches."""
_MOST_PROOF = 20.0
"""Seconds of work for bound and solver at most: neither can be stopped half-way."""
_SMALL = 200
"""Compute actions that the exact solver is tried for."""
_RECUT, _NEARLY = 4, 0.05
"""Named schedules whose cuts are shifted by what they take: the quickest, and others not slower by more than that share."""
_NAMED_SHARE = 0.5
"""Of the seconds: for the named schedules, where orders are searched for too."""
_STARTING = 4
"""What it takes at least to search, in orders that are timed as named ones are."""
_HASTE = 0.5
"""How much of the time that a step will probably take must be left for it to be started."""
_SMALL_ORDER = 4096
"""Cells (stages times microbatches) of an order that is timed however late it is: some hundredths of a second."""
_EVEN = 1e-9

Key = tuple[object, ...]


@dataclass(frozen=True)
class Bounds:
    """What no schedule of a setting can be quicker than, by what shows it."""

    value: float
    name: str
    all: dict[str, float]


@dataclass
class Explorer:
    """Everything that was tried so far."""

    request: Request
    attempts: list[Attempt] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Schedules that were not tried at all, and why."""
    notes: list[str] = field(default_factory=list)
    _bounds: dict[Key, Bounds] = field(default_factory=dict)
    _settings: dict[Key, Setting] = field(default_factory=dict)
    _best: Trial | None = None
    _cut_short: list[str] = field(default_factory=list)
    """What was left out because the seconds were over."""
    _timed: tuple[float, int] = (0.0, 0)
    """The seconds that timing named schedules took so far, and the cells that they have."""

    def __post_init__(self) -> None:
        self.cutter = Cutter(self.request)
        self._start = time.monotonic()

    # What there is ----------------------------------------------------------------------------------------------------

    @property
    def best(self) -> Trial | None:
        """The quickest that fits."""
        return self._best

    @property
    def fitting(self) -> list[Attempt]:
        return [each for each in self.attempts if each.verdict is Verdict.FITS]

    def bounds_of(self, setting: Setting) -> Bounds:
        """The best bound that is known for a setting."""
        key = key_of(setting)
        self._settings.setdefault(key, setting)
        if key not in self._bounds:
            from penstock.planner.bounds import lower_bound

            self._bounds[key] = _work(setting)
            self._note_bounds(setting, lower_bound(setting.problem).all)
        return self._bounds[key]

    def known_bounds(self, setting: Setting) -> Bounds | None:
        """The best bound of a setting; None if it is not known and too late to look for it."""
        if key_of(setting) not in self._bounds and self.is_too_late_for("candidates not bounded", setting.cells):
            return None
        return self.bounds_of(setting)

    def _note_bounds(self, setting: Setting, proved: Mapping[str, float]) -> None:
        """Keep what is proved of a setting besides what was known."""
        made = {**self.bounds_of(setting).all, **proved}
        name = max(made, key=made.__getitem__)
        self._bounds[key_of(setting)] = Bounds(made[name], name, made)

    def overall_bound(self) -> float:
        """What no plan can be quicker than, however the layers are cut, placed, ordered and recomputed."""
        request = self.request
        copies = max(len(setting.placement.copies) for setting in self._settings.values())
        return min(
            Overall(
                case.profile, case.microbatches, request.ranks, copies, request.limits, request.recompute, request.barrier, request.split
            ).value()
            for case in request.cases
        )

    # Time -------------------------------------------------------------------------------------------------------------

    def seconds_left(self, share: float = 1.0) -> float:
        """Of a share of the seconds; 0 seconds are for the named schedules, however long these take."""
        return math.inf if not self.request.seconds else self._start + share * self.request.seconds - time.monotonic()

    def is_too_late_for(self, what: str, cells: float, share: float = 1.0) -> bool:
        """Whether timing so many cells would take longer than the seconds that are left; noted then as `what`."""
        seconds, timed = self._timed
        late = cells > _SMALL_ORDER and self.seconds_left(share) < _HASTE * cells * seconds / max(timed, 1)
        if late:
            self._cut_short.append(what)
        return late

    def _is_over(self, what: str, cells: float, share: float) -> bool:
        return self.request.stop() or self.is_too_late_for(what, cells, share)

    def note_what_was_cut_short(self) -> None:
        if self._cut_short:
            counts = Counter(self._cut_short)
            said = ", ".join(what if count == 1 else f"{what} ({count})" for what, count in counts.items())
            self.notes.append(f"seconds={self.request.seconds:g} were over: {said}; another run may give another plan")

    def _rounds(self, share: float, cells: int) -> float:
        """The part of the search that a share of the seconds stands for, in orders of so many cells."""
        rounds = self.request.rounds
        return share * rounds if rounds is not None else rounds_in(share * self.request.seconds, cells)

    # The three parts --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.time_named()
        if self.request.searches and self.request.seconds > 0:
            self.search()
        self.prove()

    def time_named(self) -> None:
        """Time every named schedule at every microbatch size."""
        found, self.refused = families(self.request.names, self.request.ranks, len(self.request.profile))
        todo = sorted(((family, case) for case in self.request.cases for family in found), key=_effort_of)
        simulate(lower(one_at_a_time(Placement.linear(1), 1)), Costs())  # loads what is compiled before anything is measured
        share = _NAMED_SHARE if self.request.searches else 1.0
        for done, (family, case) in enumerate(todo):
            if self.request.stop():
                return
            cells = family.placement.stages * case.microbatches
            if self._best is not None and self.is_too_late_for("named schedules not timed", cells, share):
                continue
            self._tell("timing", done, len(todo), family.name)
            before = time.monotonic()
            for attempt in attempts(family, case, self.cutter, self._is_slow):
                self._add(attempt)
            self._timed = self._timed[0] + time.monotonic() - before, self._timed[1] + cells
        if self._best is None and self.request.searches:
            self.try_one_at_a_time()
        self._recut()

    def _recut(self) -> None:
        """Shift the cuts under the quickest that fit; each keeps its place in the list."""
        best, share = self._best, _NAMED_SHARE if self.request.searches else 1.0
        for attempt in sorted(self.fitting, key=objective_of)[:_RECUT]:
            if best is None or attempt.trial is None or attempt.trial.objective > best.objective * (1 + _NEARLY):
                continue
            trial = recut(attempt.trial, partial(self._is_over, "cuts not shifted", attempt.trial.setting.cells, share))
            if trial is not attempt.trial:
                self.attempts[next(place for place, each in enumerate(self.attempts) if each is attempt)] = replace(attempt, trial=trial)
                self._keep(trial)

    def search(self) -> None:
        """Search for orders in the settings that promise most, then longer in those that keep it."""
        from penstock.planner.orders.ready import get_ready

        # What is left is for the search, and at least as much as was meant for it where the named schedules took longer.
        self._start = max(self._start, time.monotonic() - _NAMED_SHARE * self.request.seconds)
        todo = self._promising()
        if todo and not self.request.stop():
            self._tell("preparing", 0, 1, "the search is compiled once on a machine")
            get_ready()
        total = len(todo) + _FINALISTS
        begin = 1 - self.seconds_left() / self.request.seconds
        short = _FIRST_SHARE / max(len(todo), 1)
        searching = 1 - _PROOF_SHARE - begin  # the share of the real seconds that is left for it
        tried = []
        for place, setting in enumerate(todo):
            end = begin + searching * (place + 1) / len(todo) * _FIRST_SHARE / (1 - _PROOF_SHARE)
            tried.append(self._search_in(setting, short, end, (place, total)))
        found = sorted((trial for trial in tried if trial is not None), key=lambda trial: trial.objective)[:_FINALISTS]
        final = [trial for trial in found if trial.objective <= found[0].objective * (1 + _CLOSE)]
        longer = (1 - _FIRST_SHARE - _PROOF_SHARE) / max(len(final), 1)
        for place, trial in enumerate(final):
            end = 1 - _PROOF_SHARE * (len(final) - place)
            self._search_in(trial.setting, longer, end, (len(todo) + place, total), [trial.schedule])

    def _promising(self) -> list[Setting]:
        """The settings to search first: those with the lowest bounds, but of each placement one before others of the same."""
        worth = []
        for setting in self._worth_searching():
            worth.append(setting)
            if self.request.stop() or self.is_too_late_for("settings not considered", setting.cells, 1 - _PROOF_SHARE):
                break
        worth.sort(key=lambda setting: self.bounds_of(setting).value)
        first = {setting.placement.copies: setting for setting in reversed(worth)}
        own = [setting for setting in worth if first[setting.placement.copies] is setting]
        return [*own, *(setting for setting in worth if first[setting.placement.copies] is not setting)][:_MOST_SEARCHED]

    def prove(self) -> None:
        """Bound what is possible where the best is; solve small problems exactly."""
        best = self._best
        if best is None:
            return
        self.bounds_of(best.setting)
        cells = best.setting.cells
        work = min(self._rounds(_PROOF_SHARE, cells) / rounds_in(1.0, cells), _MOST_PROOF)
        if self.request.stop() or work <= 0 or not self.request.seconds or self._is_proved(best):
            return
        if self.is_too_late_for("linear programs not tried", 2 * cells):
            return
        from penstock.planner.bounds import lower_bound

        self._tell("bounding", 0, 1, _label(best.setting))
        effort = Effort(self.seconds_left() / 2, work / 2)
        self._note_bounds(best.setting, lower_bound(best.setting.problem, effort=effort).all)
        if effort.late:
            self._cut_short.append("linear programs not finished")
        if (
            best.setting.placement.stages * best.setting.microbatches * 3 <= _SMALL
            and not self._is_proved(best)
            and not self.request.stop()
        ):
            self._solve(best, work / 2)

    # Steps ------------------------------------------------------------------------------------------------------------

    def _tell(self, phase: str, done: int, total: int, what: str) -> None:
        best = self._best
        found = (None, "") if best is None else (best.objective, best.name)
        self.request.tell(Progress(phase, done, total, what, *found))

    def _tell_found(self, place: int, total: int, what: str, objective: float) -> None:
        if self._best is None or objective < self._best.objective:
            self.request.tell(Progress("searching", place, total, what, objective, SEARCHED))

    def _is_slow(self, setting: Setting) -> bool:
        """Whether its work alone takes longer than the best; what is only just as slow may still be the more robust."""
        return self._best is not None and setting.work > self._best.objective * (1 + self.request.near)

    def _is_proved(self, trial: Trial) -> bool:
        return trial.objective <= self.bounds_of(trial.setting).value * (1 + _EVEN)

    def _add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.request.found(attempt)
        if attempt.trial is not None:
            self._keep(attempt.trial)

    def _keep(self, trial: Trial) -> None:
        self._settings.setdefault(key_of(trial.setting), trial.setting)
        if trial.fits and (self._best is None or trial.objective < self._best.objective):
            self._best = trial

    def _worth_searching(self) -> Iterator[Setting]:
        """Settings that could beat the best: those of the placements, and those that a named schedule needed to fit."""
        seen: set[Key] = set()
        for setting in [*self._own_settings(), *(each.trial.setting for each in self.fitting if each.trial is not None)]:
            key = key_of(setting)
            if key in seen or self._is_slow(setting):
                continue
            seen.add(key)
            if not self._cannot_win(setting):
                yield setting

    def _cannot_win(self, setting: Setting) -> bool:
        return self._best is not None and self.bounds_of(setting).value >= self._best.objective * (1 - _EVEN)

    def _own_settings(self) -> Iterator[Setting]:
        for case in self.request.cases:
            for placement in searchable_placements(self.request.ranks, len(self.request.profile)):
                yield from self.cutter.settings(case, placement, (False,) * placement.stages)
                if self.request.recompute and self.request.limits is not None:
                    yield from self.cutter.settings(case, placement, (True,) * placement.stages)

    def _search_in(
        self, setting: Setting, share: float, end: float, steps: tuple[int, int], start: list[Schedule] | None = None
    ) -> Trial | None:
        """Search in one setting for a share of the rounds, until a share of the seconds at most; what was found, if it fits.

        `steps` are how many were done before, and how many there are.
        """
        from penstock.planner.search import search

        what = _label(setting)
        if self.request.stop() or self._cannot_win(setting):
            return None
        if self.is_too_late_for("settings not searched", _STARTING * setting.cells, end):
            return None
        self._tell("searching", *steps, what)
        starts = [*(start or ()), *self._starts(setting)]
        found = search(
            setting.problem,
            seconds=max(self.seconds_left(end), 0.0),
            rounds=self._rounds(share, setting.cells),
            seed=self.request.seed,
            start=starts,
            progress=lambda _, objective: self._tell_found(*steps, what, objective),
            stop=self.request.stop,
        )
        if found.late:
            self._cut_short.append("searches not finished")
        if found.schedule is None:
            return None
        trial = Trial.run(SEARCHED, setting, found.schedule)
        if trial.fits:
            self._add_searched(trial)
        return trial if trial.fits else None

    def _add_searched(self, trial: Trial) -> None:
        """Add what was found, in place of what was found in the same setting before if it is better than that."""
        key = key_of(trial.setting)
        before = [each for each in self.attempts if each.name == SEARCHED and each.trial is not None and key_of(each.trial.setting) == key]
        if all(not each.trial.fits or trial.objective < each.trial.objective for each in before if each.trial is not None):
            self.attempts = [each for each in self.attempts if not any(each is other for other in before)]
            self._add(self._searched(trial))

    def _searched(self, trial: Trial) -> Attempt:
        setting = trial.setting
        verdict = Verdict.FITS if trial.fits else Verdict.OVER
        return Attempt(trial.name, case_of(setting), setting.placement, sum(setting.recompute), verdict, trial)

    def try_one_at_a_time(self) -> None:
        """The order that holds least, where no named one fits: if this does not, nothing does."""
        for setting in self._own_settings():
            self._add(self._searched(Trial.run(SEARCHED, setting, one_at_a_time(setting.placement, setting.microbatches))))

    def _starts(self, setting: Setting) -> list[Schedule]:
        """Orders that were timed on the same placement, whatever the partition: the quickest of each name, those that fit first."""
        shape = setting.placement.copies, setting.microbatches
        timed = [each.trial for each in self.attempts if each.trial is not None]
        same = [trial for trial in timed if (trial.setting.placement.copies, trial.setting.microbatches) == shape]
        found: dict[str, Schedule] = {}
        for trial in sorted(same, key=lambda trial: (not trial.fits, trial.objective)):
            found.setdefault(trial.name, trial.schedule)
        return list(found.values())

    def _solve(self, best: Trial, work: float) -> None:
        """Solve exactly from the best on, with so many seconds of work."""
        from penstock.planner.exact import solve

        self._tell("solving", 0, 1, _label(best.setting))
        try:
            effort = Effort(max(self.seconds_left(), 0.0), work)
            solved = solve(best.setting.problem, effort=effort, start=best.schedule, workers=1)
        except MissingExtraError as error:
            self.notes.append(str(error))
            return
        if effort.late:
            self._cut_short.append("solver not finished")
        self._note_bounds(best.setting, {"solver": solved.bound})
        if solved.schedule is not None:
            trial = Trial.run(SEARCHED, best.setting, solved.schedule)
            if trial.fits and trial.objective < best.objective and self.request.searches:
                self._add_searched(trial)


def _effort_of(pair: tuple[Family, Case]) -> tuple[int, int, bool]:
    """What large schedules are sorted by, so that those that take least time come first; small ones are all alike."""
    family, case = pair
    cells = family.placement.stages * case.microbatches
    return (cells, len(family.placement.copies), not family.is_fixed) if cells > _SMALL_ORDER else (0, 0, False)


def objective_of(attempt: Attempt) -> float:
    return float("inf") if attempt.trial is None else attempt.trial.objective


def key_of(setting: Setting) -> Key:
    """What tells settings of one request apart."""
    return setting.profile.microbatch, setting.placement.copies, setting.sizes, setting.recompute


def case_of(setting: Setting) -> Case:
    return Case(setting.profile, setting.microbatches)


def _label(setting: Setting) -> str:
    again = ", recomputed" if any(setting.recompute) else ""
    return f"{setting.placement.kind}, {setting.placement.chunks} a rank, {setting.microbatches} x {setting.profile.microbatch}{again}"


def one_at_a_time(placement: Placement, microbatches: int) -> Schedule:
    """Each microbatch forward through all stages and back, before the next."""
    way = [*range(placement.stages)]
    order = [(stage, kind) for kind, stages in (("F", way), ("B", way[::-1])) for stage in stages]
    rows: list[list[Action | str]] = [[] for _ in range(placement.ranks)]
    for microbatch in range(microbatches):
        for stage, kind in order:
            rows[placement.rank_of(stage, microbatch)].append(f"{stage}{kind}{microbatch}")
    return Schedule.from_actions(rows, placement, microbatches=microbatches, name=SEARCHED)


def _work(setting: Setting) -> Bounds:
    return Bounds(setting.work, "work", {"work": setting.work})
