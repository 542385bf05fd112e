"""Bounds that need OR-tools: linear programs, and CP-SAT on one rank.

A linear program tells how the actions of one rank can flow through time under lags, capacity and memory.
For each kind of action on each of the rank's stages, S(t) is the number started by time t. In every schedule

- S rises, from 0 when the first action can start to all when the last must have started;
- S of an action is at most S of the action that it needs, a lag earlier: the way over the other ranks, there and back;
- the rank works one second per second: the time spent on a kind by t is the integral of S over the last duration;
- the memory held at t, started forwards less ended gradients and so on, is within the room.

All this is linear. The linear program samples each S at equal steps and asks whether any S can end by a given time; if none
can, that time is a bound. Between samples S is only known to lie between them, which is used in the direction that keeps the
bound valid. The samples of each kind are shifted so that the lags are whole numbers of steps. If all times are multiples of the
step, every start is at a sample, and nothing is lost.

CP-SAT knows the same rules, but its actions run in one piece each. It is asked whether the rank can end by a given time; if it
cannot, that time is a bound. Times and sizes are rounded down to whole numbers, which keeps every schedule possible: its starts
can be rounded down too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.ir.memory_ledger import LIFETIMES, When, net_changes
from penstock.ir.rows import Floats
from penstock.planner.bounds.rank_bounds import ActionKey, RankTerms
from penstock.planner.bounds.terms import KINDS, NAMES
from penstock.planner.bounds.whole_numbers import floor_units, unit_for
from penstock.planner.budget import SolverBudget, solve_within

EPSILON = 1e-6
"""Every rule is loosened by this much, so that nothing is infeasible by rounding alone."""

STEPS = (60, 120, 200, 300, 450, 700)
"""Steps per bounded time, finer and finer."""
CLOSELY = 2
"""Ranks that are refined further, those with the largest gains."""
MORE = 4
"""About how much more work the next number of steps takes."""
FINE = 16
"""Bounds are found to within this fraction of a step."""


BUILDING, STARTING, ITERATING = 4e-5, 3e-6, 2e-8
"""Seconds of work: to build the program, per sample; to solve it, per row; and per row and iteration."""
TIME_STEPS = 2**16
SIZE_STEPS = 2**12
FIRST = 0.03
"""The first step above the known bound, as a share of it."""
CLOSE = 1e-4
"""The search stops at this relative difference."""


@dataclass(frozen=True)
class Precedence:
    """Two kinds of actions of the rank in their order, and the least time between their starts."""

    before: ActionKey
    after: ActionKey
    lag: float


def list_precedences(rank_terms: RankTerms) -> list[Precedence]:
    """The rank's part of each copy: up over its forwards, down over its gradients, and a weight part after each gradient."""
    order: list[Precedence] = []
    for at in range(len(rank_terms.copies)):
        copy, stages = rank_terms.copies[at].least, [stage for of, stage in rank_terms.parts if of == at]
        if not stages:
            continue
        heads, feet, turns = (table[:, 0].tolist() for table in (copy.heads, copy.feet, copy.turns))
        for low, high in pairwise(stages):
            order.append(Precedence((at, low, "forward"), (at, high, "forward"), heads[high] - heads[low]))
        order.append(Precedence((at, stages[-1], "forward"), (at, stages[-1], "gradient"), turns[stages[-1]]))
        for high, low in pairwise(stages[::-1]):
            order.append(Precedence((at, high, "gradient"), (at, low, "gradient"), feet[high] - feet[low]))
        gradient, weight = copy.gradient[:, 0].tolist(), copy.weight[:, 0].tolist()
        order += [Precedence((at, own, "gradient"), (at, own, "weight"), gradient[own]) for own in stages if weight[own] > 0]
    return order


@dataclass
class LinearProgram:
    """The linear program of one rank for ends up to `longest`, with about that `step`; the exact step divides the longest round trip."""

    rank_terms: RankTerms
    longest: float
    step: float
    unit: float | None = None
    """The unit that all times are multiples of, if there is one."""
    budget: SolverBudget = field(default_factory=SolverBudget)
    _solver: Any = field(init=False)

    def __post_init__(self) -> None:
        from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self.order = list_precedences(self.rank_terms)
        self.whole = self.unit is not None and self.step <= self.unit
        self.step = self._step()
        self.steps = math.ceil(self.longest / self.step) + 1
        self.shift = self._find_shifts()
        self.takes = {kind: self.rank_terms.find_least_time(kind) for kind in self.shift}
        self._columns = {kind: self._make_samples(kind) for kind in self.shift}
        self._add_rise()
        self._follow()
        self._work()
        self._hold()
        self.budget.spend(BUILDING * len(self.shift) * (self.steps + 1))

    def can_end_by(self, end: float) -> bool:
        """Whether the rank may end by then; also True if the solver runs out of budget."""
        if self.budget.over:
            return True
        for kind, columns in self._columns.items():
            latest = end - self.rank_terms.get_rest(kind)  # rising: later actions have less to follow
            begun = np.searchsorted(latest, self._list_moments(kind) + EPSILON * self.step, side="right").tolist()
            for column, least in zip(columns, begun, strict=True):
                if least > column.ub():
                    return False
                column.SetLb(max(0.0, least - EPSILON))
        return self._solve()

    def _solve(self) -> bool:
        rows = self._solver.NumConstraints()
        self._solver.SetTimeLimit(max(1, int(min(self.budget.real_left, 1e6) * 1000)))
        if self.budget.work is not None:
            most = max(1, int(self.budget.left / (ITERATING * rows)))
            self._solver.SetSolverSpecificParametersAsString(f"max_number_of_iterations: {most}")
        feasible = self._solver.Solve() != self._solver.INFEASIBLE
        self.budget.spend(rows * (STARTING + ITERATING * self._solver.iterations()))
        return bool(feasible)

    # Columns ----------------------------------------------------------------------------------------------------------

    def _step(self) -> float:
        if self.unit is not None and self.whole:
            return self.unit
        copies = [(self.rank_terms.copies[at].least, stage) for at, stage in self.rank_terms.parts]
        trip = max(float(least.turns[stage, 0] + least.gradient[stage, 0]) for least, stage in copies)
        return trip / math.ceil(trip / self.step) if trip > self.step else self.step

    def _find_shifts(self) -> dict[ActionKey, float]:
        places: dict[ActionKey, float] = {}
        for pair in self.order:
            if pair.before not in places:
                places[pair.before] = float(self.rank_terms.get_early(pair.before)[0])
            places[pair.after] = places[pair.before] + pair.lag
        return {kind: place - math.floor(place / self.step + EPSILON) * self.step for kind, place in places.items()}

    def _make_samples(self, kind: ActionKey) -> list[Any]:
        early = self.rank_terms.get_early(kind)
        most = np.searchsorted(early, self._list_moments(kind) + EPSILON * self.step, side="right").tolist()
        return [self._solver.NumVar(0.0, float(count), "") for count in most]

    def _list_moments(self, kind: ActionKey) -> Floats:
        return np.asarray(self.shift[kind] + np.arange(self.steps + 1) * self.step, dtype=np.float64)

    def _get_sample(self, kind: ActionKey, index: int) -> Any:
        """A sample; None before the start, when S is 0."""
        return None if index < 0 else self._columns[kind][min(index, self.steps)]

    def _sample_from_above(self, kind: ActionKey, time: float) -> Any:
        return self._get_sample(kind, math.ceil((time - self.shift[kind]) / self.step - EPSILON))

    def _sample_from_below(self, kind: ActionKey, time: float) -> Any:
        return self._get_sample(kind, math.floor((time - self.shift[kind]) / self.step + EPSILON))

    def _add_row(self, most: float, terms: list[tuple[float, Any]]) -> None:
        """Add the rule that the sum of the terms is at most `most`."""
        row = self._solver.Constraint(-self._solver.infinity(), most + EPSILON)
        sums: dict[int, tuple[float, Any]] = {}
        for factor, column in terms:
            if column is not None:
                sums[column.index()] = sums.get(column.index(), (0.0, None))[0] + factor, column
        for factor, column in sums.values():
            row.SetCoefficient(column, factor)

    # The rules --------------------------------------------------------------------------------------------------------

    def _add_rise(self) -> None:
        for columns in self._columns.values():
            for before, after in pairwise(columns):
                self._add_row(0.0, [(1.0, before), (-1.0, after)])

    def _follow(self) -> None:
        for pair in self.order:
            for index in range(self.steps + 1):
                moment = self.shift[pair.after] + index * self.step
                self._add_row(
                    0.0, [(1.0, self._get_sample(pair.after, index)), (-1.0, self._sample_from_above(pair.before, moment - pair.lag))]
                )

    def _work(self) -> None:
        """The time spent by each step's end is a column between two sums of samples, and grows by a step at most."""
        before = None
        for index in range(self.steps + 1):
            spent = self._solver.NumVar(0.0, self._solver.infinity(), "")
            least, most = self._integrate_spent(index * self.step)
            most = least if self.whole else most
            self._add_row(0.0, [*least, (-1.0 / self.step, spent)])
            self._add_row(0.0, [(1.0 / self.step, spent), *((-factor, column) for factor, column in most)])
            self._add_row(1.0, [(1.0 / self.step, spent), (-1.0 / self.step, before)])
            before = spent

    def _integrate_spent(self, moment: float) -> tuple[list[tuple[float, Any]], list[tuple[float, Any]]]:
        """The integral of every S over its last duration, in steps: from the sample before and from the one after."""
        least: list[tuple[float, Any]] = []
        most: list[tuple[float, Any]] = []
        for kind, takes in self.takes.items():
            index = math.ceil((moment - self.shift[kind]) / self.step - EPSILON)
            while (end := self.shift[kind] + index * self.step) > moment - takes + EPSILON * self.step:
                part = (min(moment, end) - max(moment - takes, end - self.step)) / self.step
                least.append((part, self._get_sample(kind, index - 1)))
                most.append((part, self._get_sample(kind, index)))
                index -= 1
        return least, most

    def _hold(self) -> None:
        """Memory whenever a forward may start."""
        room = self.rank_terms.room
        if room == math.inf or room <= 0:
            return
        for kind in self._columns:
            if kind[2] == "forward":
                for index in range(self.steps + 1):
                    self._add_row(1.0, self._sum_held(self.shift[kind] + index * self.step, room))
        for forward, gradient, most in self.rank_terms.list_waits():
            self._wait(forward, gradient, most)

    def _wait(self, forward: ActionKey, gradient: ActionKey, most: int) -> None:
        """At most `most` forwards are ahead of the gradients."""
        for index in range(self.steps + 1):
            moment = self.shift[forward] + index * self.step
            ended = self._sample_from_above(gradient, moment - self.takes[gradient])
            self._add_row(1.0, [(1.0 / most, self._get_sample(forward, index)), (-1.0 / most, ended)])

    def _sum_held(self, moment: float, room: float) -> list[tuple[float, Any]]:
        terms: list[tuple[float, Any]] = []
        for at, stage in self.rank_terms.parts:
            sizes = {name: size / room for name, size in self.rank_terms.find_least_sizes(at, stage).items()}
            for (kind, when), size in net_changes(LIFETIMES, sizes).items():
                key = (at, stage, NAMES[kind])
                if when is When.START:
                    terms.append((size, self._sample_from_below(key, moment)))
                elif key in self.takes:  # no stage gains memory at the end of an action: the stash is no larger than the activation
                    terms.append((size, self._sample_from_above(key, moment - self.takes[key])))
        return terms


@dataclass
class FlowBound:
    """Raises a known bound by the linear programs of the ranks."""

    ranks: list[RankTerms]
    value: float
    unit: float | None
    """The unit that all times are multiples of, if there is one."""
    budget: SolverBudget

    def __post_init__(self) -> None:
        self.best = self.ranks[-1]
        """The rank that the bound comes from; the last one until a rank has gained something."""

    def run(self) -> float:
        """Refine until the budget is spent or nothing is left to gain."""
        ranks = [rank_terms for pair in zip(self.ranks[::-1], self.ranks, strict=True) for rank_terms in pair][: len(self.ranks)]
        for steps in STEPS:
            before = self.budget.used
            gains = {rank_terms.rank: self._raise_for(rank_terms, self.value / steps) for rank_terms in ranks}
            whole = self.unit is not None and self.value <= self.unit * steps
            if whole or MORE * (self.budget.used - before) / len(ranks) >= self.budget.left:
                break
            if any(gains.values()):
                ranks = sorted(ranks, key=lambda rank_terms: -gains[rank_terms.rank])[:CLOSELY]
        return self.value

    def _raise_for(self, rank_terms: RankTerms, step: float) -> float:
        """Raise the value to the earliest end that the rank's linear program allows; returns it, or 0 if it did not rise."""
        before, ahead = self.value, 4 * step
        while not self.budget.over:
            program = LinearProgram(rank_terms, self.value + ahead, step, self.unit, self.budget)
            grain = program.step if program.whole else program.step / FINE
            most = max(1, int(ahead / grain))
            refused = self._count_refused(program, grain, most)
            # The end is later than the last refused one, by at least a unit if all times are whole.
            self.value += grain * (refused if program.whole else max(0, refused - 1))
            if refused < most:
                break
            ahead *= 3
        if self.value > before:
            self.best = rank_terms
        return self.value if self.value > before else 0.0

    def _count_refused(self, program: LinearProgram, grain: float, most: int) -> int:
        """How many of `most` ends, each a grain later, the linear program refuses, by bisection."""
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2 if low else 0
            if program.can_end_by(self.value + middle * grain):
                high = middle
            else:
                low = middle + 1
        return low


Starts = dict[ActionKey, list[Any]]
"""Start variables of the k-th action of each kind."""


@dataclass
class OneRankSolver:
    """Raises a known bound by solving one rank exactly."""

    rank_terms: RankTerms
    value: float
    unit: float | None
    """The unit that all times are multiples of, if there is one."""
    budget: SolverBudget

    def __post_init__(self) -> None:
        rank_terms = self.rank_terms
        self.kinds: list[ActionKey] = [(at, stage, name) for at, stage in rank_terms.parts for name in KINDS]
        self.order = list_precedences(rank_terms)
        self.time = unit_for(
            [*(self.rank_terms.find_least_time(kind) for kind in self.kinds), *(pair.lag for pair in self.order)], TIME_STEPS
        )
        self.size = unit_for(
            [size for at, stage in rank_terms.parts for size in rank_terms.find_least_sizes(at, stage).values()], SIZE_STEPS
        )

    def run(self) -> float:
        """Try later ends until one is possible or the budget is spent; then bisect."""
        step, high = FIRST * self.value, math.inf
        while not self.budget.over:
            tried = self._move_between_units(min(self.value + step, (self.value + high) / 2))
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

    def _move_between_units(self, end: float) -> float:
        """Half a unit after a possible time: if it is refused, the next unit is a bound."""
        return end if self.unit is None else (math.floor(end / self.unit) + 0.5) * self.unit

    def _refuses(self, end: float) -> bool | None:
        """Whether the rank cannot end by then; None if half of the remaining budget did not suffice."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        starts = self._starts(model, end)
        if starts is None:
            return True
        self._order(model, starts)
        self._hold(model, starts, math.floor(Fraction(end) / self.time) + 1)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        status = solve_within(solver, model, self.budget.part(0.5), self.budget)
        if status == cp_model.INFEASIBLE:
            return True
        return False if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None

    # The rules --------------------------------------------------------------------------------------------------------

    def _starts(self, model: Any, end: float) -> Starts | None:
        """Start variables between the earliest and the latest start; None if a latest start is before the earliest."""
        starts: Starts = {}
        for kind in self.kinds:
            starts[kind] = []
            early, rest = self.rank_terms.get_early(kind), self.rank_terms.get_rest(kind)
            for first, follows in zip(early.tolist(), rest.tolist(), strict=True):
                low, high = floor_units(first, self.time), math.floor(Fraction(end - follows) / self.time)
                if high < low:
                    return None
                starts[kind].append(model.new_int_var(low, high, ""))
        return starts

    def _order(self, model: Any, starts: Starts) -> None:
        lane = []
        for kind, own in starts.items():
            takes = floor_units(self.rank_terms.find_least_time(kind), self.time)
            lane += [model.new_fixed_size_interval_var(start, takes, "") for start in own]
            for before, after in pairwise(own):
                model.add(after >= before + takes)
        model.add_no_overlap(lane)
        for pair in self.order:
            for before, after in zip(starts[pair.before], starts[pair.after], strict=True):
                model.add(after >= before + floor_units(pair.lag, self.time))

    def _hold(self, model: Any, starts: Starts, longest: int) -> None:
        if self.rank_terms.room == math.inf:
            return
        for forward, gradient, most in self.rank_terms.list_waits():
            takes_gradient = floor_units(self.rank_terms.find_least_time(gradient), self.time)
            for before, after in zip(starts[gradient], starts[forward][most:], strict=False):
                model.add(after >= before + takes_gradient)
        intervals: list[Any] = []
        sizes: list[int] = []
        for at, stage in self.rank_terms.parts:
            held = {name: floor_units(size, self.size) for name, size in self.rank_terms.find_least_sizes(at, stage).items()}
            keys = {kind: (at, stage, name) for kind, name in NAMES.items()}
            takes = {kind: floor_units(self.rank_terms.find_least_time(key), self.time) for kind, key in keys.items()}
            for own in zip(*(starts[key] for key in keys.values()), strict=True):
                begins = dict(zip(keys, own, strict=True))
                for size, begin, when, end in LIFETIMES:
                    if held[size]:
                        start = begins[begin] + (takes[begin] if when is When.END else 0)
                        length = model.new_int_var(0, longest, "")
                        intervals.append(model.new_interval_var(start, length, begins[end] + takes[end], ""))
                        sizes.append(held[size])
        model.add_cumulative(intervals, sizes, floor_units(self.rank_terms.room, self.size))
