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

    `waves` = w is the number of times down and up. A rank runs what is due first of what it can run and hold: microbatches
    enter at the rate of their work and are due at a stage twice as late as they could be there. Hanayo, arXiv 2308.15762.

    Bubble: (2p-2)/(3pw+2p-2) of the time where B = 2F and m = p; 2/3 (p-1)(F+B) with one wave and m >= p
    Memory: p
    Needs: any ranks, any waves (of two chunks each), any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("hanayo", ranks=4, microbatches=4, waves=1).grid())
    """
    placement = Placement.wave(shape.ranks, shape.chunks // 2)
    # Waiting a slot for what is due earlier pays while the pipeline fills and drains, not in between.
    runs = [_run(placement, shape.microbatches, patience) for patience in (1, 0)]
    return [rank.row for rank in min(runs, key=lambda ranks: max(rank.free for rank in ranks))]


def _run(placement: Placement, microbatches: int, patience: int) -> list[_Rank]:
    arrivals = Arrivals(placement.stages, microbatches, Kind.B)
    ranks = [_Rank(placement.stages_of(rank), placement.stages, microbatches, patience) for rank in range(placement.ranks)]
    now, left = 0, 2 * placement.stages * microbatches
    while left:
        for rank in ranks:
            left -= rank.free <= now and rank.step(now, arrivals)
        now += 1
    return ranks


class _Candidate(NamedTuple):
    due: int
    depth: int
    kind: Kind
    chunk: int
    arrives: int


class _Rank:
    """How far one rank is with each chunk, and what it holds."""

    def __init__(self, stages: tuple[int, ...], of_all: int, microbatches: int, patience: int) -> None:
        self.stages, self.of_all, self.microbatches, self.patience = stages, of_all, microbatches, patience
        self.next = {kind: [0] * len(stages) for kind in LENGTH}
        self.free = self.held = 0
        self.row: list[int] = []

    def step(self, now: int, arrivals: Arrivals) -> bool:
        """Run what is due first, or meanwhile what is done before that arrives; if anything can run now."""
        soon = list(self._arriving(now + self.patience, arrivals))
        until = min(soon, default=None)
        if until is not None and until.arrives > now:
            soon = [each for each in soon if each.arrives <= now and now + LENGTH[each.kind] <= until.arrives]
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

    def _arriving(self, time: int, arrivals: Arrivals) -> Iterator[_Candidate]:
        """What can run at this time."""
        for kind, following in self.next.items():
            for chunk, microbatch in enumerate(following):
                if microbatch == self.microbatches or not self._fits(kind, chunk):
                    continue
                stage = self.stages[chunk]
                arrives = arrivals.at(kind, stage)[microbatch]
                if arrives <= time:
                    way = stage if kind is Kind.F else self.of_all + 2 * (self.of_all - 1 - stage)
                    yield _Candidate(3 * len(self.stages) * microbatch + 2 * way, -stage, kind, chunk, arrives)

    def _fits(self, kind: Kind, chunk: int) -> bool:
        """Whether a forward leaves room for one of each later chunk, without which no microbatch might come to its end."""
        return kind is Kind.B or self.held + len(self.stages) - chunk <= self.of_all
