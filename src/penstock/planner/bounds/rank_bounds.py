"""Bounds that look at one rank alone: its work, what comes before and after, and its memory.

Each takes a `RankTerms` and bounds the objective: the makespan, or the rank's own span, whose times count from the rank's first
action and include nothing of other ranks afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bounds.terms import KINDS, Events, ModelCopy, Terms, find_earliest_starts, find_remaining_times, list_waits

ActionKey = tuple[int, int, str]
"""A copy of the model, a stage, and one of `KINDS`."""


@dataclass(frozen=True, eq=False)
class RankTerms:
    """One rank's part of each copy of the model, with the events that bound its actions."""

    terms: Terms
    rank: int
    copies: tuple[ModelCopy, ...]
    early: tuple[Events, ...]
    """Earliest starts of actions."""
    rest: tuple[Events, ...]
    """Least remaining time from the start of each action."""

    @cached_property
    def room(self) -> float:
        return self.terms.room[self.rank]

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The rank's stages: which copy of the model, and which stage of it."""
        return tuple((at, stage) for at, copy in enumerate(self.copies) for stage in copy.stages_of(self.rank))

    def get_early(self, key: ActionKey) -> Floats:
        return np.asarray(self.early[key[0]][key[2]][key[1]])

    def get_rest(self, key: ActionKey) -> Floats:
        return np.asarray(self.rest[key[0]][key[2]][key[1]])

    def find_least_time(self, key: ActionKey) -> float:
        """The least duration of such an action."""
        return float(getattr(self.copies[key[0]].least, key[2])[key[1], 0])

    def find_least_sizes(self, at: int, stage: int) -> dict[str, float]:
        """The least sizes of what a stage holds, by the names of `ir.memory_ledger.LIFETIMES`."""
        least = self.copies[at].least
        tables = {"activation": least.activation, "weight_stash": least.stash, "received": least.received, "returned": least.returned}
        return {name: float(table[stage, 0]) for name, table in tables.items()}

    def list_waits(self) -> Iterator[tuple[ActionKey, ActionKey, int]]:
        """Forwards of the rank, the gradients that they wait for, and how many forwards may be ahead."""
        for at, copy in enumerate(self.copies):
            for wait in list_waits(self.terms, copy):
                if copy.ranks[wait.forward] == self.rank:
                    yield (at, wait.forward, "forward"), (at, wait.gradient, "gradient"), wait.most

    @cached_property
    def head(self) -> float:
        """Earliest start of the rank."""
        return min(float(self.early[at]["forward"][stage, 0]) for at, stage in self.parts)

    @cached_property
    def after(self) -> float:
        """Least time after the rank's last action."""
        return min(self.terms.after[self.rank][stage] for _, stage in self.parts)

    @cached_property
    def work(self) -> float:
        return sum(float(table[stage].sum()) for at, stage in self.parts for table in _list_times(self.copies[at]))


def list_rank_terms(terms: Terms) -> list[RankTerms]:
    """The terms of every rank with a stage."""
    copies = terms.copies
    held = [rank for rank in range(terms.problem.ranks) if any(rank in copy.ranks for copy in copies)]
    if terms.problem.barrier:
        early, rest = (
            tuple(find_earliest_starts(terms, copy) for copy in copies),
            tuple(find_remaining_times(terms, copy) for copy in copies),
        )
        return [RankTerms(terms, rank, copies, early, rest) for rank in held]
    return [_build_own_span(terms, rank) for rank in held]


def _build_own_span(terms: Terms, rank: int) -> RankTerms:
    """For the span of the rank: its clock starts with its first action, and only its own actions count."""
    copies = tuple(copy for copy in terms.copies if rank in copy.ranks)
    early = tuple(find_earliest_starts(terms, copy, first=copy.ranks.index(rank)) for copy in copies)
    return RankTerms(terms, rank, copies, early, tuple(find_remaining_times(terms, copy, only=rank) for copy in copies))


# The bounds -----------------------------------------------------------------------------------------------------------


def bound_work(rank_terms: RankTerms) -> float:
    """The first microbatch's way to the rank, all work of the rank, and what follows it: a rank does one action at a time."""
    return rank_terms.head + rank_terms.work + rank_terms.after


def bound_chains(rank_terms: RankTerms) -> float:
    """The longest path through the events of the rank: dependencies, messages, one action at a time, and memory to be freed first."""
    keys = [(at, stage, kind) for at, stage in rank_terms.parts for kind in KINDS]
    return max(float((rank_terms.get_early(key) + rank_terms.get_rest(key)).max()) for key in keys)


def bound_one_machine(rank_terms: RankTerms) -> float:
    """All actions of the rank, each with its earliest start and remaining time, on one machine that may interrupt them.

    Interrupting can only help, and then the action with the most to follow always goes first (Jackson's rule).
    """
    bounds = [_list_ranked(rank_terms), _list_labelled(rank_terms)]
    return max(jackson(*(np.concatenate(column) for column in zip(*jobs, strict=True))) for jobs in bounds if jobs)


def bound_first_backward(rank_terms: RankTerms) -> float:
    """The most work that memory allows the rank before the first gradient of one of its stages, then all the rest.

    Until then no memory of the forwards on this stage and earlier ones is freed, so their number is limited, and no later stage
    has seen more microbatches than they have. The best use of the memory is a prefix of the stages: on each microbatch as much
    as can be done by then.
    """
    best = 0.0
    for at, stage in rank_terms.parts:
        stages = tuple(own for copy, own in rank_terms.parts if copy == at)
        others = sum(
            float(table[own].sum()) for copy, own in rank_terms.parts if copy != at for table in _list_times(rank_terms.copies[copy])
        )
        until = float(rank_terms.early[at]["gradient"][stage, 0])
        done = others + _bound_most_before(rank_terms, rank_terms.copies[at], stage, stages)
        best = max(best, until + max(0.0, rank_terms.work - done) + rank_terms.after)
    return best


def bound_holding(rank_terms: RankTerms) -> float:
    """Every activation is held for at least a round trip, and memory is limited: size times time bounds the time.

    Memory fills no faster than forwards run and empties no faster than backwards run, so there is less room at both ends.
    """
    if rank_terms.room == math.inf:
        return 0.0
    needed, filling, emptying, most = 0.0, 0.0, 0.0, 0.0
    for at, stage in rank_terms.parts:
        copy = rank_terms.copies[at]
        activation, stash = copy.activation[stage], copy.stash[stage]
        needed += float((activation * (copy.turns[stage] + copy.gradient[stage]) + stash * copy.weight[stage]).sum())
        most = max(most, float(activation.max()), float(stash.max()))
        filling = max(filling, _find_rate(activation, copy.forward[stage]))
        emptying = max(emptying, _find_rate(activation, copy.gradient[stage]), _find_rate(stash, copy.weight[stage]))
    return rank_terms.head + _solve_least_time(needed, rank_terms.room, most, filling, emptying) + rank_terms.after


# Their parts ----------------------------------------------------------------------------------------------------------


def _list_times(copy: ModelCopy) -> tuple[Floats, Floats, Floats]:
    return copy.forward, copy.gradient, copy.weight


Jobs = list[tuple[Floats, Floats, Floats]]
"""Per group of actions: earliest starts, durations, and least times after their ends."""


def _list_ranked(rank_terms: RankTerms) -> Jobs:
    """The k-th action of each kind, with the least time of any microbatch."""
    jobs: Jobs = []
    for at, stage in rank_terms.parts:
        for key in ((at, stage, kind) for kind in KINDS):
            takes, early, rest = rank_terms.find_least_time(key), rank_terms.get_early(key), rank_terms.get_rest(key)
            jobs.append((early, np.full(len(early), takes), rest - takes))
    return jobs


def _list_labelled(rank_terms: RankTerms) -> Jobs:
    """The actions of each microbatch with its own times; only if they differ, and not for spans."""
    if all(copy.uniform for copy in rank_terms.copies) or not rank_terms.terms.problem.barrier:
        return []
    jobs: Jobs = []
    for at, stage in rank_terms.parts:
        copy, after = rank_terms.copies[at], rank_terms.terms.after
        head, turn = copy.heads[stage], copy.turns[stage]
        ends = [
            copy.feet[stage] - copy.feet[low] + copy.gradient[low] + copy.weight[low] + after[copy.ranks[low]][low]
            for low in range(stage + 1)
        ]
        rest = np.max(ends, axis=0)
        forward, gradient, weight = (table[stage] for table in _list_times(copy))
        jobs.append((head, forward, turn - forward + rest))
        jobs.append((head + turn, gradient, rest - gradient))
        jobs.append((head + turn + gradient, weight, np.full(len(weight), after[rank_terms.rank][stage])))
    return jobs


def jackson(release: Floats, takes: Floats, tail: Floats) -> float:
    """The best end of jobs on one machine that may interrupt them: of the released jobs, the one with the longest tail runs."""
    order = np.argsort(release, kind="stable")
    waiting: list[tuple[float, int]] = []
    left = takes.tolist()
    jobs = [(float(release[job]), int(job)) for job in order]
    clock, end, at = 0.0, -math.inf, 0
    while at < len(jobs) or waiting:
        if not waiting:
            clock = max(clock, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= clock:
            heappush(waiting, (-float(tail[jobs[at][1]]), jobs[at][1]))
            at += 1
        follows, job = waiting[0]
        until = jobs[at][0] if at < len(jobs) else math.inf
        if clock + left[job] <= until:
            clock += left[job]
            end = max(end, clock - follows)
            heappop(waiting)
        else:
            left[job] -= until - clock
            clock = until
    return end


def _bound_most_before(rank_terms: RankTerms, copy: ModelCopy, stage: int, stages: tuple[int, ...]) -> float:
    """The most work of the rank on its stages of this copy before the first gradient of this stage."""
    below = [own for own in stages if own <= stage]
    everything = sum(float(copy.forward[own].sum()) for own in stages)
    everything += sum(float(table[own].sum()) for own in stages if own > stage for table in _list_times(copy)[1:])
    held, value, values = 0.0, 0.0, []
    for own in stages:
        held += float(copy.least.activation[own, 0]) if own <= stage else 0.0
        value += sum(float(table[own].max()) for table in (_list_times(copy) if own > stage else (copy.forward,)))
        values.append((value, held))
    if rank_terms.room == math.inf or not values[0][1]:
        return everything
    if len(below) == 1:
        return min(everything, int(rank_terms.room / held) * value)
    return min(everything, max(value / held for value, held in values) * rank_terms.room)


def _find_rate(sizes: Floats, times: Floats) -> float:
    """The most memory that is taken or freed per time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(sizes > 0, sizes / times, 0.0).max())


def _solve_least_time(needed: float, room: float, most: float, filling: float, emptying: float) -> float:
    """The time until the area below `room` is as large as `needed`, with memory filling from the start and emptying to the end."""
    if needed <= 0:
        return 0.0
    base = min(most, room)
    rise, fall = ((room - base) / rate if rate > 0 else 0.0 for rate in (filling, emptying))
    lost = (rise + fall) * (room - base) / 2
    if needed >= room * (rise + fall) - lost:
        return (needed + lost) / room
    # Never full: a peak at which both slopes meet, of area base x time + height x time / 2.
    slope = (room - base) / (rise + fall)
    return (-base + math.sqrt(base * base + 2 * slope * needed)) / slope
