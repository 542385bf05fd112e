"""A linear program for one rank: how its actions can flow through time under lags, capacity and memory.

For each kind of action on each of the rank's stages, S(t) is the number started by time t. In every schedule

- S rises, from 0 when the first can start to all when the last must have started;
- S of what follows is at most S of what it needs, a lag earlier: the way over the other ranks, there and back;
- the rank works one second a second: the time it has spent on a kind by t is the integral of S over the last duration;
- what it holds at t, started forwards less ended gradients and so on, is within its room.

All this is linear. The program samples each S at equal steps and asks whether any S can end by a given time; that none can is
a bound. Between samples S is only known to lie between them, which is used in the direction that keeps the bound valid. The
samples of each kind are shifted so that the lags are whole numbers of steps. Where all times are multiples of the step, every
start is at a sample, and nothing is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.planner.bounds_events import waits
from penstock.planner.bounds_rank import KINDS, Share
from penstock.planner.bounds_terms import Floats
from penstock.planner.effort import Effort

EPSILON = 1e-6
"""Every rule is loosened by so much, so that what the linear solver calls impossible is not so by rounding alone."""

BUILDING, STARTING, ITERATING = 4e-5, 3e-6, 2e-8
"""Seconds of work: to build the program, for each sample; to solve it, for each row; and for each row and iteration."""

Kind = tuple[int, int, str]
"""A line, a stage, and one of `KINDS`."""


@dataclass(frozen=True)
class Way:
    """What of the rank's own must come before what, and how much later it starts at least."""

    before: Kind
    after: Kind
    lag: float


def ways(share: Share) -> list[Way]:
    """The rank's part of each line: up over its forwards, over the top, and down over its gradients; a weight part hangs on each."""
    found: list[Way] = []
    for at in range(len(share.lines)):
        line, mine = share.lines[at].least, [stage for of, stage in share.parts if of == at]
        if not mine:
            continue
        heads, feet, turns = (table[:, 0].tolist() for table in (line.heads, line.feet, line.turns))
        for low, high in pairwise(mine):
            found.append(Way((at, low, "forward"), (at, high, "forward"), heads[high] - heads[low]))
        found.append(Way((at, mine[-1], "forward"), (at, mine[-1], "gradient"), turns[mine[-1]]))
        for high, low in pairwise(mine[::-1]):
            found.append(Way((at, high, "gradient"), (at, low, "gradient"), feet[high] - feet[low]))
        gradient, weight = line.gradient[:, 0].tolist(), line.weight[:, 0].tolist()
        found += [Way((at, own, "gradient"), (at, own, "weight"), gradient[own]) for own in mine if weight[own] > 0]
    return found


@dataclass
class Program:
    """The linear program of one rank for ends up to `longest`, with about that `step`: one that divides the longest round trip."""

    share: Share
    longest: float
    step: float
    unit: float | None = None
    """What all times are multiples of, if anything."""
    effort: Effort = field(default_factory=Effort)
    _solver: Any = field(init=False)

    def __post_init__(self) -> None:
        from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self.ways = ways(self.share)
        self.whole = self.unit is not None and self.step <= self.unit
        self.step = self._step()
        self.steps = math.ceil(self.longest / self.step) + 1
        self.shift = self._shifts()
        self.takes = {kind: self._takes(kind) for kind in self.shift}
        self._columns = {kind: self._samples(kind) for kind in self.shift}
        self._rise()
        self._follow()
        self._work()
        self._hold()
        self.effort.spend(BUILDING * len(self.shift) * (self.steps + 1))

    def can_end_by(self, end: float) -> bool:
        """Whether the rules leave a way to end by then; also where the solver found no answer with the effort that is left."""
        if self.effort.over:
            return True
        for kind, columns in self._columns.items():
            latest = end - self._of(kind, self.share.rest)  # rising: later ones have less to follow
            begun = np.searchsorted(latest, self._moments(kind) + EPSILON * self.step, side="right").tolist()
            for column, least in zip(columns, begun, strict=True):
                if least > column.ub():
                    return False
                column.SetLb(max(0.0, least - EPSILON))
        return self._solve()

    def _solve(self) -> bool:
        rows = self._solver.NumConstraints()
        self._solver.SetTimeLimit(max(1, int(min(self.effort.real_left, 1e6) * 1000)))
        if self.effort.work is not None:
            most = max(1, int(self.effort.left / (ITERATING * rows)))
            self._solver.SetSolverSpecificParametersAsString(f"max_number_of_iterations: {most}")
        feasible = self._solver.Solve() != self._solver.INFEASIBLE
        self.effort.spend(rows * (STARTING + ITERATING * self._solver.iterations()))
        return bool(feasible)

    # What it is made of -----------------------------------------------------------------------------------------------

    def _of(self, kind: Kind, events: Any) -> Floats:
        table: Floats = events[kind[0]].of(kind[2])[kind[1]]
        return table

    def _takes(self, kind: Kind) -> float:
        line, stage, name = kind
        table: Floats = getattr(self.share.lines[line].least, name)
        return float(table[stage, 0])

    def _step(self) -> float:
        if self.unit is not None and self.whole:
            return self.unit
        lines = [(self.share.lines[at].least, stage) for at, stage in self.share.parts]
        trip = max(float(least.turns[stage, 0] + least.gradient[stage, 0]) for least, stage in lines)
        return trip / math.ceil(trip / self.step) if trip > self.step else self.step

    def _shifts(self) -> dict[Kind, float]:
        places: dict[Kind, float] = {}
        for way in self.ways:
            if way.before not in places:
                places[way.before] = float(self._of(way.before, self.share.early)[0])
            places[way.after] = places[way.before] + way.lag
        return {kind: place - math.floor(place / self.step + EPSILON) * self.step for kind, place in places.items()}

    def _samples(self, kind: Kind) -> list[Any]:
        early = self._of(kind, self.share.early)
        most = np.searchsorted(early, self._moments(kind) + EPSILON * self.step, side="right").tolist()
        return [self._solver.NumVar(0.0, float(each), "") for each in most]

    def _moments(self, kind: Kind) -> Floats:
        return np.asarray(self.shift[kind] + np.arange(self.steps + 1) * self.step, dtype=np.float64)

    def _at(self, kind: Kind, index: int) -> Any:
        """A sample; None for what was before the start, which is 0."""
        return None if index < 0 else self._columns[kind][min(index, self.steps)]

    def _from_above(self, kind: Kind, time: float) -> Any:
        return self._at(kind, math.ceil((time - self.shift[kind]) / self.step - EPSILON))

    def _from_below(self, kind: Kind, time: float) -> Any:
        return self._at(kind, math.floor((time - self.shift[kind]) / self.step + EPSILON))

    def _row(self, most: float, terms: list[tuple[float, Any]]) -> None:
        """The sum of the terms is at most that."""
        row = self._solver.Constraint(-self._solver.infinity(), most + EPSILON)
        sums: dict[int, tuple[float, Any]] = {}
        for factor, column in terms:
            if column is not None:
                sums[column.index()] = sums.get(column.index(), (0.0, None))[0] + factor, column
        for factor, column in sums.values():
            row.SetCoefficient(column, factor)

    # The rules --------------------------------------------------------------------------------------------------------

    def _rise(self) -> None:
        for columns in self._columns.values():
            for before, after in pairwise(columns):
                self._row(0.0, [(1.0, before), (-1.0, after)])

    def _follow(self) -> None:
        for way in self.ways:
            for index in range(self.steps + 1):
                moment = self.shift[way.after] + index * self.step
                self._row(0.0, [(1.0, self._at(way.after, index)), (-1.0, self._from_above(way.before, moment - way.lag))])

    def _work(self) -> None:
        """The time spent by each step's end is a column between two sums of samples, and grows by a step at most."""
        before = None
        for index in range(self.steps + 1):
            spent = self._solver.NumVar(0.0, self._solver.infinity(), "")
            least, most = self._spent(index * self.step)
            most = least if self.whole else most
            self._row(0.0, [*least, (-1.0 / self.step, spent)])
            self._row(0.0, [(1.0 / self.step, spent), *((-factor, column) for factor, column in most)])
            self._row(1.0, [(1.0 / self.step, spent), (-1.0 / self.step, before)])
            before = spent

    def _spent(self, moment: float) -> tuple[list[tuple[float, Any]], list[tuple[float, Any]]]:
        """The integral of every S over its last duration, in steps: from the sample before and from the one after."""
        least: list[tuple[float, Any]] = []
        most: list[tuple[float, Any]] = []
        for kind, takes in self.takes.items():
            index = math.ceil((moment - self.shift[kind]) / self.step - EPSILON)
            while (end := self.shift[kind] + index * self.step) > moment - takes + EPSILON * self.step:
                part = (min(moment, end) - max(moment - takes, end - self.step)) / self.step
                least.append((part, self._at(kind, index - 1)))
                most.append((part, self._at(kind, index)))
                index -= 1
        return least, most

    def _hold(self) -> None:
        """What is held whenever a forward may start."""
        room = self.share.room
        if room == math.inf or room <= 0:
            return
        for kind in self._columns:
            if kind[2] == "forward":
                for index in range(self.steps + 1):
                    self._row(1.0, self._held(self.shift[kind] + index * self.step, room))
        for at, line in enumerate(self.share.lines):
            for wait in waits(self.share.terms, line):
                if line.ranks[wait.forward] == self.share.rank:
                    self._wait((at, wait.forward, "forward"), (at, wait.gradient, "gradient"), wait.most)

    def _wait(self, forward: Kind, gradient: Kind, most: int) -> None:
        """So many forwards are ahead of those gradients at most."""
        for index in range(self.steps + 1):
            moment = self.shift[forward] + index * self.step
            ended = self._from_above(gradient, moment - self.takes[gradient])
            self._row(1.0, [(1.0 / most, self._at(forward, index)), (-1.0 / most, ended)])

    def _held(self, moment: float, room: float) -> list[tuple[float, Any]]:
        terms: list[tuple[float, Any]] = []
        for at, stage in self.share.parts:
            least = self.share.lines[at].least
            activation, stash, received, returned = (
                float(table[stage, 0]) / room for table in (least.activation, least.stash, least.received, least.returned)
            )
            forward, gradient, weight = ((at, stage, kind) for kind in KINDS)
            terms.append((activation + received, self._from_below(forward, moment)))
            terms.append((-received, self._from_above(forward, moment - self.takes[forward])))
            terms.append((returned, self._from_below(gradient, moment)))
            terms.append((stash - activation - returned, self._from_above(gradient, moment - self.takes[gradient])))
            if weight in self.takes:
                terms.append((-stash, self._from_above(weight, moment - self.takes[weight])))
        return terms
