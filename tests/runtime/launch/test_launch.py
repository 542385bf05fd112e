"""Running a function on virtual ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import launch, rank
from penstock.runtime.transport.current_group import get_group
from penstock.runtime.transport.threads import VirtualGroup


@pytest.mark.parametrize("parallel", [False, True])
def test_results_by_rank(parallel: bool) -> None:
    assert launch(lambda a, b: (rank(), a + b), 4, args=(1, 2), parallel=parallel) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert rank() == 0


def test_invalid_arguments_are_refused() -> None:
    for ranks in (0, "2", 1.0):
        with pytest.raises(ScheduleError, match="ranks must be a whole number of at least 1, got"):
            launch(rank, ranks)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"fn must be a function, which is called as fn\(\*args\), once per rank, got 3"):
        launch(3, 2)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="backend 'mpi'"):
        launch(rank, 2, "mpi")
    for name in ("nccl", "NCCL"):
        with pytest.raises(ScheduleError, match="ranks that each have a GPU of their own use NCCL by themselves"):
            launch(rank, 2, name)


def test_one_rank_at_a_time() -> None:
    """No other rank runs between two waits."""
    running = 0

    def work() -> None:
        nonlocal running
        group, mine = get_group()
        for _ in range(20):
            running += 1
            assert running == 1
            time.sleep(0.0005)
            assert running == 1
            running -= 1
            group.gather(mine, "round", None, 10)

    launch(work, 4)


@pytest.mark.parametrize("parallel", [False, True])
def test_gather_is_by_rank(parallel: bool) -> None:
    def work() -> list[list[int]]:
        group, mine = get_group()
        return [group.gather(mine, f"round {k}", mine * 10 + k, 10) for k in range(5)]

    for found in launch(work, 3, parallel=parallel):
        assert found == [[0 + k, 10 + k, 20 + k] for k in range(5)]


def test_gathers_keep_nothing_alive() -> None:
    groups: list[VirtualGroup] = []

    def work() -> None:
        group, mine = get_group()
        for k in range(5):
            group.gather(mine, f"round {k}", torch.zeros(3), 10)
        groups.append(group)

    launch(work, 3)
    assert groups[0]._gatherings == {}


@pytest.mark.parametrize("parallel", [False, True])
def test_first_error_is_raised(parallel: bool) -> None:
    """The rank's own error is raised rather than the reports of the other ranks."""

    def work() -> None:
        group, mine = get_group()
        if mine == 2:
            raise ZeroDivisionError("mine")
        group.gather(mine, "never", None, 10)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        launch(work, 4, parallel=parallel)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]


@pytest.mark.parametrize("parallel", [False, True])
def test_all_waiting_is_a_deadlock(parallel: bool) -> None:
    def work() -> None:
        group, mine = get_group()
        group.wait(mine, lambda: False, f"what never comes to {mine}", 60)

    with pytest.raises(PipelineError, match="no rank can go on: each waits for another") as caught:
        launch(work, 3, parallel=parallel)
    assert "  rank 1 waits for what never comes to 1" in str(caught.value)


def test_a_past_failure_is_not_raised_again() -> None:
    """A rank is told of a failure; while it is still on its way out, the others have begun again. Its report of it is old news."""
    group = VirtualGroup(2, parallel=True)
    group.fail(0, PipelineError("the first"))
    with pytest.raises(PipelineError, match="the first"):
        group.enter(1, 1)
    group.enter(0, 1)
    assert group.failure is None
    group.fail(1, PipelineError("the first"))
    assert group.failure is None
    group.enter(1, 1)
    group.fail(1, PipelineError("the second"))
    with pytest.raises(PipelineError, match="the second"):
        group.enter(0, 1)


def test_random_state_travels_with_the_baton() -> None:
    def draw() -> list[float]:
        group, mine = get_group()
        torch.manual_seed(mine)
        found = []
        for _ in range(3):
            found.append(float(torch.rand(())))
            group.gather(mine, "next", None, 10)
        return found

    for mine, found in enumerate(launch(draw, 3)):
        torch.manual_seed(mine)
        assert found == [float(torch.rand(())) for _ in range(3)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches the test even if the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("parallel", [False, True])
def test_interrupt_does_not_hang(parallel: bool) -> None:
    """Ctrl-C in the middle of a launch: it is raised soon, and the ranks stop where they next wait."""

    begun = threading.Event()

    def interrupt() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    ended: list[str] = []

    def work() -> None:
        group, mine = get_group()
        try:
            for k in range(10_000):
                time.sleep(0.001)
                if k == 10:
                    begun.set()
                group.gather(mine, f"round {k}", None, 60)
        except PipelineError as error:
            ended.append(str(error))
            raise

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(work, 3, parallel=parallel)
    thread.join()
    assert len(ended) == 3
    assert all("KeyboardInterrupt" in text for text in ended)


def test_launch_inside_a_launch() -> None:
    def outer() -> list[tuple[int, int]]:
        mine = rank()
        return launch(lambda: (mine, rank()), 2)

    assert launch(outer, 2) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_multiprocessors_need_a_gpu() -> None:
    with pytest.raises(ScheduleError, match="no GPU to split"):
        launch(lambda: None, 2, sms=32)
    with pytest.raises(ScheduleError, match="virtual ranks, but backend 'gloo' has none"):
        launch(lambda: None, 2, backend="gloo", sms=32)
