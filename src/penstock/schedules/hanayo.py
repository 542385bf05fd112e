"""Hanayo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.schedules._arrivals import Arrivals
from penstock.schedules.registry import Shape, register, wave

LENGTH = {Kind.F: 1, Kind.B: 2}


@register("hanayo", placement=wave, whole=True)
def hanayo(shape: Shape) -> list[list[int]]:
    """Pass the ranks in waves, down and up several times, so that the pipeline fills and drains by smaller chunks.

    `waves` = w is the number of times down and up. A rank runs the action that is due first among those it can run and hold: microbatches
    enter at the rate of their work and are due at a stage twice as late as they could be there. Hanayo, arXiv 2308.15762.

    Bubble: (2p-2)/(3pw+2p-2) of the time if B = 2F and m = p; 2/3 (p-1)(F+B) with one wave and m >= p
    Memory: p
    Needs: any ranks, any waves (of two chunks each), any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("hanayo", ranks=4, microbatches=4, waves=1).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4          1F3     2F2     4F0
     5                  5F0     3F1
     6          6F0     2F3     4F1
     7  7F0             5F1     3F2
     8  7B0     6F1             4F2
     9  7F1     6B0     5F2     3F3
    10  7B1     6F2             4F3
    11  7F2     6B1     5F3
    12  7B2     6F3     5B0
    13  7F3     6B2     5B1     4B0
    14  7B3             5B2     3B0
    15          6B3     2B0     4B1
    16          1B0     5B3     3B1
    17  0B0             2B1     4B2
    18          1B1             3B2
    19  0B1             2B2     4B3
    20          1B2             3B3
    21  0B2             2B3
    22          1B3
    23  0B3
    """
    placement = Placement.wave(shape.ranks, shape.chunks // 2)
    # Waiting a slot for an action that is due earlier pays while the pipeline fills and drains, not in between.
    runs = [_run(placement, shape.microbatches, patience) for patience in (1, 0)]
    return [rank.row for rank in min(runs, key=lambda ranks: max(rank.free for rank in ranks))]


def _run(placement: Placement, microbatches: int, patience: int) -> list[_RankProgress]:
    arrivals = Arrivals(placement.stages, microbatches, Kind.B)
    ranks = [_RankProgress(placement.stages_of(rank), placement.stages, microbatches, patience) for rank in range(placement.ranks)]
    now, left = 0, 2 * placement.stages * microbatches
    while left:
        for rank in ranks:
            left -= rank.free <= now and rank.step(now, arrivals)
        now += 1
    return ranks


class _ReadyAction(NamedTuple):
    due: int
    depth: int
    kind: Kind
    chunk: int
    arrives: int


class _RankProgress:
    """How far one rank is with each chunk, and how much it holds."""

    def __init__(self, stages: tuple[int, ...], of_all: int, microbatches: int, patience: int) -> None:
        self.stages, self.of_all, self.microbatches, self.patience = stages, of_all, microbatches, patience
        self.next = {kind: [0] * len(stages) for kind in LENGTH}
        self.free = self.held = 0
        self.row: list[int] = []

    def step(self, now: int, arrivals: Arrivals) -> bool:
        """Run the action that is due first, or another one that ends before it arrives; returns whether anything ran."""
        soon = list(self._arriving(now + self.patience, arrivals))
        until = min(soon, default=None)
        if until is not None and until.arrives > now:
            soon = [ready for ready in soon if ready.arrives <= now and now + LENGTH[ready.kind] <= until.arrives]
        if not soon:
            return False
        _, _, kind, chunk, _ = min(soon)
        microbatch = self.next[kind][chunk]
        self.next[kind][chunk] += 1
        self.held += 1 if kind is Kind.F else -1
        self.free = now + LENGTH[kind]
        arrivals.end(kind, self.stages[chunk], microbatch, self.free)
        self.row.append(codes.pack(chunk, int(kind), microbatch))
        return True

    def _arriving(self, time: int, arrivals: Arrivals) -> Iterator[_ReadyAction]:
        """The actions that can run at this time."""
        for kind, following in self.next.items():
            for chunk, microbatch in enumerate(following):
                if microbatch == self.microbatches or not self._fits(kind, chunk):
                    continue
                stage = self.stages[chunk]
                arrives = arrivals.at(kind, stage)[microbatch]
                if arrives <= time:
                    way = stage if kind is Kind.F else self.of_all + 2 * (self.of_all - 1 - stage)
                    yield _ReadyAction(3 * len(self.stages) * microbatch + 2 * way, -stage, kind, chunk, arrives)

    def _fits(self, kind: Kind, chunk: int) -> bool:
        """Whether a forward leaves room for one of each later chunk, without which no microbatch might come to its end."""
        return kind is Kind.B or self.held + len(self.stages) - chunk <= self.of_all
