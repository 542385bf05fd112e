"""Time a named schedule: cut the model for it, and if it does not fit, cut it otherwise or recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.errors import PenstockError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.planner.families import Family
from penstock.planner.partition import Partition, partition
from penstock.planner.request import Case, Request
from penstock.planner.setting import Setting, Trial
from penstock.planner.spans import Moment
from penstock.planner.stage_costs import runs
from penstock.planner.units import Units

SLACKS = (0.0, 0.02)
"""Shares of the least load that a more even partition may cost."""
_ROUNDS = 4
"""Partitions that are tried for the memory of one schedule."""


@dataclass
class Cutter:
    """The partitions that were asked for before."""

    request: Request
    known: dict[object, Partition] = field(default_factory=dict)

    def cut(
        self, case: Case, placement: Placement, recompute: tuple[bool, ...], moments: Sequence[Moment] = (), slack: float = 0.0
    ) -> Partition:
        key = (case.profile.microbatch, placement.copies, recompute, tuple(moments), slack)
        if key not in self.known:
            limits = self.request.limits
            self.known[key] = partition(case.profile, placement, recompute=recompute, limits=limits, moments=moments, slack=slack)
        return self.known[key]

    def setting(self, case: Case, placement: Placement, sizes: tuple[int, ...], recompute: tuple[bool, ...]) -> Setting:
        request = self.request
        return Setting(case.profile, placement, case.microbatches, sizes, recompute, request.limits, request.barrier, request.split)

    def settings(self, case: Case, placement: Placement, recompute: tuple[bool, ...]) -> list[Setting]:
        """One for the least load, and one whose stages are more even if there is."""
        cuts = [self.cut(case, placement, recompute, slack=slack) for slack in SLACKS]
        sizes = dict.fromkeys(each.sizes for each in cuts if each.fits)
        return [self.setting(case, placement, each, recompute) for each in sizes]


class Verdict(StrEnum):
    """What came of a candidate."""

    FITS = "fits"
    OVER = "over its memory limit"
    TOO_LARGE = "too large for one microbatch"
    SLOW = "not timed: its work alone takes longer than the best"
    REFUSED = "cannot be had"


@dataclass(frozen=True)
class Attempt:
    """What came of a schedule: the best that fits, or that which comes nearest, or why there is none."""

    name: str
    case: Case
    placement: Placement
    recompute: int
    """How many stages are recomputed."""
    verdict: Verdict
    trial: Trial | None = None
    reason: str = ""


def attempts(family: Family, case: Case, cutter: Cutter, is_slow: Callable[[Setting], bool]) -> list[Attempt]:
    """Time one schedule and, where it does not fit and that is allowed, again with some and with all stages recomputed."""
    return list(_Named(family, case, cutter, is_slow).all())


@dataclass
class _Named:
    family: Family
    case: Case
    cutter: Cutter
    is_slow: Callable[[Setting], bool]
    known: Trial | None = None
    """One in any setting, where the order is the same in all."""

    def all(self) -> Iterator[Attempt]:
        stages, copies = self.family.placement.stages, self.family.placement.copies
        found = self._fitted((False,) * stages)
        yield found
        if found.verdict not in (Verdict.OVER, Verdict.TOO_LARGE) or not self.cutter.request.recompute or len(copies) > 1:
            return
        some = None if found.trial is None else self._some(found.trial)
        if some is not None:
            yield some
        yield self._fitted((True,) * stages)

    def _attempt(self, recompute: Sequence[bool], verdict: Verdict, trial: Trial | None = None, reason: str = "") -> Attempt:
        return Attempt(self.family.name, self.case, self.family.placement, sum(recompute), verdict, trial, reason)

    def _fitted(self, recompute: tuple[bool, ...]) -> Attempt:
        """With these stages recomputed: the best of several partitions that fits, else the nearest after cutting for its memory."""
        settings, units = self.cutter.settings(self.case, self.family.placement, recompute), Units.of(self.cutter.request)
        if not settings:
            return self._attempt(recompute, Verdict.TOO_LARGE, None, self._too_large(recompute, units))
        timed = [setting for setting in settings if not self.is_slow(setting)]
        if not timed:
            return self._attempt(recompute, Verdict.SLOW, None, units.time(min(setting.work for setting in settings)))
        try:
            trials = [trial for setting in timed for trial in self._trials(setting)]
        except PenstockError as error:  # the schedule itself says what it does not take
            return self._attempt(recompute, Verdict.REFUSED, None, str(error))
        if not trials:
            return self._attempt(recompute, Verdict.REFUSED, None, "it splits the backward")
        best = _best(trials)
        best = best if best.fits else self._cut_for(best)
        return self._attempt(recompute, Verdict.FITS if best.fits else Verdict.OVER, best)

    def _too_large(self, recompute: tuple[bool, ...], units: Units) -> str:
        cut = self.cutter.cut(self.case, self.family.placement, recompute)
        rank = max(range(len(cut.excesses)), key=cut.excesses.__getitem__)
        cut_layers = runs(self.case.profile, cut.sizes)
        kept = sum(layer.static for stage in self.family.placement.stages_of(rank) for layer in cut_layers[stage])
        always = f"; it keeps {units.size(kept)} for parameters, gradients and optimizer alone" if kept else ""
        return f"rank {rank} is {units.size(cut.excesses[rank])} over{always}"

    def _trials(self, setting: Setting) -> Iterator[Trial]:
        if self.known is not None:
            yield self.known.again(setting)
            return
        for schedule in self.family.schedules(setting):
            if setting.split or not schedule.rows.is_kind(Kind.I).any():
                trial = Trial.run(self.family.name, setting, schedule)
                self.known = trial if self.family.is_fixed else None
                yield trial

    def _cut_for(self, trial: Trial) -> Trial:
        """Cut the model so that what this schedule holds fits; the moments that did not are met one after the other."""
        best, last, moments = trial, trial, trial.moments()
        for _ in range(_ROUNDS):
            setting = last.setting
            cut = self.cutter.cut(self.case, setting.placement, setting.recompute, moments)
            if not cut.fits or cut.sizes == setting.sizes:
                break
            again = self.cutter.setting(self.case, setting.placement, cut.sizes, setting.recompute)
            last = _best(list(self._trials(again)))
            best = _best([best, last])
            if last.fits:
                break
            moments += last.moments()
        return best

    def _some(self, trial: Trial) -> Attempt | None:
        """Recompute on the ranks that are over their limits alone, and on those that then are."""
        ranks, last = trial.setting.placement.copies[0], trial
        for _ in range(_ROUNDS):
            over = {moment.rank for moment in last.moments()}
            flags = tuple(again or rank in over for again, rank in zip(last.setting.recompute, ranks, strict=True))
            if all(flags) or flags == last.setting.recompute:
                return None
            found = self._fitted(flags)
            if found.trial is None or found.trial.fits:
                return found
            last = found.trial
        return None


def _best(trials: list[Trial]) -> Trial:
    """The quickest that fits, else the one that is least over the limit."""
    return min(trials, key=lambda trial: (not trial.fits, trial.objective if trial.fits else trial.excess, trial.objective))
