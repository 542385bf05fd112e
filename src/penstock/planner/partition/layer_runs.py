"""Time and memory of every contiguous run of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.ir.cluster import Cluster, Device, Speeds
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.planner.profile import Profile

SLACK = 1e-9
"""Relative tolerance of limits and loads: sums of fractions are not exact."""


@dataclass(frozen=True)
class PeakMoment:
    """The memory of a rank at one moment: activations and weight stashes per stage, in the order of `stages_of`, and other memory.

    Both are counted in microbatches; a slice is a part of one.
    """

    rank: int
    activations: tuple[float, ...]
    stashes: tuple[float, ...]
    other: float = 0.0
    kept: tuple[float, ...] = ()
    """What is kept besides the activations; of as many microbatches as there are activations by default."""
    kept_gradients: tuple[float, ...] = ()
    """The sums of its gradients, if microbatches are cut into slices; none by default."""

    @property
    def by_stage(self) -> list[tuple[float, float, float, float]]:
        """How many activations, stashes, kept tensors and sums of their gradients each stage holds."""
        none = (0.0,) * len(self.activations)
        columns = self.activations, self.stashes, self.kept or self.activations, self.kept_gradients or none
        return list(zip(*columns, strict=True))


@dataclass(frozen=True, eq=False)
class LayerRuns:
    """Tables with one row per first layer of a run and one column per layer after its last."""

    profile: Profile
    lengths: tuple[int, ...] = ()
    """Tokens of each slice, if sequences are cut into slices; times and sizes are those of a whole microbatch all the same."""
    _held: dict[tuple[bool, tuple[float, float, float, float]], Floats] = field(default_factory=dict)
    _devices: dict[Speeds, LayerRuns] = field(default_factory=dict)

    def on(self, device: Device) -> LayerRuns:
        """The same runs on a device."""
        own = self.profile.on(device)
        if own is self.profile:
            return self
        if device.speeds not in self._devices:
            self._devices[device.speeds] = LayerRuns(own, self.lengths)
        return self._devices[device.speeds]

    @cached_property
    def layers(self) -> int:
        return len(self.profile)

    @cached_property
    def _slices(self) -> list[LayerRuns]:
        return [LayerRuns(part) for part in self.profile.cut_sequence(self.lengths)]

    def _sum(self, *names: str) -> Floats:
        values = [sum(getattr(layer, name) for name in names) for layer in self.profile.layers]
        ends = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(ends[None, :] - ends[:, None])

    @cached_property
    def times(self) -> tuple[Floats, Floats]:
        """Time of one microbatch, without and with recompute: a second forward."""
        if self.lengths:
            return _add_up([part.times for part in self._slices])
        once = self._sum("f", "i", "w")
        return once, once + self._sum("f")

    @cached_property
    def forwards(self) -> Floats:
        """Time of the forward of one microbatch."""
        return np.asarray(sum(part.forwards for part in self._slices)) if self.lengths else self._sum("f")

    @cached_property
    def _activations(self) -> tuple[Floats, Floats]:
        """Memory of one activation, without and with recompute; a run may also hold its output, but the last one has only the loss."""
        if self.lengths:
            return _add_up([part._activations for part in self._slices])
        profile, whole = self.profile, self._sum("activation")
        inputs = np.array([profile.input, *(layer.output for layer in profile.layers)])
        kept_outputs = np.array([0.0, *(layer.output * profile.keeps_output for layer in profile.layers[:-1]), 0.0])
        again = inputs[:, None] + np.broadcast_to(kept_outputs[None, :], whole.shape)
        return whole + kept_outputs[None, :], again

    @cached_property
    def _stashes(self) -> Floats:
        """Memory of the weight stash of one microbatch."""
        return np.asarray(sum(part._stashes for part in self._slices)) if self.lengths else self._sum("weight_stash")

    @cached_property
    def _kept(self) -> Floats:
        """Memory of what is kept of one microbatch besides its activation."""
        return np.asarray(sum(part._kept for part in self._slices)) if self.lengths else self._sum("kept")

    @cached_property
    def _kept_gradients(self) -> Floats:
        """Memory of the sums of its gradients: of all slices but the last."""
        parts = [part._sum("kept_gradients") for part in self._slices[:-1]] if self.lengths else []
        return np.asarray(sum(parts, start=np.zeros((self.layers + 1, self.layers + 1))))

    def sum_held(self, recompute: bool, counts: tuple[float, float, float, float]) -> Floats:
        """Memory with so many activations, stashes, kept tensors and sums of their gradients, parameters included.

        A recomputed run holds only its input in place of its activation.
        """
        key = recompute, counts
        if key not in self._held:
            activations, stashes, kept, gradients = counts
            held = self._sum("static") + activations * self._activations[recompute] + stashes * self._stashes
            self._held[key] = np.asarray(held + kept * self._kept + gradients * self._kept_gradients)
        return self._held[key]

    @cached_property
    def reserves(self) -> tuple[Floats, Floats]:
        """Extra memory while an action runs, without and with recompute: the largest workspace, and all activations of the run."""
        if self.lengths:
            once, again = zip(*(part.reserves for part in self._slices), strict=True)
            return np.maximum.reduce(once), np.maximum.reduce(again)
        whole, kept = self._activations
        largest = np.zeros_like(whole)
        workspaces = np.array([layer.workspace for layer in self.profile.layers])
        for first in range(len(workspaces)):
            largest[first, first + 1 :] = np.maximum.accumulate(workspaces[first:])
        return largest, largest + np.maximum(whole - kept, 0.0)


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
    moves: bool = False
    """Whether activations may be moved to the host."""
    cluster: Cluster | None = None
    """The devices of the ranks, if they differ."""
    always: tuple[float, ...] = ()
    """Time that each rank takes per microbatch besides that of its layers, if it differs between ranks: of S and T, less the least."""

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
        """Time of every rank per microbatch if the work could be shared without regard to layers, and without recompute.

        The largest load of any cuts is at least this.
        """
        return self.work / float(self.speeds.sum())

    @cached_property
    def work(self) -> float:
        """Time of a microbatch on all layers, as the profile has it."""
        return float(self.runs.times[False][0, -1])

    @cached_property
    def speeds(self) -> Floats:
        """How fast each rank is at most: the largest ratio of a layer's time in the profile to that on the rank's device."""
        layer = np.diagonal(self.runs.times[False], 1)
        return np.array([_ratio(layer, np.diagonal(once, 1)) for once, _ in self._by_rank])

    def moments_of(self, rank: int) -> list[PeakMoment]:
        """The moments of a rank: the given ones, and the one with a microbatch in all of its stages, which every schedule has.

        With slices, that is when the last of them runs its backward on the rank's last stage, and the gradients of the others begin there.
        If activations may move, only that of this backward must be there; what slices keep never moves.
        """
        held = len(self.placement.stages_of(rank))
        none, last = (0,) * held, (*(0,) * (held - 1), 1)
        if self.moves:
            lengths = self.runs.lengths
            least = (*none[1:], lengths[-1] / sum(lengths) if lengths else 1)
            own = PeakMoment(rank, least, none, kept=(1,) * held, kept_gradients=last)
        else:
            own = PeakMoment(rank, (1,) * held, none, kept_gradients=last)
        return [own, *(moment for moment in self.moments if moment.rank == rank)]

    def times(self, rank: int, stage: int) -> Floats:
        """Time of a rank on a stage, for every run of layers, with a part of what it takes besides.

        Stages of equal devices, both recomputed or not, share a table. If the embedding and the head are spread over the ranks, neither
        can be a stage on its own, and its time is infinite.
        """
        return self._shares[rank][self.recompute[stage]]

    def slowest_times(self, stage: int) -> Floats:
        """The same on the slowest of the ranks that run the stage for different copies of the model."""
        tables = {id(table): table for table in (self.times(ranks[stage], stage) for ranks in self.placement.copies)}
        first, *others = tables.values()
        return np.maximum.reduce([first, *others]) if others else first

    @cached_property
    def _by_rank(self) -> list[tuple[Floats, Floats]]:
        """Time of a microbatch on every run of layers, without and with recompute, by rank."""
        if self.cluster is None:
            return [self.runs.times] * self.placement.ranks
        return [self.runs.on(device).times for device in self.cluster.devices]

    @cached_property
    def _shares(self) -> list[tuple[Floats, Floats]]:
        more = [time / len(self.placement.stages_of(rank)) for rank, time in enumerate(self.always or (0.0,) * self.placement.ranks)]
        keys = [(id(tables), time) for tables, time in zip(self._by_rank, more, strict=True)]
        shares = {
            key: (self.share * tables[0] + key[1], self.share * tables[1] + key[1]) for key, tables in zip(keys, self._by_rank, strict=True)
        }
        for table in (table for tables in shares.values() for table in tables if self.runs.profile.shares):
            table[0, 1] = table[-2, -1] = np.inf
        return [shares[key] for key in keys]

    def loads(self, cuts: Ints) -> Floats:
        """Time of each rank per microbatch, one row per row of cuts."""
        totals = np.zeros((len(cuts), self.placement.ranks))
        for copy in self.placement.copies:  # a rank may run one stage for several copies
            for stage, rank in enumerate(copy):
                totals[:, rank] += self.times(rank, stage)[cuts[:, stage], cuts[:, stage + 1]]
        return totals

    def excesses(self, cuts: Ints) -> Floats:
        """Memory of each rank over its limit, or 0, one row per row of cuts."""
        totals = np.zeros((len(cuts), self.placement.ranks))
        for rank, limit in enumerate(self.limits or ()):
            stages = self.placement.stages_of(rank)
            for moment in self.moments_of(rank):
                held = np.full(len(cuts), moment.other)
                reserve = np.zeros(len(cuts))
                for stage, counts in zip(stages, moment.by_stage, strict=True):
                    run = cuts[:, stage], cuts[:, stage + 1]
                    held += self.runs.sum_held(self.recompute[stage], counts)[run]
                    reserve = np.maximum(reserve, self.runs.reserves[self.recompute[stage]][run])
                totals[:, rank] = np.maximum(totals[:, rank], memory_over(held + reserve, limit))
        return totals

    def squares(self, cuts: Ints) -> Floats:
        """How uneven the stages are, per row of cuts: the sum of squared times."""
        totals = np.zeros(len(cuts))
        for stage in range(self.stages):
            totals += self.slowest_times(stage)[cuts[:, stage], cuts[:, stage + 1]] ** 2
        return totals


def _ratio(times: Floats, own: Floats) -> float:
    """The largest ratio of two times of a layer; 1 if no layer takes any time."""
    taken = (times > 0) & (own > 0)
    return float((times[taken] / own[taken]).max()) if taken.any() else 1.0


def _add_up(tables: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """The sums of the tables without recompute, and of those with it."""
    once, again = zip(*tables, strict=True)
    return np.add.reduce(once), np.add.reduce(again)


def memory_over(held: Floats, limit: float) -> Floats:
    """Memory over a limit, or 0."""
    return np.where(held <= limit * (1 + SLACK), 0.0, held - limit)
