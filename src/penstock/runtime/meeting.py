"""Things that every rank does and all of them must have done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import CheckpointError
from penstock.runtime.alarm import Told
from penstock.runtime.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Meeting:
    """This rank among those that save and load together. Where something fails on one rank, all raise the same."""

    group: Group
    rank: int
    deadline: float

    def own(self, what: str, act: Callable[[], T]) -> T:
        """Do it here; what came of it here, once all have done it."""
        made: list[T] = []
        self.each(what, lambda: made.append(act()))
        return made[0]

    def each(self, what: str, act: Callable[[], T]) -> list[T]:
        """Do it here; what came of it on every rank."""
        mine, error = None, None
        try:
            mine = act()
        except Exception as caught:
            error = caught
        told = None if error is None else (Told.of(error), isinstance(error, CheckpointError))
        everyone = self.group.gather(self.rank, what, (mine, told), self.deadline)
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                cause, plain = theirs
                text = cause.name.partition(": ")[2] if plain else f"rank {rank} failed to {what}: {cause.name}"
                raise CheckpointError(text) from (error if rank == self.rank else cause.error())
        return [value for value, _ in everyone]
