"""A problem in whole numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.planner.exact_scale import floored, unit_for
from penstock.planner.problem import SLACK, Problem

Whole = NDArray[np.int64]

TIME_STEPS = 2**26
SIZE_STEPS = 2**16
"""Units to the largest value, where values have none in common."""


@dataclass(frozen=True, eq=False)
class Instance:
    """Times and sizes in units, all rounded down: what the solver finds impossible is impossible. Tables are by stage and microbatch."""

    problem: Problem
    time: Fraction
    size: Fraction
    """The units."""
    f: Whole
    i: Whole
    w: Whole
    b: Whole
    travel: Whole
    """Of a message between a stage and the one before it, within a rank too."""
    activation: Whole
    stash: Whole
    output: Whole
    room: tuple[int | None, ...]
    """For what comes on top of the parameters; None where there is no limit."""
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
        steps, ends = costs.per_stage("optimizer", problem.stages), costs.per_stage("reduce", problem.stages)
        time = unit_for([*np.concatenate([*times.values(), hops]).ravel().tolist(), *steps, *ends], TIME_STEPS)
        size = unit_for(np.concatenate([*sizes.values()]).ravel().tolist(), SIZE_STEPS)
        room = [_room(limit, kept, size) for limit, kept in zip(problem.limits, problem.static_memory, strict=True)]
        own = [sum(steps[stage] for stage in problem.placement.stages_of(rank)) for rank in range(problem.ranks)]
        f, i, w, b, travel = (_whole(table, time) for table in (*times.values(), hops))
        activation, stash, output = (_whole(table, size) for table in sizes.values())
        reduce, optimizer = (tuple(floored(each, time) for each in values) for values in (ends, own))
        return cls(problem, time, size, f, i, w, b, travel, activation, stash, output, tuple(room), reduce, optimizer)

    def with_less_room(self, less: list[float]) -> Instance:
        """With so much less on each rank."""
        units = [math.ceil(Fraction(each) / self.size) for each in less]
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
        """Microbatches that are alike in all: of one copy, with the same times and sizes on every stage."""
        tables = np.concatenate([self.f, self.i, self.w, self.b, self.travel, self.activation, self.stash, self.output])
        found: dict[tuple[int, bytes], list[int]] = {}
        for m in range(self.microbatches):
            key = m % len(self.problem.placement.copies), np.ascontiguousarray(tables[:, m]).tobytes()
            found.setdefault(key, []).append(m)
        return list(found.values())

    def may_split(self, stage: int, m: int) -> bool:
        """Whether an I and a W can be of use; a full backward that takes no longer than the I alone is better in all."""
        return self.problem.split and bool(self.b[stage, m] > self.i[stage, m])

    def may_join(self, stage: int, m: int) -> bool:
        """Whether a full backward can be of use: not where I and W in its place take no longer and hold no more."""
        better = self.b[stage, m] < self.i[stage, m] + self.w[stage, m] or self.stash[stage, m] > self.activation[stage, m]
        return bool(better) or not self.may_split(stage, m)


def _whole(table: NDArray[np.float64], unit: Fraction) -> Whole:
    return np.array([[floored(value, unit) for value in row] for row in table.tolist()], dtype=np.int64)


def _room(limit: float, kept: float, unit: Fraction) -> int | None:
    if limit == math.inf:
        return None
    return floored(max(-1.0, limit * (1 + SLACK) - kept), unit) if limit * (1 + SLACK) >= kept else -1
