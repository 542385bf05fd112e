"""How long a search may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Budget:
    """Seconds, or a count of timed orders, with which a search is the same whenever it is run; both end it."""

    seconds: float | None
    rounds: float | None
    stop: Callable[[], bool]
    spent: float = 0.0
    end: float = 1.0
    """The share of the whole at which the present part ends."""
    enough: bool = False
    """Whether nothing better can be found."""
    late: bool = False
    """Whether the seconds were over before the rounds."""

    def __post_init__(self) -> None:
        self.begun = time.monotonic()

    @property
    def share(self) -> float:
        """How much of the whole is used up: of the rounds if they are counted, whatever the clock says, so that runs do not differ."""
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
        """Whether the present part is at its end."""
        if self.enough or self.share >= self.end or self.stop():
            return True
        if self.seconds is not None and self.elapsed >= self.seconds:
            self.late = self.rounds is not None
            return True
        return False

    @contextmanager
    def part(self, share: float) -> Iterator[tuple[float, float]]:
        """Limit what follows to a share of what is left in the part around it; from where to where that is."""
        before, begin = self.end, self.share
        self.end = min(before, begin + share * max(0.0, before - begin))
        try:
            yield begin, self.end
        finally:
            self.end = before
