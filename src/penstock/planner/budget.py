"""How much work searches and solvers may do, counted so that equal runs stop at the same place, with a clock as a second stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CELLS_PER_SECOND = 3e6
"""Cells (stages times microbatches) of the orders that a search times per second of work; a usual core does about twice as many."""
LEAST_SOLVE = 0.02
"""Seconds of work of every CP-SAT model: to build it and hand it over."""


def count_rounds(seconds: float, cells: int) -> float:
    """How many orders of so many cells (stages times microbatches) are timed in that many seconds of work."""
    return seconds * CELLS_PER_SECOND / max(cells, 1)


@dataclass
class SearchBudget:
    """Seconds, or a count of timed orders, which makes equal runs stop at the same place; whichever is spent first ends the search."""

    seconds: float | None
    rounds: float | None
    stop: Callable[[], bool]
    spent: float = 0.0
    end: float = 1.0
    """The share of the whole at which the present part ends."""
    enough: bool = False
    """Whether nothing better can be found."""
    late: bool = False
    """Whether the seconds ran out before the rounds."""
    begun: float = field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        """The share that is used up: of the rounds if they are counted, whatever the clock says, so that runs do not differ."""
        if self.rounds is not None:
            return self.spent / max(self.rounds, 1.0)
        return 0.0 if self.seconds is None else self.elapsed / max(self.seconds, 1e-9)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def spend(self, rounds: float) -> None:
        self.spent += rounds

    @property
    def over(self) -> bool:
        """Whether the present part has ended."""
        if self.enough or self.share >= self.end or self.stop():
            return True
        if self.seconds is None or self.elapsed < self.seconds:
            return False
        self.late = self.rounds is not None
        return True

    @contextmanager
    def part(self, share: float) -> Iterator[tuple[float, float]]:
        """Limit the block to a share of what is left of the enclosing part; yields where the part begins and ends."""
        before, begin = self.end, self.share
        self.end = min(before, begin + share * max(0.0, before - begin))
        try:
            yield begin, self.end
        finally:
            self.end = before


@dataclass
class SolverBudget:
    """Seconds of work, estimated from the solvers' own counts and never from a clock, and real seconds as a second stop.

    Without `work` only the real seconds count, and runs may differ.
    """

    seconds: float = math.inf
    work: float | None = None
    spent: float = 0.0
    late: bool = False
    """Whether the real seconds ran out first."""
    begun: float = field(default_factory=time.monotonic)

    @property
    def real_left(self) -> float:
        """Real seconds left."""
        return self.begun + self.seconds - time.monotonic()

    @property
    def left(self) -> float:
        """Seconds of work left, or real seconds if work is not counted."""
        return self.real_left if self.work is None else self.work - self.spent

    @property
    def over(self) -> bool:
        if self.work is not None and self.real_left <= 0 < self.work - self.spent:
            self.late = True
        return self.left <= 0 or self.real_left <= 0

    @property
    def used(self) -> float:
        """Seconds used so far, of work or real ones."""
        return time.monotonic() - self.begun if self.work is None else self.spent

    def spend(self, work: float) -> None:
        self.spent += work

    def part(self, share: float) -> SolverBudget:
        """A share of what is left, for one step; return what it used with `spend(part.spent)`."""
        work = None if self.work is None else max(0.0, share * self.left)
        seconds = share * self.real_left if self.work is None else self.real_left
        return SolverBudget(max(0.0, seconds), work)


def solve_within(solver: Any, model: Any, limit: SolverBudget, budget: SolverBudget) -> Any:
    """Run CP-SAT for at most `limit` and return its status; its work is spent from `budget`.

    The solver's deterministic time is about a second of one core, and the same in every run with one worker.
    """
    solver.parameters.max_time_in_seconds = max(0.01, min(limit.real_left, 1e9))
    if limit.work is not None:
        solver.parameters.max_deterministic_time = max(0.001, limit.left)
    status = solver.solve(model)
    budget.spend(LEAST_SOLVE + solver.response_proto.deterministic_time)
    return status
