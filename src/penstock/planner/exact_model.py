"""The problem as a constraint model: a start for every action, one action at a time on a rank, messages, and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from penstock.ir.kind import Kind
from penstock.planner.exact_instance import Instance

Cell = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(eq=False)
class Doing:
    """One action in the model. `there` says whether it is done at all; None where it always is."""

    start: Any
    end: Any
    takes: int
    there: Any = None


@dataclass(eq=False)
class Model:
    """The model and what its variables mean.

    Its orders are those of single actions. It is exact, but for these, where it allows more than the simulator and so bounds
    from below: a receive buffer counts only while its user runs; on shared links messages go in any order; an action that takes
    no time holds nothing while it does.
    """

    instance: Instance
    least: int
    """No end is earlier, as is known."""
    most: int
    cp: Any = field(init=False)
    forward: dict[Cell, Doing] = field(default_factory=dict)
    gradient: dict[Cell, Doing] = field(default_factory=dict)
    """I or B, whichever it is."""
    weight: dict[Cell, Doing] = field(default_factory=dict)
    full: dict[Cell, Any] = field(default_factory=dict)
    """Whether the gradient is a B, where that is open."""

    def __post_init__(self) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model.CpModel()
        self.end = self.cp.new_int_var(self.least, self.most, "end")
        self._lanes: dict[int, list[Any]] = {rank: [] for rank in range(self.instance.problem.ranks)}
        for stage in range(self.instance.stages):
            for m in range(self.instance.microbatches):
                self._actions((stage, m))
        for lane in self._lanes.values():
            self.cp.add_no_overlap(lane)
        self._needs()
        self._messages()
        self._alike()
        self._memory()
        self._ends()
        self.cp.minimize(self.end)

    # Actions ----------------------------------------------------------------------------------------------------------

    def _actions(self, cell: Cell) -> None:
        one = self.instance
        self.forward[cell] = self._action(cell, int(one.f[cell]))
        if not one.may_split(*cell):
            self.gradient[cell] = self._action(cell, int(one.b[cell]))
        elif not one.may_join(*cell):
            self.gradient[cell] = self._action(cell, int(one.i[cell]))
            self.weight[cell] = self._action(cell, int(one.w[cell]))
        else:
            self._either(cell)

    def _either(self, cell: Cell) -> None:
        """A backward that is I and W or B."""
        one, cp = self.instance, self.cp
        full = self.full[cell] = cp.new_bool_var("full")
        start, end = self.moment(), self.moment()
        for takes, there in ((int(one.i[cell]), full.negated()), (int(one.b[cell]), full)):
            lane = self._lanes[one.ranks[cell[0]][cell[1]]]
            lane.append(cp.new_optional_fixed_size_interval_var(start, takes, there, ""))
            cp.add(end == start + takes).only_enforce_if(there)
        self.gradient[cell] = Doing(start, end, int(min(one.i[cell], one.b[cell])))
        self.weight[cell] = self._action(cell, int(one.w[cell]), full.negated())

    def _action(self, cell: Cell, takes: int, there: Any = None) -> Doing:
        start = self.moment()
        lane = self._lanes[self.instance.ranks[cell[0]][cell[1]]]
        if there is None:
            lane.append(self.cp.new_fixed_size_interval_var(start, takes, ""))
        else:
            lane.append(self.cp.new_optional_fixed_size_interval_var(start, takes, there, ""))
        return Doing(start, start + takes, takes, there)

    def moment(self) -> Any:
        """A time that is to be found."""
        return self.cp.new_int_var(0, self.most if self.instance.problem.barrier else self.instance.horizon, "")

    # What comes before what -------------------------------------------------------------------------------------------

    def _needs(self) -> None:
        for cell, forward in self.forward.items():
            gradient = self.gradient[cell]
            self.cp.add(gradient.start >= forward.end)
            if cell in self.weight:
                self._before(gradient, self.weight[cell])

    def _before(self, one: Doing, other: Doing) -> None:
        rule = self.cp.add(other.start >= one.end)
        there = [doing.there for doing in (one, other) if doing.there is not None]
        if there:
            rule.only_enforce_if(there)

    def _messages(self) -> None:
        """Messages by the link that they occupy; what stays on a rank is there at once."""
        from penstock.planner.exact_links import Message, add_links

        one, messages = self.instance, []
        for stage in range(1, one.stages):
            for m in range(one.microbatches):
                low, high = (stage - 1, m), (stage, m)
                down, up = one.ranks[stage - 1][m], one.ranks[stage][m]
                ends = ((self.forward[low], self.forward[high], down, up), (self.gradient[high], self.gradient[low], up, down))
                for backward, (maker, user, source, target) in enumerate(ends):
                    if source == target:
                        self._before(maker, user)
                    else:
                        takes, lane = int(one.travel[high]), (stage, bool(backward), self._class[m])
                        messages.append(Message(maker, user, takes, source, target, bool(backward), lane, high))
        self.links = add_links(self, messages)

    @cached_property
    def _class(self) -> dict[int, int]:
        return {m: k for k, alike in enumerate(self.instance.classes) for m in alike}

    def _alike(self) -> None:
        """Microbatches that are alike pass every stage in the same order.

        Of any schedule, let the k-th of them on each stage, by F, by gradient and by W, be called the k-th: what each needs
        was there then, for k + 1 of it were; times and memory are the same. So no optimum is lost.
        """
        for alike in self.instance.classes:
            for stage in range(self.instance.stages):
                for first, second in pairwise(alike):
                    for doings in (self.forward, self.gradient, self.weight):
                        if (stage, first) in doings:
                            self._before(doings[stage, first], doings[stage, second])

    # Memory -----------------------------------------------------------------------------------------------------------

    def _memory(self) -> None:
        for rank, room in enumerate(self.instance.room):
            if room is not None:
                self._hold(rank, room)
                self._freed_first(rank, room)

    def _hold(self, rank: int, room: int) -> None:
        """What is held at any time: an activation from F to the gradient's end, a stash from there to the end of W."""
        one = self.instance
        intervals: list[Any] = []
        sizes: list[int] = []
        for cell, forward in self.forward.items():
            if one.ranks[cell[0]][cell[1]] != rank:
                continue
            gradient, held = self.gradient[cell], int(one.activation[cell])
            received = int(one.output[cell[0] - 1, cell[1]]) if self._comes_from_afar(cell, -1) else 0
            returned = int(one.output[cell]) if self._comes_from_afar(cell, 1) else 0
            weight = self.weight.get(cell)
            pieces = [(forward.start, gradient.end, held, None), (forward.start, forward.end, received, None)]
            pieces.append((gradient.start, gradient.end, returned, None))
            if weight is not None:
                pieces.append((gradient.end, weight.end, int(one.stash[cell]), weight.there))
            for start, end, size, there in pieces:
                if size:
                    intervals.append(self._span(start, end, there))
                    sizes.append(size)
        self.cp.add_cumulative(intervals, sizes, room)

    def _span(self, start: Any, end: Any, there: Any) -> Any:
        size = self.moment()
        if there is None:
            return self.cp.new_interval_var(start, size, end, "")
        return self.cp.new_optional_interval_var(start, size, end, there, "")

    def _comes_from_afar(self, cell: Cell, step: int) -> bool:
        stage, m = cell[0] + step, cell[1]
        return 0 <= stage < self.instance.stages and self.instance.ranks[stage][m] != self.instance.ranks[cell[0]][m]

    def _freed_first(self, rank: int, room: int) -> None:
        """Forwards that wait for earlier gradients, of their stage or a later one of the rank: see `bounds_events.waits`; for speed."""
        one = self.instance
        for alike in one.classes:
            mine = [stage for stage in range(one.stages) if one.ranks[stage][alike[0]] == rank]
            for at, first in enumerate(mine):
                each = sum(int(one.activation[own, alike[0]]) for own in mine[: at + 1])
                for second in mine[at:] if each else ():
                    more = sum(int(one.activation[own, alike[0]]) for own in mine if first < own <= second)
                    fit = (room - more) // each
                    for before, after in zip(alike, alike[fit:] if fit > 0 else (), strict=False):
                        self._before(self.gradient[second, before], self.forward[first, after])

    # Ends -------------------------------------------------------------------------------------------------------------

    def _ends(self) -> None:
        from penstock.planner.exact_spans import add_begins

        one, problem = self.instance, self.instance.problem
        begins = [0] * problem.ranks if problem.barrier else add_begins(self)
        lanes: dict[int, list[Any]] = {}
        for (rank, stage), doings in self._last().items():
            takes = one.reduce[stage]
            begun = self.moment() if takes else None
            for doing in doings:
                finished = doing.end if begun is None else begun
                if begun is not None:
                    self._before(doing, Doing(begun, begun + takes, takes))
                self._by_the_end(finished + takes + one.optimizer[rank] - begins[rank], doing.there)
            if begun is not None:
                lanes.setdefault(rank, []).append(self.cp.new_fixed_size_interval_var(begun, takes, ""))
        for lane in lanes.values():
            self.cp.add_no_overlap(lane)

    def _by_the_end(self, time: Any, there: Any) -> None:
        rule = self.cp.add(self.end >= time)
        if there is not None:
            rule.only_enforce_if(there)

    def _last(self) -> dict[Cell, list[Doing]]:
        """For each rank and stage, the actions of which one is the last: gradients and weights."""
        last: dict[Cell, list[Doing]] = {}
        for doings in (self.gradient, self.weight):
            for cell, doing in doings.items():
                last.setdefault((self.instance.ranks[cell[0]][cell[1]], cell[0]), []).append(doing)
        return last

    # A solution -------------------------------------------------------------------------------------------------------

    def done(self, solver: Any) -> list[tuple[int, int, Kind, Cell]]:
        """Every action of a solution: its start, its end, its kind, its stage and microbatch."""
        made = [(forward, Kind.F, cell) for cell, forward in self.forward.items()]
        for cell, gradient in self.gradient.items():
            joined = solver.boolean_value(self.full[cell]) if cell in self.full else cell not in self.weight
            made.append((gradient, Kind.B if joined else Kind.I, cell))
            if not joined:
                made.append((self.weight[cell], Kind.W, cell))
        return [(solver.value(doing.start), solver.value(doing.end), kind, cell) for doing, kind, cell in made]
