"""Calls on ranks of which some are lost: on those that are left, every call is made once, whenever and on whomever a loss strikes."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import LostRankError
from penstock.runtime.transport.recovery import Recovery

CALLS = 4
RANKS = 4


class DeadError(Exception):
    """Ends the thread of a rank that is lost."""


class World:
    """Ranks that exchange values, and lose ranks at chosen exchanges.

    `losses` has for the number of an exchange the rank that is lost in it, after it has sent its value, and the ranks that complete it all
    the same. The others learn of the loss in that exchange, and those that completed it in their next one.
    """

    def __init__(self, losses: dict[int, tuple[int, set[int]]]) -> None:
        self.losses = dict(losses)
        self.members = tuple(range(RANKS))
        self.condition = threading.Condition()
        self.exchanges = 0
        self.values: dict[int, tuple[str, Any]] = {}
        self.results: dict[int, list[Any]] = {}
        self.lost: int | None = None
        self.dead: set[Any] = set()
        self.knows: set[int] = set()
        self.met: set[int] = set()
        self.returned: set[int] = set()

    def exchange(self, rank: int, name: str, value: Any) -> list[Any]:
        with self.condition:
            self.raise_loss(rank)
            self.values[rank] = name, value
            if len(self.values) == len(self.members):
                self.complete()
            self.wait(lambda: rank in self.results or rank not in self.values)
            if rank in self.results:
                return self.results.pop(rank)
            if rank in self.dead:
                raise DeadError
            self.raise_loss(rank)
            raise AssertionError("an exchange ends with a result or a loss")

    def complete(self) -> None:
        assert len({name for name, _ in self.values.values()}) == 1, self.values
        victim, completes = self.losses.pop(self.exchanges, (None, set(self.members)))
        everything = [self.values[member][1] for member in self.members]
        if victim in self.members and len(self.members) > 1:
            self.lost, completes = victim, completes - {victim}
            self.dead.add(victim)
        else:
            completes = set(self.members)
        self.results = {member: everything for member in self.members if member in completes}
        self.values = {}
        self.exchanges += 1
        self.condition.notify_all()

    def raise_loss(self, rank: int) -> None:
        if self.lost is not None and rank not in self.knows:
            self.knows.add(rank)
            raise LostRankError("a rank is lost", (self.lost,))

    def enter(self, rank: int) -> None:
        """Meet the others that are left, once all of them know of the loss."""
        with self.condition:
            if self.lost is None:
                return
            self.met.add(rank)
            self.meet()
            self.wait(lambda: rank not in self.met)

    def meet(self) -> None:
        left = tuple(member for member in self.members if member != self.lost and member not in self.returned)
        if self.lost is not None and self.met == set(left):
            self.members, self.lost, self.knows, self.met = left, None, set(), set()
            self.condition.notify_all()

    def leave(self, rank: int) -> None:
        """A rank has made all its calls; the others do not wait for it any more."""
        with self.condition:
            self.returned.add(rank)
            self.meet()

    def wait(self, is_over: Any) -> None:
        assert self.condition.wait_for(is_over, timeout=20), "the ranks wait for each other"


class Member:
    """One rank's view of the world, as a recovery uses a group of processes."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank

    @property
    def members(self) -> tuple[int, ...]:
        return self.world.members

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        return self.world.exchange(rank, name, value)

    def enter(self, rank: int, deadline: float) -> None:
        self.world.enter(rank)


class Regrouped:
    """A pipeline that notes with whom it goes on."""

    def __init__(self, number: int, member: Member) -> None:
        self.number, self.member, self.members = number, member, member.members

    def regroup(self) -> None:
        self.member.gather(self.member.rank, f"regroup {self.number}", None, 1.0)
        self.members = self.member.members


def make_calls(world: World, rank: int, applied: list[int], results: list[Any]) -> None:
    """Calls of two exchanges each: one that may be repeated, and the last one, before which the call takes effect here.

    Two pipelines make them in turns. Ranks let go of a third one at different times.
    """
    group: Any = Member(world, rank)
    recovery = Recovery(group, 1.0)
    pipelines = [Regrouped(number, group) for number in range(3)]
    for number in range(3):
        recovery.add(pipelines[number], 1.0)

    def call(number: int) -> Any:
        group.gather(rank, f"begin {number}", None, 1.0)
        assert pipelines[number % 2].members == group.members
        applied.append(number)
        try:
            return recovery.decide(f"end {number}", (rank, number), applied.pop, lambda values: {value for _, value in values})
        except LostRankError:
            if not recovery.is_prepared:
                applied.pop()
            raise

    for number in range(CALLS):
        if number == rank:
            del pipelines[2:]
        result = recovery.run(partial(call, number))
        results.append(result)


strikes = st.dictionaries(
    st.integers(0, 4 * CALLS), st.tuples(st.integers(0, RANKS - 1), st.sets(st.integers(0, RANKS - 1))), max_size=RANKS - 1
)


@settings(max_examples=150)
@given(strikes)
@example({1: (0, {1}), 4: (3, set())})  # again in the recovery from a loss, after those behind have completed their call
def test_every_call_is_made_once(losses: dict[int, tuple[int, set[int]]]) -> None:
    world = World(losses)
    applied: list[list[int]] = [[] for _ in range(RANKS)]
    results: list[list[Any]] = [[] for _ in range(RANKS)]
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            make_calls(world, rank, applied[rank], results[rank])
            world.leave(rank)
        except DeadError:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    for rank in range(RANKS):
        if rank not in world.dead:
            assert applied[rank] == list(range(CALLS))
            assert results[rank] == [{number} for number in range(CALLS)]
