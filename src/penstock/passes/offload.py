"""Move activations to host memory until their backward needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir import codes
from penstock.ir.kind import COMPUTE, COPIES, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows, find_first
from penstock.ir.schedule import Schedule
from penstock.passes.base import Pass, Stages, check_stages, is_within
from penstock.text.units import check_count


@dataclass(frozen=True)
class Offload(Pass):
    """OFFLOAD activations to host memory right after their forward, and RELOAD them before their backward.

    `share` is the percentage of each rank's activations to move, or one percentage per rank; `stages` limits it to some stages. The stages
    whose activations live longest go first: with the most compute actions of the rank between a forward and its backward. Of a stage that
    moves in part, every second or third microbatch is taken, so that the copies are evenly spread. The copy of an OFFLOAD runs beside the
    next compute action of its rank, and its memory is free for the first forward behind that; an activation without such a forward before
    its RELOAD stays.

    `ahead` is how many compute actions before the backward the RELOAD stands. With 1, offloads and reloads alternate in an order that
    alternates forwards and backwards.
    """

    name = "offload"
    share: int | tuple[int, ...] = 100
    ahead: int = 1
    stages: Stages = None

    def __post_init__(self) -> None:
        shares: tuple[object, ...] = self.share if isinstance(self.share, tuple) else (self.share,)
        for share in shares:
            check_count("share of pass offload, a percentage,", share, 0, 100, error=PassError)
        check_count("ahead of pass offload", self.ahead, 0, error=PassError)

    def apply(self, program: Program) -> Program:
        rows = program.rows
        if rows.is_kind(*COPIES).any():
            raise PassError("the program has OFFLOAD or RELOAD actions already: run the pass 'offload' once")
        check_stages(self.name, self.stages, program)
        if isinstance(self.share, tuple) and len(self.share) != program.ranks:
            raise PassError(f"share of pass offload has {len(self.share)} percentages for {program.ranks} ranks: give one, or one per rank")
        lives = _Lives.of(program, self.ahead)
        chosen = lives.choose(self._share_budgets(program, lives))
        forward, reload = lives.forward[chosen], lives.reload[chosen]
        stage, unit, rank = rows.stage[forward], rows.microbatch[forward], rows.rank[forward]
        before = np.concatenate((rows.group_ends[forward], reload))
        entries = np.concatenate([codes.pack(stage, int(kind), unit) for kind in COPIES])
        return self._record(program, rows=rows.insert(before, entries, np.tile(rank, 2), np.tile(forward, 2)).cut_into(program.slices))

    def _share_budgets(self, program: Program, lives: _Lives) -> list[tuple[Ints, int]]:
        """The activations that compete with each other, and how many of them may move."""
        rows, stage, rank = program.rows, program.rows.stage[lives.forward], program.rows.rank[lives.forward]
        forwards = np.flatnonzero(rows.is_kind(Kind.F))
        shares = self.share if isinstance(self.share, tuple) else (self.share,) * len(rows)
        competing, allowed = is_within(self.stages, stage), is_within(self.stages, rows.stage[forwards])
        counts = np.bincount(rows.rank[forwards][allowed], minlength=len(rows)).tolist()
        return [
            (np.flatnonzero((rank == number) & competing), share * count // 100)
            for number, (share, count) in enumerate(zip(shares, counts, strict=True))
        ]


def move_activations(schedule: Schedule, offload: Offload) -> Schedule:
    """The schedule with the copies that the pass adds, for any number of microbatches that it can be built for."""
    moved = offload.apply(Program.start(schedule))
    remake = schedule.remake
    changed = Schedule.from_rows(
        moved.rows, schedule.placement, schedule.microbatches, graph=schedule.graph, name=schedule.name, slices=schedule.slices
    )
    changed.options = schedule.options
    changed.remake = None if remake is None else lambda microbatches: move_activations(remake(microbatches), offload)
    return changed


@dataclass(frozen=True)
class _Lives:
    """The activations that are worth moving: their forward, where their RELOAD would stand, their stage, and how long it holds them."""

    forward: Ints
    reload: Ints
    stage: Ints
    life: Ints

    @classmethod
    def of(cls, program: Program, ahead: int) -> _Lives:
        rows = program.rows
        span = program.stages * program.units
        forwards, backwards = (np.flatnonzero(rows.is_kind(*kinds)) for kinds in ((Kind.F,), (Kind.B, Kind.I)))
        cell = rows.stage * program.units + rows.microbatch
        backward = find_first(cell[backwards], backwards, span)[cell[forwards]]
        forwards, backward = forwards[backward >= 0], backward[backward >= 0]
        starts, offsets = _compute_starts(rows)
        rank = rows.rank[forwards]
        place = np.searchsorted(starts, rows.group_starts[backward])
        at = np.maximum(place - ahead, offsets[rank])
        reload = starts[at]
        own = np.searchsorted(starts, rows.group_starts[forwards])
        beside = rows.group_ends[starts[np.minimum(own + 1, len(starts) - 1)]]
        count = np.concatenate(([0], np.cumsum(rows.is_kind(Kind.F))))
        worth = (rows.rank[backward] == rank) & (reload >= beside) & (count[reload] > count[beside])
        life = np.zeros(program.stages, dtype=np.int64)
        np.maximum.at(life, rows.stage[forwards], place - own)
        stage = rows.stage[forwards][worth]
        return cls(forwards[worth], reload[worth], stage, life[stage])

    def choose(self, budgets: list[tuple[Ints, int]]) -> Ints:
        """Of each group of competing activations those of the stages with the longest lives, within its budget."""
        chosen: list[Ints] = [np.zeros(0, dtype=np.int64)]
        for competing, budget in budgets:
            left = budget
            stages, first = np.unique(self.stage[competing], return_index=True)
            for stage in stages[np.argsort(-self.life[competing[first]], kind="stable")]:
                same = competing[self.stage[competing] == stage]
                taken = min(left, len(same))
                chosen.append(same[np.arange(taken) * len(same) // max(taken, 1)])
                left -= taken
        return np.sort(np.concatenate(chosen))


def _compute_starts(rows: Rows) -> tuple[Ints, Ints]:
    """The first entry of each compute action, in the order of the rows, and the place of each rank's first one among them."""
    starts = np.flatnonzero(rows.heads & rows.is_kind(*COMPUTE))
    return starts, np.searchsorted(starts, rows.offsets[:-1])
