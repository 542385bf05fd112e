"""A bound for every way to cut a model: any contiguous partition, placement, order and choice of stages to recompute.

It knows layers and ranks, and neither stages nor cuts. Its arguments assume only that each rank holds at least one layer, that
a rank does one action at a time, and that activations are held from the forward to the backward (see `ir.memory_ledger`):

- *average*: the ranks share the work of all layers. In each copy of the model at most one rank starts with the first layer, one
  more after that layer, and so on, so most ranks are idle at first;
- *largest layer*: one rank runs it for all microbatches of a copy, after the layers before it;
- *one microbatch*: forward and backward through all layers, with a message each way between neighbouring ranks;
- *holding*: every activation is held for its round trip, and the memory of all ranks together is limited.

If sequences are cut into q slices, the bound holds for all lengths of them. The work of a microbatch is then the same for all lengths, but
each rank begins with a first slice, which may be as short as the granularity allows. The longest slice has at least a q-th of the tokens,
and goes through all layers. A slice is held on its layer until all later ones have passed there in both directions, and for its round trip.
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
    slices: int = 1
    least_slice: int = 0
    """The fewest tokens of a first slice."""

    def value(self) -> float:
        """The best of the arguments; infinite if the model does not fit on all ranks together."""
        return max(self.average(), self.bound_largest_layer(), self.bound_one_microbatch(), self.bound_holding())

    def average(self) -> float:
        idle = 0.0
        if self.barrier:
            idle = sum(self._bound_before(place // self.copies) for place in range(self.ranks))
        return (self.microbatches * float(self._all.sum()) + idle) / self.ranks

    def bound_largest_layer(self) -> float:
        before = np.concatenate(([0.0], np.cumsum(self._time_first("f"))[:-1])) if self.barrier else np.zeros(len(self.profile))
        return float((before + self.microbatches // self.copies * self._all).max())

    def bound_one_microbatch(self) -> float:
        back = "i" if self.split else "b"
        if self.slices == 1:
            return float((self._list_times("f") + self._list_times(back)).sum()) + 2 * (self.ranks - 1) * self._time_hop()
        tokens = self._tokens / self.slices
        return float((self._time_slice("f", tokens) + self._time_slice(back, tokens)).sum()) + 2 * (self.ranks - 1) * self._time_hop(tokens)

    def bound_holding(self) -> float:
        if self.limits is None or self.recompute:
            return 0.0
        layers = self.profile.layers
        room = sum(self.limits) * (1 + 2 * SLACK) - sum(layer.static for layer in layers)
        area = self.microbatches * (self._bound_held_area() if self.slices == 1 else self._bound_held_area_of_slices())
        if room <= 0:
            return math.inf if area > 0 or room < 0 else 0.0
        return area / room

    # Helpers ----------------------------------------------------------------------------------------------------------

    def _bound_held_area(self) -> float:
        """Memory times time that the activations of one microbatch take at least."""
        forward, back = self._list_times("f"), self._list_times("i" if self.split else "b")
        trips = np.cumsum((forward + back)[::-1])[::-1]
        return float((np.array([layer.activation for layer in self.profile.layers]) * trips).sum())

    def _bound_held_area_of_slices(self) -> float:
        """The same if the microbatch is cut into slices, of any lengths; only what grows with their tokens counts.

        Slice k of n_k tokens is held on a layer while slices k, k+1 and so on pass there: the sum of n_k n_j over j >= k is at least T^2/2,
        and that of n_k with the pairs of these slices at least T^3/3. Or it is held for its round trip: the sum of n_k^2 is at least T^2/q.
        """
        back = ("i",) if self.split else ("i", "w")
        share = min(1.0, self.profile.overlap)
        held = self._list_terms("activation", "token") + np.array([layer.slices.keys for layer in self.profile.layers if layer.slices])
        token = share * sum(self._list_terms(name, "token") for name in ("f", *back))
        pair = share * sum(self._list_terms(name, "pair") for name in ("f", *back))
        passing = token * self._tokens**2 / 2 + pair * self._tokens**3 / 3
        trips = np.cumsum(np.asarray(token)[::-1])[::-1] * self._tokens**2 / self.slices
        return float((held * np.maximum(passing, trips)).sum())

    @property
    def _tokens(self) -> int:
        assert self.profile.tokens is not None
        return self.profile.tokens

    def _list_terms(self, name: str, term: str) -> Floats:
        """A term of the slice cost of every layer."""
        return np.array([getattr(getattr(layer.slices, name), term) for layer in self.profile.layers])

    def _time_slice(self, name: str, tokens: float) -> Floats:
        """Least time of a slice of so many tokens on each layer: with nothing before it."""
        if name == "b":
            return self._time_slice("i", tokens) + self._time_slice("w", tokens)
        times = self._list_terms(name, "fixed") + self._list_terms(name, "token") * tokens + self._list_terms(name, "pair") * tokens**2 / 2
        return np.asarray(min(1.0, self.profile.overlap) * times)

    def _time_first(self, name: str) -> Floats:
        """Least time on each layer of what comes first and last of all: a microbatch, or its first slice."""
        return self._list_times(name) if self.slices == 1 else self._time_slice(name, self.least_slice)

    def _list_times(self, name: str) -> Floats:
        """Time of a microbatch on each layer, of all its slices together."""
        if name == "b":
            return self._list_times("i") + self._list_times("w")
        # Overlapped actions take this share of their sum, and no action takes less.
        if self.slices > 1:
            return self._time_slice(name, self._tokens) + min(1.0, self.profile.overlap) * (self.slices - 1) * self._list_terms(
                name, "fixed"
            )
        return min(1.0, self.profile.overlap) * np.array([getattr(layer, name) for layer in self.profile.layers])

    @property
    def _all(self) -> Floats:
        return self._list_times("f") + self._list_times("b")

    def _time_hop(self, tokens: float | None = None) -> float:
        """The least time of a message between two ranks, of a slice if its tokens are given."""
        profile = self.profile
        least = min(layer.output for layer in profile.layers) * (1.0 if tokens is None else tokens / self._tokens)
        return profile.latency + (0.0 if profile.bandwidth is None else least / profile.bandwidth)

    def _bound_before(self, layers: int) -> float:
        """Least idle time of a rank with so many layers before its first one: before its first action and after its last."""
        hop = self._time_hop(None if self.slices == 1 else self.least_slice)
        before = float(self._time_first("f")[:layers].sum()) + layers * hop
        # A split backward leaves weight gradients to run until the end.
        return before if self.split else before + float(self._time_first("b")[:layers].sum()) + layers * hop
