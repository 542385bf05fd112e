"""The named schedules of the zoo: which of them a request can use, and timing them on partitions that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.planner.candidate import Candidate, Verdict
from penstock.planner.partition.stage_costs import split_layers
from penstock.planner.problem import Problem
from penstock.planner.profile import Profile
from penstock.planner.request import SEARCHED, Request
from penstock.schedules.registry import Algorithm, algorithm, algorithms

CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages per rank to try if a schedule leaves the number open."""
_MOST_RANKS = 8
"""Ranks of the small pipelines that show whether a schedule trains."""
_ROUNDS = 4
"""Partitions that are tried for the memory of one schedule."""


@dataclass(frozen=True)
class NamedSchedule:
    """A named schedule with a number of chunks per rank."""

    algorithm: Algorithm
    placement: Placement

    @property
    def name(self) -> str:
        layout = self.algorithm.layout
        return self.algorithm.name if layout.fixed else f"{self.algorithm.name}{{chunks={self.placement.chunks}}}"

    @property
    def is_fixed(self) -> bool:
        """Whether the order is independent of costs and limits."""
        return not {"costs", "memory_limit"} & set(self.algorithm.options)

    def build(self, problem: Problem) -> Iterator[Schedule]:
        """The schedule for a problem; several if it takes a memory limit, because only the simulator knows which of them fit."""
        options = self.algorithm.options
        chunks = None if self.algorithm.layout.fixed else self.placement.chunks
        costs: dict[str, Any] = {"costs": problem.costs} if "costs" in options else {}
        for limit in _list_limits(problem) if "memory_limit" in options else [{}]:
            try:
                yield self.algorithm.build(problem.ranks, problem.microbatches, chunks, **costs, **limit)
            except PenstockError:  # the limit is too low for it
                if not limit:
                    raise


def _list_limits(problem: Problem) -> list[dict[str, Any]]:
    """Limits of activations and stashes per rank: the schedule's own default, all memory that is left, and that less two messages."""
    highest = max(problem.costs.per_stage("activation", problem.stages))
    left = min(limit - static for limit, static in zip(problem.limits, problem.static_memory, strict=True))
    left = min(left, 2 * problem.ranks * highest)
    messages = 2 * max(problem.costs.per_stage("output", problem.stages))
    return [{}, *({"memory_limit": size} for size in dict.fromkeys((left, left - messages)) if size > 0)]


def list_candidates(names: Sequence[str], ranks: int, layers: int) -> tuple[list[NamedSchedule], dict[str, str]]:
    """The schedules to try, and the reasons against the others."""
    usable: list[NamedSchedule] = []
    refused: dict[str, str] = {}
    for name in names:
        if name != SEARCHED:
            placements, reason = _list_placements(algorithm(name), ranks, layers)
            usable += [NamedSchedule(algorithm(name), placement) for placement in placements]
            if not placements:
                refused[name] = reason
    return usable, refused


def _list_placements(entry: Algorithm, ranks: int, layers: int) -> tuple[list[Placement], str]:
    layout = entry.layout
    placements: list[Placement] = []
    reason = ""
    for chunks in [layout.chunks] if layout.fixed else [count for count in CHUNKS if count >= layout.chunks]:
        try:
            placement = layout.place(entry.shape(ranks, 1, chunks))
            entry.build(ranks, 1, None if layout.fixed else chunks)  # checks the shape without generating any row
        except PenstockError as error:
            reason = reason or str(error)
            continue
        if not is_training(entry):
            reason = reason or "it has no backward"
        elif placement.stages > layers:
            reason = reason or f"{layers} layers are too few for its {placement.stages} stages"
        else:
            placements.append(placement)
    return placements, reason


@cache
def is_training(entry: Algorithm) -> bool:
    """Whether the schedule has backwards, as seen on the smallest pipeline that it accepts: that does not depend on the ranks."""
    for ranks in range(1, _MOST_RANKS + 1):
        try:
            return entry.build(ranks, ranks).training
        except PenstockError:
            continue
    return True  # the schedule itself says what it needs when it is timed


def list_searchable_placements(ranks: int, layers: int) -> list[Placement]:
    """The placements on which orders are searched."""
    placements = [Placement.linear(ranks)]
    if ranks > 1:
        placements += [Placement.v(ranks), *(Placement.looped(ranks, chunks) for chunks in CHUNKS[1:4]), Placement.wave(ranks, 2)]
    return [placement for placement in placements if placement.stages <= layers]


def list_searchable_problems(request: Request) -> Iterator[Problem]:
    """The problems on which orders are searched: every microbatch size and placement, without and with recompute if that is allowed."""
    for profile in request.profiles:
        for placement in list_searchable_placements(request.ranks, len(request.profile)):
            yield from request.make_problems(profile, placement, (False,) * placement.stages)
            if request.recompute and request.limits is not None:
                yield from request.make_problems(profile, placement, (True,) * placement.stages)


# Starting orders ------------------------------------------------------------------------------------------------------


def list_named_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every named schedule that has the problem's placement and trains, built for its costs and limits if it takes them."""
    for entry in algorithms().values():
        chunks = entry.layout.chunks if entry.layout.fixed else problem.placement.chunks
        options: dict[str, Any] = {"costs": problem.costs} if "costs" in entry.options else {}
        if "memory_limit" in entry.options and problem.memory_limit is not None:
            # These schedules take one limit for all ranks, without parameters.
            options["memory_limit"] = min(limit - kept for limit, kept in zip(problem.limits, problem.static_memory, strict=True))
        try:
            schedule = entry.build(problem.ranks, problem.microbatches, chunks, **options)
            if schedule.placement.copies != problem.placement.copies or not len(schedule.rows) or not schedule.training:
                continue
        except PenstockError:
            continue
        if problem.split or not schedule.rows.is_kind(Kind.I, Kind.W).any():
            yield schedule


def one_at_a_time(placement: Placement, microbatches: int, name: str = "one-at-a-time") -> Schedule:
    """Each microbatch forward through all stages and back before the next, with full backwards: no order holds less."""
    stages = np.arange(placement.stages)
    stage = np.tile(np.concatenate((stages, stages[::-1])), microbatches)
    kind = np.tile(np.repeat((int(Kind.F), int(Kind.B)), placement.stages), microbatches)
    microbatch = np.repeat(np.arange(microbatches), 2 * placement.stages)
    ranks = placement.ranks_of(stage, microbatch)
    by_rank = np.argsort(ranks, kind="stable")
    entries = codes.pack(stage, kind, microbatch)[by_rank]
    return Schedule.from_rows(Rows.sorted_by(entries, ranks[by_rank], placement.ranks), placement, microbatches, name=name)


# Timing ---------------------------------------------------------------------------------------------------------------


def time_named(named: NamedSchedule, profile: Profile, request: Request, is_slow: Callable[[Problem], bool]) -> list[Candidate]:
    """Time one schedule and, if it does not fit and that is allowed, again with some and with all stages recomputed."""
    return list(_Fitting(named, profile, request, is_slow).run())


@dataclass
class _Fitting:
    """Cuts the model for one schedule and, if it does not fit, cuts it otherwise or recomputes."""

    named: NamedSchedule
    profile: Profile
    request: Request
    is_slow: Callable[[Problem], bool]
    known: Candidate | None = None
    """The order on any problem, if it is the same on all."""

    def run(self) -> Iterator[Candidate]:
        placement = self.named.placement
        first = self._fit((False,) * placement.stages)
        yield first
        if first.verdict not in (Verdict.OVER, Verdict.TOO_LARGE) or not self.request.recompute or len(placement.copies) > 1:
            return
        some = None if first.timed is None else self._recompute_some(first)
        if some is not None:
            yield some
        yield self._fit((True,) * placement.stages)

    def _fit(self, recompute: tuple[bool, ...]) -> Candidate:
        """With these stages recomputed: the best of several partitions that fits, else the nearest after cutting for its memory."""
        request, named = self.request, self.named
        problems = request.make_problems(self.profile, named.placement, recompute)
        if not problems:
            sizes = request.cut(self.profile, named.placement, recompute).sizes
            too_large = request.make_problem(self.profile, named.placement, sizes, recompute)
            return Candidate.untimed(named.name, too_large, Verdict.TOO_LARGE, self._explain_excess(recompute))
        fast = [problem for problem in problems if not self.is_slow(problem)]
        if not fast:
            least = min(problem.work for problem in problems)
            return Candidate.untimed(named.name, problems[0], Verdict.SLOW, request.units.time(least))
        try:
            timed = [candidate for problem in fast for candidate in self._time(problem)]
        except PenstockError as error:  # the schedule itself says what it does not take
            return Candidate.untimed(named.name, problems[0], Verdict.REFUSED, str(error))
        if not timed:
            return Candidate.untimed(named.name, problems[0], Verdict.REFUSED, "it splits the backward")
        best = _pick_best(timed)
        return best if best.fits else self._cut_for_memory(best)

    def _explain_excess(self, recompute: tuple[bool, ...]) -> str:
        cut, units = self.request.cut(self.profile, self.named.placement, recompute), self.request.units
        rank = max(range(len(cut.excesses)), key=cut.excesses.__getitem__)
        layers = split_layers(self.profile, cut.sizes)
        kept = sum(layer.static for stage in self.named.placement.stages_of(rank) for layer in layers[stage])
        always = f"; it keeps {units.size(kept)} for parameters, gradients and optimizer alone" if kept else ""
        return f"rank {rank} is {units.size(cut.excesses[rank])} over{always}"

    def _time(self, problem: Problem) -> Iterator[Candidate]:
        if self.known is not None:
            yield self.known.retime(problem)
            return
        for schedule in self.named.build(problem):
            if problem.split or not schedule.rows.is_kind(Kind.I).any():
                candidate = Candidate.time(self.named.name, problem, schedule)
                self.known = candidate if self.named.is_fixed else None
                yield candidate

    def _cut_for_memory(self, candidate: Candidate) -> Candidate:
        """Cut the model so that this schedule fits; the moments at which it did not are added one after the other."""
        best, last, moments = candidate, candidate, candidate.list_moments()
        for _ in range(_ROUNDS):
            problem = last.problem
            cut = self.request.cut(self.profile, problem.placement, problem.recompute, moments)
            if not cut.fits or cut.sizes == problem.sizes:
                break
            last = _pick_best(list(self._time(problem.recut(cut.sizes))))
            best = _pick_best([best, last])
            if last.fits:
                break
            moments += last.list_moments()
        return best

    def _recompute_some(self, candidate: Candidate) -> Candidate | None:
        """Recompute only on the ranks that are over their limits, and on further ranks that then are."""
        ranks, last = self.named.placement.copies[0], candidate
        for _ in range(_ROUNDS):
            over = {moment.rank for moment in last.list_moments()}
            flags = tuple(again or rank in over for again, rank in zip(last.problem.recompute, ranks, strict=True))
            if all(flags) or flags == last.problem.recompute:
                return None
            fitted = self._fit(flags)
            if fitted.timed is None or fitted.fits:
                return fitted
            last = fitted
        return None


def _pick_best(candidates: list[Candidate]) -> Candidate:
    """The fastest that fits, else the one that is least over its limit."""
    return min(candidates, key=lambda option: (not option.fits, option.objective if option.fits else option.excess, option.objective))
