"""When each action of a chain of stages may run, for the schedules that are built by running them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.kind import Kind

NEVER = 1 << 60


class Arrivals:
    """`at(kind, stage)[microbatch]` is the time from which it may run, `NEVER` until everything it needs has been placed.

    Times are slots of a forward; a message takes none. `backward` is the kind whose end the stage before waits for.
    """

    def __init__(self, stages: int, microbatches: int, backward: Kind) -> None:
        self._stages, self._backward = stages, backward
        self._at = {kind: [[NEVER] * microbatches for _ in range(stages)] for kind in (Kind.F, backward, Kind.W)}
        self._at[Kind.F][0] = [0] * microbatches

    def at(self, kind: Kind, stage: int) -> Sequence[int]:
        return self._at[kind][stage]

    def end(self, kind: Kind, stage: int, microbatch: int, time: int) -> None:
        """Record the end of an action: actions that wait for it may run from then on."""
        if kind is Kind.F:
            if stage + 1 < self._stages:
                self._at[Kind.F][stage + 1][microbatch] = time
            else:
                self._at[self._backward][stage][microbatch] = time
        elif kind is self._backward:
            self._at[Kind.W][stage][microbatch] = time
            if stage:
                self._at[kind][stage - 1][microbatch] = time
