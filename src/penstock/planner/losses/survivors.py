"""The ranks that are left of a mesh, and which of them runs which microbatch of which replica."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

from penstock.errors import ScheduleError
from penstock.ir.placement import Placement
from penstock.text.units import check_count

Place = tuple[int, int]
"""A rank's place in the mesh: its rank in its pipeline, and its replica."""


@dataclass(frozen=True)
class Survivors:
    """The ranks that are left of a mesh of `data` replicas of a pipeline; `places[k]` is the place of rank k among them.

    >>> survivors = Survivors.after(pipeline=2, data=3, lost=[(1, 2)])
    >>> survivors.places
    ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    >>> [survivors.find_taker((1, 2), microbatch) for microbatch in range(4)]
    [3, 4, 3, 4]
    """

    pipeline: int
    data: int
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        for name in ("pipeline", "data"):
            check_count(name, getattr(self, name), error=ScheduleError)
        if len(set(self.places)) < len(self.places):
            raise ScheduleError(f"the places {self.places} have one twice: give each living rank its own")
        for place in self.places:
            _check_place(place, self.pipeline, self.data)
        for rank in range(self.pipeline):
            if not self.list_peers(rank):
                copies = "the only replica" if self.data == 1 else f"all {self.data} replicas"
                raise ScheduleError(
                    f"{copies} of pipeline rank {rank} {'is' if self.data == 1 else 'are'} lost, so no rank holds its stages any more: "
                    "start again from the last checkpoint"
                )

    @classmethod
    def after(cls, pipeline: int, data: int, lost: Iterable[Place]) -> Survivors:
        """The survivors in the order of a device mesh of `pp` x `dp`."""
        for name, count in (("pipeline", pipeline), ("data", data)):
            check_count(name, count, error=ScheduleError)
        gone = {_check_place(place, pipeline, data) for place in _list_places(lost)}
        places = ((rank, replica) for rank in range(pipeline) for replica in range(data))
        return cls(pipeline, data, tuple(place for place in places if place not in gone))

    @cached_property
    def ranks(self) -> dict[Place, int]:
        """The rank of each living place."""
        return {place: rank for rank, place in enumerate(self.places)}

    @cached_property
    def lost(self) -> tuple[Place, ...]:
        """The places of the lost ranks."""
        places = ((rank, replica) for rank in range(self.pipeline) for replica in range(self.data))
        return tuple(place for place in places if place not in self.ranks)

    def list_peers(self, pipeline_rank: int) -> tuple[int, ...]:
        """The living ranks with the stages of this rank of the pipeline."""
        return tuple(rank for rank, (column, _) in enumerate(self.places) if column == pipeline_rank)

    def find_taker(self, place: Place, microbatch: int) -> int:
        """The rank that runs a microbatch of a place's replica: the one at the place, or its peers in turn if it is lost."""
        if place in self.ranks:
            return self.ranks[place]
        gone, peers = self._lost_of[place[0]], self.list_peers(place[0])
        return peers[(microbatch * len(gone) + gone.index(place)) % len(peers)]

    def count_taken(self, place: Place, microbatches: int) -> dict[int, int]:
        """How many of the microbatches of a lost place each of its peers runs."""
        return dict(sorted(Counter(self.find_taker(place, k) for k in range(microbatches)).items()))

    @cached_property
    def _lost_of(self) -> dict[int, list[Place]]:
        return {rank: [place for place in self.lost if place[0] == rank] for rank in range(self.pipeline)}

    def find_period(self, microbatches: int) -> int:
        """After how many microbatches of a replica the same ranks take their turns again, at most all of them."""
        turns = [
            len(self.list_peers(rank)) // math.gcd(len(gone), len(self.list_peers(rank))) for rank, gone in self._lost_of.items() if gone
        ]
        return min(math.lcm(*turns), microbatches)

    def place(self, placement: Placement, microbatches: int) -> Placement:
        """The joint placement: microbatch k x replicas + d runs where microbatch k of replica d did, or on the peers of lost ranks."""
        check_pipeline(placement, self.pipeline)
        # Every copy of a stage keeps its place, also if there are fewer microbatches than copies.
        period = min(math.lcm(self.find_period(microbatches), len(placement.copies)), max(microbatches, len(placement.copies)))
        copies = [
            [self.find_taker((holder, replica), k) for holder in placement.copies[k % len(placement.copies)]]
            for k in range(period)
            for replica in range(self.data)
        ]
        return Placement.custom(*copies, ranks=len(self.places))

    def split_number(self, microbatch: int) -> tuple[int, int]:
        """A joint microbatch's number in its replica, and the replica."""
        return divmod(microbatch, self.data)


def _list_places(lost: Any) -> list[Any]:
    if isinstance(lost, str) or not isinstance(lost, Iterable):
        raise ScheduleError(f"lost must be a list of the places of lost ranks, like [(1, 0)], got {lost!r}")
    return list(lost)


def _check_place(place: Place, pipeline: int, data: int) -> Place:
    try:
        rank, replica = map(index, place)
    except (TypeError, ValueError):
        raise ScheduleError(f"{place!r} is no place of a mesh: give the rank in the pipeline and the replica, as in (1, 0)") from None
    if not (0 <= rank < pipeline and 0 <= replica < data):
        raise ScheduleError(
            f"place {place} in a mesh of {pipeline} pipeline ranks x {data} replicas: ranks run from 0 to {pipeline - 1}, replicas from "
            f"0 to {data - 1}"
        )
    return rank, replica


def check_pipeline(placement: Placement, ranks: int) -> None:
    """Refuse a placement for another number of ranks than the pipelines of the mesh have."""
    if placement.ranks != ranks:
        raise ScheduleError(f"the schedule is for {placement.ranks} ranks, but the pipelines of the mesh have {ranks}")
