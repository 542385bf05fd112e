"""The terms of every bound: times and sizes that no schedule can undercut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.problem import SLACK, Problem

_MOST_SUMS = 20_000


@dataclass(frozen=True, eq=False)
class ModelCopy:
    """The stages that the microbatches of one copy of the model run through. Tables have one row per stage and one column per microbatch.

    Every backward counts as a gradient followed by a weight part, which undercuts everything that a schedule may do: a full
    backward includes the weight part and holds its activation throughout, so if it may be chosen, the gradient takes the lesser
    of the two times, both parts together no more than the full backward, and the stash is no larger than the activation.
    """

    ranks: tuple[int, ...]
    forward: Floats
    gradient: Floats
    weight: Floats
    """Zero if nothing is left to do after the gradient."""
    travel: Floats
    """Time of the message from the stage before; zero for the first stage and within a rank."""
    activation: Floats
    stash: Floats
    received: Floats
    """Size of the received message that a forward holds while it runs."""
    returned: Floats
    """The same for a gradient."""

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return int(self.forward.shape[1])

    @cached_property
    def uniform(self) -> bool:
        """Whether all microbatches are alike."""
        return all(bool((table == table[:, :1]).all()) for table in (self.forward, self.gradient, self.weight, self.travel))

    @cached_property
    def least(self) -> ModelCopy:
        """The least value over the microbatches, in a single column."""
        tables = (self.forward, self.gradient, self.weight, self.travel, self.activation, self.stash, self.received, self.returned)
        return ModelCopy(self.ranks, *(table.min(axis=1, keepdims=True) for table in tables))

    @cached_property
    def heads(self) -> Floats:
        """Earliest start of each forward, counted from the first forward of its microbatch."""
        heads = np.zeros_like(self.forward)
        heads[1:] = np.cumsum(self.forward[:-1] + self.travel[1:], axis=0)
        return heads

    @cached_property
    def feet(self) -> Floats:
        """Time from the start of each gradient to the start of the last gradient of its microbatch."""
        feet = np.zeros_like(self.forward)
        feet[1:] = np.cumsum(self.gradient[1:] + self.travel[1:], axis=0)
        return feet

    @cached_property
    def turns(self) -> Floats:
        """Time from the start of each forward to the start of its gradient: the round trip."""
        top = self.heads[-1] + self.forward[-1] - self.heads
        return np.asarray(top + self.feet[-1] - self.feet, dtype=np.float64)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, of in enumerate(self.ranks) if of == rank)


@dataclass(frozen=True, eq=False)
class Terms:
    """A problem as its bounds see it: one entry per copy of the model."""

    problem: Problem
    copies: tuple[ModelCopy, ...]
    after: tuple[tuple[float, ...], ...]
    """Time after a stage's last action, by rank and stage: the gradient reduction and the optimizer step."""
    room: tuple[float, ...]
    """Memory of each rank beyond its parameters, tolerance included: the most that sizes can add up to within the limit."""

    @classmethod
    def of(cls, problem: Problem) -> Terms:
        room = tuple(
            limit * (1 + 2 * SLACK) - kept if limit < math.inf else limit
            for limit, kept in zip(problem.limits, problem.static_memory, strict=True)
        )
        copies = _model_copies(problem)
        return cls(problem, copies, _after(problem), tuple(_usable(copies, rank, size) for rank, size in enumerate(room)))

    @property
    def ranks(self) -> int:
        return self.problem.ranks


def _after(problem: Problem) -> tuple[tuple[float, ...], ...]:
    reduce, steps = problem.costs.per_stage("reduce", problem.stages), problem.costs.per_rank("optimizer", problem.placement)
    return tuple(tuple(time + step for time in reduce) for step in steps.tolist())


def _model_copies(problem: Problem) -> tuple[ModelCopy, ...]:
    placed, tables = problem.placement.copies, _tables(problem)
    return tuple(
        _model_copy(ranks, *(np.ascontiguousarray(table[:, place :: len(placed)]) for table in tables))
        for place, ranks in enumerate(placed[: problem.microbatches])
    )


def _tables(problem: Problem) -> tuple[Floats, ...]:
    """Forward, gradient, weight, travel, activation, stash and output, before ranks are considered."""
    costs, shape = problem.costs, (problem.stages, problem.microbatches)
    f, i, w, b, activation, stash, output = (
        costs.table(name, *shape) for name in ("f", "i", "w", "b", "activation", "weight_stash", "output")
    )
    together = min(1.0, costs.overlap)  # overlapped actions take this share of their sum, and no action takes less
    gradient = np.minimum(i, b) if problem.split else b
    weight = np.minimum(i + w, b) - gradient if problem.split else np.zeros(shape)
    travel = costs.latency + (output / costs.bandwidth if costs.bandwidth is not None else np.zeros(shape))
    held = np.where(weight > 0, np.minimum(stash, activation), 0.0)
    return f * together, gradient * together, weight * together, travel, activation, held, output


def _model_copy(ranks: tuple[int, ...], *tables: Floats) -> ModelCopy:
    """The tables of one copy, with messages only between different ranks."""
    forward, gradient, weight, travel, activation, stash, output = tables
    crosses = np.array([before != after for before, after in pairwise(ranks)], dtype=np.float64).reshape(-1, 1)
    none = np.zeros_like(output[:1])
    sent = output[:-1] * crosses
    received, returned = np.concatenate((none, sent)), np.concatenate((sent, none))
    hops = np.concatenate((none, travel[:-1] * crosses))
    return ModelCopy(ranks, forward, gradient, weight, hops, activation, stash, received, returned)


def _usable(copies: tuple[ModelCopy, ...], rank: int, room: float) -> float:
    """The largest sum of the rank's sizes within the room; the room itself if there are too many sums."""
    sizes: set[float] = set()
    for copy in copies:
        mine = list(copy.stages_of(rank))
        for table in (copy.activation, copy.stash, copy.received, copy.returned):
            sizes.update(table[mine].ravel().tolist())
    shares = [size / room for size in sizes if size > 0] if 0 < room < math.inf else []
    if not shares or math.prod(1 / share + 1 for share in shares) > _MOST_SUMS:
        return room
    sums = np.zeros(1)
    for share in shares:
        sums = np.unique((sums[:, None] + np.arange(int(1 / share) + 1) * share).round(12))
        sums = sums[sums <= 1]
    return min(room, float(sums.max()) * room * (1 + SLACK))
