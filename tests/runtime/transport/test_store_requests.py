"""How many requests ranks send to the store that connects them: as many for a thousand ranks as for four."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.runtime.transport import processes
from penstock.runtime.transport.failures import FailureBoard, Notices, PrefixStore
from penstock.runtime.transport.group import Activity
from penstock.runtime.transport.processes import ChannelEnds, Processes

SIZES = (4, 1000)


class CountingStore(dist.Store):
    """A store in memory that counts requests, and the keys that they name."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.keys = 0

    def _count(self, name: str, keys: int = 1) -> None:
        self.requests[name] += 1
        self.keys += keys

    def set_timeout(self, timeout: Any) -> None:
        pass

    def set(self, key: str, value: Any) -> None:
        self._count("set")
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self._count("get")
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._count("check", len(keys))
        return all(key in self.values for key in keys)

    def add(self, key: str, value: int) -> int:
        self._count("add")
        with self.lock:
            total = int(self.values.get(key, b"0")) + value
            self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count("compare_set")
        expected, desired = (text.encode() if isinstance(text, str) else bytes(text) for text in (expected, desired))
        with self.lock:
            if self.values.get(key, b"") == expected:
                self.values[key] = desired
            return self.values[key]

    def clear(self) -> None:
        self.requests.clear()
        self.keys = 0


class Prefixed:
    """What torch's `PrefixStore` does, for a store written in Python."""

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix, self.store = prefix, store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.store, name)

        def prefixed(key: Any, *args: Any) -> Any:
            return call([f"{self.prefix}/{each}" for each in key] if isinstance(key, list) else f"{self.prefix}/{key}", *args)

        return prefixed


class Clock:
    """Stands for the event that ends a watch: each wait is one look, and looks are counted."""

    def __init__(self, looks: int, between: Callable[[int], None] = lambda _: None) -> None:
        self.looks, self.between, self.done = looks, between, 0

    def wait(self, seconds: float) -> bool:
        if self.done == self.looks:
            return True
        self.between(self.done)
        self.done += 1
        return False


def rank_of(ranks: int, store: Any) -> Any:
    """One rank as it is once all have met, without connections."""
    group = Processes.__new__(Processes)
    group.rank, group.ranks, group.names, group.subgroups, group.generation = 1, ranks, [], {}, 0
    group.members, group.goes_on, group._connecting = range(ranks), False, None
    group._store, group._lock, group._activity, group.connection = store, threading.Lock(), Activity(), object()
    group.all_gather = type("Exchanges", (), {"number": 3, "drop": lambda self: None})()
    group.ends, group._devices = ChannelEnds(), None
    group.board = FailureBoard(Prefixed("penstock/0", store), 1, range(ranks), Notices(store))
    return group


@pytest.fixture(autouse=True)
def prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PrefixStore", Prefixed)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("returned", [False, True])
def test_a_look_is_one_request_for_one_key(ranks: int, returned: bool) -> None:
    store = CountingStore()
    group = rank_of(ranks, store)
    if returned:  # all others are through after as many exchanges as this rank has come to
        for other in (0, *range(2, ranks)):
            store.set(f"returned/{other}", b"")
            store.set("returned", b"")
            FailureBoard(Prefixed("penstock/0", store), other, range(ranks), Notices(store)).post_return(3)
    group._closing = Clock(12, lambda look: store.clear() if look == 2 else None)
    group._watch()
    assert (store.requests, store.keys) == ({"check": 10}, 10)
    assert group.connection is not None


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("what", ["failure", "return"])
def test_the_next_look_sees_it(ranks: int, what: str) -> None:
    store = CountingStore()
    group = rank_of(ranks, store)
    other = FailureBoard(Prefixed("penstock/0", store), 0, range(1), Notices(store))
    group.board._compose = lambda failure: None

    def happen(look: int) -> None:
        if look == 5:
            assert group.connection is not None
            store.clear()
            other.post_failure("rank 0 failed", None, "computes") if what == "failure" else other.post_return(2)
        elif look == 6:
            assert group.connection is None
            assert sum(store.requests.values()) <= 20

    group._closing = Clock(8, happen)
    group._watch()
    assert group.board.has_failure()
    assert "penstock/0/doing/1" in store.values


@pytest.mark.parametrize("ranks", SIZES)
def test_each_meeting_rank_requests_one_key(ranks: int) -> None:
    store = CountingStore()
    group, board = rank_of(ranks, store), Prefixed("penstock/1", store)
    looks, sleep = [0], time.sleep

    def count(seconds: float) -> None:
        looks[0] += 1
        if looks[0] == 1:
            store.clear()
        if looks[0] == 11:
            assert (set(store.requests), store.keys) == ({"check"}, 20)
            for other in (0, *range(2, ranks)):
                processes.count_arrival(board, "here", other, ranks)
        sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", count)
        group._meet(board, 60.0)
    assert looks[0] == 11


@pytest.mark.parametrize("what", ["ended", "returned"])
def test_a_meeting_ends_when_a_rank_is_gone(what: str) -> None:
    store = CountingStore()
    group, looks = rank_of(4, store), [0]

    def count(seconds: float) -> None:
        looks[0] += 1
        if looks[0] == 5:
            for rank in (0, 2):
                store.set(f"{what}/{rank}", b"")
            store.set(what, b"")
            Notices(store).post("a rank is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", count)
        with pytest.raises(PipelineError, match=rf"ranks \[0, 2\] have {what}"):
            group._meet(Prefixed("penstock/1", store), 60.0)
    assert looks[0] == 5


@pytest.mark.parametrize("ranks", SIZES)
def test_a_leaving_rank_requests_three_keys(ranks: int) -> None:
    store = CountingStore()
    group, looks = rank_of(ranks, store), [0]

    def count(seconds: float) -> None:
        looks[0] += 1
        if looks[0] == 1:
            store.clear()
        if looks[0] == 11:
            assert (set(store.requests), store.keys) == ({"check"}, 30)
            for other in (0, *range(2, ranks)):
                processes.count_arrival(group.board.store, "left", other, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", count)
        group.board.wait_until_all_leave(60.0, lambda: bool(group._list_ended()))
    assert looks[0] == 11


def test_a_notice_is_seen_once_by_each_reader_and_none_is_lost() -> None:
    store = PrefixStore("notices", dist.HashStore())  # torch's own
    readers = [Notices(store), Notices(store)]
    assert not readers[0].have_come()
    writers = [threading.Thread(target=Notices(store).post, args=(f"notice of {number}",)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all(store.check([f"notice/{number}"]) for number in range(1, 9))
    assert [reader.have_come() for reader in readers] == [True, True]
    assert [reader.have_come() for reader in readers] == [False, False]
    readers[0].post("one more")
    assert [reader.have_come() for reader in readers] == [True, True]


def test_a_return_after_fewer_exchanges_counts_whichever_rank_arrived_first() -> None:
    store = PrefixStore("board", dist.HashStore())
    boards = [FailureBoard(store, rank, range(4), Notices(store)) for rank in range(4)]
    assert boards[0].find_first_return() is None
    for rank, exchanges in ((2, 7), (1, 7), (3, 5), (0, 6)):
        boards[rank].post_return(exchanges)
    assert boards[0].find_first_return() == (5, 3)
    assert store.check(["notice/2"]), "the return of rank 2, and that of rank 3"
    assert not store.check(["notice/3"])
