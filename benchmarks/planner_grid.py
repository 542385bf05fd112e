"""The problems that the planner is measured on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import penstock as ps
from penstock.ir.placement import Placement
from penstock.planner.problem import Problem


@dataclass(frozen=True)
class Work:
    """What a whole rank takes and holds a microbatch; a stage takes its share of it."""

    f: float
    i: float
    w: float
    latency: float
    uneven: bool = False
    """Whether stages differ by up to 1.4 to 0.6."""

    def costs(self, placement: Placement) -> ps.Costs:
        chunks = placement.chunks
        parts = [(3 + 7 * stage % 5) / 5 if self.uneven else 1.0 for stage in range(placement.stages)]
        times = {name: [getattr(self, name) * part / chunks for part in parts] for name in ("f", "i", "w")}
        return ps.Costs(**times, latency=self.latency, activation=1 / chunks, weight_stash=0.5 / chunks)


WORKS = {
    "equal": Work(1.0, 1.0, 1.0, 0.0),
    "skewed": Work(1000.0, 1400.0, 600.0, 50.0),
    "comm-heavy": Work(10.0, 12.0, 8.0, 5.0),
    "uneven": Work(100.0, 140.0, 60.0, 5.0, uneven=True),
}

PLACEMENTS = {
    "linear": Placement.linear,
    "v": Placement.v,
    "looped": lambda ranks: Placement.looped(ranks, 2),
    "wave": lambda ranks: Placement.wave(ranks, 2),
}


@dataclass(frozen=True)
class Case:
    """One problem by its name."""

    placement: str
    ranks: int
    microbatches: int
    limit: float
    work: str

    def __str__(self) -> str:
        return f"{self.placement} p={self.ranks} m={self.microbatches} limit {self.limit:.3g} {self.work}"

    @property
    def problem(self) -> Problem:
        placement = PLACEMENTS[self.placement](self.ranks)
        return Problem(placement, self.microbatches, WORKS[self.work].costs(placement), (self.limit,) * self.ranks)


def grid() -> list[Case]:
    """Sixty problems: 2 to 16 ranks, as many microbatches as ranks up to four times as many, memory from a third of the ranks to twice."""
    return list(_cases())


def _cases() -> Iterator[Case]:
    placements, shares, works = list(PLACEMENTS), (1 / 3, 1 / 2, 2 / 3, 1.0, 2.0), list(WORKS)
    turn = 0
    for ranks in (2, 3, 4, 6, 8, 12, 16):
        for times in (1, 2, 4):
            half = 2 * ((ranks // 2 + times) % 2)
            for work in works if ranks <= 4 else works[half : half + 2]:
                placement = placements[(turn + turn // 4) % 4]
                yield Case(placement, ranks, ranks * times, max(1.5, ranks * shares[turn % 5]), work)
                turn += 1
