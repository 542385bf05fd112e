"""Plans that move activations to host memory: which of them, and where recomputing is better.

A schedule that memory holds back is tried again on evenly cut stages, which need not hold a whole microbatch now. Each rank that is over
its limit moves the smallest share of its activations with which it fits, those with the longest life first. If it does not fit even so, it
recomputes as well, if that is allowed, or gets fewer layers; and wherever recomputing is faster than copies that do not hide behind the
computation, it takes their place. The simulator is the judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.schedule import Schedule
from penstock.passes.offload import Offload, move_activations
from penstock.planner.candidate import Candidate, Verdict
from penstock.planner.named_schedules import NamedSchedule
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.problem import SLACK, Problem
from penstock.planner.profile import Profile
from penstock.planner.request import Request
from penstock.simulator.timeline import Timeline
from penstock.verifier.rules.offload import peak_host_memory

AHEAD = (1, 2, 3)
"""How many compute actions before its backward an activation is reloaded."""
_ROUNDS = 3
"""Partitions that are tried for the memory of one schedule."""
_ROOMIER = 1.5
"""By how much the activations of an order may exceed those of another, if it is searched for with moves."""
_FASTER = 1e-9


@dataclass(frozen=True)
class OffloadProblem(Problem):
    """A problem whose activations may be moved to the host.

    Its `memory_limit` is None: the arguments of the bounds, which count what is held from F to I, do not hold for it.
    """

    device_limits: tuple[float, ...] = ()
    host_limits: tuple[float, ...] | None = None

    @classmethod
    def of(cls, problem: Problem, request: Request) -> OffloadProblem:
        return problem if isinstance(problem, cls) else cls._convert(problem, request.host_limits_of(problem.assignment))

    @classmethod
    def _convert(cls, problem: Problem, host_limits: tuple[float, ...] | None) -> OffloadProblem:
        values: dict[str, Any] = {item.name: getattr(problem, item.name) for item in fields(Problem)}
        return cls(**{**values, "memory_limit": None}, device_limits=problem.limits, host_limits=host_limits)

    def move(self, other: Problem, host_limits: tuple[float, ...] | None) -> OffloadProblem:
        return self._convert(other, host_limits)

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, "offload"

    def recut(self, sizes: tuple[int, ...], lengths: tuple[int, ...] | None = None) -> OffloadProblem:
        cut = super().recut(sizes, lengths)
        return replace(self, sizes=cut.sizes, lengths=cut.lengths, costs=cut.costs)

    def fits(self, timeline: Timeline) -> bool:
        """Whether every rank stays within its limits, on the device and on the host."""
        return not self.list_over(timeline) and self.fits_on_host(timeline)

    def list_over(self, timeline: Timeline) -> list[int]:
        """The ranks over their limits on the device."""
        return [rank for rank, peak in enumerate(timeline.peak_memory) if peak > self.device_limits[rank] * (1 + SLACK)]

    def fits_on_host(self, timeline: Timeline) -> bool:
        if self.host_limits is None:
            return True
        held = peak_host_memory(timeline.table, self.costs)
        return not any(peak > limit * (1 + SLACK) for peak, limit in zip(held, self.host_limits, strict=True))


def make_roomy_problem(candidate: Candidate, request: Request) -> tuple[Problem, Schedule]:
    """A problem whose orders may hold more than the limits, because activations can be moved; and the candidate's order without copies.

    They may hold what the candidate does without moves, or the limit, and a half more besides parameters.
    """
    problem, schedule = candidate.problem, candidate.schedule
    rows = schedule.rows.keep(schedule.rows.is_kind(*COMPUTE))
    shape = schedule.placement, schedule.microbatches
    bare = Schedule.from_rows(rows, *shape, graph=schedule.graph, name=schedule.name, slices=schedule.slices)
    values: dict[str, Any] = {item.name: getattr(problem, item.name) for item in fields(Problem)}
    held = zip(
        problem.evaluate(bare).peak_memory, request.limits_of(problem.assignment) or problem.limits, problem.static_memory, strict=True
    )
    roomy = tuple(static + _ROOMIER * (max(peak, limit) - static) for peak, limit, static in held)
    return Problem(**{**values, "memory_limit": roomy}), bare


def is_held_back(candidates: Sequence[Candidate], even: Sequence[Problem]) -> bool:
    """Whether a named schedule does not fit without recomputing, or only on stages that are cut unevenly.

    `candidates` are what was tried of it, and `even` its problems if activations may be moved.
    """
    first = candidates[0]
    if first.verdict in (Verdict.SLOW, Verdict.REFUSED):
        return False
    return not first.fits or all((first.sizes, first.devices) != (problem.sizes, problem.devices) for problem in even)


def time_without_limit(named: NamedSchedule, profile: Profile, request: Request) -> Candidate | None:
    """The schedule as fast as it is if memory does not hold it back, on a partition that may fit with activations on the host."""
    none = (False,) * named.placement.stages
    fastest: Candidate | None = None
    order: Candidate | None = None
    for problem in request.make_problems(profile, named.placement, none, named.slices, moves=True):
        free = OffloadProblem.of(problem, request)
        if order is not None:
            timed = [order.retime(free)]
        else:
            schedules = [schedule for schedule in named.build(free) if free.split or not schedule.rows.is_kind(Kind.I).any()]
            timed = [Candidate.time(named.name, free, schedule) for schedule in schedules]
            order = timed[0] if timed and named.is_fixed else None
        fastest = min([*timed, *([] if fastest is None else [fastest])], key=lambda candidate: candidate.time_or_inf, default=None)
    return fastest


def offload(candidate: Candidate, request: Request) -> Candidate | None:
    """The fastest way found to make a candidate without moves fit by moving activations; None if there is none."""
    problem = candidate.problem
    assert isinstance(problem, OffloadProblem)
    tried: set[tuple[int, ...]] = set()
    moments: tuple[PeakMoment, ...] = ()
    for _ in range(_ROUNDS):
        tried.add(problem.sizes)
        moving = _Moving(candidate, problem, request)
        if (fitting := moving.run()) is not None:
            return fitting
        moments += moving.list_moments()
        assert problem.profile is not None
        options: dict[str, Any] = {"lengths": problem.lengths, "moves": True}
        cut = request.cut(problem.profile, problem.placement, problem.recompute, moments, **options)
        if not cut.fits or cut.sizes in tried:
            return None
        problem = problem.recut(cut.sizes)
    return None


@dataclass(frozen=True)
class _Choice:
    """The treatment of each rank's activations: a share moves, and some ranks recompute."""

    shares: tuple[int, ...]
    """Percentages."""
    recomputed: frozenset[int] = frozenset()
    ahead: int = 1

    def replace_shares(self, shares: Mapping[int, int]) -> _Choice:
        return replace(self, shares=tuple(shares.get(rank, share) for rank, share in enumerate(self.shares)))


@dataclass(frozen=True)
class _Moving:
    """One schedule on one partition."""

    candidate: Candidate
    problem: OffloadProblem
    request: Request

    def run(self) -> Candidate | None:
        choice = self._find_shares()
        if choice is None:
            return None
        best = self._time(choice)
        for other in self._list_variants(choice):
            trial = self._time(other)
            if trial.fits and trial.time_or_inf < best.time_or_inf * (1 - _FASTER):
                best = trial
        return best if best.offloaded else None

    def list_moments(self) -> tuple[PeakMoment, ...]:
        """The peaks of the ranks that are over their limits with everything moved that can be."""
        most = self._choose_most()
        return self._time(most).list_moments(self._list_over(most))

    @property
    def _may_recompute(self) -> bool:
        return self.request.recompute and len(self.problem.placement.copies) == 1

    def _choose_most(self) -> _Choice:
        """Move everything on the ranks that are over their limits, and recompute on those that are so even then."""
        none = _Choice((0,) * self.problem.ranks)
        most = none.replace_shares(dict.fromkeys(self._list_over(none), 100))
        over = self._list_over(most)
        return replace(most, recomputed=frozenset(over)) if over and self._may_recompute else most

    def _find_shares(self) -> _Choice | None:
        """The smallest share of each rank with which it fits, by bisection; None if some rank does not fit with all."""
        choice = self._choose_most()
        if self._list_over(choice):
            return None
        low = {rank: -1 if rank in choice.recomputed else 0 for rank, share in enumerate(choice.shares) if share}
        high = dict.fromkeys(low, 100)
        step = max(1, 100 // (self.problem.cells // self.problem.ranks))
        while open_ranks := [rank for rank in low if high[rank] - low[rank] > step]:
            middle = {rank: (low[rank] + high[rank]) // 2 for rank in open_ranks}
            over = self._list_over(choice.replace_shares(high | middle))
            for rank, share in middle.items():
                (low if rank in over else high)[rank] = share
        choice = choice.replace_shares({rank: 0 if share <= step and low[rank] < 0 else share for rank, share in high.items()})
        return choice if self._time(choice).fits else self._raise_until_fits(choice)

    def _raise_until_fits(self, choice: _Choice) -> _Choice | None:
        """Move more where a rank is over its limit after all: what it holds need not fall evenly with the share."""
        while over := [rank for rank in self._list_over(choice) if choice.shares[rank] < 100]:
            choice = choice.replace_shares({rank: min(choice.shares[rank] + 10, 100) for rank in over})
        return choice if self._time(choice).fits else None

    def _list_variants(self, choice: _Choice) -> Iterator[_Choice]:
        """Other ways to fit: earlier reloads, and recomputing in place of moving on one of the ranks."""
        yield from (replace(choice, ahead=ahead) for ahead in AHEAD[1:])
        if not self._may_recompute:
            return
        for rank in (rank for rank, share in enumerate(choice.shares) if share):
            yield replace(choice.replace_shares({rank: 0}), recomputed=choice.recomputed | {rank})

    def _list_over(self, choice: _Choice) -> list[int]:
        candidate = self._time(choice)
        problem = candidate.problem
        assert isinstance(problem, OffloadProblem)
        return problem.list_over(candidate.timeline)

    def _time(self, choice: _Choice) -> Candidate:
        if choice not in self._timed:
            problem: Problem = self.problem
            assert problem.profile is not None
            if choice.recomputed:
                flags = tuple(
                    again or rank in choice.recomputed for again, rank in zip(problem.recompute, problem.placement.copies[0], strict=True)
                )
                options: dict[str, Any] = {"lengths": problem.lengths, "assignment": problem.assignment}
                problem = self.request.make_problem(problem.profile, problem.placement, problem.sizes, flags, **options)
                problem = OffloadProblem.of(problem, self.request)
            schedule = self.candidate.schedule
            if any(choice.shares):
                schedule = move_activations(schedule, Offload(choice.shares, choice.ahead))
            self._timed[choice] = Candidate.time(self.candidate.name, problem, schedule)
        return self._timed[choice]

    @cached_property
    def _timed(self) -> dict[_Choice, Candidate]:
        return {}
