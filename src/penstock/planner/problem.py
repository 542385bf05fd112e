"""What an order search, a bound and a solver are given: one placement, its costs and a memory limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import CostsError
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline

SLACK = 1e-9
"""Of a limit: sums of fractions are not exact."""


@dataclass(frozen=True)
class Problem:
    """Order the compute actions of a pipeline: minimise the time under a memory limit.

    >>> Problem(Placement.v(2), 4, Costs(), memory_limit=(3.0, 3.0)).ranks
    2
    """

    placement: Placement
    microbatches: int
    costs: Costs
    """Those of the placement's stages."""
    memory_limit: tuple[float, ...] | None = None
    """The most that each rank may hold at once, parameters included: `Timeline.peak_memory` of the lowered schedule."""
    barrier: bool = True
    """Whether all ranks wait for each other at the end, so that the makespan counts; else the longest rank span does."""
    split: bool = True
    """Whether a backward may be split into I and W."""

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise CostsError(f"{self.microbatches} microbatches: there must be at least 1")
        self.costs.check(self.stages, self.microbatches)
        if self.memory_limit is None:
            return
        limits = tuple(float(limit) for limit in self.memory_limit)
        if len(limits) != self.ranks or not all(limit >= 0 for limit in limits):
            raise CostsError(f"memory_limit must be one number of at least 0 for each of the {self.ranks} ranks, got {self.memory_limit!r}")
        object.__setattr__(self, "memory_limit", limits)

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def limits(self) -> tuple[float, ...]:
        """The memory limit of each rank, infinite where there is none."""
        return (math.inf,) * self.ranks if self.memory_limit is None else self.memory_limit

    @property
    def static_memory(self) -> tuple[float, ...]:
        """What each rank holds all the time: the parameters of its stages."""
        kept = self.costs.per_stage("parameters", self.stages)
        return tuple(sum(kept[stage] for stage in self.placement.stages_of(rank)) for rank in range(self.ranks))

    def evaluate(self, schedule: Schedule) -> Timeline:
        """The timeline that users see: the schedule lowered by the usual passes and simulated."""
        return simulate(lower(schedule), self.costs)

    def objective(self, timeline: Timeline) -> float:
        """What is minimised: the makespan, or without a barrier the longest time from a rank's first action to its last."""
        return timeline.makespan if self.barrier else float((timeline.finished - timeline.begun).max(initial=0.0))

    def fits(self, timeline: Timeline) -> bool:
        """Whether every rank stays within its limit."""
        return not any(peak > limit * (1 + SLACK) for peak, limit in zip(timeline.peak_memory, self.limits, strict=True))
