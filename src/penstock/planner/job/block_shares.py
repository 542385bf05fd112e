"""Share the equal blocks of a transformer out among the ranks of a schedule, and recompute as many as memory asks for.

What a rank holds at its peak decides how many blocks fit, so every number of blocks is looked at on every rank at once: tables have one
row per rank, one column per number of blocks and, if they need it, one layer per stage of the rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.ir.rows import Floats, Ints
from penstock.planner.candidate import Candidate
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.profile import Layer

_MOST_SHARE = 3
"""A rank takes at most so many times its even share of the blocks."""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Shares:
    """The layers and recomputed layers of every stage."""

    sizes: tuple[int, ...]
    """Layers per stage."""
    recomputed: tuple[bool, ...]
    """For each layer that can be recomputed, whether it is."""
    load: float
    """Seconds of the slowest rank per microbatch."""


@dataclass(frozen=True)
class BlockShares:
    """Shares blocks and recomputed blocks out among the ranks of an order."""

    costs: LayerCosts
    order: Candidate
    moments: Sequence[PeakMoment]
    """The memory of each rank at its peak."""
    limits: tuple[float, ...]
    recompute: bool

    @property
    def _blocks(self) -> int:
        return self.costs.job.layers

    @cached_property
    def _stages(self) -> Ints:
        """The stages of each rank, one row per rank; every rank has as many."""
        placement = self.order.problem.placement
        return np.array([placement.stages_of(rank) for rank in range(placement.ranks)], dtype=np.int64)

    def run(self) -> Shares | float:
        """The shares with the fastest slowest rank, or the bytes over the limit if nothing fits."""
        times, lowest = self._times, [sum(not ends for ends in row) for row in self._ends]
        fitting = np.isfinite(times).sum(axis=1)
        if (fitting <= lowest).any() or int(fitting.sum()) - len(fitting) < self._blocks:
            return self._find_excess()
        loads = np.unique(times[np.isfinite(times)])
        low, high = 0, len(loads) - 1
        while low < high:
            middle = (low + high) // 2
            counts = self._count(loads[middle])
            if counts.sum() >= self._blocks and (counts >= lowest).all():
                high = middle
            else:
                low = middle + 1
        counts = self._count(loads[low])
        while counts.sum() > self._blocks:
            spare = [rank for rank, count in enumerate(counts) if count > lowest[rank]]  # not empty: there are more layers than stages
            counts[max(spare, key=lambda rank: (times[rank, counts[rank]], rank))] -= 1
        return self._lay_out(counts)

    def _count(self, load: float) -> Ints:
        """The most blocks of each rank that take no longer."""
        return np.asarray((self._times <= load * (1 + _ROUNDING)).sum(axis=1) - 1)

    def _lay_out(self, counts: Ints) -> Shares:
        """Layers per stage and recomputed blocks, from the number of blocks of each rank."""
        ranks = np.arange(len(counts))
        sizes, again = np.zeros(self.order.problem.stages, dtype=np.int64), np.zeros(self.order.problem.stages, dtype=np.int64)
        sizes[self._stages], again[self._stages] = self._sizes[ranks, counts], self._tables[1][ranks, counts]
        flags = [number < recomputed for size, recomputed in zip(sizes.tolist(), again.tolist(), strict=True) for number in range(size)]
        for stages, ends in zip(self._stages.tolist(), self._ends, strict=True):
            for stage, layers in zip(stages, ends, strict=True):
                sizes[stage] += len(layers)
        sizes[[0, -1]] += np.array(self.costs.configuration.shared_ends)  # they are layers of the model, in no stage's time and memory
        return Shares(tuple(sizes.tolist()), tuple(flags), float(self._times[ranks, counts].max()))

    # Tables -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _ends(self) -> list[list[tuple[Layer, ...]]]:
        """The layers of each stage of each rank that are not blocks: an embedding and a head that are not shared among the ranks."""
        last, costs = self.order.problem.stages - 1, self.costs
        embedding_is_shared, head_is_shared = costs.configuration.shared_ends
        first, behind = (costs.embedding,) * (not embedding_is_shared), (costs.head,) * (not head_is_shared)
        return [[first * (stage == 0) + behind * (stage == last) for stage in stages] for stages in self._stages.tolist()]

    @cached_property
    def _sizes(self) -> Ints:
        """Blocks per stage, for 0, 1, 2, ... blocks of a rank: one on each empty stage, then on the stage with the least time."""
        ranks, chunks = self._stages.shape
        most = min(_MOST_SHARE * math.ceil(self._blocks / ranks) + 1, self._blocks)
        sizes = np.zeros((ranks, most + 1, chunks), dtype=np.int64)
        in_turn = np.arange(most) % chunks
        for rank, ends in enumerate(self._ends):
            order = np.array(self._order_of_blocks(ends, most)) if any(ends) else in_turn
            sizes[rank, np.arange(1, most + 1), order] = 1
        return np.asarray(np.cumsum(sizes, axis=1))

    def _order_of_blocks(self, ends: Sequence[tuple[Layer, ...]], most: int) -> list[int]:
        """The place of the stage that each further block of a rank with an embedding or a head goes to."""
        loads = [sum(layer.time for layer in layers) for layers in ends]
        empty = [place for place, layers in enumerate(ends) if not layers]
        order: list[int] = []
        for number in range(most):
            place = empty[number] if number < len(empty) else min(range(len(ends)), key=loads.__getitem__)
            loads[place] += self.costs.block.time
            order.append(place)
        return order

    @property
    def _times(self) -> Floats:
        """Seconds of a rank per microbatch by its number of blocks; infinite from the first number that does not fit."""
        return self._tables[0]

    @cached_property
    def _tables(self) -> tuple[Floats, Ints]:
        """The times, and the recomputed blocks per stage that they are for: those of the stages that hold the most microbatches first."""
        block, again, sizes = self.costs.block, self.costs.recomputed_block, self._sizes
        numbers, activations = np.arange(sizes.shape[1]), self._activations
        memory, spare = self._sum_memory_of_ends()
        held = block.static + activations * block.activation + self._stashes * block.weight_stash
        workspace = np.where(numbers > 0, np.maximum(spare, block.workspace)[:, None], spare[:, None])
        over = memory[:, None] + (sizes * held[:, None, :]).sum(axis=2) + workspace - np.array(self.limits)[:, None]
        flags = np.zeros_like(sizes)
        if self.recompute and (over > 0).any():
            short = over > 0
            over += np.where(short, (np.maximum(spare, again.workspace) - np.maximum(spare, block.workspace))[:, None], 0.0)
            saving = activations * (block.activation - again.activation) + block.static - again.static
            ranks = np.arange(len(sizes))
            for places in np.argsort(-activations, axis=1, kind="stable").T:
                own = saving[ranks, places][:, None]
                needed = np.ceil(np.maximum(over, 0.0) / np.where(own > 0, own, 1.0))
                chosen = np.where(short & (over > 0) & (own > 0), np.minimum(sizes[ranks, :, places], needed), 0.0).astype(np.int64)
                flags[ranks, :, places] = chosen
                over -= chosen * own
        ends = np.array([sum(layer.time for layers in row for layer in layers) for row in self._ends])
        always = ends + sum(share.time for share in self.costs.shares)
        times = always[:, None] + numbers * block.time + flags.sum(axis=2) * (again.time - block.time)
        return np.where(np.cumsum(over > 0, axis=1) > 0, np.inf, times), flags

    @cached_property
    def _activations(self) -> Floats:
        return np.array([moment.activations for moment in self.moments], dtype=np.float64)

    @cached_property
    def _stashes(self) -> Floats:
        return np.array([moment.stashes for moment in self.moments], dtype=np.float64)

    def _sum_memory_of_ends(self) -> tuple[Floats, Floats]:
        """Bytes of each rank without any block, and the largest workspace of its embedding and head."""
        memory, spare = np.array([moment.other for moment in self.moments]), np.zeros(len(self.moments))
        shares = self.costs.shares
        memory += sum(share.static for share in shares) + max((share.workspace for share in shares), default=0.0)
        for rank, row in enumerate(self._ends):
            for place, layers in enumerate(row):
                for layer in layers:
                    held = self._activations[rank, place] * layer.activation + self._stashes[rank, place] * layer.weight_stash
                    memory[rank] += layer.static + held
                    spare[rank] = max(spare[rank], layer.workspace)
        return memory, spare

    def _find_excess(self) -> float:
        """Bytes over the limit on the fullest rank if the blocks are shared out evenly and all recomputed that may be."""
        share, layer = self._blocks / len(self._stages), self.costs.recomputed_block if self.recompute else self.costs.block
        memory, spare = self._sum_memory_of_ends()
        held, stashed = self._activations.mean(axis=1), self._stashes.mean(axis=1)
        memory = memory + share * (layer.static + held * layer.activation + stashed * layer.weight_stash)
        return max(float((memory + np.maximum(spare, layer.workspace) - np.array(self.limits)).max()), 1.0)
