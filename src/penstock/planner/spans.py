"""What a run of layers takes and holds, for every run at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir.placement import Placement
from penstock.planner.profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLACK = 1e-9
"""Of a limit or a load: sums of fractions are not exact."""


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment: for each of its stages, in the order of `stages_of`, so many microbatches' activations
    and weight stashes, and something else besides."""

    rank: int
    activations: tuple[int, ...]
    stashes: tuple[int, ...]
    other: float = 0.0


@dataclass(frozen=True, eq=False)
class Spans:
    """Tables with a row for the first layer of a run and a column for the one after its last."""

    profile: Profile
    _held: dict[tuple[bool, int, int], Floats] = field(default_factory=dict)

    @cached_property
    def layers(self) -> int:
        return len(self.profile)

    @cached_property
    def _input(self) -> Floats:
        """What a run that begins with each layer is given, as a column."""
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
        """What a run that ends before each layer holds of its output, as a row; the last has only the loss."""
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
        """What one microbatch takes; a run that is recomputed has a second forward."""
        return self._times[recompute]

    def held(self, recompute: bool, activations: int, stashes: int) -> Floats:
        """What is held for so many microbatches, and throughout; a run that is recomputed keeps its input alone."""
        key = recompute, activations, stashes
        if key not in self._held:
            self._held[key] = np.asarray(self._static + activations * self._activations[recompute] + stashes * self._stash)
        return self._held[key]

    def reserve(self, recompute: bool) -> Floats:
        """What a run needs for a moment, while one of its actions runs; all its activations where it is recomputed."""
        return self._reserves[recompute]

    @cached_property
    def _reserves(self) -> tuple[Floats, Floats]:
        whole, kept = self._activations
        needed = self._workspace
        return needed, needed + np.maximum(whole - kept, 0.0)

    @cached_property
    def _workspace(self) -> Floats:
        """The most that one layer of a run needs beyond what is held, for every run."""
        found = np.zeros_like(self._activations[0])
        each = np.array([layer.workspace for layer in self.profile.layers])
        for first in range(len(each)):
            found[first, first + 1 :] = np.maximum.accumulate(each[first:])
        return found


@dataclass(frozen=True, eq=False)
class Cutting:
    """Layers to be cut for a placement, within the limits of its ranks at the given moments."""

    spans: Spans
    placement: Placement
    recompute: tuple[bool, ...]
    limits: tuple[float, ...] | None
    moments: tuple[Moment, ...]
    slack: float = 0.0
    """How much more than the least load will do, as a share of it, where stages become more even by that."""

    @property
    def stages(self) -> int:
        return self.placement.stages

    def allowed(self, load: float) -> float:
        """The load that will do where this is the least."""
        return load * (1 + SLACK + self.slack)

    @cached_property
    def share(self) -> float:
        """The part of the microbatches that a rank runs each of its stages for."""
        return 1.0 / len(self.placement.copies)

    @cached_property
    def even_load(self) -> float:
        """What the ranks spend on a microbatch in the mean, with nothing recomputed."""
        return float(self.spans.time(False)[0, -1]) / self.placement.ranks

    def moments_of(self, rank: int) -> list[Moment]:
        """The moments that count for a rank: those given, and the one with a microbatch in all of its stages, which always comes."""
        held = len(self.placement.stages_of(rank))
        return [Moment(rank, (1,) * held, (0,) * held), *(moment for moment in self.moments if moment.rank == rank)]

    def times(self, stage: int) -> Floats:
        """What a rank spends on a stage, for every run of layers."""
        return self._times[self.recompute[stage]]

    @cached_property
    def _times(self) -> tuple[Floats, Floats]:
        return self.share * self.spans.time(False), self.share * self.spans.time(True)

    def loads(self, cuts: Ints) -> Floats:
        """For each row of cuts, what each rank spends on a microbatch."""
        made = np.zeros((len(cuts), self.placement.ranks))
        for rank in range(self.placement.ranks):
            for stage in self.placement.stages_of(rank):
                made[:, rank] += self.times(stage)[cuts[:, stage], cuts[:, stage + 1]]
        return made

    def excesses(self, cuts: Ints) -> Floats:
        """For each row of cuts, how much each rank is over its limit; 0 where it is not."""
        made = np.zeros((len(cuts), self.placement.ranks))
        for rank, limit in enumerate(self.limits or ()):
            stages = self.placement.stages_of(rank)
            for moment in self.moments_of(rank):
                held = np.full(len(cuts), moment.other)
                reserve = np.zeros(len(cuts))
                for stage, activations, stashes in zip(stages, moment.activations, moment.stashes, strict=True):
                    run = cuts[:, stage], cuts[:, stage + 1]
                    held += self.spans.held(self.recompute[stage], activations, stashes)[run]
                    reserve = np.maximum(reserve, self.spans.reserve(self.recompute[stage])[run])
                made[:, rank] = np.maximum(made[:, rank], over(held + reserve, limit))
        return made

    def squares(self, cuts: Ints) -> Floats:
        """For each row of cuts, how uneven its stages are: the sum of the squares of what they take."""
        made = np.zeros(len(cuts))
        for stage in range(self.stages):
            made += self.spans.time(self.recompute[stage])[cuts[:, stage], cuts[:, stage + 1]] ** 2
        return made


def over(held: Floats, limit: float) -> Floats:
    """By how much sizes are over a limit, 0 where they are not."""
    return np.where(held <= limit * (1 + SLACK), 0.0, held - limit)
