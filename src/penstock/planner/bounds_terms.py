"""What every bound reads of a problem: times and sizes that no schedule can undercut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.planner.problem import SLACK, Problem

Floats = NDArray[np.float64]

MOST_SUMS = 20_000


@dataclass(frozen=True, eq=False)
class Line:
    """The stages that the microbatches of one copy run through. Tables have a row a stage and a column a microbatch.

    Every backward counts as a gradient followed by a weight part, which undercuts all that a schedule may do: a full
    backward has the weight part inside it and holds its activation throughout, so where it may be chosen the gradient takes
    the lesser of the two times, both parts no more than it, and the stash no more than the activation.
    """

    ranks: tuple[int, ...]
    forward: Floats
    gradient: Floats
    weight: Floats
    """Zero where nothing is left to do after the gradient."""
    travel: Floats
    """Of a message between a stage and the one before it; zero for the first stage and within a rank."""
    activation: Floats
    stash: Floats
    received: Floats
    """What a forward has received and holds while it runs."""
    returned: Floats
    """The same of a gradient."""

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def count(self) -> int:
        """How many microbatches."""
        return int(self.forward.shape[1])

    @cached_property
    def uniform(self) -> bool:
        """Whether all microbatches are alike."""
        return all(bool((table == table[:, :1]).all()) for table in (self.forward, self.gradient, self.weight, self.travel))

    @cached_property
    def least(self) -> Line:
        """The least over the microbatches, in a single column."""
        tables = (self.forward, self.gradient, self.weight, self.travel, self.activation, self.stash, self.received, self.returned)
        return Line(self.ranks, *(table.min(axis=1, keepdims=True) for table in tables))

    @cached_property
    def heads(self) -> Floats:
        """When each forward can start at the earliest, counted from its microbatch's first."""
        heads = np.zeros_like(self.forward)
        heads[1:] = np.cumsum(self.forward[:-1] + self.travel[1:], axis=0)
        return heads

    @cached_property
    def feet(self) -> Floats:
        """From the start of each gradient to that of its microbatch's last."""
        feet = np.zeros_like(self.forward)
        feet[1:] = np.cumsum(self.gradient[1:] + self.travel[1:], axis=0)
        return feet

    @cached_property
    def turns(self) -> Floats:
        """From the start of each forward to the start of its gradient, there and back."""
        top = self.heads[-1] + self.forward[-1] - self.heads
        return np.asarray(top + self.feet[-1] - self.feet, dtype=np.float64)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, of in enumerate(self.ranks) if of == rank)


@dataclass(frozen=True, eq=False)
class Terms:
    """A problem for its bounds: a line for each copy of the model."""

    problem: Problem
    lines: tuple[Line, ...]
    after: tuple[tuple[float, ...], ...]
    """What follows a stage's last action on a rank, by rank and stage: reducing its gradients, and the optimizer's step."""
    room: tuple[float, ...]
    """What each rank can hold on top of its parameters, slack included: the most that sizes can add up to within the limit."""

    @classmethod
    def of(cls, problem: Problem) -> Terms:
        room = tuple(
            limit * (1 + 2 * SLACK) - kept if limit < math.inf else limit
            for limit, kept in zip(problem.limits, problem.static_memory, strict=True)
        )
        lines = _lines(problem)
        return cls(problem, lines, _after(problem), tuple(_usable(lines, rank, each) for rank, each in enumerate(room)))

    @property
    def ranks(self) -> int:
        return self.problem.ranks


def _after(problem: Problem) -> tuple[tuple[float, ...], ...]:
    reduce, step = (problem.costs.per_stage(name, problem.stages) for name in ("reduce", "optimizer"))
    steps = [sum(step[stage] for stage in problem.placement.stages_of(rank)) for rank in range(problem.ranks)]
    return tuple(tuple(each + steps[rank] for each in reduce) for rank in range(problem.ranks))


def _lines(problem: Problem) -> tuple[Line, ...]:
    copies = problem.placement.copies
    tables = _tables(problem)
    made = []
    for copy, ranks in enumerate(copies):
        if copy >= problem.microbatches:
            break
        made.append(_line(ranks, *(np.ascontiguousarray(table[:, copy :: len(copies)]) for table in tables)))
    return tuple(made)


def _tables(problem: Problem) -> tuple[Floats, ...]:
    """Forward, gradient, weight, travel, activation, stash and output, before any rank is looked at."""
    costs, shape = problem.costs, (problem.stages, problem.microbatches)
    f, i, w, b, activation, stash, output = (
        costs.table(name, *shape) for name in ("f", "i", "w", "b", "activation", "weight_stash", "output")
    )
    together = min(1.0, costs.overlap)  # overlapped actions take that share of their sum, and none takes less
    gradient = np.minimum(i, b) if problem.split else b
    weight = np.minimum(i + w, b) - gradient if problem.split else np.zeros(shape)
    travel = costs.latency + (output / costs.bandwidth if costs.bandwidth is not None else np.zeros(shape))
    held = np.where(weight > 0, np.minimum(stash, activation), 0.0)
    return f * together, gradient * together, weight * together, travel, activation, held, output


def _line(ranks: tuple[int, ...], *tables: Floats) -> Line:
    """The tables of one copy, with what crosses ranks and what does not."""
    forward, gradient, weight, travel, activation, stash, output = tables
    crosses = np.array([before != after for before, after in pairwise(ranks)], dtype=np.float64).reshape(-1, 1)
    none = np.zeros_like(output[:1])
    sent = output[:-1] * crosses
    received, returned = np.concatenate((none, sent)), np.concatenate((sent, none))
    hops = np.concatenate((none, travel[:-1] * crosses))
    return Line(ranks, forward, gradient, weight, hops, activation, stash, received, returned)


def _usable(lines: tuple[Line, ...], rank: int, room: float) -> float:
    """The largest sum of the rank's sizes that is within the room; the room itself where there are too many sums."""
    sizes: set[float] = set()
    for line in lines:
        mine = list(line.stages_of(rank))
        for table in (line.activation, line.stash, line.received, line.returned):
            sizes.update(table[mine].ravel().tolist())
    shares = [size / room for size in sizes if size > 0] if 0 < room < math.inf else []
    if not shares or math.prod(1 / share + 1 for share in shares) > MOST_SUMS:
        return room
    sums = np.zeros(1)
    for share in shares:
        sums = np.unique((sums[:, None] + np.arange(int(1 / share) + 1) * share).round(12))
        sums = sums[sums <= 1]
    return min(room, float(sums.max()) * room * (1 + SLACK))
