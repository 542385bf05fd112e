"""The ends of channels that a group of processes knows: for as long as something uses them, and their sends a little longer."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import pytest

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


def test_ends_go_with_whatever_uses_them() -> None:
    ends = ChannelEnds()
    for _ in range(5):
        kept = [End(ends), End(ends)]
        gc.collect()
        assert list(ends) == kept
    del kept
    gc.collect()
    assert len(ends) == 0


@pytest.mark.parametrize("lost", [False, True])
def test_sends_of_an_end_that_is_gone_are_waited_for_by_the_next(lost: bool) -> None:
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
