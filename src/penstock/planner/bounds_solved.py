"""One rank solved for itself: its actions in one piece each, with lags, heads, tails and memory.

The rules are those of the linear program, whose actions may run in parts. The solver is asked whether the rank can end by a
given time; that it cannot is a bound. Times and sizes are rounded down to whole numbers, which can only make it possible: a
schedule stays one when each start is rounded down too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from penstock.planner.bounds_events import Events, waits
from penstock.planner.bounds_program import Kind, ways
from penstock.planner.bounds_rank import KINDS, Share
from penstock.planner.bounds_terms import Floats
from penstock.planner.effort import Effort, solve_within
from penstock.planner.exact_scale import floored, unit_for

TIME_STEPS = 2**16
SIZE_STEPS = 2**12
FIRST = 0.03
"""How much more than what is known is tried first, as a share of it."""
CLOSE = 1e-4
"""And between what differences nothing more is tried."""

Starts = dict[Kind, list[Any]]
"""The start of the k-th action of each kind."""


@dataclass
class Alone:
    """The best bound of one rank so far, from the one that is known on."""

    share: Share
    value: float
    unit: float | None
    """What all times are multiples of, if anything."""
    effort: Effort

    def __post_init__(self) -> None:
        share = self.share
        self.kinds: list[Kind] = [(at, stage, name) for at, stage in share.parts for name in KINDS]
        self.ways = ways(share)
        self.time = unit_for([*(self._takes(kind) for kind in self.kinds), *(way.lag for way in self.ways)], TIME_STEPS)
        self.size = unit_for([size for at, stage in share.parts for size in self._sizes(at, stage)], SIZE_STEPS)

    def run(self) -> float:
        """Try later and later ends until one is possible or the time is up; then earlier ones again."""
        step, high = FIRST * self.value, math.inf
        while not self.effort.over:
            tried = self._between_units(min(self.value + step, (self.value + high) / 2))
            if not self.value < tried < high or high - self.value < CLOSE * self.value:
                break
            refused = self._refuses(tried)
            if refused:
                self.value, step = tried, 2 * step
            elif refused is None:
                step /= 4
            else:
                high = tried
        return self.value

    def _between_units(self, end: float) -> float:
        """Half a unit after a time that there can be: what is refused there bounds by the next unit."""
        return end if self.unit is None else (math.floor(end / self.unit) + 0.5) * self.unit

    def _refuses(self, end: float) -> bool | None:
        """Whether the rank cannot end by then; None where the solver did not find out with half of the effort that is left."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        starts = self._starts(model, end)
        if starts is None:
            return True
        self._order(model, starts)
        self._hold(model, starts, math.floor(Fraction(end) / self.time) + 1)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        status = solve_within(solver, model, self.effort.part(0.5), self.effort)
        if status == cp_model.INFEASIBLE:
            return True
        return False if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None

    # Its numbers ------------------------------------------------------------------------------------------------------

    def _of(self, kind: Kind, events: tuple[Events, ...]) -> Floats:
        table: Floats = events[kind[0]].of(kind[2])[kind[1]]
        return table

    def _takes(self, kind: Kind) -> float:
        return float(getattr(self.share.lines[kind[0]].least, kind[2])[kind[1], 0])

    def _sizes(self, at: int, stage: int) -> list[float]:
        least = self.share.lines[at].least
        return [float(table[stage, 0]) for table in (least.activation, least.stash, least.received, least.returned)]

    # The rules --------------------------------------------------------------------------------------------------------

    def _starts(self, model: Any, end: float) -> Starts | None:
        """Between the earliest and the latest start; None where that is before it."""
        starts: Starts = {}
        for kind in self.kinds:
            starts[kind] = []
            early, rest = self._of(kind, self.share.early), self._of(kind, self.share.rest)
            for first, follows in zip(early.tolist(), rest.tolist(), strict=True):
                low, high = floored(first, self.time), math.floor(Fraction(end - follows) / self.time)
                if high < low:
                    return None
                starts[kind].append(model.new_int_var(low, high, ""))
        return starts

    def _order(self, model: Any, starts: Starts) -> None:
        lane = []
        for kind, each in starts.items():
            takes = floored(self._takes(kind), self.time)
            lane += [model.new_fixed_size_interval_var(start, takes, "") for start in each]
            for before, after in pairwise(each):
                model.add(after >= before + takes)
        model.add_no_overlap(lane)
        for way in self.ways:
            for before, after in zip(starts[way.before], starts[way.after], strict=True):
                model.add(after >= before + floored(way.lag, self.time))

    def _hold(self, model: Any, starts: Starts, longest: int) -> None:
        if self.share.room == math.inf:
            return
        self._wait(model, starts)
        intervals: list[Any] = []
        sizes: list[int] = []
        for at, stage in self.share.parts:
            forward, gradient, weight = ((at, stage, name) for name in KINDS)
            activation, stash, received, returned = (floored(size, self.size) for size in self._sizes(at, stage))
            takes = {kind: floored(self._takes(kind), self.time) for kind in (forward, gradient, weight)}
            for f, g, w in zip(starts[forward], starts[gradient], starts[weight], strict=True):
                back = g + takes[gradient]
                pieces = [(f, back, activation), (back, w + takes[weight], stash), (f, f + takes[forward], received), (g, back, returned)]
                for start, end, size in pieces:
                    if size:
                        intervals.append(model.new_interval_var(start, model.new_int_var(0, longest, ""), end, ""))
                        sizes.append(size)
        model.add_cumulative(intervals, sizes, floored(self.share.room, self.size))

    def _wait(self, model: Any, starts: Starts) -> None:
        for at, line in enumerate(self.share.lines):
            for wait in waits(self.share.terms, line):
                if line.ranks[wait.forward] == self.share.rank:
                    gradient = (at, wait.gradient, "gradient")
                    takes = floored(self._takes(gradient), self.time)
                    later = starts[at, wait.forward, "forward"][wait.most :]
                    for before, after in zip(starts[gradient], later, strict=False):
                        model.add(after >= before + takes)
