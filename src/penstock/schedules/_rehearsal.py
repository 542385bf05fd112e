"""A zero-bubble pipeline on a stopwatch: the rows that a lookahead gives under given costs, and how long they take.

A lookahead is two numbers per rank: how many forwards run ahead of the first backward, and how many weight backwards are kept
back. zb-h1 and zb-h2 are two lookaheads. Here a weight backward also runs when a wait is long enough for it, and when its
memory is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.ir.codes import F, I, W

SLACK = 1 + 1e-9
"""Room for rounding when sums are compared with a limit or an arrival."""


@dataclass(frozen=True)
class StageCosts:
    """The times and sizes of each microbatch on one stage; `hop` is the time to the next stage or back."""

    f: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    hop: Sequence[float]
    activation: Sequence[float]
    weight_stash: Sequence[float]


class Lookahead(NamedTuple):
    """Per rank, the forwards ahead of its first pair of forward and backward, and the weight backwards kept back.

    No rank may run further ahead than the one before it: it would wait for a forward that waits for its backward.
    """

    ahead: tuple[int, ...]
    kept: tuple[int, ...]


class RankClock:
    """One rank as it runs."""

    __slots__ = ("before", "begin", "clock", "forwards", "held", "inputs", "kept", "limit", "returned", "row", "sent", "stage", "weights")

    def __init__(self, stage: StageCosts, before: RankClock | None, kept: int, limit: float) -> None:
        self.stage, self.before, self.kept, self.limit = stage, before, kept, limit * SLACK
        self.forwards = self.inputs = self.weights = 0
        self.begin = self.clock = self.held = self.returned = 0.0
        self.sent: list[float] = []
        self.row: list[int] = []

    def forward(self) -> None:
        number, stage, before = self.forwards, self.stage, self.before
        while self.weights < self.inputs and self.held + stage.activation[number] > self.limit:
            self.weight()
        if before is not None:
            self.wait(before.sent[number] + before.stage.hop[number])
        if not number:
            self.begin = self.clock
        self.clock += stage.f[number]
        self.held += stage.activation[number]
        self.forwards += 1
        self.sent.append(self.clock)
        self.row.append(F(0, number))

    def backward(self, after: RankClock | None) -> None:
        """Run an I, and then an earlier W if more are pending than are kept back."""
        number, stage = self.inputs, self.stage
        grows = stage.weight_stash[number] - stage.activation[number]
        while self.weights < number and self.held + grows > self.limit:
            self.weight()
        if after is not None:
            self.wait(after.returned + stage.hop[number])
        self.clock += stage.i[number]
        self.held += grows
        self.inputs += 1
        self.returned = self.clock
        self.row.append(I(0, number))
        if self.inputs - self.weights > self.kept:
            self.weight()

    def weight(self) -> None:
        self.clock += self.stage.w[self.weights]
        self.held -= self.stage.weight_stash[self.weights]
        self.row.append(W(0, self.weights))
        self.weights += 1

    def wait(self, until: float) -> None:
        """Fill the time with weight backwards that end in it."""
        while self.weights < self.inputs and self.clock + self.stage.w[self.weights] <= until * SLACK:
            self.weight()
        if until > self.clock:
            self.clock = until


def rehearse(stages: Sequence[StageCosts], microbatches: int, lookahead: Lookahead, limit: float) -> list[RankClock]:
    """Run the lookahead to the end. Going down with the forwards and up with the backwards, what a rank waits for is known."""
    ranks: list[RankClock] = []
    for stage, ahead, kept in zip(stages, lookahead.ahead, lookahead.kept, strict=True):
        ranks.append(RankClock(stage, ranks[-1] if ranks else None, kept, limit))
        for _ in range(ahead):  # nF
            ranks[-1].forward()
    for _ in range(microbatches):  # nF I W
        for rank in ranks:
            if rank.forwards < microbatches:
                rank.forward()
        after = None
        for rank in reversed(ranks):
            rank.backward(after)
            after = rank
    for rank in ranks:  # nW
        while rank.weights < microbatches:
            rank.weight()
    return ranks
