"""Plans that move activations to host memory: which of them, and where recomputing is better.

A schedule that memory holds back is tried again on evenly cut stages. Each rank that is over its limit moves the smallest share of its
activations with which it fits, those with the longest life first. A rank that does not fit even so recomputes as well, if that is allowed;
and wherever recomputing is faster than copies that do not hide behind the computation, it takes their place. The simulator is the judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.passes.offload import Offload
from penstock.planner.candidate import Candidate
from penstock.planner.problem import SLACK, Problem
from penstock.planner.request import Request
from penstock.simulator.timeline import Timeline
from penstock.verifier.rules.offload import peak_host_memory

SHARES = (25, 50, 75, 100)
"""Percentages of a rank's activations that are tried."""
AHEAD = (1, 2, 3)
"""How many compute actions before its backward an activation is reloaded."""
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
        values: dict[str, Any] = {item.name: getattr(problem, item.name) for item in fields(problem)}
        host = request.host_limits_of(problem.assignment)
        return cls(**{**values, "memory_limit": None}, device_limits=problem.limits, host_limits=host)

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, "offload"

    def recut(self, sizes: tuple[int, ...], lengths: tuple[int, ...] | None = None) -> Problem:
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


def move_activations(schedule: Schedule, offload: Offload) -> Schedule:
    """The schedule with the copies that the pass adds."""
    moved = offload.apply(Program.start(schedule))
    remake = schedule.remake
    changed = Schedule.from_rows(
        moved.rows, schedule.placement, schedule.microbatches, graph=schedule.graph, name=schedule.name, slices=schedule.slices
    )
    changed.options = schedule.options
    changed.remake = None if remake is None else lambda microbatches: move_activations(remake(microbatches), offload)
    return changed


def count_moves(schedule: Schedule) -> int:
    """How many activations a schedule moves to the host."""
    return int(schedule.rows.is_kind(Kind.OFFLOAD).sum())


def is_held_back(candidate: Candidate, request: Request) -> bool:
    """Whether a timed candidate that recomputes nothing does not fit, or only on stages that are cut unevenly."""
    if candidate.timed is None or candidate.recompute or candidate.offloaded or candidate.schedule.slices > 1:
        return False
    return not candidate.fits or all(candidate.sizes != problem.sizes for problem in _make_even_problems(candidate, request))


def _make_even_problems(candidate: Candidate, request: Request) -> Sequence[Problem]:
    problem = candidate.problem
    assert problem.profile is not None
    problems = request.make_problems(problem.profile, problem.placement, problem.recompute)
    return [other for other in problems if other.devices == problem.devices]


def offload(candidate: Candidate, request: Request) -> Candidate | None:
    """The fastest way found to make a candidate fit by moving activations; None if there is none."""
    problems = [*_make_even_problems(candidate, request)[:1], candidate.problem]
    for problem in problems:
        if (fitting := _Moving(candidate, problem, request).run()) is not None:
            return fitting
    return None


@dataclass(frozen=True)
class _Choice:
    """What a plan does with the activations of each rank: a share moves, and some ranks recompute."""

    shares: tuple[int, ...]
    recomputed: frozenset[int] = frozenset()
    ahead: int = 1


@dataclass(frozen=True)
class _Moving:
    """One schedule on one partition."""

    candidate: Candidate
    problem: Problem
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

    def _find_shares(self) -> _Choice | None:
        """The smallest share of each rank with which it fits; ranks that do not fit with any recompute too."""
        ranks = range(self.problem.ranks)
        choice = _Choice((0,) * self.problem.ranks)
        over = self._list_over(choice)
        for _ in range(2):
            for share in SHARES:
                if not over:
                    break
                choice = replace(choice, shares=tuple(share if rank in over else choice.shares[rank] for rank in ranks))
                over = self._list_over(choice)
            if over and self.request.recompute and not choice.recomputed and len(self.problem.placement.copies) == 1:
                choice = replace(choice, recomputed=frozenset(over), shares=tuple(0 if r in over else choice.shares[r] for r in ranks))
                over = self._list_over(choice)
        return choice if not over and self._time(choice).fits else None

    def _list_variants(self, choice: _Choice) -> Iterator[_Choice]:
        """Other ways to fit: earlier reloads, and recomputing in place of moving on one of the ranks."""
        yield from (replace(choice, ahead=ahead) for ahead in AHEAD[1:])
        if not self.request.recompute or len(self.problem.placement.copies) > 1:
            return
        moving = [rank for rank, share in enumerate(choice.shares) if share]
        for rank in moving:
            shares = tuple(0 if other == rank else share for other, share in enumerate(choice.shares))
            yield replace(choice, shares=shares, recomputed=choice.recomputed | {rank})

    def _list_over(self, choice: _Choice) -> list[int]:
        candidate = self._time(choice)
        problem = candidate.problem
        assert isinstance(problem, OffloadProblem)
        return problem.list_over(candidate.timeline)

    def _time(self, choice: _Choice) -> Candidate:
        if choice not in self._timed:
            problem = self.problem
            assert problem.profile is not None
            if choice.recomputed:
                flags = tuple(
                    again or rank in choice.recomputed for again, rank in zip(problem.recompute, problem.placement.copies[0], strict=True)
                )
                problem = self.request.make_problem(problem.profile, problem.placement, problem.sizes, flags, assignment=problem.assignment)
            schedule = self.candidate.schedule
            if any(choice.shares):
                schedule = move_activations(schedule, Offload(choice.shares, choice.ahead))
            timed = Candidate.time(self.candidate.name, OffloadProblem.of(problem, self.request), schedule)
            self._timed[choice] = replace(timed, offloaded=count_moves(schedule))
        return self._timed[choice]

    @cached_property
    def _timed(self) -> dict[_Choice, Candidate]:
        return {}
