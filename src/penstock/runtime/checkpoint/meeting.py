"""Collective steps of saving and loading: they succeed on every rank or fail on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import CheckpointError
from penstock.runtime.transport.failures import PickledError
from penstock.runtime.transport.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Meeting:
    """This rank among those that save and load together. If a step fails on one rank, all raise the same error."""

    group: Group
    rank: int
    deadline: float

    def own(self, what: str, act: Callable[[], T]) -> T:
        """Run a step on every rank; returns this rank's result once all ranks have succeeded."""
        results: list[T] = []
        self.each(what, lambda: results.append(act()))
        return results[0]

    def each(self, what: str, act: Callable[[], T]) -> list[T]:
        """Run a step on every rank; returns the results of all ranks."""
        result, error = None, None
        try:
            result = act()
        except Exception as caught:
            error = caught
        failure = None if error is None else (PickledError.of(error), isinstance(error, CheckpointError))
        everyone = self.group.gather(self.rank, what, (result, failure), self.deadline)
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                cause, plain = theirs
                text = cause.description.partition(": ")[2] if plain else f"rank {rank} failed to {what}: {cause.description}"
                raise CheckpointError(text) from (error if rank == self.rank else cause.rebuild())
        return [value for value, _ in everyone]
