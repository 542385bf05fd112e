"""A problem in whole numbers, for a solver that knows no others."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.planner.problem import SLACK, Problem
from penstock.planner.whole_numbers import floor_units, unit_for

Whole = NDArray[np.int64]

TIME_STEPS = 2**26
SIZE_STEPS = 2**16
"""Units per largest value, if the values have no common unit."""


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
    """Time of the message from the stage before, also within a rank."""
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
        sizes = {name: costs.table(name, *shape) for name in ("activation", "weight_stash", "output")}
        hops = np.zeros(shape)
        hops[1:] = costs.latency + (sizes["output"][:-1] / costs.bandwidth if costs.bandwidth is not None else 0.0)
        steps, ends = (costs.per_stage(name, problem.stages) for name in ("optimizer", "reduce"))
        time = unit_for([*np.concatenate([*times.values(), hops]).ravel().tolist(), *steps, *ends], TIME_STEPS)
        size = unit_for(np.concatenate([*sizes.values()]).ravel().tolist(), SIZE_STEPS)
        room = [_room(limit, kept, size) for limit, kept in zip(problem.limits, problem.static_memory, strict=True)]
        own = costs.per_rank("optimizer", problem.placement).tolist()
        f, i, w, b, travel = (_whole(table, time) for table in (*times.values(), hops))
        activation, stash, output = (_whole(table, size) for table in sizes.values())
        reduce, optimizer = (tuple(floor_units(value, time) for value in values) for values in (ends, own))
        return cls(problem, time, size, f, i, w, b, travel, activation, stash, output, tuple(room), reduce, optimizer)

    def with_less_room(self, less: list[float]) -> Instance:
        """The instance with that much less room on each rank."""
        units = [math.ceil(Fraction(size) / self.size) for size in less]
        room = tuple(None if room is None else max(-1, room - taken) for room, taken in zip(self.room, units, strict=True))
        return replace(self, room=room)

    @property
    def stages(self) -> int:
        return self.problem.stages

    @property
    def microbatches(self) -> int:
        return self.problem.microbatches

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The rank of each stage and microbatch."""
        return [[self.problem.placement.rank_of(stage, m) for m in range(self.microbatches)] for stage in range(self.stages)]

    @cached_property
    def horizon(self) -> int:
        """One microbatch after the other takes no longer, and fits if anything does."""
        backward = np.maximum(self.b, self.i + self.w)
        return int((self.f + backward + 2 * self.travel).sum()) + sum(self.reduce) + max(self.optimizer) + 1

    @cached_property
    def classes(self) -> list[list[int]]:
        """Groups of identical microbatches: of one copy of the model, with the same times and sizes on every stage."""
        tables = np.concatenate([self.f, self.i, self.w, self.b, self.travel, self.activation, self.stash, self.output])
        groups: dict[tuple[int, bytes], list[int]] = {}
        for m in range(self.microbatches):
            key = m % len(self.problem.placement.copies), np.ascontiguousarray(tables[:, m]).tobytes()
            groups.setdefault(key, []).append(m)
        return list(groups.values())

    def may_split(self, stage: int, m: int) -> bool:
        """Whether an I and a W can be useful; a full backward that takes no longer than the I alone is always better."""
        return self.problem.split and bool(self.b[stage, m] > self.i[stage, m])

    def may_join(self, stage: int, m: int) -> bool:
        """Whether a full backward can be useful: not if I and W take no longer and hold no more."""
        better = self.b[stage, m] < self.i[stage, m] + self.w[stage, m] or self.stash[stage, m] > self.activation[stage, m]
        return bool(better) or not self.may_split(stage, m)


def _whole(table: NDArray[np.float64], unit: Fraction) -> Whole:
    return np.array([[floor_units(value, unit) for value in row] for row in table.tolist()], dtype=np.int64)


def _room(limit: float, kept: float, unit: Fraction) -> int | None:
    if limit == math.inf:
        return None
    return floor_units(max(-1.0, limit * (1 + SLACK) - kept), unit) if limit * (1 + SLACK) >= kept else -1
