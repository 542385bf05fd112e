"""Every order of a cluster's devices with every partition of the layers: one of each is a setting.

Small clusters have so few settings that a schedule can be timed on the best of them. `SettingScores` scores all of them at once and without
a schedule: by a bound that holds for every order of the actions, and by an estimate to sort them by. Both know how long the pipeline takes
to fill, and which messages queue for the same lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from penstock.ir.cluster import Cluster
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats, Ints
from penstock.planner.partition.assignment import Assignment, Orders
from penstock.planner.partition.layer_runs import Cutting, LayerRuns
from penstock.planner.profile import Profile

MOST_SETTINGS = 50_000
"""Up to this many settings, all are scored; there are 42,504 of 24 layers on four devices that all differ."""


@dataclass(frozen=True)
class Setting:
    """An order of the devices and a partition."""

    assignment: Assignment
    sizes: tuple[int, ...]
    bound: float
    """No schedule takes less."""


@dataclass(frozen=True, eq=False)
class SettingScores:
    """Scores all settings of a placement, in whole sequences."""

    profile: Profile
    placement: Placement
    cluster: Cluster
    microbatches: int
    recompute: tuple[bool, ...]
    limits: tuple[float, ...] | None = None
    """The memory limit of each device."""
    barrier: bool = True

    @property
    def count(self) -> int:
        """How many settings there are."""
        layers, stages = len(self.profile), self.placement.stages
        return self._orders.count * math.comb(layers - 1, stages - 1)

    def list_best(self, most: int) -> list[Setting]:
        """The most promising settings in which a microbatch at a time fits, the best first; nothing if there are too many to score."""
        if self.count > MOST_SETTINGS:
            return []
        layers = len(self.profile)
        cuts = np.array([(0, *inner, layers) for inner in combinations(range(1, layers), self.placement.stages - 1)], dtype=np.int64)
        assignments = [Assignment(self.cluster, order) for order in self._orders.list_all()]
        scores = [self.score(assignment, cuts) for assignment in assignments]
        bounds, estimates = (np.concatenate(values) for values in zip(*scores, strict=True))
        best = [place for place in np.argsort(estimates, kind="stable")[:most].tolist() if math.isfinite(estimates[place])]
        return [
            Setting(assignments[place // len(cuts)], tuple(np.diff(cuts[place % len(cuts)]).tolist()), float(bounds[place]))
            for place in best
        ]

    def score(self, assignment: Assignment, cuts: Ints) -> tuple[Floats, Floats]:
        """A bound and an estimate per row of cuts; both infinite if not even a microbatch at a time fits.

        A rank starts when the first microbatch reaches it, and then has all its work to do. About that long takes a pipeline that is
        never idle but for one microbatch on its way there and back; copies of the model share that way.
        """
        limits = None if self.limits is None else assignment.arrange(self.limits)
        cutting = Cutting(self._runs, self.placement, self.recompute, limits, (), cluster=assignment.cluster)
        links, least = Costs(**assignment.cluster.link_fields), min(1.0, self.profile.overlap)
        copies = self.placement.copies
        starts, loads = np.full((len(cuts), self.placement.ranks), np.inf), np.zeros((len(cuts), self.placement.ranks))
        lanes, trip = dict[object, Floats](), np.zeros(len(cuts))
        for place, ranks in enumerate(copies[: self.microbatches]):
            own, ahead = len(range(place, self.microbatches, len(copies))), np.zeros(len(cuts))
            for stage, rank in enumerate(ranks):
                run = cuts[:, stage], cuts[:, stage + 1]
                if stage and ranks[stage - 1] != rank:
                    sizes, before = self._outputs[run[0] - 1], ranks[stage - 1]
                    for source, target, back in ((before, rank, False), (rank, before, True)):
                        time = links.travel(sizes, source, target)
                        trip += time
                        ahead += 0.0 if back else time
                        for link in links.name_links(source, target, back):
                            lanes[link] = lanes.get(link, 0.0) + own * time
                time = cutting.times(rank, stage)[run] / cutting.share
                starts[:, rank] = np.minimum(starts[:, rank], ahead)
                ahead += least * self._runs.on(assignment.cluster.devices[rank]).forwards[run]
                trip += time
                loads[:, rank] += own * least * time
        busiest = np.maximum.reduce([np.zeros(len(cuts)), *lanes.values()])
        bounds = loads.max(axis=1)
        slowest = np.maximum(bounds, busiest)
        if self.barrier:
            bounds = np.maximum((starts + loads).max(axis=1), busiest)
        estimates = trip / len(copies) ** 2 + slowest * (self.microbatches - 1) / self.microbatches + self._time_exchanges(cuts, links)
        too_large = cutting.excesses(cuts).any(axis=1)
        return np.where(too_large, np.inf, bounds), np.where(too_large, np.inf, estimates)

    def _time_exchanges(self, cuts: Ints, links: Costs) -> Floats:
        """Time in which the copies of the slowest stage exchange their gradients, per row of cuts."""
        slowest, gradients = np.zeros(len(cuts)), self._gradients
        for stage, (rank, *others) in enumerate(zip(*self.placement.copies, strict=True)):
            size = gradients[cuts[:, stage + 1]] - gradients[cuts[:, stage]]
            for other in others:
                slowest = np.maximum.reduce([slowest, links.travel(size, rank, other), links.travel(size, other, rank)])
        return slowest

    @cached_property
    def _orders(self) -> Orders:
        return Orders(self.cluster, self.placement, self.limits)

    @cached_property
    def _runs(self) -> LayerRuns:
        return LayerRuns(self.profile)

    @cached_property
    def _outputs(self) -> Floats:
        return np.array([layer.output for layer in self.profile.layers])

    @cached_property
    def _gradients(self) -> Floats:
        """The gradients of all layers before each one."""
        return np.concatenate(([0.0], np.cumsum([layer.gradients for layer in self.profile.layers])))
