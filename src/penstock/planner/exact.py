"""The exact solver: the best order of a problem with proof, or the best found and a bound when the budget is spent.

It needs CP-SAT (the `solve` extra). An `Instance` is the problem rounded down to whole numbers, and a `SolverModel` has a start for
every action, one action at a time per rank, messages, memory and spans. A problem and a starting schedule go in; a schedule that
the simulator has timed, and a lower bound, come out.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtraError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.memory_ledger import LIFETIMES, When
from penstock.ir.schedule import Schedule
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.bounds.whole_numbers import floor_units, unit_for
from penstock.planner.budget import SolverBudget, solve_within
from penstock.planner.problem import SLACK, Problem

CLOSE = 1e-6
"""An objective within this share of a bound is optimal: times are rounded to whole numbers for the solver."""
ON_BOUNDS = 0.2
"""Share of the budget that goes into a bound first, which tells the solver earlier that it is done."""
MOST_WORKERS = 8
TIME_STEPS = 2**26
SIZE_STEPS = 2**16
"""Units per largest value, if the values have no common unit."""
MOST_CAUSES = 20_000
"""With more possible causes, ranks may start late in the model."""
MOST_PAIRS = 20_000
"""Pairs of messages per channel whose order is decided one by one; with more, messages may overtake each other in the model."""

Whole = NDArray[np.int64]
Cell = tuple[int, int]
"""A stage and a microbatch."""
Thing = tuple[str, Cell]
"""A forward, or the message that it waits for."""
Cause = tuple[Any, Thing | None]
"""A time at which something may start, and the thing that must be prompt then."""
Done = tuple[int, int, Kind, Cell]
"""A solved action: its start, end, kind, and stage and microbatch."""


@dataclass(frozen=True)
class Solved:
    """The result of the solver. `objective` is the simulated one of `schedule`; `bound` holds even if there is no schedule."""

    schedule: Schedule | None
    objective: float
    bound: float
    proven: bool
    """Whether the schedule is optimal among the orders of single actions."""
    infeasible: bool
    """Whether no schedule fits the memory."""


def solve(
    problem: Problem,
    *,
    seconds: float = math.inf,
    budget: SolverBudget | None = None,
    start: Schedule | None = None,
    workers: int | None = None,
) -> Solved:
    """Search for the optimal order within the budget, starting from `start`.

    With a `budget` that counts work, and one worker, equal runs give equal results. The result is `start` if it fits and
    nothing better was found. Overlapped actions are not searched: if they take less than their sum, nothing is proven.
    """
    if importlib.util.find_spec("ortools") is None:
        raise MissingExtraError("the exact solver", "OR-tools", "solve")
    budget = SolverBudget(seconds) if budget is None else budget
    first = budget.part(ON_BOUNDS)
    bound = lower_bound(problem, budget=first).value
    budget.spend(first.spent)
    if bound == math.inf:
        return Solved(None, math.inf, math.inf, proven=False, infeasible=True)
    search = _ExactSearch(problem, bound, workers or min(MOST_WORKERS, os.cpu_count() or 1))
    if start is not None:
        search.consider(start)
    search.run(budget)
    return search.result()


class _ExactSearch:
    """The best so far, and the solver's runs."""

    def __init__(self, problem: Problem, bound: float, workers: int) -> None:
        self.problem, self.bound, self.workers = problem, bound, workers
        self.instance = Instance.of(problem)
        self.best: Schedule | None = None
        self.objective = math.inf
        self.infeasible = False

    @property
    def proven(self) -> bool:
        return self.objective <= self.bound * (1 + CLOSE)

    def result(self) -> Solved:
        return Solved(self.best, self.objective, min(self.bound, self.objective), self.proven, self.infeasible)

    def consider(self, schedule: Schedule) -> list[float]:
        """Keep the schedule if it is the best that fits; returns each rank's memory over its limit."""
        timeline = self.problem.evaluate(schedule)
        if self.problem.fits(timeline) and self.problem.objective(timeline) < self.objective:
            self.best, self.objective = schedule, self.problem.objective(timeline)
        return [max(0.0, peak - limit) for peak, limit in zip(timeline.peak_memory, self.problem.limits, strict=True)]

    def run(self, budget: SolverBudget) -> None:
        """Solve; if the solution holds more in receive buffers than the model says, solve again with that much less room."""
        less = [0.0] * self.problem.ranks
        while not self.proven and not self.infeasible and not budget.over:
            over = self._solve(less, budget)
            if over is None or not any(over):
                return
            less = [before + more for before, more in zip(less, over, strict=True)]

    def _solve(self, less: list[float], budget: SolverBudget) -> list[float] | None:
        """One run of the solver; None if it found nothing."""
        from ortools.sat.python import cp_model

        whole = not any(less)
        model = SolverModel(self.instance.with_less_room(less), *self._find_range())
        if self.best is not None:
            add_hint(model, self.best)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = self.workers
        status = solve_within(solver, model.cp, budget, budget)
        if status == cp_model.INFEASIBLE:
            self.infeasible = whole and self.best is None
            return None
        if whole and status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN) and self.problem.costs.overlap >= 1:
            self.bound = max(self.bound, solver.best_objective_bound * float(self.instance.time))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return self.consider(build_schedule(self.problem, model.list_done(solver)))

    def _find_range(self) -> tuple[int, int]:
        """The least and the latest possible end, in units."""
        unit, horizon = float(self.instance.time), self.instance.horizon
        least = math.floor(self.bound / unit + CLOSE)
        most = horizon if self.best is None else min(horizon, math.floor(self.objective * (1 + CLOSE) / unit) + 1)
        return min(least, most), most


# In whole numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Instance:
    """Times and sizes in units, all rounded down: anything infeasible here is infeasible. Tables are by stage and microbatch."""

    problem: Problem
    time: Fraction
    size: Fraction
    """The units."""
    f: Whole
    i: Whole
    w: Whole
    b: Whole
    travel: Whole
    travel_back: Whole
    """Times of the message from the stage before, and of the gradient that goes back; 0 within a rank."""
    activation: Whole
    stash: Whole
    output: Whole
    room: tuple[int | None, ...]
    """Memory beyond the parameters; None without a limit."""
    reduce: tuple[int, ...]
    optimizer: tuple[int, ...]
    """By rank."""

    @classmethod
    def of(cls, problem: Problem) -> Instance:
        shape, costs = (problem.stages, problem.microbatches), problem.costs
        times = {name: costs.table(name, *shape) for name in ("f", "i", "w", "b")}
        sizes = {"activation": costs.tabulate_held(*shape)} | {name: costs.table(name, *shape) for name in ("weight_stash", "output")}
        steps, ends = (costs.per_stage(name, problem.stages) for name in ("optimizer", "reduce"))
        time = unit_for([*np.concatenate([*times.values(), *problem.hops]).ravel().tolist(), *steps, *ends], TIME_STEPS)
        size = unit_for(np.concatenate([*sizes.values()]).ravel().tolist(), SIZE_STEPS)
        room = [
            None if limit == math.inf else floor_units(limit * (1 + SLACK) - static, size) if limit * (1 + SLACK) >= static else -1
            for limit, static in zip(problem.limits, problem.static_memory, strict=True)
        ]
        own = costs.per_rank("optimizer", problem.placement).tolist()
        f, i, w, b, up, back = (_round_down(table, time) for table in (*times.values(), *problem.hops))
        activation, stash, output = (_round_down(table, size) for table in sizes.values())
        reduce, optimizer = (tuple(floor_units(value, time) for value in values) for values in (ends, own))
        return cls(problem, time, size, f, i, w, b, up, back, activation, stash, output, tuple(room), reduce, optimizer)

    def with_less_room(self, less: list[float]) -> Instance:
        """The instance with that much less room on each rank."""
        units = [math.ceil(Fraction(size) / self.size) for size in less]
        room = tuple(None if room is None else max(-1, room - taken) for room, taken in zip(self.room, units, strict=True))
        return replace(self, room=room)

    @cached_property
    def ranks(self) -> dict[Cell, int]:
        """The rank of each stage and microbatch, stage by stage."""
        cells = product(range(self.problem.stages), range(self.problem.microbatches))
        return {cell: self.problem.placement.rank_of(*cell) for cell in cells}

    @cached_property
    def horizon(self) -> int:
        """One microbatch after the other takes no longer, and fits if anything does."""
        backward = np.maximum(self.b, self.i + self.w)
        return int((self.f + backward + self.travel + self.travel_back).sum()) + sum(self.reduce) + max(self.optimizer) + 1

    @cached_property
    def classes(self) -> list[list[int]]:
        """Groups of identical microbatches: of one copy of the model, with the same times and sizes on every stage."""
        times = self.f, self.i, self.w, self.b, self.travel, self.travel_back
        tables = np.concatenate([*times, self.activation, self.stash, self.output])
        groups: dict[tuple[int, bytes], list[int]] = {}
        for m in range(self.problem.microbatches):
            key = m % len(self.problem.placement.copies), np.ascontiguousarray(tables[:, m]).tobytes()
            groups.setdefault(key, []).append(m)
        return list(groups.values())

    def may_split(self, cell: Cell) -> bool:
        """Whether an I and a W can be useful; a full backward that takes no longer than the I alone is always better."""
        return self.problem.split and bool(self.b[cell] > self.i[cell])

    def may_join(self, cell: Cell) -> bool:
        """Whether a full backward can be useful, if it may be split: not if I and W take no longer and hold no more."""
        return bool(self.b[cell] < self.i[cell] + self.w[cell] or self.stash[cell] > self.activation[cell])


def _round_down(table: NDArray[np.float64], unit: Fraction) -> Whole:
    return np.array([[floor_units(value, unit) for value in row] for row in table.tolist()], dtype=np.int64)


# The model ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ModelAction:
    """One action; `there` is the literal of an optional one, None if it always runs."""

    start: Any
    end: Any
    takes: int
    there: Any = None


@dataclass(eq=False)
class SolverModel:
    """The CP-SAT model and the meaning of its variables.

    It orders single actions. It is exact except in three ways, in which it allows more than the simulator and so still gives
    lower bounds: a receive buffer counts only while its consumer runs; messages on shared links go in any order; and an action
    of zero time holds nothing while it runs.
    """

    instance: Instance
    least: int
    """A known lower bound of the end."""
    most: int
    cp: Any = field(init=False)
    forward: dict[Cell, ModelAction] = field(default_factory=dict)
    gradient: dict[Cell, ModelAction] = field(default_factory=dict)
    """I or B."""
    weight: dict[Cell, ModelAction] = field(default_factory=dict)
    full: dict[Cell, Any] = field(default_factory=dict)
    """Whether the gradient is a B, if both are possible."""

    def __post_init__(self) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model.CpModel()
        self.end = self.cp.new_int_var(self.least, self.most, "end")
        self._lanes: dict[int, list[Any]] = {rank: [] for rank in range(self.instance.problem.ranks)}
        for cell in self.instance.ranks:
            self._add_actions(cell)
        for lane in self._lanes.values():
            self.cp.add_no_overlap(lane)
        self._add_needs()
        self._add_messages()
        self._order_alike()
        self._add_memory()
        self._add_ends()
        self.cp.minimize(self.end)

    # Actions ----------------------------------------------------------------------------------------------------------

    def _add_actions(self, cell: Cell) -> None:
        one = self.instance
        self.forward[cell] = self._add_action(cell, int(one.f[cell]))
        if not one.may_split(cell):
            self.gradient[cell] = self._add_action(cell, int(one.b[cell]))
        elif not one.may_join(cell):
            self.gradient[cell] = self._add_action(cell, int(one.i[cell]))
            self.weight[cell] = self._add_action(cell, int(one.w[cell]))
        else:
            self._add_either(cell)

    def _add_either(self, cell: Cell) -> None:
        """A backward that is either I and W, or B."""
        one, cp = self.instance, self.cp
        full = self.full[cell] = cp.new_bool_var("full")
        start, end = self.moment(), self.moment()
        for takes, there in ((int(one.i[cell]), full.negated()), (int(one.b[cell]), full)):
            lane = self._lanes[one.ranks[cell]]
            lane.append(cp.new_optional_fixed_size_interval_var(start, takes, there, ""))
            cp.add(end == start + takes).only_enforce_if(there)
        self.gradient[cell] = ModelAction(start, end, int(min(one.i[cell], one.b[cell])))
        self.weight[cell] = self._add_action(cell, int(one.w[cell]), full.negated())

    def _add_action(self, cell: Cell, takes: int, there: Any = None) -> ModelAction:
        start = self.moment()
        lane = self._lanes[self.instance.ranks[cell]]
        if there is None:
            lane.append(self.cp.new_fixed_size_interval_var(start, takes, ""))
        else:
            lane.append(self.cp.new_optional_fixed_size_interval_var(start, takes, there, ""))
        return ModelAction(start, start + takes, takes, there)

    def moment(self) -> Any:
        """A new time variable."""
        return self.cp.new_int_var(0, self.most if self.instance.problem.barrier else self.instance.horizon, "")

    # Precedence -------------------------------------------------------------------------------------------------------

    def _add_needs(self) -> None:
        for cell, forward in self.forward.items():
            gradient = self.gradient[cell]
            self.cp.add(gradient.start >= forward.end)
            if cell in self.weight:
                self._put_before(gradient, self.weight[cell])

    def _put_before(self, one: ModelAction, other: ModelAction) -> None:
        self._add_if(other.start >= one.end, one.there, other.there)

    def _add_if(self, rule: Any, *there: Any) -> None:
        """Add a rule that holds if these optional actions run."""
        added, literals = self.cp.add(rule), [literal for literal in there if literal is not None]
        if literals:
            added.only_enforce_if(literals)

    def _add_messages(self) -> None:
        """Add messages between ranks; data that stays on a rank is there at once."""
        one, messages = self.instance, []
        classes = {m: k for k, alike in enumerate(one.classes) for m in alike}
        for high, up in one.ranks.items():
            low = high[0] - 1, high[1]
            if low not in one.ranks:
                continue
            down = one.ranks[low]
            ends = ((self.forward[low], self.forward[high], down, up), (self.gradient[high], self.gradient[low], up, down))
            takes = int(one.travel[high]), int(one.travel_back[high])
            for backward, (producer, consumer, source, target) in zip((False, True), ends, strict=True):
                if source == target:
                    self._put_before(producer, consumer)
                else:
                    lane = high[0], backward, classes[high[1]]
                    messages.append(Message(producer, consumer, takes[backward], source, target, backward, lane, high))
        self.links = add_links(self, messages)

    def _order_alike(self) -> None:
        """Make identical microbatches pass every stage in the same order.

        In any schedule, rename the k-th of them on each stage, by F, by gradient and by W, to be the k-th: its inputs were
        there, because k + 1 of them were, and times and memory are the same. So no optimum is lost.
        """
        for alike in self.instance.classes:
            for stage in range(self.instance.problem.stages):
                for first, second in pairwise(alike):
                    for doings in (self.forward, self.gradient, self.weight):
                        if (stage, first) in doings:
                            self._put_before(doings[stage, first], doings[stage, second])

    # Memory -----------------------------------------------------------------------------------------------------------

    def _add_memory(self) -> None:
        for rank, room in enumerate(self.instance.room):
            if room is not None:
                self._hold(rank, room)
                self._add_gradient_waits(rank, room)

    def _hold(self, rank: int, room: int) -> None:
        """Limit the memory at any time."""
        one = self.instance
        intervals: list[Any] = []
        sizes: list[int] = []

        def crosses(neighbour: Cell) -> bool:
            """Whether messages of a neighbouring stage come from another rank."""
            return one.ranks.get(neighbour, rank) != rank

        for cell, forward in self.forward.items():
            if one.ranks[cell] != rank:
                continue
            actions = {Kind.F: forward, Kind.I: self.gradient[cell], Kind.W: self.weight.get(cell)}
            held = {
                "activation": int(one.activation[cell]),
                "weight_stash": int(one.stash[cell]),
                "received": int(one.output[cell[0] - 1, cell[1]]) if crosses((cell[0] - 1, cell[1])) else 0,
                "returned": int(one.output[cell]) if crosses((cell[0] + 1, cell[1])) else 0,
            }
            for size, begin, when, end in LIFETIMES:
                first, last = actions[begin], actions[end]
                if held[size] and first is not None and last is not None:
                    intervals.append(self._add_span(first.end if when is When.END else first.start, last.end, last.there))
                    sizes.append(held[size])
        self.cp.add_cumulative(intervals, sizes, room)

    def _add_span(self, start: Any, end: Any, there: Any) -> Any:
        size = self.moment()
        if there is None:
            return self.cp.new_interval_var(start, size, end, "")
        return self.cp.new_optional_interval_var(start, size, end, there, "")

    def _add_gradient_waits(self, rank: int, room: int) -> None:
        """Let forwards wait for earlier gradients of their stage or a later one of the rank (see `bounds.events.list_waits`), for speed."""
        one = self.instance
        for alike in one.classes:
            stages = [stage for stage in range(one.problem.stages) if one.ranks[stage, alike[0]] == rank]
            for at, first in enumerate(stages):
                held = sum(int(one.activation[own, alike[0]]) for own in stages[: at + 1])
                for second in stages[at:] if held else ():
                    more = sum(int(one.activation[own, alike[0]]) for own in stages if first < own <= second)
                    fit = (room - more) // held
                    for before, after in zip(alike, alike[fit:] if fit > 0 else (), strict=False):
                        self._put_before(self.gradient[second, before], self.forward[first, after])

    # Ends -------------------------------------------------------------------------------------------------------------

    def _add_ends(self) -> None:
        one, problem = self.instance, self.instance.problem
        begins = [0] * problem.ranks if problem.barrier else add_begins(self)
        lanes: dict[int, list[Any]] = {}
        last: dict[tuple[int, int], list[ModelAction]] = {}  # per rank and stage, the actions that may be the last
        for cell, doing in [*self.gradient.items(), *self.weight.items()]:
            last.setdefault((one.ranks[cell], cell[0]), []).append(doing)
        for (rank, stage), doings in last.items():
            takes = one.reduce[stage]
            begun = self.moment() if takes else None
            for doing in doings:
                finished = doing.end if begun is None else begun
                if begun is not None:
                    self._put_before(doing, ModelAction(begun, begun + takes, takes))
                self._add_if(self.end >= finished + takes + one.optimizer[rank] - begins[rank], doing.there)
            if begun is not None:
                lanes.setdefault(rank, []).append(self.cp.new_fixed_size_interval_var(begun, takes, ""))
        for lane in lanes.values():
            self.cp.add_no_overlap(lane)

    # A solution -------------------------------------------------------------------------------------------------------

    def list_done(self, solver: Any) -> list[Done]:
        """Every action of a solution."""
        actions = [(forward, Kind.F, cell) for cell, forward in self.forward.items()]
        for cell, gradient in self.gradient.items():
            joined = solver.boolean_value(self.full[cell]) if cell in self.full else cell not in self.weight
            actions.append((gradient, Kind.B if joined else Kind.I, cell))
            if not joined:
                actions.append((self.weight[cell], Kind.W, cell))
        return [(solver.value(doing.start), solver.value(doing.end), kind, cell) for doing, kind, cell in actions]


# Messages -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Message:
    """A message from its producer on one rank to its consumer on another."""

    producer: ModelAction
    consumer: ModelAction
    takes: int
    source: int
    target: int
    backward: bool
    lane: tuple[int, bool, int]
    """Messages of one lane are produced in the order of their microbatches."""
    edge: Cell
    """The higher stage, and the microbatch."""


@dataclass(frozen=True, eq=False)
class MessageLinks:
    """When messages leave if not at the end of their producer, and the other messages on their links."""

    leaves: dict[Message, Any] = field(default_factory=dict)
    forward: dict[Cell, Message] = field(default_factory=dict)
    """The message that a forward waits for."""
    beside: dict[Message, list[Message]] = field(default_factory=dict)


def add_links(model: SolverModel, messages: list[Message]) -> MessageLinks:
    """Let messages arrive after their travel time, and later if their link is busy."""
    links, added = _group_by_link(model, messages), MessageLinks()
    ordered = model.instance.problem.costs.contention == "independent"
    for link in links.values():
        if not ordered or _can_wait(link):
            _share(model, link, added, ordered)
    for message in messages:
        leaves = added.leaves.get(message, message.producer.end)
        model.cp.add(message.consumer.start >= leaves + message.takes)
        if not message.backward:
            added.forward[message.edge] = message
    return added


def _group_by_link(model: SolverModel, messages: list[Message]) -> dict[object, list[Message]]:
    links: dict[object, list[Message]] = {}
    for message in messages:
        for name in model.instance.problem.costs.name_links(message.source, message.target, message.backward):
            links.setdefault(name, []).append(message)
    return links


def _can_wait(link: list[Message]) -> bool:
    """Whether a message may wait for its link: not if each is through before its rank can produce the next."""
    return max(message.takes for message in link) > min(message.producer.takes for message in link)


def _share(model: SolverModel, link: list[Message], links: MessageLinks, ordered: bool) -> None:
    cp, lane = model.cp, []
    for message in link:
        if message not in links.leaves:
            links.leaves[message] = model.moment()
            cp.add(links.leaves[message] >= message.producer.end)
        lane.append(cp.new_fixed_size_interval_var(links.leaves[message], message.takes, ""))
        links.beside.setdefault(message, []).extend(other for other in link if other is not message)
    cp.add_no_overlap(lane)
    if ordered:
        _add_first_come(model, link, links.leaves)


def _add_first_come(model: SolverModel, link: list[Message], leaves: dict[Message, Any]) -> None:
    """Messages leave in the order in which they were produced, which is known in advance within a lane."""
    lanes: dict[object, list[Message]] = {}
    for message in link:
        lanes.setdefault(message.lane, []).append(message)
    for lane in lanes.values():
        for first, second in pairwise(lane):
            model.cp.add(leaves[second] >= leaves[first] + first.takes)
    pairs = [(one, other) for some, others in combinations(lanes.values(), 2) for one in some for other in others]
    for one, other in pairs if len(pairs) <= MOST_PAIRS else []:
        sooner = model.cp.new_bool_var("")
        for first, second, when in ((one, other, sooner), (other, one, sooner.negated())):
            model.cp.add(second.producer.start >= first.producer.end).only_enforce_if(when)
            model.cp.add(leaves[second] >= leaves[first] + first.takes).only_enforce_if(when)


# Spans ----------------------------------------------------------------------------------------------------------------
#
# The simulator starts everything as soon as its order allows. A span counts from the rank's first action, so the model must not
# start that action late to make the span look short: it must be *prompt*. An action is prompt if it starts at 0, or exactly
# when the thing that it waits for ends and that thing is prompt too. Before every rank has begun only forwards run, because a
# gradient comes after its microbatch's forward on every stage; so only forwards and their messages are considered.


def add_begins(model: SolverModel) -> list[Any]:
    """When each rank's first action starts."""
    causes = _list_causes(model)
    few = sum(map(len, causes.values())) <= MOST_CAUSES
    prompt = {thing: model.cp.new_bool_var("") for thing in causes} if few else {}
    for thing, literal in prompt.items():
        start = model.forward[thing[1]].start if thing[0] == "forward" else model.links.leaves[model.links.forward[thing[1]]]
        _require_cause(model, start, literal, causes[thing], prompt)
    return [_begin(model, rank, prompt) for rank in range(model.instance.problem.ranks)]


def _begin(model: SolverModel, rank: int, prompt: dict[Thing, Any]) -> Any:
    first = _list_firsts(model, rank)
    if not first:
        return 0
    begin = model.moment()
    model.cp.add_min_equality(begin, [model.forward[cell].start for cell in first])
    if prompt:
        always = model.cp.new_constant(1)
        _require_cause(model, begin, always, [(model.forward[cell].start, ("forward", cell)) for cell in first], prompt)
    return begin


def _list_firsts(model: SolverModel, rank: int) -> list[Cell]:
    """The forwards that can be the rank's first action: those on the lowest of its stages that their microbatches pass."""
    lowest: dict[int, int] = {}
    for (stage, m), of in model.instance.ranks.items():
        if of == rank:
            lowest.setdefault(m, stage)
    return [(lowest[m], m) for m in sorted(lowest)]


def _require_cause(model: SolverModel, start: Any, literal: Any, causes: list[Cause], prompt: dict[Thing, Any]) -> None:
    """If the literal holds, the start is the time of one of the causes, and the thing behind it is prompt."""
    reasons = []
    for time, thing in causes:
        reason = model.cp.new_bool_var("")
        model.cp.add(start == time).only_enforce_if(reason)
        if thing is not None:
            model.cp.add_implication(reason, prompt[thing])
        reasons.append(reason)
    model.cp.add_bool_or(reasons).only_enforce_if(literal)


def _list_causes(model: SolverModel) -> dict[Thing, list[Cause]]:
    lanes = {m: (k, place) for k, alike in enumerate(model.instance.classes) for place, m in enumerate(alike)}
    causes: dict[Thing, list[Cause]] = {}
    for cell in model.forward:
        before = [other for other in model.forward if other != cell and _may_precede(model, other, cell, lanes)]
        causes["forward", cell] = [*_find_input(model, cell), *((model.forward[other].end, ("forward", other)) for other in before)]
        message = model.links.forward.get(cell)
        if message in model.links.leaves:
            beside = [other for other in model.links.beside[message] if not other.backward]
            queue = [(model.links.leaves[other] + other.takes, ("message", other.edge)) for other in beside]
            causes["message", cell] = [(message.producer.end, ("forward", (cell[0] - 1, cell[1]))), *queue]
    return causes


def _may_precede(model: SolverModel, one: Cell, other: Cell, lanes: dict[int, tuple[int, int]]) -> bool:
    """Whether a forward may run right before another: on the same rank, and among identical microbatches only the previous one."""
    if model.instance.ranks[one] != model.instance.ranks[other]:
        return False
    (kind, place), (other_kind, other_place) = lanes[one[1]], lanes[other[1]]
    return one[0] != other[0] or kind != other_kind or place + 1 == other_place


def _find_input(model: SolverModel, cell: Cell) -> list[Cause]:
    """When the input of the forward is there."""
    if cell[0] == 0:
        return [(0, None)]
    before, message = (cell[0] - 1, cell[1]), model.links.forward.get(cell)
    if message is None:
        return [(model.forward[before].end, ("forward", before))]
    if message in model.links.leaves:
        return [(model.links.leaves[message] + message.takes, ("message", cell))]
    return [(message.producer.end + message.takes, ("forward", before))]


# Schedules ------------------------------------------------------------------------------------------------------------


def build_schedule(problem: Problem, done: list[Done]) -> Schedule:
    """Each rank's actions in the order of the solution; actions of zero time come after their inputs."""
    rows: list[list[Action]] = [[] for _ in range(problem.ranks)]
    for _, _, kind, (stage, m) in sorted(done, key=_place):
        rows[problem.placement.rank_of(stage, m)].append(Action(stage, kind, m))
    return Schedule.from_actions(rows, problem.placement, microbatches=problem.microbatches, name="solved")


def _place(one: Done) -> tuple[int, int, int, int]:
    start, end, kind, (stage, _) = one
    return start, end, (Kind.F, Kind.B, Kind.I, Kind.W).index(kind), stage if kind is Kind.F else -stage


def add_hint(model: SolverModel, schedule: Schedule) -> None:
    """Tell the solver when the schedule's actions start; identical microbatches are renamed to come in order."""
    problem, unit = model.instance.problem, float(model.instance.time)
    timeline = problem.evaluate(schedule)
    starts: dict[Kind, dict[Cell, int]] = {kind: {} for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    for rank in range(problem.ranks):
        for span in timeline.spans(rank):
            for part in span.action.parts:
                starts[part.kind][part.stage, part.microbatch or 0] = round(span.start / unit)
    for alike in model.instance.classes:
        for stage in range(problem.stages):
            cells = [(stage, m) for m in alike]
            for cell, start in zip(cells, sorted(starts[Kind.F][cell] for cell in cells), strict=True):
                model.cp.add_hint(model.forward[cell].start, start)
            _hint_backwards(model, starts, cells)
    model.cp.add_hint(model.end, min(model.most, round(problem.objective(timeline) / unit)))


def _hint_backwards(model: SolverModel, starts: dict[Kind, dict[Cell, int]], cells: list[Cell]) -> None:
    gradients = sorted((start, kind) for kind in (Kind.B, Kind.I) for cell in cells if (start := starts[kind].get(cell)) is not None)
    weights = sorted(start for cell in cells if (start := starts[Kind.W].get(cell)) is not None)
    for cell, (start, kind) in zip(cells, gradients, strict=True):
        model.cp.add_hint(model.gradient[cell].start, start)
        if cell in model.full:
            model.cp.add_hint(model.full[cell], kind is Kind.B)
        if cell in model.weight:
            later = weights.pop(0) if kind is Kind.I and weights else start + int(model.instance.i[cell])
            model.cp.add_hint(model.weight[cell].start, later)
