"""Divides samples into microbatches of equal cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.errors import CostsError, PlanError
from penstock.planner.batches.lengths import LengthCosts, check_length, read_lengths
from penstock.text.units import check_count

_EVEN = 1e-12
"""Relative rounding error of a sum of costs."""
_CLOSE = 1e-4
"""A largest cost that is above the bound by no more than this share is good enough."""
_NEAR = 1e-3
"""Above the bound by no more than this share, a packing is improved, but no other one is tried."""
_NODES = 10_000
"""Partial packings that the exact search looks at before it gives up."""
_MOST_EXACT = 200
"""The most samples of an exact search, which is as deep as there are samples; with more of them the other packings are near the bound."""
_CHANGES = 500
"""The most improvements of one packing."""


@dataclass(frozen=True)
class Packing:
    """The microbatch of each sample."""

    groups: tuple[tuple[int, ...], ...]
    """The samples of each microbatch, as indices into the lengths that were packed."""
    lengths: tuple[tuple[int, ...], ...]
    """The lengths of these samples: what `BatchPlanner.order` takes."""
    costs: tuple[float, ...]
    """The cost of each microbatch."""
    bound: float
    """No packing has a largest cost below this."""

    @property
    def largest(self) -> float:
        """The cost of the most expensive microbatch, which was minimised."""
        return max(self.costs)

    @property
    def gap(self) -> float:
        """How much the largest cost is above the bound, as a share of the bound; 0 if the packing is proved to be the best."""
        return max(0.0, self.largest / self.bound - 1)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of each microbatch."""
        return tuple(map(sum, self.lengths))


def pack(
    lengths: Sequence[int], microbatches: int, *, capacity: int | None = None, sequence: int | None = None, quadratic: float = 0.0
) -> Packing:
    """Pack samples into microbatches so that the most expensive one costs as little as possible.

    - `capacity`: the most tokens of a microbatch;
    - `quadratic`: the share of the time of a sample with `sequence` tokens that grows with the square of the length, see `LengthCosts`;
      by default the cost of a sample is its length.

    Differencing and largest-first packings are improved by moving and exchanging samples. Unless that comes within 0.1 % of the bound, a
    search with a fixed number of steps looks for a better one; for few samples it is complete. Equal arguments give equal packings.

    >>> pack([7, 5, 4, 4, 3, 1], 3).lengths
    ((7, 1), (5, 3), (4, 4))
    """
    samples = [length for (length,) in _read_samples(lengths)]
    _check_counts(samples, microbatches, capacity)
    if quadratic and sequence is None:
        raise CostsError(f"quadratic={quadratic:g} is a share of the time at one length: give that length as sequence=")
    model = LengthCosts(1 if sequence is None else sequence, quadratic)
    return _Packer(samples, [model.of([length]) for length in samples], microbatches, capacity).run()


def _read_samples(lengths: Any) -> list[tuple[int, ...]]:
    samples = read_lengths(lengths)
    for index, sample in enumerate(samples):
        if len(sample) != 1:
            raise CostsError(f"lengths[{index}] has {len(sample)} values: give one number of tokens per sample")
    return samples


def _check_counts(lengths: list[int], microbatches: Any, capacity: int | None) -> None:
    """Refuse what no packing can do, with the least number or capacity that could."""
    check_count("microbatches", microbatches)
    if len(lengths) < microbatches:
        raise PlanError(f"{len(lengths)} samples cannot fill {microbatches} microbatches: ask for at most {len(lengths)}")
    if capacity is None:
        return
    check_length(capacity, "capacity")
    longest = max(range(len(lengths)), key=lambda index: lengths[index])
    if lengths[longest] > capacity:
        raise PlanError(
            f"sample {longest} has {lengths[longest]} tokens, more than the capacity of {capacity} per microbatch: cut the sample, or "
            f"raise the capacity to {lengths[longest]}"
        )
    total = sum(lengths)
    if total > microbatches * capacity:
        raise PlanError(
            f"{total} tokens do not fit into {microbatches} microbatches of at most {capacity}: use at least {math.ceil(total / capacity)} "
            f"microbatches, or a capacity of at least {math.ceil(total / microbatches)}"
        )


class _Packer:
    """Packings of one set of samples; groups are lists of indices."""

    def __init__(self, lengths: list[int], costs: list[float], microbatches: int, capacity: int | None) -> None:
        self.lengths, self.costs, self.count = lengths, costs, microbatches
        self.capacity = sum(lengths) if capacity is None else capacity
        self.order = sorted(range(len(lengths)), key=lambda sample: (-costs[sample], sample))
        """The most expensive sample first."""

    def run(self) -> Packing:
        best: list[list[int]] | None = None
        bound = self._bound()
        for start in (self._pack_by_differencing, self._pack_largest_first, self._pack_fullest_first):
            groups = start() if best is None or self._find_largest(best) > bound * (1 + _NEAR) else None
            if groups is not None:
                self._improve(groups, bound * (1 + _CLOSE))
                best = groups if best is None or self._find_largest(groups) < self._find_largest(best) else best
        if best is None or self._find_largest(best) > bound * (1 + _NEAR):
            exact, complete = self._search(math.inf if best is None else self._find_largest(best))
            best = exact or best
            if best is None:
                total = sum(self.lengths)
                raise PlanError(
                    f"no packing of {len(self.lengths)} samples, {total} tokens, into {self.count} microbatches of at most {self.capacity} "
                    f"{'exists' if complete else 'was found'}: they are {total / self.count / self.capacity:.1%} full on average; use more "
                    "microbatches or a larger capacity"
                )
            if complete:
                bound = self._find_largest(best)
        groups = sorted((sorted(group) for group in best), key=lambda group: (-self._sum_cost(group), group))
        return Packing(
            groups=tuple(map(tuple, groups)),
            lengths=tuple(tuple(self.lengths[sample] for sample in group) for group in groups),
            costs=tuple(map(self._sum_cost, groups)),
            bound=min(bound, max(map(self._sum_cost, groups))),
        )

    def _sum_cost(self, group: Sequence[int]) -> float:
        return math.fsum(self.costs[sample] for sample in group)

    def _count_tokens(self, group: Sequence[int]) -> int:
        return sum(self.lengths[sample] for sample in group)

    def _find_largest(self, groups: Sequence[Sequence[int]]) -> float:
        return max(map(self._sum_cost, groups))

    def _bound(self) -> float:
        """The mean cost; and among the k * microbatches + 1 most expensive samples, k + 1 are in one microbatch, at best the cheapest."""
        costs = [self.costs[sample] for sample in self.order]
        crowded = (math.fsum(costs[rank - rank // self.count : rank + 1]) for rank in range(0, len(costs), self.count))
        return max(math.fsum(costs) / self.count, *crowded)

    # Packings to begin with -------------------------------------------------------------------------------------------

    def _pack_largest_first(self) -> list[list[int]] | None:
        """Each sample, the most expensive first, into the cheapest microbatch with room."""
        groups: list[list[int]] = [[] for _ in range(self.count)]
        costs, tokens = [0.0] * self.count, [0] * self.count
        for sample in self.order:
            open_groups = [place for place in range(self.count) if tokens[place] + self.lengths[sample] <= self.capacity]
            if not open_groups:
                return None
            place = min(open_groups, key=lambda place: (costs[place], place))
            groups[place].append(sample)
            costs[place] += self.costs[sample]
            tokens[place] += self.lengths[sample]
        return groups

    def _pack_fullest_first(self) -> list[list[int]] | None:
        """Each sample, the longest first, into the fullest microbatch with room: fits when little room is left."""
        groups: list[list[int]] = [[] for _ in range(self.count)]
        tokens = [0] * self.count
        for sample in sorted(self.order, key=lambda sample: (-self.lengths[sample], sample)):
            open_groups = [place for place in range(self.count) if tokens[place] + self.lengths[sample] <= self.capacity]
            if not open_groups:
                return None
            place = max(open_groups, key=lambda place: (tokens[place], -place))
            groups[place].append(sample)
            tokens[place] += self.lengths[sample]
        for empty in (group for group in groups if not group):
            empty.append(max(groups, key=len).pop())
        return groups

    def _pack_by_differencing(self) -> list[list[int]] | None:
        """Karmarkar and Karp: join the two most uneven partial packings, the expensive groups of one with the cheap ones of the other."""
        # A partial packing has its groups that are not empty, by falling cost, which is kept negative so that tuples sort as they are.
        heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
            (-self.costs[sample] if self.count > 1 else 0.0, sample, [(-self.costs[sample], [sample])]) for sample in self.order
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            _, first, uneven = heapq.heappop(heap)
            _, _, other = heapq.heappop(heap)
            alone = self.count - len(other)  # groups of the first that meet an empty one
            joined = [(one + two, left + right) for (one, left), (two, right) in zip(uneven[alone:], reversed(other), strict=False)]
            joined += uneven[:alone]
            joined += other[: self.count - len(uneven)]
            joined.sort()
            smallest = joined[-1][0] if len(joined) == self.count else 0.0
            heapq.heappush(heap, (joined[0][0] - smallest, first, joined))
        groups = [group for _, group in heap[0][2]]
        full = len(groups) == self.count and all(self._count_tokens(group) <= self.capacity for group in groups)
        return groups if full else None

    # Improvement ------------------------------------------------------------------------------------------------------

    def _improve(self, groups: list[list[int]], enough: float) -> None:
        """Move a sample out of the most expensive microbatch, or exchange it, as long as that makes the larger of the two cheaper."""
        sample_costs, sample_lengths = np.array([*self.costs, 0.0]), np.array([*self.lengths, 0])
        nothing = len(self.costs)  # the sample that stands for taking none in exchange
        place_of = np.zeros(len(self.costs), dtype=np.int64)
        for place, group in enumerate(groups):
            place_of[group] = place
        costs, tokens = np.array(list(map(self._sum_cost, groups))), np.array(list(map(self._count_tokens, groups)))
        for _ in range(_CHANGES):
            high = int(np.argmax(costs))
            if costs[high] <= enough:
                break
            samples = np.array(groups[high])
            others = np.flatnonzero(place_of != high)
            taken = np.concatenate((others, np.full(self.count if len(samples) > 1 else 0, nothing)))
            places = np.concatenate((place_of[others], np.arange(self.count if len(samples) > 1 else 0)))
            shift = sample_costs[samples][:, None] - sample_costs[taken]
            longer = sample_lengths[samples][:, None] - sample_lengths[taken]
            larger = np.maximum(costs[high] - shift, costs[places] + shift)
            fits = (tokens[places] + longer <= self.capacity) & (tokens[high] - longer <= self.capacity) & (places != high)
            larger = np.where(fits, larger, np.inf)
            best = int(np.argmin(larger))
            if larger.ravel()[best] >= costs[high] * (1 - _EVEN):
                break
            sample, other, low = int(samples[best // len(taken)]), int(taken[best % len(taken)]), int(places[best % len(taken)])
            groups[high].remove(sample)
            groups[low].append(sample)
            place_of[sample] = low
            if other != nothing:
                groups[low].remove(other)
                groups[high].append(other)
                place_of[other] = high
            for place in (high, low):
                costs[place], tokens[place] = self._sum_cost(groups[place]), self._count_tokens(groups[place])

    # Exact search -----------------------------------------------------------------------------------------------------

    def _search(self, above: float) -> tuple[list[list[int]] | None, bool]:
        """A packing whose largest cost is below `above`, the best if the search is complete; and whether it is."""
        groups: list[list[int]] = [[] for _ in range(self.count)]
        costs, tokens = [0.0] * self.count, [0] * self.count
        best: list[list[int]] | None = None
        nodes, mean = 0, self._bound()

        def descend(at: int) -> bool:
            """Place the samples from this one on; returns whether nothing was cut off by the number of nodes."""
            nonlocal above, best, nodes
            if at == len(self.order):
                best, above = [list(group) for group in groups], max(map(self._sum_cost, groups))
                return True
            nodes += 1
            if nodes > _NODES:
                return False
            sample, seen = self.order[at], set()
            empty = sum(not group for group in groups)
            for place in sorted(range(self.count), key=lambda place: (costs[place], place)):
                state = costs[place], tokens[place]
                if state in seen or (empty == len(self.order) - at and groups[place]):
                    continue
                seen.add(state)
                cost = costs[place] + self.costs[sample]
                if cost >= above * (1 - _EVEN) or tokens[place] + self.lengths[sample] > self.capacity:
                    continue
                groups[place].append(sample)
                costs[place], tokens[place] = cost, tokens[place] + self.lengths[sample]
                complete = descend(at + 1)
                groups[place].pop()
                costs[place], tokens[place] = state
                if not complete or above <= mean * (1 + _EVEN):
                    return complete
            return True

        if len(self.order) > _MOST_EXACT:
            return None, False
        complete = descend(0)
        return best, complete
