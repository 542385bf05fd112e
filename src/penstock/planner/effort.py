"""How much work bounds and solvers may do, counted so that every run stops at the same place."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

ORDERS = 3e6
"""Stages times microbatches of the orders that a search times in one second of work; a usual core does about twice as many."""

LEAST_SOLVE = 0.02
"""Seconds of work that a CP-SAT model takes at least: to be built and handed over."""


def rounds_in(seconds: float, cells: int) -> float:
    """How many orders of so many cells (stages times microbatches) are timed in so many seconds of work."""
    return seconds * ORDERS / max(cells, 1)


@dataclass
class Effort:
    """Seconds of work, estimated from the solvers' own counts and never from a clock, and real seconds as a second stop.

    Without `work` the real seconds alone count, and runs may differ.
    """

    seconds: float = math.inf
    work: float | None = None
    spent: float = 0.0
    late: bool = False
    """Whether the real seconds were over first."""
    begun: float = field(default_factory=time.monotonic)

    @property
    def real_left(self) -> float:
        """Real seconds left."""
        return self.begun + self.seconds - time.monotonic()

    @property
    def left(self) -> float:
        """Seconds of work left, or without a count of work the real ones."""
        return self.real_left if self.work is None else self.work - self.spent

    @property
    def over(self) -> bool:
        if self.work is not None and self.real_left <= 0 < self.work - self.spent:
            self.late = True
        return self.left <= 0 or self.real_left <= 0

    @property
    def used(self) -> float:
        """What was used so far, on the clock that counts."""
        return time.monotonic() - self.begun if self.work is None else self.spent

    def spend(self, work: float) -> None:
        self.spent += work

    def part(self, share: float) -> Effort:
        """A share of what is left, for one step; give back what it used with `spend(part.spent)`."""
        work = None if self.work is None else max(0.0, share * self.left)
        seconds = share * self.real_left if self.work is None else self.real_left
        return Effort(max(0.0, seconds), work)


def solve_within(solver: Any, model: Any, limit: Effort, effort: Effort) -> Any:
    """The status of a CP-SAT model after at most that limit; what it took is spent of the effort.

    The solver's deterministic time is about a second of one core, and the same in every run with one worker.
    """
    solver.parameters.max_time_in_seconds = max(0.01, min(limit.real_left, 1e9))
    if limit.work is not None:
        solver.parameters.max_deterministic_time = max(0.001, limit.left)
    status = solver.solve(model)
    effort.spend(LEAST_SOLVE + solver.response_proto.deterministic_time)
    return status
