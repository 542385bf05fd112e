"""A bound for every way to cut a model: any contiguous partition, placement, order and choice of stages to recompute.

It knows layers and ranks, and neither stages nor cuts. Its arguments assume only that each rank holds at least one layer, that
a rank does one action at a time, and that activations are held from the forward to the backward (see `ir.memory_ledger`):

- *average*: the ranks share the work of all layers. In each copy of the model at most one rank starts with the first layer, one
  more after that layer, and so on, so most ranks are idle at first. Ranks of different speeds share it by their speeds;
- *average with shares*: the ranks share the work of all layers and that of a spread vocabulary, in any parts of its rows;
- *counting*: a rank that ends in time has run only so many layers, and all ranks together must have run all of them. Only one of them
  starts with the first layer;
- *largest layer*: one rank runs it for all microbatches of a copy, after the layers before it;
- *one microbatch*: forward and backward through all layers, with a message each way between neighbouring ranks;
- *holding*: every activation is held for its round trip, and the memory of all ranks together is limited.

On a cluster any device may be any rank: where an argument asks for the time of a layer, that on the fastest device counts, and for a
message that over the fastest link.

If sequences are cut into q slices, the bound holds for all lengths of them. The work of a microbatch is then the same for all lengths, but
each rank begins with a first slice, which may be as short as the granularity allows. The longest slice has at least a q-th of the tokens,
and goes through all layers. A slice is held on its layer until all later ones have passed there in both directions, and for its round trip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.ir.cluster import Cluster, Speeds
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
    cluster: Cluster | None = None
    """The devices, if they differ; any of them may be any rank."""

    def value(self) -> float:
        """The best of the arguments; infinite if the model does not fit on all ranks together."""
        arguments = self.average(), self.average_with_shares(), self.bound_count()
        return max(*arguments, self.bound_largest_layer(), self.bound_one_microbatch(), self.bound_holding())

    def average(self) -> float:
        speeds = sorted(self._speeds, reverse=True)
        idle = 0.0
        if self.barrier:  # the slowest device may be the one that is idle longest
            idle = sum(speed * self._bound_before(place // self.copies) for place, speed in enumerate(speeds))
        return (self.microbatches * float(self._all.sum()) + idle) / sum(speeds)

    def average_with_shares(self) -> float:
        """Without idle time at first, when S of the embedding may run."""
        share = _time_share(self.profile)
        if not share:
            return 0.0
        own = [self.profile] * self.ranks if self.cluster is None else [self.profile.on(device) for device in self.cluster.devices]
        speeds = [max(speed, share / _time_share(profile)) for speed, profile in zip(self._speeds, own, strict=True)]
        return self.microbatches * (float(self._all.sum()) + self.ranks * share) / sum(speeds)

    def bound_count(self) -> float:
        if self.copies > 1:
            return 0.0
        wait = self._bound_before(1) if self.barrier and self.ranks > 1 else 0.0
        own = {speeds: self._sum_smallest(kind) for speeds, kind in self._kinds.items()}
        sums = [self._sum_smallest(self)] * self.ranks if self.cluster is None else [own[device.speeds] for device in self.cluster.devices]
        ends = np.unique(np.concatenate([time + idle for time in [*own.values(), sums[0]] for idle in (0.0, wait)]))
        low, high = 0, len(ends) - 1
        while low < high:  # the first end by which the ranks have run as many layers as there are
            middle = (low + high) // 2
            later, at_once = (
                np.array([np.searchsorted(time, ends[middle] * (1 + SLACK) - idle, "right") for time in sums]) for idle in (wait, 0.0)
            )
            enough = int(later.sum() + (at_once - later).max()) >= len(self.profile)
            low, high = (low, middle) if enough else (middle + 1, high)
        return float(ends[low])

    def bound_largest_layer(self) -> float:
        first, every = self._least(lambda own: own._time_first("f")), self._least(lambda own: own._all)
        before = np.concatenate(([0.0], np.cumsum(first)[:-1])) if self.barrier else np.zeros(len(self.profile))
        return float((before + self.microbatches // self.copies * every).max())

    def bound_one_microbatch(self) -> float:
        tokens, back = None if self.slices == 1 else self._tokens / self.slices, "i" if self.split else "b"

        def pass_through(own: OverallBound) -> Floats:
            if tokens is None:
                return own._list_times("f") + own._list_times(back)
            return own._time_slice("f", tokens) + own._time_slice(back, tokens)

        least = self._least(pass_through)
        # Each device has at least one layer, whether it is the best for it or not.
        more = {speeds: float((pass_through(own) - least).min()) for speeds, own in self._kinds.items()}
        devices = () if self.cluster is None else self.cluster.devices
        return float(least.sum()) + sum(more[device.speeds] for device in devices) + self._time_hops(tokens)

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
        both = self._least(lambda own: own._list_times("f") + own._list_times("i" if self.split else "b"))
        trips = np.cumsum(both[::-1])[::-1]
        return float((np.array([layer.activation for layer in self.profile.layers]) * trips).sum())

    def _bound_held_area_of_slices(self) -> float:
        """The same if the microbatch is cut into slices, of any lengths; only what grows with their tokens counts.

        Slice k of n_k tokens is held on a layer while slices k, k+1 and so on pass there: the sum of n_k n_j over j >= k is at least T^2/2,
        and that of n_k with the pairs of these slices at least T^3/3. Or it is held for its round trip: the sum of n_k^2 is at least T^2/q.
        """
        back = ("i",) if self.split else ("i", "w")
        share = min(1.0, self.profile.overlap)
        held = self._list_terms("activation", "token") + np.array([layer.slices.keys for layer in self.profile.layers if layer.slices])
        token, pair = (
            share * self._least(lambda own, term=term: np.add.reduce([own._list_terms(name, term) for name in ("f", *back)]))  # type: ignore[misc]
            for term in ("token", "pair")
        )
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

    @cached_property
    def _kinds(self) -> dict[Speeds, OverallBound]:
        """The same on each kind of device of the cluster."""
        devices = () if self.cluster is None else self.cluster.devices
        return {device.speeds: replace(self, profile=self.profile.on(device), cluster=None) for device in devices}

    def _least(self, times: Callable[[OverallBound], Floats]) -> Floats:
        """Times of every layer on the device that is fastest for it."""
        return np.asarray(np.minimum.reduce([times(own) for own in self._kinds.values() or (self,)]))

    @property
    def _speeds(self) -> list[float]:
        """How fast each rank is at most, compared with the profile."""
        if self.cluster is None:
            return [1.0] * self.ranks
        work = self._all
        ratios = {speeds: work[work > 0] / own._all[work > 0] for speeds, own in self._kinds.items()}
        return [float(ratios[device.speeds].max(initial=0.0)) or 1.0 for device in self.cluster.devices]

    def _sum_smallest(self, own: OverallBound) -> Floats:
        """The least time of all microbatches on one layer, on two, and so on."""
        return self.microbatches * np.cumsum(np.sort(own._all))

    def _find_least_size(self, tokens: float | None) -> float:
        """The size of the smallest message, of a slice if its tokens are given."""
        return min(layer.output for layer in self.profile.layers) * (1.0 if tokens is None else tokens / self._tokens)

    def _time_hop(self, tokens: float | None = None) -> float:
        """The least time of a message between two ranks."""
        profile, least = self.profile, self._find_least_size(tokens)
        if self.cluster is not None:
            return self.cluster.find_least_hop(least)
        return profile.latency + (0.0 if profile.bandwidth is None else least / profile.bandwidth)

    def _time_hops(self, tokens: float | None) -> float:
        """The least time of the messages of one microbatch through all ranks and back."""
        return (
            2 * (self.ranks - 1) * self._time_hop(tokens)
            if self.cluster is None
            else self.cluster.find_least_tour(self._find_least_size(tokens))
        )

    def _bound_before(self, layers: int) -> float:
        """Least idle time of a rank with so many layers before its first one: before its first action and after its last."""
        hop = self._time_hop(None if self.slices == 1 else self.least_slice)
        before = float(self._least(lambda own: own._time_first("f"))[:layers].sum()) + layers * hop
        # A split backward leaves weight gradients to run until the end.
        return before if self.split else before + float(self._least(lambda own: own._time_first("b"))[:layers].sum()) + layers * hop


def _time_share(profile: Profile) -> float:
    """S and T of a mean share of a spread vocabulary; 0 without one."""
    return sum(share.time for share in profile.shares)
