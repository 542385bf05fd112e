"""One way to lay out a model: what a schedule is then timed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.planner.problem import Problem
from penstock.planner.profile import Profile
from penstock.planner.spans import Floats, Moment
from penstock.planner.stage_costs import stage_costs
from penstock.simulator.simulate import retime
from penstock.simulator.timeline import Timeline
from penstock.verifier.memory import held_in


@dataclass(frozen=True)
class Setting:
    """A partition of the layers over a placement, with the microbatches, and which stages are recomputed."""

    profile: Profile
    """For the microbatch size."""
    placement: Placement
    microbatches: int
    sizes: tuple[int, ...]
    """How many layers each stage has."""
    recompute: tuple[bool, ...]
    limits: tuple[float, ...] | None = None
    barrier: bool = True
    split: bool = True

    @property
    def cells(self) -> int:
        """Stages times microbatches: what the size of an order goes by."""
        return self.placement.stages * self.microbatches

    @cached_property
    def costs(self) -> Costs:
        return stage_costs(self.profile, self.sizes, self.placement, self.recompute)

    @cached_property
    def problem(self) -> Problem:
        return Problem(self.placement, self.microbatches, self.costs, self.limits, self.barrier, self.split)

    @cached_property
    def work(self) -> float:
        """What the slowest rank computes: no schedule of this setting takes less."""
        each = self.costs.table("f", self.placement.stages, 1) + self.costs.table("b", self.placement.stages, 1)
        counts = [len(range(copy, self.microbatches, len(self.placement.copies))) for copy in range(len(self.placement.copies))]
        loads = np.zeros(self.placement.ranks)
        for copy, count in zip(self.placement.copies, counts, strict=True):
            np.add.at(loads, list(copy), count * each[:, 0])
        return float(loads.max()) * min(1.0, self.costs.overlap)


@dataclass(frozen=True)
class Trial:
    """A schedule timed in a setting."""

    name: str
    setting: Setting
    schedule: Schedule
    timeline: Timeline

    @classmethod
    def run(cls, name: str, setting: Setting, schedule: Schedule) -> Trial:
        return cls(name, setting, schedule, setting.problem.evaluate(schedule))

    def again(self, setting: Setting) -> Trial:
        """The same order in another setting, without building anything anew."""
        return replace(self, setting=setting, timeline=retime(self.timeline, setting.costs))

    @cached_property
    def objective(self) -> float:
        return self.setting.problem.objective(self.timeline)

    @cached_property
    def fits(self) -> bool:
        return self.setting.problem.fits(self.timeline)

    @cached_property
    def worst_rank(self) -> int:
        """The rank that is most over its limit or nearest to it; without limits, the one that holds most."""
        peaks, limits = self.timeline.peak_memory, self.setting.limits or (0.0,) * self.setting.placement.ranks
        return max(range(len(peaks)), key=lambda rank: peaks[rank] - limits[rank])

    @property
    def excess(self) -> float:
        """How much the worst rank is over its limit; negative where it is under it."""
        return self.timeline.peak_memory[self.worst_rank] - self.setting.problem.limits[self.worst_rank]

    def moments(self) -> tuple[Moment, ...]:
        """What each rank that is over its limit holds when it holds most."""
        peaks, limits = self.timeline.peak_memory, self.setting.limits or ()
        full = [rank for rank, limit in enumerate(limits) if peaks[rank] > limit]
        held = held_in(self.timeline.table, self.setting.costs)
        return tuple(moment_of(self.timeline.table, self.setting.costs, rank, held) for rank in full)


def moment_of(table: Table, costs: Costs, rank: int, all_held: Floats) -> Moment:
    """The moment at which a rank holds most, of what is held while each action runs."""
    rows = table.rows
    begin, end = (int(group) for group in rows.group_offsets[rank : rank + 2])
    held = all_held[begin:end]
    peak = begin + int(np.argmax(held))
    stages = table.placement.stages_of(rank)
    first, at_peak, after = np.searchsorted(rows.group, (begin, peak, peak + 1))
    started, ended = slice(first, after), slice(first, at_peak)

    def count(entries: slice, stage: int, *kinds: Kind) -> int:
        return int((np.isin(rows.kind[entries], kinds) & (rows.stage[entries] == stage)).sum())

    activations = tuple(count(started, stage, Kind.F) - count(ended, stage, Kind.I, Kind.B) for stage in stages)
    stashes = tuple(count(ended, stage, Kind.I) - count(ended, stage, Kind.W) for stage in stages)
    of_stage = zip(stages, activations, stashes, strict=True)
    known = sum(_held(costs, stage, activation, stash) for stage, activation, stash in of_stage)
    return Moment(rank, activations, stashes, max(float(held.max()) - known, 0.0))


def _held(costs: Costs, stage: int, activations: int, stashes: int) -> float:
    each: Sequence[float] = [costs.of_stage(name, stage) for name in ("parameters", "activation", "weight_stash")]
    return each[0] + activations * each[1] + stashes * each[2]
