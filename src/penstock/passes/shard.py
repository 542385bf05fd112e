"""Gather parameters before they are used, and free them afterwards."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir import codes
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Flags, Ints, Rows
from penstock.passes.base import Pass
from penstock.text.units import check_count


@dataclass(frozen=True)
class Shard(Pass):
    """UNSHARD each stage before it computes and RESHARD it when it is no longer needed.

    `residency` is how many stages of a rank may be unsharded at once (by default all). With fewer than the rank holds,
    the stage whose next use is farthest makes room, which gives the fewest unshards that the residency allows.
    `lookahead` is how many compute actions ahead of its first use a stage is unsharded, if a place is free by then.
    """

    name = "shard"
    lookahead: int = 1
    residency: int | None = None

    def __post_init__(self) -> None:
        check_count("lookahead of pass shard", self.lookahead, 0, error=PassError)
        if self.residency is not None:
            check_count("residency of pass shard", self.residency, error=PassError)

    def apply(self, program: Program) -> Program:
        rows = program.rows
        if rows.is_kind(Kind.UNSHARD, Kind.RESHARD).any():
            raise PassError("the program has UNSHARD or RESHARD actions already: shard it once")
        compute = rows.is_kind(*COMPUTE)
        placed = [self._shard_row(rows, rank, compute) for rank in range(len(rows))]
        before, entries, ranks, tie = (np.concatenate(column) for column in zip(*placed, strict=True))
        return self._record(program, rows=rows.insert(before, entries, ranks, tie))

    def _shard_row(self, rows: Rows, rank: int, compute: Flags) -> tuple[Ints, Ints, Ints, Ints]:
        """One rank's new entries: in front of which entry, the code, the rank, and the order among equals."""
        use = _Use.of(rows, rank, compute)
        most = max((len(stages) for stages in use.stages), default=0) if use.overlaps else 1
        if self.residency is not None and self.residency < most:
            raise PassError(f"residency={self.residency}, but rank {rank} runs an action that uses {most} stages at once")
        if self.residency is None or self.residency >= len(use.held):
            stays = use.list_whole_stays()
        else:
            stays = list(list_stays(use.stages, self.residency))
        if not stays:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty, empty
        stage, free, first, last = (np.array(column, dtype=np.int64) for column in zip(*stays, strict=True))
        gather = np.maximum(free, first - self.lookahead)
        before = np.concatenate((use.ends[last], use.starts[gather]))
        entries = np.concatenate((codes.pack(stage, int(Kind.RESHARD)), codes.pack(stage, int(Kind.UNSHARD))))
        tie = np.concatenate((last, first + len(use.starts)))
        return before, entries, np.full(len(before), rank, dtype=np.int64), tie


Stay = tuple[int, int, int, int]
"""One stay of a stage in full: the stage, the first group by which a place is free, its first and its last use."""


@dataclass(frozen=True)
class _Use:
    """A rank's compute groups in order: the start and end of each, and the stage of each part."""

    starts: Ints
    ends: Ints
    group: Ints
    stage: Ints

    @classmethod
    def of(cls, rows: Rows, rank: int, compute: Flags) -> _Use:
        low, high = int(rows.offsets[rank]), int(rows.offsets[rank + 1])
        parts = low + np.flatnonzero(compute[low:high])
        starts, group = np.unique(rows.group_starts[parts], return_inverse=True)
        return cls(starts, rows.group_ends[starts], group, rows.stage[parts])

    @property
    def overlaps(self) -> bool:
        return len(self.stage) > len(self.starts)

    @property
    def held(self) -> list[int]:
        return np.unique(self.stage).tolist()  # type: ignore[no-any-return]

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """The stages that each group uses."""
        if not self.overlaps:
            return [(stage,) for stage in self.stage.tolist()]
        lists: list[list[int]] = [[] for _ in self.starts]
        for group, stage in zip(self.group.tolist(), self.stage.tolist(), strict=True):
            if stage not in lists[group]:
                lists[group].append(stage)
        return [tuple(stages) for stages in lists]

    def list_whole_stays(self) -> list[Stay]:
        """One stay for each stage, from its first to its last use."""
        stays = []
        for stage in self.held:
            used = self.group[self.stage == stage]
            stays.append((stage, 0, int(used[0]), int(used[-1])))
        return stays


def list_stays(uses: Sequence[tuple[int, ...]], residency: int) -> Iterator[Stay]:
    """The stays with the fewest gathers when at most `residency` stages are in full at once; `uses[k]` are the stages of group k.

    Whenever a place is wanted and none is free, the stage whose next use is farthest gives up its place as of its last use.
    """
    following = _find_next_uses(uses)
    next_use: dict[int, int] = {}
    first: dict[int, int] = {}
    latest: dict[int, int] = {}
    since: dict[int, int] = {}
    places = [0] * residency
    for group, stages in enumerate(uses):
        for stage in stages:
            if stage not in first:
                if not places:
                    victim = max((s for s in first if s not in stages), key=next_use.__getitem__)
                    yield victim, since.pop(victim), first.pop(victim), latest[victim]
                    heapq.heappush(places, latest[victim] + 1)
                first[stage], since[stage] = group, max(heapq.heappop(places), latest.get(stage, -1) + 1)
        for stage, after in zip(stages, following[group], strict=True):
            next_use[stage], latest[stage] = after, group
            if after == len(uses):
                yield stage, since.pop(stage), first.pop(stage), group
                heapq.heappush(places, group + 1)


def _find_next_uses(uses: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each group and stage the next group that uses the stage; the number of groups if there is none."""
    seen: dict[int, int] = {}
    following: list[tuple[int, ...]] = []
    for group in range(len(uses) - 1, -1, -1):
        following.append(tuple(seen.get(stage, len(uses)) for stage in uses[group]))
        seen.update(dict.fromkeys(uses[group], group))
    return following[::-1]
