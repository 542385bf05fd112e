"""A problem: one placement with its costs and memory limits, which the order search, the bounds and the solver work on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from penstock.errors import CostsError
from penstock.ir.cluster import Cluster, share_rows
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.partition.assignment import Assignment
from penstock.planner.partition.stage_costs import sliced_stage_costs, stage_costs
from penstock.planner.profile import Profile
from penstock.planner.profile.vocabulary import list_rank_shares
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline

SLACK = 1e-9
"""Relative tolerance of a limit: sums of fractions are not exact."""


@dataclass(frozen=True)
class Problem:
    """Order the compute actions of a pipeline: minimise the time under a memory limit.

    >>> Problem(Placement.v(2), 4, Costs(), memory_limit=(3.0, 3.0)).ranks
    2
    """

    placement: Placement
    microbatches: int
    costs: Costs
    """Costs of the placement's stages; with slices, values per microbatch are values per slice, in the order of the units."""
    memory_limit: tuple[float, ...] | None = None
    """The most that each rank may hold at once, parameters included: `Timeline.peak_memory` of the lowered schedule."""
    barrier: bool = True
    """Whether all ranks wait for each other at the end, so that the makespan counts; else the longest rank span counts."""
    split: bool = True
    """Whether a backward may be split into I and W."""
    profile: Profile | None = field(default=None, compare=False, repr=False)
    """The layers behind the costs, at the microbatch size of the problem, if it was cut from a model."""
    sizes: tuple[int, ...] = ()
    """Layers per stage, then."""
    recompute: tuple[bool, ...] = ()
    """The stages that are recomputed, then."""
    slices: int = 1
    """Slices that each microbatch is cut into along the sequence."""
    lengths: tuple[int, ...] = ()
    """Tokens of each slice, if there are several and the problem was cut from a model."""
    assignment: Assignment | None = field(default=None, compare=False, repr=False)
    """Which device of a cluster each rank is, if the problem was cut for one."""

    @classmethod
    def cut(  # noqa: PLR0917
        cls,
        profile: Profile,
        placement: Placement,
        microbatches: int,
        sizes: tuple[int, ...],
        recompute: tuple[bool, ...],
        memory_limit: tuple[float, ...] | None = None,
        barrier: bool = True,
        split: bool = True,
        lengths: tuple[int, ...] = (),
        assignment: Assignment | None = None,
    ) -> Problem:
        """The problem of a model that is cut into stages of these sizes, and its sequences into slices of these lengths.

        With an `assignment`, the stages take as long as on its devices. The memory limits are those of the ranks.
        """
        cluster = None if assignment is None else assignment.cluster
        if lengths:
            costs = sliced_stage_costs(profile, sizes, placement, recompute, lengths, microbatches, cluster)
        else:
            rows = () if assignment is None else assignment.rows
            costs = stage_costs(profile, sizes, placement, recompute, cluster, rows, microbatches)
        slices = max(len(lengths), 1)
        return cls(placement, microbatches, costs, memory_limit, barrier, split, profile, sizes, recompute, slices, lengths, assignment)

    def recut(self, sizes: tuple[int, ...], lengths: tuple[int, ...] | None = None) -> Problem:
        """The same model with other stage sizes, and with other lengths of its slices if they are given."""
        assert self.profile is not None
        lengths = self.lengths if lengths is None else lengths
        shape = self.profile, self.placement, self.microbatches, sizes, self.recompute
        return Problem.cut(*shape, self.memory_limit, self.barrier, self.split, lengths, self.assignment)

    def share_rows(self, rows: tuple[float, ...]) -> Problem:
        """The same stages on the same devices, with these parts of a spread vocabulary's rows by rank."""
        assert self.profile is not None
        assert self.assignment is not None
        shape = self.profile, self.placement, self.microbatches, self.sizes, self.recompute
        return Problem.cut(*shape, self.memory_limit, self.barrier, self.split, self.lengths, self.assignment.take_rows(rows))

    def balance_rows(self, most: Sequence[float] = (), layers: bool = True) -> Problem | None:
        """The same stages with the rows of `find_rows`; None if there are none."""
        rows = self.find_rows(most, layers)
        return None if rows is None else self.share_rows(rows)

    def find_rows(self, most: Sequence[float] = (), layers: bool = True) -> tuple[float, ...] | None:
        """The part of the rows of each rank with which the slowest has least to do on its rows, with `layers` on its stages too.

        `most` is the largest part of the rows that each rank has memory for; None if these do not hold all rows.
        """
        assert self.profile is not None
        loads = np.bincount(self.placement.copies[0], layers * self._stage_times, self.ranks)
        shares = list_rank_shares(self.profile, self.ranks, self.cluster)
        return share_rows([self.ranks * sum(layer.time for layer in own) for own in shares], most, loads.tolist()) or None

    def move(self, other: Problem, host_limits: tuple[float, ...] | None) -> Problem:
        """The same model on other devices, whose ranks have these limits of host memory: a problem of the same kind as this one."""
        return other

    def shorten(self, microbatches: int) -> Problem:
        """The same problem with fewer microbatches; each has the costs of its copy of the model, or the same slices."""
        if not self.lengths and not self.costs.differing:
            return replace(self, microbatches=microbatches)
        assert self.profile is not None
        shape = self.profile, self.placement, microbatches, self.sizes, self.recompute
        return Problem.cut(*shape, self.memory_limit, self.barrier, self.split, self.lengths, self.assignment)

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise CostsError(f"{self.microbatches} microbatches: there must be at least 1")
        if self.slices > 1 and len(self.placement.copies) > 1:
            raise CostsError(f"{self.slices} slices on a placement with {len(self.placement.copies)} copies of the model: take one copy")
        self.costs.check(self.stages, self.units, self.ranks)
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
    def units(self) -> int:
        """Microbatches, or their slices."""
        return self.microbatches * self.slices

    @property
    def cells(self) -> int:
        """Stages times units: the size of an order."""
        return self.stages * self.units

    @property
    def microbatch(self) -> int:
        """Samples per microbatch."""
        return 1 if self.profile is None else self.profile.microbatch

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies a problem among those of one request."""
        return self.microbatch, self.placement.copies, self.sizes, self.recompute, self.lengths, self.devices, self.rows, self.is_spread

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of a cluster that each rank is; empty without a cluster."""
        return () if self.assignment is None else self.assignment.devices

    @property
    def rows(self) -> tuple[float, ...]:
        """The part of a spread vocabulary's rows that each rank has, if these are not equal."""
        return () if self.assignment is None else self.assignment.rows

    @property
    def cluster(self) -> Cluster | None:
        """The cluster with its devices in the order of the ranks."""
        return None if self.assignment is None else self.assignment.cluster

    @property
    def is_spread(self) -> bool:
        """Whether the vocabulary is spread over the ranks: the orders of such a problem have S, T and collectives as well."""
        return self.profile is not None and bool(self.profile.shares)

    @property
    def limits(self) -> tuple[float, ...]:
        """The memory limit of each rank, infinite without one."""
        return (math.inf,) * self.ranks if self.memory_limit is None else self.memory_limit

    @property
    def static_memory(self) -> tuple[float, ...]:
        """Memory that each rank holds all the time: the parameters of its stages."""
        return tuple(self.costs.per_rank("parameters", self.placement).tolist())

    @cached_property
    def hops(self) -> tuple[Floats, Floats]:
        """Times of messages, by stage (row) and unit (column): from the stage before to this one, and of the gradient that goes back.

        They are 0 for the first stage and within a rank.
        """
        shape = (self.stages, self.units)
        ranks, sizes = self.placement.ranks_of(*np.indices(shape)), self.costs.table("output", *shape)
        up, back = np.zeros(shape), np.zeros(shape)
        crosses = ranks[1:] != ranks[:-1]
        up[1:] = np.where(crosses, self.costs.travel(sizes[:-1], ranks[:-1], ranks[1:]), 0.0)
        back[1:] = np.where(crosses, self.costs.travel(sizes[:-1], ranks[1:], ranks[:-1]), 0.0)
        return up, back

    @cached_property
    def work(self) -> float:
        """Compute time of the slowest rank: no schedule takes less."""
        copies, loads = self.placement.copies, np.zeros(self.ranks)
        every = self.costs.table("f", self.stages, self.units) + self.costs.table("b", self.stages, self.units)
        for place, ranks in enumerate(copies):
            np.add.at(loads, list(ranks), min(1.0, self.costs.overlap) * every[:, place :: len(copies)].sum(axis=1))
        if self.is_spread:  # S and T run alone
            loads += self.microbatches * sum(self.costs.share_table(name, self.stages, self.ranks).sum(axis=1) for name in ("s", "t"))
        return float(loads.max())

    @property
    def _stage_times(self) -> Floats:
        """The least time of a microbatch on each stage."""
        times = self.costs.table("f", self.stages, 1) + self.costs.table("b", self.stages, 1)
        return np.asarray(min(1.0, self.costs.overlap) * times[:, 0])

    def evaluate(self, schedule: Schedule) -> Timeline:
        """The timeline that users see: the schedule lowered by the usual passes and simulated."""
        return simulate(lower(schedule), self.costs)

    def objective(self, timeline: Timeline) -> float:
        """The minimised time: the makespan, or without a barrier the longest time from a rank's first action to its last."""
        return timeline.makespan if self.barrier else float((timeline.finished - timeline.begun).max(initial=0.0))

    def fits(self, timeline: Timeline) -> bool:
        """Whether every rank stays within its limit."""
        if self.memory_limit is None:
            return True
        return not any(peak > limit * (1 + SLACK) for peak, limit in zip(timeline.peak_memory, self.memory_limit, strict=True))

    def describe(self) -> str:
        """Placement, chunks, microbatches and recompute in a few words."""
        again = ", recomputed" if any(self.recompute) else ""
        again += ", vocabulary on all ranks" if self.is_spread else ""
        slices = f" in {self.slices} slices" if self.slices > 1 else ""
        return f"{self.placement.kind}, {self.placement.chunks} per rank, {self.microbatches} x {self.microbatch}{slices}{again}"
