"""Schedules on a V that repeat one building block every six slots.

A chunk's F, I and W take a slot each and a full backward two, so that six slots are the work of one microbatch on a rank.
A rank's `Cycle` says which action runs in which of them; the time from its forwards to the ends of their backwards is the memory
it holds. Repeated as it stands a block leaves much of its first and last rounds empty: `Squeeze` starts everything earlier.
Building blocks are the idea of Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.schedules._arrivals import Arrivals
from penstock.schedules.registry import Shape

PERIOD = 6
LENGTH = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
CHANGE = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}
"""How many chunk activations an action adds to those of its rank, counted to W."""

Planned = tuple[Kind, int, int]
"""Kind, chunk, unit."""


@dataclass
class Cycle:
    """The actions of a rank for the first microbatch, each in its slot; each further microbatch is a period later."""

    slots: list[tuple[int, Kind, int]] = field(default_factory=list)
    _taken: set[int] = field(default_factory=set)

    def put(self, kind: Kind, chunk: int, earliest: int) -> int:
        """Take the first slots from `earliest` on that are free in every round; the slot behind them."""
        slot, length = earliest, LENGTH[kind]
        while any((slot + k) % PERIOD in self._taken for k in range(length)):
            slot += 1
        self._taken.update((slot + k) % PERIOD for k in range(length))
        self.slots.append((slot, kind, chunk))
        return slot + length

    def row(self, shape: Shape) -> list[Planned]:
        """All units' actions in order. With slices everything but the forwards is later by as many periods as other slices come first."""
        every = (
            (slot + PERIOD * i, kind, chunk, i)
            if kind is Kind.F
            else (slot + PERIOD * (i + shape.slices - 1), kind, chunk, shape.mirror(i))
            for slot, kind, chunk in self.slots
            for i in range(shape.units)
        )
        return [(kind, chunk, unit) for _, kind, chunk, unit in sorted(every)]


def shortest(cycles: Sequence[Cycle], shape: Shape) -> list[list[int]]:
    """Every rank's row, weight backwards giving way to what others wait for either early or late.

    Which is shorter depends on the number of ranks: early fills the first rounds better, but runs the memory full.
    """
    runs = [Squeeze(cycles, shape, give_way) for give_way in (False, True)]
    return min(runs, key=lambda run: run.makespan).rows


class Squeeze:
    """The cycles repeated and run slot by slot: a rank that would wait takes the next action of its plan that can run.

    Only actions of one slot are taken before their turn, so they delay nothing, and a forward only if the rank
    will not hold more for it than the cycles do. Weight backwards give way once the first chunk has no forward left to
    make room for, or from the start.
    """

    def __init__(self, cycles: Sequence[Cycle], shape: Shape, give_way: bool = False) -> None:
        plans = [cycle.row(shape) for cycle in cycles]
        most = max(max(accumulate(CHANGE[kind] for kind, _, _ in plan)) for plan in plans)
        backward = Kind.I if any(kind is Kind.I for kind, _, _ in plans[0]) else Kind.B
        arrivals = Arrivals(2 * len(plans), shape.units, backward)
        ranks = [_RankQueue((r, 2 * len(plans) - 1 - r), plan, most, give_way) for r, plan in enumerate(plans)]
        now = 0
        while any(rank.plan for rank in ranks):
            for rank in ranks:
                if rank.free <= now:
                    rank.step(now, arrivals)
            now += 1
        self.rows = [rank.row for rank in ranks]
        self.makespan = max(rank.free for rank in ranks)


class _RankQueue:
    """The remaining actions of one rank, those that have run, and the activations held."""

    def __init__(self, stages: tuple[int, int], plan: list[Planned], most: int, give_way: bool) -> None:
        self.stages, self.most, self.give_way = stages, most, give_way
        numbers = {group: number for number, group in enumerate(dict.fromkeys((kind, chunk) for kind, chunk, _ in plan))}
        self.groups = [(kind, chunk, LENGTH[kind] == 1, kind is Kind.F, kind is Kind.W) for kind, chunk in numbers]
        """Kind and chunk, and whether they take one slot, are forwards or weight backwards."""
        self.plan = [(numbers[kind, chunk], CHANGE[kind], unit) for kind, chunk, unit in reversed(plan)]
        """The remaining actions, the next one last: the number of their group, how they change what is held, and their unit."""
        self.row: list[int] = []
        self.free = self.held = 0
        self.first_forwards = sum(kind is Kind.F and chunk == 0 for kind, chunk, _ in plan)

    def step(self, now: int, arrivals: Arrivals) -> None:
        """Run an action now, if one can run."""
        place = self._choose(now, arrivals)
        if place is None:
            return
        group, change, unit = self.plan.pop(place)
        kind, chunk, *_ = self.groups[group]
        self.free = now + LENGTH[kind]
        self.held += change
        self.first_forwards -= kind is Kind.F and chunk == 0
        arrivals.end(kind, self.stages[chunk], unit, self.free)
        self.row.append(codes.pack(chunk, int(kind), unit))

    def _choose(self, now: int, arrivals: Arrivals) -> int | None:
        """The place in the plan, which is kept last action first, of the first one that can and may run."""
        weights_wait = self.give_way or not self.first_forwards
        plan, groups, most = self.plan, self.groups, self.most
        weights, unseen, left, held, peak = None, [True] * len(groups), len(groups), self.held, self.held
        for place in range(len(plan) - 1, -1, -1):
            group, change, unit = plan[place]
            if unseen[group]:  # the others of a kind come after its first
                unseen[group], left = False, left - 1
                kind, chunk, is_short, is_forward, is_weight = groups[group]
                in_turn = is_short or place == len(plan) - 1
                fits = not is_forward or peak < most
                if in_turn and fits and arrivals.at(kind, self.stages[chunk])[unit] <= now:
                    if not is_weight or not weights_wait:
                        return place
                    weights = place if weights is None else weights
                if not left:
                    break
            held += change
            if change > 0:
                peak = max(peak, held)
        return weights
