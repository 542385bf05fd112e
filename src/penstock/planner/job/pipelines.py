"""The pipeline of one configuration: a named schedule, layers shared out among its stages, and as many recomputed as memory asks for.

The shares follow from what each rank of the schedule holds at its peak: the slowest rank is made as fast as possible, a rank with little
room taking fewer layers or recomputing some. Time and memory of the result come from the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from penstock.errors import PenstockError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.rows import Ints
from penstock.planner.candidate import Candidate
from penstock.planner.job.block_shares import BlockShares, Shares
from penstock.planner.job.costs import JobCosts
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.job.layer_shares import LayerShares
from penstock.planner.named_schedules import NamedSchedule, list_candidates
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.problem import Problem

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "v-half")
"""The schedules that are tried by default."""
_ROUNDS = 4
"""How often blocks are shared out for the memory of one schedule."""
_USUAL = Costs(f=1.0, i=1.15, w=0.75, weight_stash=0.6)
"""About the proportions of a transformer's block: they show where a schedule peaks and what its critical path is."""
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

    @property
    def candidate(self) -> Candidate:
        assert self.timed is not None
        return self.timed

    @property
    def seconds(self) -> float:
        return math.inf if self.timed is None else self.timed.time_or_inf


@dataclass(frozen=True)
class ScheduleTemplate:
    """A schedule that was lowered and timed once, so that other costs only retime it, and what each rank holds at its peak."""

    candidate: Candidate
    moments: tuple[PeakMoment, ...]
    path: Ints
    """How often each stage (column) runs F, I and W (rows) along one chain of actions that wait for each other: no costs make it faster."""

    @classmethod
    def of(cls, candidate: Candidate) -> ScheduleTemplate:
        moments = candidate.list_moments(range(candidate.problem.ranks))
        actions = [step.action for step in candidate.timeline.critical_path if step.what == "action" and step.action is not None]
        path = np.zeros((3, candidate.problem.stages), dtype=np.int64)
        for action in actions:
            path[_TIMED_BY[action.kind], action.stage] += 1
        return cls(candidate, tuple(replace(moment, other=0.0) for moment in moments), path)


@dataclass
class ScheduleTemplates:
    """Templates by schedule, ranks and microbatches."""

    names: Sequence[str]
    _usable: dict[tuple[int, int], list[NamedSchedule]] = field(default_factory=dict)
    _timed: dict[tuple[str, int, int], ScheduleTemplate | None] = field(default_factory=dict)

    def list_usable(self, ranks: int, layers: int) -> list[NamedSchedule]:
        """The schedules for so many ranks; on one rank all are the same, so that the first does."""
        if (ranks, layers) not in self._usable:
            usable = list_candidates(self.names, ranks, layers)[0]
            self._usable[ranks, layers] = usable if ranks > 1 else usable[:1]
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

    def run(self, best: float = math.inf) -> list[ScheduleTrial]:
        """Try every schedule; one whose bound is not below the best time is not timed. The fastest that fits comes first."""
        trials = list(self._try_all(best))
        return sorted(trials, key=lambda trial: (trial.timed is None, trial.seconds, trial.excess, trial.bound))

    def _try_all(self, best: float) -> Iterator[ScheduleTrial]:
        ranks, layers = self.costs.configuration.pipeline, self.costs.job.layers + sum(self.costs.ends)
        for named in self.templates.list_usable(ranks, layers):
            template = self.templates.time(named, self.microbatches)
            if template is not None:
                trial = self._try(template, best)
                best = min(best, trial.seconds)
                yield trial

    def _try(self, template: ScheduleTemplate, best: float) -> ScheduleTrial:
        order, moments = template.candidate, template.moments
        placement, limit = order.problem.placement, self._limit
        limits = [limit] * placement.ranks
        bound = excess = 0.0
        for _ in range(_ROUNDS):
            shares = self._share(order, moments, tuple(limits))
            if not isinstance(shares, Shares):
                return ScheduleTrial(order.name, excess=max(shares, excess))
            sizes, recomputed = shares.sizes, shares.recomputed
            lower = max(self.microbatches * shares.load, self._bound_path(template, sizes, recomputed))
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

    def _bound_path(self, template: ScheduleTemplate, sizes: tuple[int, ...], recomputed: tuple[bool, ...]) -> float:
        """Seconds of the order's chain of actions on these stages."""
        stages = np.add.reduceat(self.costs.list_times(recomputed), [0, *accumulate(sizes[:-1])], axis=1)
        return float((template.path * stages).sum())

    def _make_problem(self, order: Candidate, sizes: tuple[int, ...], recomputed: tuple[bool, ...]) -> Problem:
        placement = order.problem.placement
        limits, never = (self._limit,) * placement.ranks, (False,) * placement.stages
        return Problem.cut(self.costs.profile(recomputed), placement, self.microbatches, sizes, never, limits)
