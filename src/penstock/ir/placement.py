"""Placements: which rank holds which stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any

from penstock.errors import PlacementError
from penstock.ir.codes import MAX_STAGES
from penstock.text.numbers import format_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Placement:
    """For each copy of the model, the rank of each stage.

    All placements but the bidirectional have one copy. With two, even microbatches run through the first copy and odd
    ones through the second; with any number of them, microbatch m runs through copy m mod copies. Copies may share a rank for
    a stage, which the rank then holds once. A stage's *chunk* is its index among the stages of its rank.

    >>> Placement.v(4).stages_of(1)
    (1, 6)
    >>> Placement.bidirectional(4).rank_of(0, microbatch=1)
    3
    """

    kind: str
    ranks: int
    copies: tuple[tuple[int, ...], ...]

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        """Stage s on rank s."""
        return cls._build("linear", ranks, [range(ranks)])

    @classmethod
    def looped(cls, ranks: int, chunks: int) -> Placement:
        """Stage s on rank s mod ranks: each rank is passed `chunks` times in the same direction."""
        return cls._build("looped", ranks, [[s % ranks for s in range(ranks * chunks)]])

    @classmethod
    def v(cls, ranks: int) -> Placement:
        """Down the ranks and up again: rank r holds stages r and 2 ranks - 1 - r."""
        return cls._build("v", ranks, [_list_waves(ranks, 1)])

    @classmethod
    def wave(cls, ranks: int, waves: int) -> Placement:
        """The V, repeated: 2 x waves chunks per rank."""
        return cls._build("wave", ranks, [_list_waves(ranks, waves)])

    @classmethod
    def bidirectional(cls, ranks: int) -> Placement:
        """Two copies of the model in opposite directions: rank r holds stage r of one and ranks - 1 - r of the other."""
        return cls._build("bidirectional", ranks, [range(ranks), range(ranks - 1, -1, -1)])

    @classmethod
    def custom(cls, *copies: Sequence[int], ranks: int | None = None) -> Placement:
        """Any map: for each copy a sequence with the rank of each stage."""
        if not copies or not copies[0]:
            raise PlacementError("a custom placement needs the rank of each stage, as in Placement.custom([0, 1, 1, 0])")
        if any(len(copy) != len(copies[0]) for copy in copies):
            raise PlacementError(f"each copy must place the same stages, got copies of {[len(c) for c in copies]} stages")
        highest = max(max(copy) for copy in copies)
        return cls._build("custom", highest + 1 if ranks is None else ranks, copies)

    @classmethod
    def _build(cls, kind: str, ranks: int, copies: Iterable[Iterable[int]]) -> Placement:
        if index(ranks) < 1:
            raise PlacementError(f"{ranks} ranks: a {kind} placement needs at least 1")
        maps = tuple(tuple(index(rank) for rank in copy) for copy in copies)
        if not maps[0]:
            raise PlacementError(f"a {kind} placement needs at least one chunk per rank")
        if len(maps[0]) > MAX_STAGES:
            raise PlacementError(f"{len(maps[0])} stages: at most {MAX_STAGES} are supported")
        wrong = [rank for copy in maps for rank in copy if not 0 <= rank < ranks]
        if wrong:
            raise PlacementError(f"rank {wrong[0]} in a placement over {ranks} ranks: ranks run from 0 to {ranks - 1}")
        return cls(kind, ranks, maps)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.copies[0])

    @property
    def chunks(self) -> int:
        """The most stages that any rank holds."""
        return max(map(len, self._held))

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        stages: list[dict[int, None]] = [{} for _ in range(self.ranks)]
        for copy in self.copies:
            for stage, rank in enumerate(copy):
                stages[rank][stage] = None
        return tuple(map(tuple, stages))

    @cached_property
    def partners(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups: those of one group hold the same stages, for different copies of the model.

        >>> Placement.bidirectional(4).partners
        ((0, 3), (1, 2))
        >>> Placement.v(3).partners
        ((0,), (1,), (2,))
        """
        group_of = [{rank} for rank in range(self.ranks)]
        for holders in zip(*self.copies, strict=True):
            joined = set().union(*(group_of[rank] for rank in holders))
            for rank in joined:
                group_of[rank] = joined
        return tuple(tuple(sorted(group)) for rank, group in enumerate(group_of) if rank == min(group))

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        import numpy as np

        return np.array(self.copies, dtype=np.int64)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, each once, in chunk order."""
        return self._held[rank]

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs this stage for this microbatch."""
        return self.copies[microbatch % len(self.copies)][stage]

    def chunk_of(self, stage: int, microbatch: int = 0) -> int:
        """The stage's index among the stages of the rank that runs it for this microbatch."""
        return self._held[self.rank_of(stage, microbatch)].index(stage)

    def ranks_of(self, stages: Any, microbatches: Any) -> NDArray[np.int64]:
        """`rank_of` for whole arrays."""
        ranks: NDArray[np.int64] = self._table[microbatches % len(self.copies), stages]
        return ranks

    def describe(self) -> str:
        """One line: `v, 4 ranks, 8 stages`."""
        return f"{self.kind}, {format_count(self.ranks, 'rank')}, {format_count(self.stages, 'stage')}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks": self.ranks, "copies": [list(copy) for copy in self.copies]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Placement:
        return recognise(cls.custom(*data["copies"], ranks=data["ranks"]))


def _list_waves(ranks: int, waves: int) -> list[int]:
    down = list(range(ranks))
    return (down + down[::-1]) * waves


def recognise(placement: Placement) -> Placement:
    """The same map under the name of the family it belongs to, if it belongs to one."""
    ranks, stages = placement.ranks, placement.stages
    chunks = stages // ranks
    known = [Placement.linear(ranks)]
    if chunks:
        known += [Placement.looped(ranks, chunks), Placement.v(ranks), Placement.bidirectional(ranks)]
    if chunks >= 2:
        known.append(Placement.wave(ranks, chunks // 2))
    return next((k for k in known if k.copies == placement.copies), placement)
