"""Time and memory of every contiguous run of layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.planner.profile import Profile

SLACK = 1e-9
"""Relative tolerance of limits and loads: sums of fractions are not exact."""


@dataclass(frozen=True)
class PeakMoment:
    """What a rank holds at one moment: activations and weight stashes per stage, in the order of `stages_of`, and other memory."""

    rank: int
    activations: tuple[int, ...]
    stashes: tuple[int, ...]
    other: float = 0.0


@dataclass(frozen=True, eq=False)
class LayerRuns:
    """Tables with one row per first layer of a run and one column per layer after its last."""

    profile: Profile
    _held: dict[tuple[bool, int, int], Floats] = field(default_factory=dict)

    @cached_property
    def layers(self) -> int:
        return len(self.profile)

    @cached_property
    def _input(self) -> Floats:
        """Input size of a run by its first layer, as a column."""
        outputs = [self.profile.input, *(layer.output for layer in self.profile.layers)]
        return np.array(outputs)[:, None]

    def _sum(self, *names: str) -> Floats:
        values = [sum(getattr(layer, name) for name in names) for layer in self.profile.layers]
        ends = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(ends[None, :] - ends[:, None])

    @cached_property
    def _times(self) -> tuple[Floats, Floats]:
        once = self._sum("f", "i", "w")
        return once, once + self._sum("f")

    @cached_property
    def _kept_output(self) -> Floats:
        """Output that a run holds, by the layer after its last, as a row; the last run has only the loss."""
        outputs = [0.0, *(layer.output * self.profile.keeps_output for layer in self.profile.layers[:-1]), 0.0]
        return np.array(outputs)[None, :]

    @cached_property
    def _activations(self) -> tuple[Floats, Floats]:
        whole = self._sum("activation")
        return whole + self._kept_output, self._input + np.broadcast_to(self._kept_output, whole.shape)

    @cached_property
    def _static(self) -> Floats:
        return self._sum("static")

    @cached_property
    def _stash(self) -> Floats:
        return self._sum("weight_stash")

    def time(self, recompute: bool) -> Floats:
        """Time of one microbatch; a recomputed run has a second forward."""
        return self._times[recompute]

    def held(self, recompute: bool, activations: int, stashes: int) -> Floats:
        """Memory with that many activations and stashes, parameters included; a recomputed run keeps only its input."""
        key = recompute, activations, stashes
        if key not in self._held:
            self._held[key] = np.asarray(self._static + activations * self._activations[recompute] + stashes * self._stash)
        return self._held[key]

    def reserve(self, recompute: bool) -> Floats:
        """Extra memory while an action runs: the workspace, and all activations of a recomputed run."""
        return self._reserves[recompute]

    @cached_property
    def _reserves(self) -> tuple[Floats, Floats]:
        whole, kept = self._activations
        needed = self._workspace
        return needed, needed + np.maximum(whole - kept, 0.0)

    @cached_property
    def _workspace(self) -> Floats:
        """The largest workspace of a layer, for every run."""
        largest = np.zeros_like(self._activations[0])
        workspaces = np.array([layer.workspace for layer in self.profile.layers])
        for first in range(len(workspaces)):
            largest[first, first + 1 :] = np.maximum.accumulate(workspaces[first:])
        return largest


@dataclass(frozen=True, eq=False)
class Cutting:
    """Layers to cut for a placement, within the limits of its ranks at the given moments."""

    runs: LayerRuns
    placement: Placement
    recompute: tuple[bool, ...]
    limits: tuple[float, ...] | None
    moments: tuple[PeakMoment, ...]
    slack: float = 0.0
    """Share by which the load may exceed the least one if that makes stages more even."""

    @property
    def stages(self) -> int:
        return self.placement.stages

    def allow(self, load: float) -> float:
        """The load that is acceptable if `load` is the least."""
        return load * (1 + SLACK + self.slack)

    @cached_property
    def share(self) -> float:
        """Share of the microbatches that a rank runs each of its stages for."""
        return 1.0 / len(self.placement.copies)

    @cached_property
    def even_load(self) -> float:
        """Mean time of a rank per microbatch, without recompute."""
        return float(self.runs.time(False)[0, -1]) / self.placement.ranks

    def moments_of(self, rank: int) -> list[PeakMoment]:
        """The moments of a rank: the given ones, and the one with a microbatch in all of its stages, which every schedule has."""
        held = len(self.placement.stages_of(rank))
        return [PeakMoment(rank, (1,) * held, (0,) * held), *(moment for moment in self.moments if moment.rank == rank)]

    def times(self, stage: int) -> Floats:
        """Time of a rank on a stage, for every run of layers."""
        return self._times[self.recompute[stage]]

    @cached_property
    def _times(self) -> tuple[Floats, Floats]:
        return self.share * self.runs.time(False), self.share * self.runs.time(True)

    def loads(self, cuts: Ints) -> Floats:
        """Time of each rank per microbatch, one row per row of cuts."""
        totals = np.zeros((len(cuts), self.placement.ranks))
        for rank in range(self.placement.ranks):
            for stage in self.placement.stages_of(rank):
                totals[:, rank] += self.times(stage)[cuts[:, stage], cuts[:, stage + 1]]
        return totals

    def excesses(self, cuts: Ints) -> Floats:
        """Memory of each rank over its limit, or 0, one row per row of cuts."""
        totals = np.zeros((len(cuts), self.placement.ranks))
        for rank, limit in enumerate(self.limits or ()):
            stages = self.placement.stages_of(rank)
            for moment in self.moments_of(rank):
                held = np.full(len(cuts), moment.other)
                reserve = np.zeros(len(cuts))
                for stage, activations, stashes in zip(stages, moment.activations, moment.stashes, strict=True):
                    run = cuts[:, stage], cuts[:, stage + 1]
                    held += self.runs.held(self.recompute[stage], activations, stashes)[run]
                    reserve = np.maximum(reserve, self.runs.reserve(self.recompute[stage])[run])
                totals[:, rank] = np.maximum(totals[:, rank], memory_over(held + reserve, limit))
        return totals

    def squares(self, cuts: Ints) -> Floats:
        """How uneven the stages are, per row of cuts: the sum of squared times."""
        totals = np.zeros(len(cuts))
        for stage in range(self.stages):
            totals += self.runs.time(self.recompute[stage])[cuts[:, stage], cuts[:, stage + 1]] ** 2
        return totals


def memory_over(held: Floats, limit: float) -> Floats:
    """Memory over a limit, or 0."""
    return np.where(held <= limit * (1 + SLACK), 0.0, held - limit)
