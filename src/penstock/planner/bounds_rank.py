"""Bounds that look at one rank alone: what it must do, what comes before and after, and what it can hold.

Each takes the terms and a `Share`, and bounds the objective: the makespan, or the rank's own span, for which times count
from the rank's first action and nothing of other ranks need follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from penstock.planner.bounds_events import Events, earliest, remaining
from penstock.planner.bounds_terms import Floats, Line, Terms

KINDS = ("forward", "gradient", "weight")


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of each line, with the events that bound its actions."""

    terms: Terms
    rank: int
    lines: tuple[Line, ...]
    early: tuple[Events, ...]
    """When actions can start at the earliest."""
    rest: tuple[Events, ...]
    """What is left from their start at least."""

    @cached_property
    def room(self) -> float:
        return self.terms.room[self.rank]

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The rank's stages: which line, and which stage of it."""
        return tuple((at, stage) for at, line in enumerate(self.lines) for stage in line.stages_of(self.rank))

    @cached_property
    def head(self) -> float:
        """When the rank can start."""
        return min(float(self.early[at].forward[stage, 0]) for at, stage in self.parts)

    @cached_property
    def after(self) -> float:
        """What follows the rank's last action at least."""
        return min(self.terms.after[self.rank][stage] for _, stage in self.parts)

    @cached_property
    def work(self) -> float:
        return sum(float(table[stage].sum()) for table, stage in self._tables())

    def _tables(self) -> Iterator[tuple[Floats, int]]:
        for at, stage in self.parts:
            line = self.lines[at]
            yield from ((table, stage) for table in (line.forward, line.gradient, line.weight))


def shares(terms: Terms) -> list[Share]:
    """Every rank that has a stage."""
    lines = terms.lines
    held = [rank for rank in range(terms.ranks) if any(rank in line.ranks for line in lines)]
    if terms.problem.barrier:
        early, rest = tuple(earliest(terms, line) for line in lines), tuple(remaining(terms, line) for line in lines)
        return [Share(terms, rank, lines, early, rest) for rank in held]
    return [_alone(terms, rank) for rank in held]


def _alone(terms: Terms, rank: int) -> Share:
    """For the span of the rank: its clock starts with its first action, and only what it does itself counts."""
    lines = tuple(line for line in terms.lines if rank in line.ranks)
    early = tuple(earliest(terms, line, first=line.ranks.index(rank)) for line in lines)
    return Share(terms, rank, lines, early, tuple(remaining(terms, line, only=rank) for line in lines))


# The bounds -----------------------------------------------------------------------------------------------------------


def work(share: Share) -> float:
    """The first microbatch's way to the rank, all that the rank does, and what follows it: a rank does one action at a time."""
    return share.head + share.work + share.after


def chains(share: Share) -> float:
    """The longest way through the events of the rank: dependencies, messages, one at a time, and memory that must be freed first."""
    ways = (early.of(kind)[stage] + rest.of(kind)[stage] for early, rest, stage in _events(share) for kind in KINDS)
    return max(float(way.max()) for way in ways)


def one_machine(share: Share) -> float:
    """All actions of the rank, each with its earliest start and what must follow it, on one machine that may interrupt them.

    Interrupting can only help, and then the action with the most to follow always goes first (Jackson's rule).
    """
    bounds = [_ranked(share), _labelled(share)]
    return max(jackson(*(np.concatenate(column) for column in zip(*jobs, strict=True))) for jobs in bounds if jobs)


def first_backward(share: Share) -> float:
    """What memory lets the rank do before the first gradient of one of its stages, and after that all the rest.

    Until then nothing that its forwards on this stage and on earlier ones took is freed, so their number is limited, and no later
    stage has seen more microbatches than they have. What is best to do with the memory is a prefix of the stages: on each
    microbatch as much as can be done of it by then.
    """
    best = 0.0
    for at, stage in share.parts:
        mine = tuple(own for line, own in share.parts if line == at)
        others = sum(float(table[own].sum()) for line, own in share.parts if line != at for table in _times(share.lines[line]))
        until = float(share.early[at].gradient[stage, 0])
        done = others + _most_before(share, share.lines[at], stage, mine)
        best = max(best, until + max(0.0, share.work - done) + share.after)
    return best


def holding(share: Share) -> float:
    """Every activation is held for a round trip at least, and memory is only so large: size times time bounds the time.

    Memory fills no faster than forwards run and empties no faster than backwards do, so that the ends give less room.
    """
    if share.room == math.inf:
        return 0.0
    needed, filling, emptying, most = 0.0, 0.0, 0.0, 0.0
    for at, stage in share.parts:
        line = share.lines[at]
        activation, stash = line.activation[stage], line.stash[stage]
        needed += float((activation * (line.turns[stage] + line.gradient[stage]) + stash * line.weight[stage]).sum())
        most = max(most, float(activation.max()), float(stash.max()))
        filling = max(filling, _rate(activation, line.forward[stage]))
        emptying = max(emptying, _rate(activation, line.gradient[stage]), _rate(stash, line.weight[stage]))
    return share.head + _least_time(needed, share.room, most, filling, emptying) + share.after


# Their parts ----------------------------------------------------------------------------------------------------------


def _events(share: Share) -> Iterator[tuple[Events, Events, int]]:
    for at, stage in share.parts:
        yield share.early[at], share.rest[at], stage


def _times(line: Line) -> tuple[Floats, Floats, Floats]:
    return line.forward, line.gradient, line.weight


Jobs = list[tuple[Floats, Floats, Floats]]
"""Of each group of actions: the earliest starts, the times and what follows their ends."""


def _ranked(share: Share) -> Jobs:
    """The k-th action of each kind, with the least time of any microbatch."""
    jobs: Jobs = []
    for at, stage in share.parts:
        least = share.lines[at].least
        for kind, table in zip(KINDS, _times(least), strict=True):
            takes = float(table[stage, 0])
            early, rest = share.early[at].of(kind)[stage], share.rest[at].of(kind)[stage]
            jobs.append((early, np.full(len(early), takes), rest - takes))
    return jobs


def _labelled(share: Share) -> Jobs:
    """The actions of each microbatch with its own times; only where they differ and microbatches run through everything."""
    if all(line.uniform for line in share.lines) or not share.terms.problem.barrier:
        return []
    jobs: Jobs = []
    for at, stage in share.parts:
        line, after = share.lines[at], share.terms.after
        head, turn = line.heads[stage], line.turns[stage]
        ends = [
            line.feet[stage] - line.feet[low] + line.gradient[low] + line.weight[low] + after[line.ranks[low]][low]
            for low in range(stage + 1)
        ]
        rest = np.max(ends, axis=0)
        forward, gradient, weight = (table[stage] for table in _times(line))
        jobs.append((head, forward, turn - forward + rest))
        jobs.append((head + turn, gradient, rest - gradient))
        jobs.append((head + turn + gradient, weight, np.full(len(weight), after[share.rank][stage])))
    return jobs


def jackson(release: Floats, takes: Floats, tail: Floats) -> float:
    """The best end of jobs on one machine that may interrupt them: of those there, the one with the longest tail runs."""
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


def _most_before(share: Share, line: Line, stage: int, mine: tuple[int, ...]) -> float:
    """The most that the rank can do on its stages of this line before the first gradient of this stage."""
    holding = [own for own in mine if own <= stage]
    everything = sum(float(line.forward[own].sum()) for own in mine)
    everything += sum(float(table[own].sum()) for own in mine if own > stage for table in _times(line)[1:])
    held, value, values = 0.0, 0.0, []
    for own in mine:
        held += float(line.least.activation[own, 0]) if own <= stage else 0.0
        value += sum(float(table[own].max()) for table in (_times(line) if own > stage else (line.forward,)))
        values.append((value, held))
    if share.room == math.inf or not values[0][1]:
        return everything
    if len(holding) == 1:
        return min(everything, int(share.room / held) * value)
    return min(everything, max(value / held for value, held in values) * share.room)


def _rate(sizes: Floats, times: Floats) -> float:
    """The most that is taken or freed in a time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(sizes > 0, sizes / times, 0.0).max())


def _least_time(needed: float, room: float, most: float, filling: float, emptying: float) -> float:
    """How long until an area as large as needed is under `room`, under what fills from the start and what empties to the end."""
    if needed <= 0:
        return 0.0
    base = min(most, room)
    rise, fall = ((room - base) / rate if rate > 0 else 0.0 for rate in (filling, emptying))
    lost = (rise + fall) * (room - base) / 2
    if needed >= room * (rise + fall) - lost:
        return (needed + lost) / room
    # Never full: a peak where both slopes meet, of area base x time + height x time / 2.
    slope = (room - base) / (rise + fall)
    return (-base + math.sqrt(base * base + 2 * slope * needed)) / slope
