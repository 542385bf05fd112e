"""Zero bubble fitted to costs and memory.

A lookahead is two numbers per rank: how many forwards run ahead of the first backward, and how many weight backwards are kept
back. zb-h1 and zb-h2 are two lookaheads. `rehearse` runs the pipeline on a stopwatch: the rows that a lookahead gives under given
costs, and how long they take. There a weight backward also runs when a wait is long enough for it, and when its memory is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from penstock.errors import ScheduleError
from penstock.ir.codes import F, I, W
from penstock.ir.costs import Costs
from penstock.schedules.registry import Shape, linear, register
from penstock.text.units import parse_size


def _stages(shape: Shape, costs: Costs) -> list[StageCosts]:

    names = ("f", "i", "w", "activation", "weight_stash")
    f, i, w, activation, stash = (costs.table(name, shape.ranks, shape.microbatches).tolist() for name in names)
    sizes, ends = (
        costs.table("output", shape.ranks, shape.microbatches),
        [(rank, min(rank + 1, shape.ranks - 1)) for rank in range(shape.ranks)],
    )
    up = [costs.travel(sizes[rank], rank, after).tolist() for rank, after in ends]
    back = [costs.travel(sizes[rank], after, rank).tolist() for rank, after in ends]
    return [StageCosts(*of_stage) for of_stage in zip(f, i, w, up, back, activation, stash, strict=True)]


def _least(stages: list[StageCosts]) -> float:
    """The memory of one microbatch at a time on the stage that needs most."""
    return max(max(map(max, (stage.activation, stage.weight_stash))) for stage in stages)


def _limit(stages: list[StageCosts], memory_limit: float | str | None) -> float:
    if memory_limit is not None:
        return parse_size(memory_limit)
    return max(_least(stages), len(stages) * max(max(stage.activation) for stage in stages))


def _check(shape: Shape, costs: Any = None, memory_limit: Any = None) -> None:
    if costs is not None and not isinstance(costs, Costs):
        raise ScheduleError(f"costs must be a penstock.Costs, got {costs!r}")
    stages = _stages(shape, costs or Costs())
    limit, least = _limit(stages, memory_limit), _least(stages)
    if limit < least:
        raise ScheduleError(
            f"memory_limit={memory_limit!r} does not hold one microbatch of every stage: the smallest that works is {least:g}, "
            "the largest activation or weight_stash"
        )


@register("zb-auto", placement=linear, check=_check, whole=True)
def zb_auto(shape: Shape, *, costs: Costs | None = None, memory_limit: float | str | None = None) -> list[list[int]]:
    """Fit zero bubble to given costs and memory: as many forwards ahead and weight backwards kept back as pay on each rank.

    zb-h1 and zb-h2 fix both for equal times; here they are searched for `costs` (by default equal times), and the order
    whose worst rank has the shortest span is kept. No rank ever holds more than `memory_limit`, in the unit of the costs'
    `activation` and `weight_stash`; by default, it is one activation per rank. Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Bubble: searched, that of zb-h1 or zb-h2 or less if they fit
    Memory: the limit, counted to W
    Needs: any ranks, any microbatches; a memory_limit that holds one microbatch

    >>> import penstock as ps
    >>> print(ps.schedule("zb-auto", ranks=4, microbatches=6, costs=ps.Costs(f=2, i=2, w=1), memory_limit=6).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4  0F4     1F3     2F2     3I0
     5  0F5     1F4     2I0     3F1
     6          1I0     2F3     3I1
     7  0I0     1F5     2I1     3F2
     8  0W0     1I1     2F4     3I2
     9  0I1     1W0     2I2     3F3
    10  0W1     1W1     2F5     3I3
    11          1I2     2I3     3F4
    12  0I2     1W2     2W0     3I4
    13  0W2     1I3     2W1     3F5
    14  0I3     1W3     2I4     3I5
    15  0W3     1I4     2W2     3W0
    16  0I4     1W4     2W3     3W1
    17  0W4             2I5     3W2
    18          1I5     2W4     3W3
    19  0I5     1W5     2W5     3W4
    20  0W5                     3W5
    """
    stages = _stages(shape, costs or Costs())
    limit = _limit(stages, memory_limit)
    order = search(stages, shape.microbatches, limit)
    return [rank.row for rank in rehearse(stages, shape.microbatches, order, limit)]


SLACK = 1 + 1e-9
"""Room for rounding when sums are compared with a limit or an arrival."""
SCALES = (1.0, 0.5, 1.1, 0.9, 0.75, 0.6, 1.25, 0.25)
MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1), (0, 3), (0, -3))
BUDGET = 500_000
"""Microbatches per rank that are rehearsed in all: about half a second."""
AT_ONCE = 4_096
"""Microbatches in one rehearsal, if that is at least four per rank; the rest only repeats."""


@dataclass(frozen=True)
class StageCosts:
    """The times and sizes of each microbatch on one stage; `up` is the time to the next stage, and `back` that of the gradient from it."""

    f: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    up: Sequence[float]
    back: Sequence[float]
    activation: Sequence[float]
    weight_stash: Sequence[float]


class Lookahead(NamedTuple):
    """Per rank, the forwards ahead of its first pair of forward and backward, and the weight backwards kept back.

    No rank may run further ahead than the one before it: it would wait for a forward that waits for its backward.
    """

    ahead: tuple[int, ...]
    kept: tuple[int, ...]


class RankClock:
    """One rank as it runs.

    `held` follows the lifetimes of activations and weight stashes in `ir.memory_ledger`, written out because this loop takes most of the
    time.
    """

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
            self.wait(before.sent[number] + before.stage.up[number])
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
            self.wait(after.returned + stage.back[number])
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


def search(stages: Sequence[StageCosts], microbatches: int, limit: float) -> Lookahead:
    """Return the lookahead with the least time from first to last action on the worst rank, and then the least in all."""
    tried = _LookaheadSearch(stages, min(microbatches, max(4 * len(stages), AT_ONCE // len(stages))), limit)
    for ahead, kept in _guesses(stages, microbatches, tried.most[0]):
        if tried.spent > BUDGET // 2:
            break
        tried.consider(ahead, kept)
    while tried.climb():
        pass
    return tried.best


class _LookaheadSearch:
    """The best lookahead so far."""

    def __init__(self, stages: Sequence[StageCosts], microbatches: int, limit: float) -> None:
        self.stages, self.microbatches, self.limit = stages, microbatches, limit
        self.most = [most_ahead(stage, microbatches, limit) for stage in stages]
        self.spent = 0
        self.seen: set[Lookahead] = set()
        self.best = self._fitting([0] * len(stages), [0] * len(stages))
        self.takes = self._time(self.best)

    def consider(self, ahead: Sequence[int], kept: Sequence[int]) -> bool:
        """Try a lookahead, cut down to what fits in memory; returns whether it is better than all before."""
        lookahead = self._fitting(ahead, kept)
        if lookahead in self.seen:
            return False
        takes = self._time(lookahead)
        if takes >= self.takes:
            return False
        self.best, self.takes = lookahead, takes
        return True

    def climb(self) -> bool:
        """Try small changes of the best lookahead, of all ranks and of each; returns whether another round is worth it."""
        better, every = False, range(len(self.stages))
        for ranks, (forwards, weights) in product([every, *([rank] for rank in every)], MOVES):
            if self.spent > BUDGET:
                return False
            ahead, kept = map(list, self.best)
            for rank in ranks:
                ahead[rank] += forwards
                kept[rank] += weights
            better |= self.consider(ahead, kept)
        return better

    def _fitting(self, ahead: Sequence[int], kept: Sequence[int]) -> Lookahead:
        fitting: list[int] = []
        for wanted, most in zip(ahead, self.most, strict=True):
            fitting.append(max(0, min(wanted, most, fitting[-1] if fitting else most)))
        return Lookahead(tuple(fitting), tuple(max(0, min(count, self.microbatches)) for count in kept))

    def _time(self, lookahead: Lookahead) -> tuple[float, float]:
        self.seen.add(lookahead)
        self.spent += self.microbatches * len(self.stages)
        ranks = rehearse(self.stages, self.microbatches, lookahead, self.limit)
        return max(rank.clock - rank.begin for rank in ranks), max(rank.clock for rank in ranks)


def most_ahead(stage: StageCosts, microbatches: int, limit: float) -> int:
    """How many forwards may run ahead of a pair, so that the pair still fits in the memory; negative if not even one does."""
    activation, weight_stash = max(stage.activation), max(stage.weight_stash)
    room = limit * SLACK - max(activation, weight_stash)
    return min(microbatches - 1, int(room // activation)) if activation else (microbatches - 1 if room >= 0 else -1)


def _guesses(stages: Sequence[StageCosts], microbatches: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """zb-h1, zb-h2, and what fills the wait for the first backward and after the last: all of it, what memory allows, or a part."""
    ranks = range(len(stages))
    for depth in (1, 2):
        yield [depth * (len(stages) - 1 - rank) for rank in ranks], [depth * rank for rank in ranks]
    turns = [fmean(stage.f) + fmean(stage.i) + fmean(stage.up) + fmean(stage.back) for stage in stages]
    ahead = [_ratio(sum(turns[rank + 1 :]), fmean(stage.f), microbatches) for rank, stage in enumerate(stages)]
    kept = [_ratio(sum(turns[:rank]), fmean(stage.w), microbatches) for rank, stage in enumerate(stages)]
    for part, later in product((most / max(ahead[0], 1), *SCALES), SCALES):
        yield [round(part * count) for count in ahead], [round(later * count) for count in kept]


def _ratio(time: float, unit: float, most: int) -> float:
    return min(time / unit, most) if unit else most
