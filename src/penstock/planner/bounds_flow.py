"""The bound of the linear programs: which rank to look at, and how closely."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.bounds_program import Program
from penstock.planner.bounds_rank import Share
from penstock.planner.effort import Effort

STEPS = (60, 120, 200, 300, 450, 700)
"""How many steps to the time that is bounded, closer and closer."""
CLOSELY = 2
"""How many of the ranks that gained something are looked at more closely."""
MORE = 4
"""How much longer a look takes with the next number of steps, about."""
FINE = 16
"""A bound is found to within this part of a step."""


@dataclass
class Flow:
    """The best bound so far, from the one that is known on."""

    shares: list[Share]
    value: float
    unit: float | None
    """What all times are multiples of, if anything."""
    effort: Effort

    def __post_init__(self) -> None:
        self.best = self.shares[-1]
        """The rank that the bound is from; the last one until one has gained something."""

    def run(self) -> float:
        """Look until the time is up or nothing is left to gain."""
        ranks = [share for pair in zip(self.shares[::-1], self.shares, strict=True) for share in pair][: len(self.shares)]
        for steps in STEPS:
            before = self.effort.used
            gains = {share.rank: self._look(share, self.value / steps) for share in ranks}
            whole = self.unit is not None and self.value <= self.unit * steps
            if whole or MORE * (self.effort.used - before) / len(ranks) >= self.effort.left:
                break
            if any(gains.values()):
                ranks = sorted(ranks, key=lambda share: -gains[share.rank])[:CLOSELY]
        return self.value

    def _look(self, share: Share, step: float) -> float:
        """Raise the value to the earliest end that the rank's program allows; the value then, or 0 where that is no more."""
        before, ahead = self.value, 4 * step
        while not self.effort.over:
            program = Program(share, self.value + ahead, step, self.unit, self.effort)
            grain = program.step if program.whole else program.step / FINE
            most = max(1, int(ahead / grain))
            refused = self._refused(program, grain, most)
            # The end is later than what was refused last, and where all times are whole by a unit at least.
            self.value += grain * (refused if program.whole else max(0, refused - 1))
            if refused < most:
                break
            ahead *= 3
        if self.value > before:
            self.best = share
        return self.value if self.value > before else 0.0

    def _refused(self, program: Program, grain: float, most: int) -> int:
        """How many ends, the value and each a grain later, the program refuses, of so many: by halving."""
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2 if low else 0
            if program.can_end_by(self.value + middle * grain):
                high = middle
            else:
                low = middle + 1
        return low
