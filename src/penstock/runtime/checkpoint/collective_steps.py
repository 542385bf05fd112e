"""Collective steps: they succeed on every rank or fail on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import CheckpointError
from penstock.runtime.transport.failures import PickledError
from penstock.runtime.transport.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveSteps:
    """Runs steps of a save or load together with the other ranks of the group.

    Every rank calls the same methods in the same order. Each call blocks until all ranks have run their part. If a part failed, every
    rank raises the same `CheckpointError`: that of the lowest rank that failed.
    """

    group: Group
    rank: int
    deadline: float
    """Seconds to wait for the other ranks in each step."""

    def run(self, step: str, action: Callable[[], T]) -> T:
        """Run this rank's part of a step and return its result, once it has succeeded on all ranks."""
        results: list[T] = []
        self.gather(step, lambda: results.append(action()))
        return results[0]

    def gather(self, step: str, action: Callable[[], T]) -> list[T]:
        """Run this rank's part of a step and return the results of all ranks, by rank."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        failure = None if error is None else (PickledError.of(error), isinstance(error, CheckpointError))
        everyone = self.group.gather(self.rank, step, (result, failure), self.deadline)
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                cause, is_ours = theirs
                text = cause.description.partition(": ")[2] if is_ours else f"rank {rank} failed to {step}: {cause.description}"
                raise CheckpointError(text) from (error if rank == self.rank else cause.rebuild())
        return [value for value, _ in everyone]
