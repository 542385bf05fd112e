"""The pipeline of one configuration: a named schedule, layers shared out among its stages, and as many recomputed as memory asks for.

The shares follow from what each rank of the schedule holds at its peak: the slowest rank is made as fast as possible, a rank with little
room taking fewer layers or recomputing some. Time and memory of the result come from the simulator.

If the vocabulary is shared among the ranks, S, T and the collectives are placed in the schedule by `spread_vocabulary`. That takes longer
than timing a schedule, so an order is placed once for all configurations whose shares take about the same part of a stage's time, and is
placed anew for the costs themselves if it comes near the best. Long orders are set aside, and placed when everything else is timed, if
their bounds are far enough below the best. Both are decided by times that do not depend on what was tried first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.rows import Ints
from penstock.passes.vocabulary import MOST_PENDING, Vocabulary, spread_vocabulary
from penstock.planner.bounds.spread_bound import bound_spread
from penstock.planner.candidate import Candidate
from penstock.planner.job.block_shares import BlockShares, Shares
from penstock.planner.job.costs import JobCosts
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.job.layer_shares import LayerShares
from penstock.planner.job.profile_costs import ProfileCosts
from penstock.planner.named_schedules import NamedSchedule, list_candidates
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.partition.stage_costs import list_logits
from penstock.planner.problem import Problem

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "v-half")
"""The schedules that are tried by default."""
_ROUNDS = 4
"""How often blocks are shared out for the memory of one schedule."""
_USUAL = Costs(f=1.0, i=1.15, w=0.75, weight_stash=0.6)
"""About the proportions of a transformer's block: they show where a schedule peaks and what its critical path is."""
_AHEAD = (1, 0, 2)
"""How many more activations a rank may hold while its vocabulary is shared: tried first, tried if memory is short, and tried at last."""
_LIKE, _JOINS_LIKE = 2.0, 4.0
"""Shares, and their collectives, whose times differ by less than these factors have one order."""
_LEAST_RATIO = 0.01
"""A time below this part of a stage's forward counts as so long."""
_NEAR, _NEAR_IF_SHORT = 0.003, 0.1
"""An order that is slower than the best by no more than this share is placed anew for its own costs; short ones gain more by that."""
_SHORT = 1000
"""Compute actions of the longest order that counts as short."""
_MOST_PLACED = 150_000
"""Compute actions of the longest order that is placed anew, and in which S and T are placed before everything else is timed."""
LONG_GAIN = 0.025
"""A longer one is placed only if its bound is below the best by more than this share: so much the best may be slower than it need be."""
_MOST_KEPT = 1_000_000
"""Actions of all orders with a shared vocabulary that are kept to be timed again: about a gigabyte."""
_TIMED_BY = {Kind.F: (0,), Kind.I: (1,), Kind.W: (2,), Kind.B: (1, 2)}
"""The rows of `list_times` that an action takes."""


@dataclass(frozen=True)
class ScheduleTrial:
    """One schedule on the stages of a configuration: timed, or ruled out by its bound or its memory."""

    name: str
    timed: Candidate | None = None
    """If it fits and was timed."""
    recomputed: tuple[bool, ...] = ()
    """For each block of the model, or layer of its profile, whether its forward runs again."""
    bound: float = 0.0
    """Seconds that it takes at least."""
    excess: float = 0.0
    """Bytes over the limit on the fullest GPU, if it does not fit."""
    guess: float = 0.0
    """About the seconds that it takes, if it was set aside because placing S and T in its order takes long."""

    @property
    def candidate(self) -> Candidate:
        assert self.timed is not None
        return self.timed

    @property
    def seconds(self) -> float:
        return math.inf if self.timed is None else self.timed.time_or_inf

    def keep_figures(self) -> ScheduleTrial:
        """The same without its order and timeline, which take much memory."""
        return self if self.timed is None else replace(self, timed=replace(self.timed, timed=None))


@dataclass(frozen=True)
class ScheduleTemplate:
    """A schedule that was lowered and timed once, so that other costs only retime it, and what each rank holds at its peak."""

    candidate: Candidate
    moments: tuple[PeakMoment, ...]
    path: Ints
    """How often each stage (column) runs F, I and W (rows) along one chain of actions that wait for each other: no costs make it faster."""

    def __len__(self) -> int:
        """Its actions."""
        return len(self.candidate.schedule.rows.codes)

    @property
    def is_long(self) -> bool:
        """Whether placing S and T in it takes many seconds."""
        return len(self) > _MOST_PLACED

    @property
    def near(self) -> float:
        """By what share it may be slower than the best to be placed anew for its own costs."""
        return 0.0 if self.is_long else _NEAR_IF_SHORT if len(self) <= _SHORT else _NEAR

    @property
    def splits(self) -> bool:
        """Whether any of its backwards is split."""
        return bool(self.candidate.schedule.rows.is_kind(Kind.I).any())

    @classmethod
    def of(cls, candidate: Candidate) -> ScheduleTemplate:
        moments = candidate.list_moments(range(candidate.problem.ranks))
        path = np.zeros((3, candidate.problem.stages), dtype=np.int64)
        if not candidate.schedule.spread_stages:  # else S and T are on the path too, and `bound_spread` takes its place
            for step in candidate.timeline.critical_path:
                if step.what == "action" and step.action is not None and step.action.kind in _TIMED_BY:  # not overlapped with another
                    path[_TIMED_BY[step.action.kind], step.action.stage] += 1
        return cls(candidate, tuple(replace(moment, other=0.0) for moment in moments), path)


@dataclass
class ScheduleTemplates:
    """Templates by schedule, ranks and microbatches, and with a shared vocabulary by the proportions of its costs."""

    names: Sequence[str]
    _usable: dict[tuple[int, int], tuple[list[NamedSchedule], dict[str, str]]] = field(default_factory=dict)
    _timed: dict[tuple[str, int, int], ScheduleTemplate | None] = field(default_factory=dict)
    _placed: dict[tuple[Any, ...], ScheduleTemplate] = field(default_factory=dict)

    def list_usable(self, ranks: int, layers: int) -> tuple[list[NamedSchedule], dict[str, str]]:
        """The schedules for so many ranks, and the reasons against others; on one rank all are the same, so that the first does."""
        if (ranks, layers) not in self._usable:
            usable, refused = list_candidates(self.names, ranks, layers)
            self._usable[ranks, layers] = usable if ranks > 1 else usable[:1], refused
        return self._usable[ranks, layers]

    def time(self, named: NamedSchedule, microbatches: int) -> ScheduleTemplate | None:
        """The schedule under plain costs; None if the schedule does not take so many microbatches."""
        key = named.name, named.placement.ranks, microbatches
        if key not in self._timed:
            plain = Problem(named.placement, microbatches, _USUAL)
            try:
                self._timed[key] = ScheduleTemplate.of(Candidate.time(named.name, plain, next(iter(named.build(plain)))))
            except PenstockError:
                self._timed[key] = None
        return self._timed[key]

    def place(self, plain: ScheduleTemplate, costs: Costs, vocabulary: Vocabulary) -> ScheduleTemplate:
        """The schedule with a shared vocabulary, placed for about these costs."""
        order = plain.candidate
        placement, microbatches = order.problem.placement, order.problem.microbatches
        shares = _round_shares(costs, placement.stages)
        key = order.name, placement.ranks, microbatches, vocabulary, shares
        template = self._placed.pop(key, None)
        if template is None:
            between = (0.0,) * (placement.stages - 2)
            times: dict[str, Any] = {name: (first, *between, last) for name, first, last in shares}
            usual = replace(_USUAL, **times)
            spread = spread_vocabulary(order.schedule, usual, vocabulary)
            template = ScheduleTemplate.of(Candidate.time(order.name, Problem(placement, microbatches, usual), spread))
        self._placed[key] = template  # the last that was used comes last
        while len(self._placed) > 1 and sum(map(len, self._placed.values())) > _MOST_KEPT:
            del self._placed[next(iter(self._placed))]
        return template


def _round_shares(costs: Costs, stages: int) -> tuple[tuple[str, float, float], ...]:
    """The times of S, T and the collectives of both ends in forwards of a stage, rounded so that similar ones are equal."""
    forward = float(costs.table("f", stages, 1).mean())

    def round_ratio(time: float, factor: float) -> float:
        return float(factor ** round(math.log(max(time / forward, _LEAST_RATIO), factor)))

    rounded = []
    for name, factor in (("s", _LIKE), ("t", _LIKE), ("broadcast", _JOINS_LIKE), ("combine", _JOINS_LIKE)):
        first, last = costs.table(name, stages, 1)[[0, -1], 0].tolist()
        rounded.append((name, round_ratio(first, factor), round_ratio(last, factor)))
    return tuple(rounded)


def sort_trials(trials: Iterable[ScheduleTrial]) -> list[ScheduleTrial]:
    """The fastest that fits first, and those that do not fit last."""
    return sorted(trials, key=lambda trial: (trial.timed is None, trial.seconds, trial.excess, trial.bound))


def gains_enough(waiting: ScheduleTrial, best: float) -> bool:
    """Whether a schedule that was set aside may be faster than the best time by so much that it is worth the seconds of placing it."""
    return waiting.bound < best * (1 - LONG_GAIN)


def count_layers(costs: JobCosts) -> int:
    """Layers that are in a stage, of which every stage needs one."""
    return costs.job.layers + sum(costs.ends) - sum(costs.configuration.shared_ends)


@dataclass(frozen=True)
class PipelineTrials:
    """Tries the schedules of one configuration."""

    costs: JobCosts
    templates: ScheduleTemplates
    recompute: bool = True
    limit: float | None = None
    """Bytes of a GPU that may be used; by default those of the job."""

    @property
    def _limit(self) -> float:
        return self.costs.job.limit if self.limit is None else self.limit

    @property
    def microbatches(self) -> int:
        chosen = self.costs.configuration
        return self.costs.job.batch // (chosen.data * chosen.microbatch)

    def list_usable(self) -> tuple[list[NamedSchedule], dict[str, str]]:
        """The schedules that are possible, and the reasons against others."""
        usable, refused = self.templates.list_usable(self.costs.configuration.pipeline, count_layers(self.costs))
        if isinstance(self.costs, ProfileCosts):
            return usable, refused
        reason = "it runs two copies of the model, but a job with the sizes of a transformer is planned with one"
        possible = [named for named in usable if len(named.placement.copies) == 1]
        return possible, refused | {named.name: reason for named in usable if named not in possible}

    def run(self, best: float = math.inf) -> list[ScheduleTrial]:
        """Try every schedule; one whose bound is not below the best time is not timed. The fastest that fits comes first."""
        trials = {trial.name: trial for trial in self.time(best)}
        best = min([best, *(trial.seconds for trial in trials.values())])
        for waiting in sorted((trial for trial in trials.values() if trial.guess), key=lambda trial: trial.guess):
            if gains_enough(waiting, best):
                trials[waiting.name] = self.time_long(waiting, best)
                best = min(best, trials[waiting.name].seconds)
        for trial in sort_trials(trials.values()):
            if self.is_near(trial, best):
                trials[trial.name] = self.place_anew(trial)
                best = min(best, trials[trial.name].seconds)
        return sort_trials(trials.values())

    def time(self, best: float = math.inf) -> list[ScheduleTrial]:
        """Try every schedule with S and T placed for similar costs, and set long ones aside."""
        return sort_trials(self._time_all(best))

    def _time_all(self, best: float) -> Iterator[ScheduleTrial]:
        usable, _ = self.list_usable()
        templates = [template for named in usable if (template := self.templates.time(named, self.microbatches)) is not None]
        for bound, template in sorted(((self._bound_shared(template, best), template) for template in templates), key=lambda pair: pair[0]):
            trial = self._try_shared(template, bound, best) if self.costs.shares else self._try(template, best)
            best = min(best, trial.seconds)
            yield trial

    def is_near(self, trial: ScheduleTrial, best: float) -> bool:
        """Whether a schedule may be faster than the best time if it is placed for its own costs; ask in the order of their times."""
        if trial.timed is None or not self.costs.shares:
            return False
        return trial.seconds < best * (1 + self._find_template(trial.name).near)

    def place_anew(self, trial: ScheduleTrial) -> ScheduleTrial:
        """The same shares with S and T placed for their own costs, or as they are if that is no faster."""
        order, known = self._find_template(trial.name).candidate, trial.timed
        assert known is not None
        assert known.sizes is not None
        problem = self._make_problem(order, known.sizes, trial.recomputed)
        spread = (spread_vocabulary(order.schedule, problem.costs, self._make_vocabulary(ahead)) for ahead in _AHEAD)
        placed = [Candidate.time(trial.name, problem, one) for one in spread]
        return replace(trial, timed=min((one for one in (known, *placed) if one.fits), key=lambda one: one.time_or_inf))

    def time_long(self, trial: ScheduleTrial, best: float) -> ScheduleTrial:
        """Time a schedule that was set aside, unless its bound is not below the best time."""
        return self._try_shared(self._find_template(trial.name), trial.bound, best, sets_aside=False)

    def _find_template(self, name: str) -> ScheduleTemplate:
        named = next(named for named in self.list_usable()[0] if named.name == name)
        template = self.templates.time(named, self.microbatches)
        assert template is not None
        return template

    def _bound_shared(self, template: ScheduleTemplate, best: float) -> float:
        """With a shared vocabulary, the bound on the shares that the plain schedule has room for; 0 without, or if there is too little."""
        if not self.costs.shares:
            return 0.0
        order = template.candidate
        shares = self._share(order, template.moments, (self._limit,) * order.problem.ranks)
        if not isinstance(shares, Shares):
            return 0.0
        bound = self._bound_work(shares)
        return bound if bound >= best else max(bound, self._bound_order(template, shares.sizes, shares.recomputed))

    def _try_shared(self, template: ScheduleTemplate, bound: float, best: float, sets_aside: bool = True) -> ScheduleTrial:
        """Try a schedule with the vocabulary shared among its ranks, which is placed if the bound is below the best."""
        order = template.candidate
        shares = self._share(order, template.moments, (self._limit,) * order.problem.ranks)
        if not isinstance(shares, Shares):
            return ScheduleTrial(order.name, excess=shares)
        if bound >= best:
            return ScheduleTrial(order.name, bound=bound)
        if template.is_long and sets_aside:
            return ScheduleTrial(order.name, bound=bound, guess=bound / (1 - (order.bubble or 0.0)))
        costs = self._make_problem(order, shares.sizes, shares.recomputed).costs
        tried: list[ScheduleTrial] = []
        for ahead in _AHEAD[:2]:
            tried.append(self._try(self.templates.place(template, costs, self._make_vocabulary(ahead)), best * (1 + template.near)))
            if tried[-1].timed is not None and not any(tried[-1].recomputed):
                break  # else memory is short: with fewer activations, less may be recomputed
        return min(tried, key=lambda trial: (trial.seconds, trial.excess, trial.bound))

    def _make_vocabulary(self, ahead: int) -> Vocabulary:
        embedding, head = self.costs.configuration.shared_ends
        return Vocabulary(head=head, embedding=embedding, ahead=ahead)

    def _try(self, template: ScheduleTemplate, best: float) -> ScheduleTrial:
        order, moments = template.candidate, template.moments
        if self.costs.shares:
            pending = MOST_PENDING * sum(list_logits(self.costs.profile(), self.costs.shares))
            moments = tuple(replace(moment, other=pending) for moment in moments)
        placement, limit = order.problem.placement, self._limit
        limits = [limit] * placement.ranks
        bound = excess = 0.0
        for _ in range(_ROUNDS):
            shares = self._share(order, moments, tuple(limits))
            if not isinstance(shares, Shares):
                return ScheduleTrial(order.name, excess=max(shares, excess))
            sizes, recomputed = shares.sizes, shares.recomputed
            lower = max(self._bound_work(shares), self._bound_order(template, sizes, recomputed))
            if lower >= best:
                return ScheduleTrial(order.name, bound=max(bound, lower))
            bound = bound or lower
            problem = self._make_problem(order, sizes, recomputed)
            candidate = order.retime(problem)
            if candidate.fits:
                flags = (True,) * len(recomputed) if self.costs.recompute_all else recomputed
                return ScheduleTrial(order.name, candidate, flags, bound)
            excess = candidate.excess or 0.0
            moments, peaks = candidate.list_moments(range(placement.ranks)), candidate.timeline.peak_memory
            limits = [low - max(peak - limit, 0.0) for low, peak in zip(limits, peaks, strict=True)]
        return ScheduleTrial(order.name, excess=excess)

    def _share(self, order: Candidate, moments: Sequence[PeakMoment], limits: tuple[float, ...]) -> Shares | float:
        """Layers and recomputed layers of the stages, or the bytes over the limit."""
        if isinstance(self.costs, LayerCosts):
            return BlockShares(self.costs, order, moments, limits, self.recompute).run()
        return LayerShares(self.costs, order, moments, limits, self.recompute).run()

    def _bound_work(self, shares: Shares) -> float:
        """Seconds of the slowest rank's work alone."""
        return self.microbatches * shares.load * self.costs.job.overlap

    def _bound_order(self, template: ScheduleTemplate, sizes: tuple[int, ...], recomputed: tuple[bool, ...]) -> float:
        """Seconds of the order's chain of actions on these stages, or of a way with S and T."""
        if self.costs.shares:
            return bound_spread(self._make_problem(template.candidate, sizes, recomputed), not template.splits)
        stages = np.add.reduceat(self.costs.list_times(recomputed), [0, *accumulate(sizes[:-1])], axis=1)
        return float((template.path * stages).sum())

    def _make_problem(self, order: Candidate, sizes: tuple[int, ...], recomputed: tuple[bool, ...]) -> Problem:
        placement = order.problem.placement
        limits, never = (self._limit,) * placement.ranks, (False,) * placement.stages
        return Problem.cut(self.costs.profile(recomputed), placement, self.microbatches, sizes, never, limits)
