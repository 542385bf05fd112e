"""The ends of channels that a group of processes knows: for as long as something uses them, and their sends a little longer."""

from __future__ import annotations

import gc
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.runtime.transport.direct_channels import FormAgreement, FormAgreements
from penstock.runtime.transport.processes import ChannelEnds


class Work:
    """A send in progress, and whether it was waited for."""

    def __init__(self, *, lost: bool = False) -> None:
        self.lost, self.waited = lost, False

    def wait(self) -> None:
        self.waited = True
        if self.lost:
            raise RuntimeError("the connection was lost")


class End:
    def __init__(self, ends: ChannelEnds, *works: Work) -> None:
        self.flight: deque[Any] = deque((number, work, bytearray(8)) for number, work in enumerate(works))
        self.itself = self  # such as the closures of a program: only the collector finds it
        ends.add(self, self.flight)

    def drop(self) -> None:
        self.flight.clear()


def test_channel_ends_are_freed_with_their_users() -> None:
    ends = ChannelEnds()
    for _ in range(5):
        kept = [End(ends), End(ends)]
        gc.collect()
        assert list(ends) == kept
    del kept
    gc.collect()
    assert len(ends) == 0


@pytest.mark.parametrize("lost", [False, True])
def test_sends_of_a_deleted_end_are_awaited_by_the_next(lost: bool) -> None:
    ends, works = ChannelEnds(), [Work(), Work(lost=lost), Work()]
    End(ends, *works)
    gc.collect()
    assert len(ends) == 0
    assert not any(work.waited for work in works), "the collector does not wait"
    held = gc.get_referrers(works[0])
    assert any(isinstance(each, tuple) and isinstance(each[-1], bytearray) for each in held), "the memory is held until then"
    del held
    after = End(ends)
    assert [work.waited for work in works] == [True, True, not lost]
    assert list(ends) == [after]
    assert not any(isinstance(each, tuple) for each in gc.get_referrers(works[0]))


def test_dropping_lets_go_of_all_sends() -> None:
    ends, here, gone = ChannelEnds(), Work(), Work()
    end = End(ends, here)
    End(ends, gone)
    gc.collect()
    ends.drop()
    assert not end.flight
    assert list(ends) == [end]
    assert not any(isinstance(each, tuple) for each in gc.get_referrers(gone))
    End(ends)
    assert not here.waited
    assert not gone.waited


class Ranks:
    """The agreements of several ranks that all-gather their inputs."""

    def __init__(self, count: int) -> None:
        self.forms = [FormAgreements() for _ in range(count)]

    def make_ends(self, program: int, *ranks: int) -> list[FormAgreement]:
        return [self.forms[rank].join(program) for rank in ranks]

    def agree(self, program: int, inputs: list[Any]) -> None:
        """Run each rank on its own thread, because they wait for each other."""
        said: dict[int, bool] = {}
        met = threading.Barrier(len(self.forms))

        def agree(rank: int) -> None:
            def gather(changed: bool) -> list[bool]:
                said[rank] = changed
                met.wait(10)
                return [said[other] for other in range(len(self.forms))]

            self.forms[rank].agree(program, inputs[rank], gather)

        with ThreadPoolExecutor(len(self.forms)) as pool:
            list(pool.map(agree, range(len(self.forms))))


def test_all_ranks_learn_forms_when_inputs_of_any_change() -> None:
    ranks = Ranks(3)
    ends = ranks.make_ends(7, 0, 1, 2)
    learning = []
    for inputs in (["a", "b", "c"], ["a", "b", "c"], ["a", "x", "c"], ["a", "x", "c"]):
        ranks.agree(7, inputs)
        learning.append([end.learning for end in ends])
    assert learning == [[True] * 3, [False] * 3, [True] * 3, [False] * 3]


def test_all_ranks_learn_forms_when_one_has_a_new_end() -> None:
    """It knows no forms, however often the program has run with these inputs, and even if the old end is still there."""
    ranks = Ranks(2)
    ends = ranks.make_ends(7, 0, 1)
    ranks.agree(7, ["a", "b"])
    ranks.agree(7, ["a", "b"])
    assert not any(end.learning for end in ends)
    ranks.make_ends(7, 1)
    ranks.agree(7, ["a", "b"])
    assert all(end.learning for end in ends)


def test_agreements_are_freed_with_the_ends_of_their_programs() -> None:
    ranks = Ranks(1)
    for program in range(20):
        ends = ranks.make_ends(program, 0, 0, 0)
        assert len({id(end) for end in ends}) == 1
        ranks.agree(program, ["a"])
    assert len(ranks.forms[0]) <= 2
    del ends
    ranks.agree(20, ["a"])  # without channels
    gc.collect()
    assert len(ranks.forms[0]) == 1
