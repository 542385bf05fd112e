"""A bound for every way to cut a model: any contiguous partition, placement, order and choice of stages to recompute.

It knows layers and ranks, and neither stages nor cuts. Its arguments assume only that each rank holds at least one layer, that
a rank does one action at a time, and that activations are held from the forward to the backward:

- *average*: the ranks share the work of all layers. In each copy of the model at most one rank starts with the first layer, one
  more after that layer, and so on, so most ranks are idle at first;
- *largest layer*: one rank runs it for all microbatches of a copy, after the layers before it;
- *one microbatch*: forward and backward through all layers, with a message each way between neighbouring ranks;
- *holding*: every activation is held for its round trip, and the memory of all ranks together is limited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.problem import SLACK
from penstock.planner.profile import Profile


@dataclass(frozen=True)
class OverallBound:
    """The bound of a profile at one microbatch size."""

    profile: Profile
    microbatches: int
    ranks: int
    copies: int = 1
    """The most copies of the model that a placement has."""
    limits: tuple[float, ...] | None = None
    recompute: bool = False
    barrier: bool = True
    split: bool = True

    def value(self) -> float:
        """The best of the arguments; infinite if the model does not fit on all ranks together."""
        return max(self.average(), self.largest_layer(), self.one_microbatch(), self.holding())

    def average(self) -> float:
        idle = 0.0
        if self.barrier:
            idle = sum(self._before(place // self.copies) for place in range(self.ranks))
        return (self.microbatches * float(self._all.sum()) + idle) / self.ranks

    def largest_layer(self) -> float:
        before = np.concatenate(([0.0], np.cumsum(self._times("f"))[:-1])) if self.barrier else np.zeros(len(self.profile))
        return float((before + self.microbatches // self.copies * self._all).max())

    def one_microbatch(self) -> float:
        back = "i" if self.split else "b"
        return float((self._times("f") + self._times(back)).sum()) + 2 * (self.ranks - 1) * self._hop

    def holding(self) -> float:
        if self.limits is None or self.recompute:
            return 0.0
        layers = self.profile.layers
        room = sum(self.limits) * (1 + 2 * SLACK) - sum(layer.static for layer in layers)
        forward, back = self._times("f"), self._times("i" if self.split else "b")
        trips = np.cumsum((forward + back)[::-1])[::-1]
        area = self.microbatches * float((np.array([layer.activation for layer in layers]) * trips).sum())
        if room <= 0:
            return math.inf if area > 0 or room < 0 else 0.0
        return area / room

    # Helpers ----------------------------------------------------------------------------------------------------------

    def _times(self, name: str) -> Floats:
        if name == "b":
            return self._times("i") + self._times("w")
        # Overlapped actions take this share of their sum, and no action takes less.
        return min(1.0, self.profile.overlap) * np.array([getattr(layer, name) for layer in self.profile.layers])

    @property
    def _all(self) -> Floats:
        return self._times("f") + self._times("b")

    @property
    def _hop(self) -> float:
        """The least time of a message between two ranks."""
        profile = self.profile
        least = min(layer.output for layer in profile.layers)
        return profile.latency + (0.0 if profile.bandwidth is None else least / profile.bandwidth)

    def _before(self, layers: int) -> float:
        """Least idle time of a rank with so many layers before its first one: before its first action and after its last."""
        before = float(self._times("f")[:layers].sum()) + layers * self._hop
        # A split backward leaves weight gradients to run until the end.
        return before if self.split else before + float(self._times("b")[:layers].sum()) + layers * self._hop
