"""Virtual ranks on streams of a fake device: which stream waits for which, and when work was done."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, StepResult, launch
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.device import autocast, gpu, graphs, rng, streams, timing
from penstock.runtime.parallel.collective_lane import Collective, Sum, ThreadLane
from runtime.models import assert_same, blocks, by_loop, by_pipeline


class Stream:
    """Work is done at once; what it waited for is kept."""

    def __init__(self) -> None:
        self.after: list[Event] = []

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.stream = other
        self.after.append(event)

    def synchronize(self) -> None:
        pass


class Event:
    """A moment of a stream, on a clock that is ahead of the host's."""

    AHEAD = 5_000_000_000

    def __init__(self, enable_timing: bool = False) -> None:
        self.time, self.stream = 0, None

    def record(self, stream: Stream) -> None:
        self.time, self.stream = time.perf_counter_ns() + self.AHEAD, stream

    def wait(self, stream: Stream) -> None:
        stream.after.append(self)

    def synchronize(self) -> None:
        assert self.stream is not None, "never recorded"

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) / 1e6


class Here(threading.local):
    def __init__(self) -> None:
        self.stream = Stream()


here = Here()


class Cuda:
    """As much of torch.cuda as is asked for."""

    Stream, Event = Stream, Event
    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    current_stream = staticmethod(lambda device=0: here.stream)
    get_rng_state = staticmethod(lambda: None)

    @staticmethod
    def set_stream(stream: Stream) -> None:
        here.stream = stream

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, here.stream = here.stream, stream
        yield
        here.stream = before


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, streams, rng, timing, graphs):
        monkeypatch.setattr(module, "cuda", Cuda)
        monkeypatch.setattr(module, "is_initialized", lambda: True)
    here.stream = Stream()


@pytest.mark.usefixtures("pretended")
def test_each_rank_has_a_stream_that_waits_for_its_messages() -> None:
    """Each after the caller's, and the caller's after all of theirs; a rank after its neighbours, who send to it."""
    schedule = ps.schedule("1f1b", ranks=3, microbatches=4)
    model, x = blocks(3), torch.randn(8, 6)
    callers = here.stream

    def train() -> tuple[Stream, list[Stream]]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        before = len(here.stream.after)
        executor = pipe._executor(4, True)
        run = executor.run
        during: list[Stream] = []

        def noted(feed: Any) -> Any:
            made = run(feed)
            during.extend(event.stream for event in here.stream.after[before:])
            return made

        executor.run = noted  # type: ignore[method-assign]
        before = len(here.stream.after)
        pipe.step(x, target=x)
        return here.stream, during

    found = launch(train, 3)
    streams = [stream for stream, _ in found]
    assert len(set(map(id, streams))) == 3
    assert all(stream.after[0].stream is callers for stream in streams)
    assert {id(event.stream) for event in callers.after[-3:]} == set(map(id, streams))
    for rank, (_, during) in enumerate(found):
        neighbours = [streams[other] for other in (rank - 1, rank + 1) if 0 <= other < 3]
        for other in neighbours:
            assert sum(each is other for each in during) == 4  # one per microbatch
        assert len(during) == 4 * len(neighbours)


@pytest.mark.usefixtures("pretended")
def test_ranks_that_share_a_parameter_share_a_stream() -> None:
    """Or two would add to one gradient at the same time."""
    schedule = ps.schedule("chimera", ranks=2, microbatches=4)
    model, x = blocks(2), torch.randn(8, 6)

    def train() -> Stream:
        Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x, target=x)
        return here.stream

    first, second = launch(train, 2)
    assert first is second


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe-v"])
def test_a_recorded_step_has_times_of_the_device(name: str) -> None:
    """On the host's clock, every action once and in order, and a message after it was sent and before it is used."""
    schedule = ps.schedule(name, ranks=2, microbatches=6)
    model, x = blocks(schedule.stages), torch.randn(12, 6)
    start = time.perf_counter()

    def train() -> StepResult:
        return Pipeline(model, schedule, loss_fn=functional.mse_loss, record=True).step(x, target=x)

    found = launch(train, 2)[0].timeline
    assert found is not None
    assert 0 < found.makespan < time.perf_counter() - start
    for low, high in itertools.pairwise(found.table.rows.group_offsets.tolist()):
        assert (found.start[low:high] <= found.end[low:high]).all()
        assert (found.end[low : high - 1] <= found.start[low + 1 : high]).all()
    assert (found.depart <= found.arrive).all()
    assert np.isfinite(found.start).all()
    assert found.bubble < 1


class Named(NamedTuple):
    first: Tensor | None
    second: Tensor


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU, and on which streams it is used."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def record_stream(self, stream: Stream) -> None:
        self.__dict__.setdefault("used", []).append(stream)


@pytest.mark.usefixtures("pretended")
def test_gathered_tensors_are_kept_until_they_are_used() -> None:
    """Also those in the fields of a dataclass, as a step's result has them, and in named tuples."""
    alone, inside, deep, named = (torch.zeros(1).as_subclass(OnDevice) for _ in range(4))
    share = ResultShare(losses={0: (inside, 1.0)}, outputs={1: {"deep": [deep, "text"]}})
    streams.record_use([alone, torch.zeros(1), share, {"named": Named(None, named)}, ResultShare, None])
    assert [tensor.__dict__["used"] for tensor in (alone, inside, deep, named)] == [[here.stream]] * 4


@pytest.mark.usefixtures("pretended")
def test_collectives_of_virtual_ranks_have_a_stream_of_their_own() -> None:
    """It waits for what the ranks have done when they join, and each rank for the collective when it takes the result."""
    before = here.stream
    lanes, ranks = ThreadLane.create(2), [Stream(), Stream()]
    values = [torch.full((1,), rank + 1.0).as_subclass(OnDevice) for rank in range(2)]
    joined = []

    def add(value: Tensor) -> Collective:
        used.append(here.stream)
        return (yield Sum(value))

    used: list[Stream] = []
    for lane, stream, value in zip(lanes, ranks, values, strict=True):
        Cuda.set_stream(stream)
        joined.append(lane.join(add(value), value))
    own = used[0]
    assert used == [own, own]
    assert own not in (before, *ranks)
    assert [event.stream for event in own.after] == ranks
    assert all(own in value.__dict__["used"] for value in values)
    for lane, stream, collective in zip(lanes, ranks, joined, strict=True):
        Cuda.set_stream(stream)
        assert lane.take(collective).item() == 3
        assert stream.after[-1].stream is own


@pytest.mark.usefixtures("pretended")
def test_numbers_do_not_change() -> None:
    schedule = ps.schedule("zbv", ranks=2, microbatches=4)
    model, x, y = blocks(4), torch.randn(8, 6), torch.randn(8, 6)
    assert_same(by_pipeline(model, schedule, x, y, record=True), by_loop(model, x, y, 4))


def test_waiting_does_not_count_as_part_of_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action begins when its wait ends, unless it has done something before that."""
    monkeypatch.setattr(timing, "cuda", Cuda)
    watch = timing.ActionTimer(1)
    watch.begin(0)
    first = watch.begun[0].time
    watch.begin_again()
    second = watch.begun[0].time
    assert second > first
    watch.fresh = False
    watch.begin_again()
    assert watch.begun[0].time == second
    assert watch.times([17]) == [17]


class Driver:
    """CUDA's driver, with a device of so many multiprocessors that are given out by eights."""

    def __init__(self, count: int) -> None:
        self.count, self.streams = count, itertools.count(100)
        self.contexts: list[int] = []
        self.start, self.resources, self.counts = 0, [], []
        """Where the resources of the last split begin; and the first resource of each description, and their number."""

    def cuDeviceGet(self, number: Any, device: int) -> int:
        return 0

    def cuDeviceGetDevResource(self, number: Any, resource: Any, kind: int) -> int:
        assert kind == 1
        self._write(resource, 0, self.count)
        return 0

    def cuDevSmResourceSplitByCount(self, cut: Any, found: Any, whole: Any, rest: Any, flags: int, least: int) -> int:
        self.start, each = ctypes.addressof(cut), -(-least // 8) * 8
        found._obj.value = min(found._obj.value, self.count // each)
        for part in range(found._obj.value):
            self._write(cut, part, each)
        return 0

    def cuDevResourceGenerateDesc(self, described: Any, resource: Any, count: int) -> int:
        first = ctypes.cast(resource, ctypes.c_void_p).value or 0
        self.resources.append((first - self.start) // 144)
        self.counts.append(count)
        return 0

    def cuGreenCtxCreate(self, context: Any, described: Any, device: Any, flags: int) -> int:
        return 0

    def cuGreenCtxStreamCreate(self, stream: Any, context: Any, flags: int, priority: int) -> int:
        stream._obj.value = next(self.streams)
        return 0

    @staticmethod
    def _write(buffer: Any, place: int, value: int) -> None:
        buffer[place * 144 + 96 : place * 144 + 100] = value.to_bytes(4, "little")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(132)
    monkeypatch.setattr(streams, "_load_driver", lambda: made)
    streams.split_multiprocessors.cache_clear()
    return made


@pytest.mark.usefixtures("driver")
def test_multiprocessors_are_divided_among_ranks() -> None:
    assert streams.split_multiprocessors((32,) * 4, 0) == (100, 101, 102, 103)
    assert streams.split_multiprocessors((32,) * 4, 0) == (100, 101, 102, 103)  # once for all
    with pytest.raises(ScheduleError, match="5 parts of 32 multiprocessors, but the device has 132"):
        streams.split_multiprocessors((32,) * 5, 0)
    with pytest.raises(ScheduleError, match=r"units of \[32, 32\] multiprocessors, but 2 parts of 30 multiprocessors need 2 units of 30"):
        streams.split_multiprocessors((30, 30), 0)


def test_ranks_may_get_different_numbers_of_multiprocessors(driver: Driver) -> None:
    """Seven units of 16: each part is made of its own units, in a row."""
    assert streams.split_multiprocessors((48, 16, 32, 16), 0) == (100, 101, 102, 103)
    assert list(zip(driver.resources, driver.counts, strict=True)) == [(0, 3), (3, 1), (4, 2), (6, 1)]
    with pytest.raises(ScheduleError, match="2 parts of 128, 16 multiprocessors, but the device has 132"):
        streams.split_multiprocessors((128, 16), 0)
    with pytest.raises(ScheduleError, match=r"units of \[8, 8, 8\] multiprocessors, but 2 parts of 8, 4 multiprocessors need 3 units of 4"):
        streams.split_multiprocessors((8, 4), 0)


@pytest.mark.parametrize(
    ("sms", "reason"),
    [
        ([8, 8, 8], "sms has 3 values for 2 ranks: give one number, or one per rank"),
        ([8, 0], "sms must be a whole number of at least 1, got 0"),
        ([8, 1.5], "sms must be a whole number of at least 1, got 1.5"),
        (0, "sms must be a whole number of at least 1, got 0"),
        ([16, 8], r"sms=\[16, 8\]: there is no GPU to split"),
    ],
)
def test_wrong_numbers_of_multiprocessors_are_refused(sms: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ScheduleError, match=reason):
        launch(lambda: None, ranks=2, sms=sms)


def test_an_unsuitable_driver_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "cuGreenCtxCreate", lambda *_: 801)
    with pytest.raises(ScheduleError, match="answered cuGreenCtxCreate with error 801"):
        streams.split_multiprocessors((8, 8), 0)
    monkeypatch.delattr(Driver, "cuGreenCtxStreamCreate")
    monkeypatch.setattr(Driver, "cuGreenCtxCreate", lambda *_: 0)
    with pytest.raises(ScheduleError, match=r"no cuGreenCtxStreamCreate: .* CUDA 12.4"):
        streams.split_multiprocessors((8, 8), 0)


def test_backwards_run_on_the_thread_of_their_rank() -> None:
    """torch would run a device's backward on another thread; the previous setting is restored afterwards."""
    model, x = blocks(2), torch.randn(4, 6)
    seen: list[bool] = []
    model[1].register_full_backward_hook(lambda *_: seen.append(torch._C._is_multithreading_enabled()))
    Pipeline(list(model), schedule=ps.schedule("looped-bfs", 1, 2, chunks=2), loss_fn=functional.mse_loss).step(x, target=x)
    assert seen == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_autocast_of_every_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autocast.find_autocast() == {}
    with torch.autocast("cpu", torch.float16):
        assert autocast.find_autocast() == {"cpu": torch.float16}
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        monkeypatch.setattr(torch, "get_autocast_dtype", {"cuda": torch.bfloat16}.__getitem__)
        assert autocast.find_autocast() == {"cuda": torch.bfloat16}
