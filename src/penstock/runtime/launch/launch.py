"""Run a function on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.errors import ScheduleError, UnknownNameError, nearest
from penstock.runtime.device import device
from penstock.runtime.launch.workers import Workers, raise_first
from penstock.runtime.transport.current_group import join, stand, under_torchrun
from penstock.runtime.transport.threads import VirtualGroup

_RESULTS = 30 * 24 * 3600.0
"""Seconds that a rank waits for the others' results: one may have little to do, and a rank that is lost is noticed at once."""


def launch(
    fn: Callable[..., Any],
    ranks: int,
    backend: str = "threads",
    args: Sequence[Any] = (),
    *,
    parallel: bool = False,
    sms: int | None = None,
) -> list[Any]:
    """Call `fn(*args)` on every rank; the results by rank.

    `threads` runs virtual ranks in this process, one at a time unless `parallel`; `gloo` starts a process for each on this
    machine, and takes functions from anywhere, a notebook too. Under `torchrun`, where the processes are there already, `gloo`
    starts nothing and calls the function in this one. The first failure is raised, after every rank has ended. Each rank starts
    from the caller's random state, which is left as it was.

    On a GPU each virtual rank has a stream of its own. With `sms` a stream has so many multiprocessors, that no other has: one
    GPU then stands for several smaller ones.
    """
    if ranks < 1:
        raise ScheduleError(f"{ranks} ranks: at least 1 is needed")
    if sms is not None and backend != "threads":
        raise ScheduleError(f"sms={sms} shares out one GPU to virtual ranks: backend {backend!r} has none")
    if backend == "gloo":
        return _joined(fn, ranks, args) if under_torchrun() else _started(fn, ranks, args)
    if backend != "threads":
        raise UnknownNameError(f"unknown backend {backend!r}; {nearest(backend, ('threads', 'gloo'))}")
    return _threads(fn, ranks, args, VirtualGroup(ranks, parallel=parallel), device.lanes(ranks, sms))


def _started(fn: Callable[..., Any], ranks: int, args: Sequence[Any]) -> list[Any]:
    with Workers(ranks) as workers:
        return workers.run(fn, args)


def _joined(fn: Callable[..., Any], ranks: int, args: Sequence[Any]) -> list[Any]:
    group = join()
    if group.ranks != ranks:
        raise ScheduleError(f"launch for {ranks} ranks, but there are {group.ranks} processes: start as many")
    return group.gather(group.rank, "launch", fn(*args), _RESULTS)


def _threads(fn: Callable[..., Any], ranks: int, args: Sequence[Any], group: VirtualGroup, lanes: Sequence[Any]) -> list[Any]:
    state, begin = device.random_state(), device.mark()
    failed: list[_Run] = []

    def body(lane: Any) -> Any:
        device.stand_on(lane)
        device.follow(begin)
        try:
            return fn(*args)
        finally:
            ends.append(device.mark())

    ends: list[Any] = []
    runs = [_Run(group, each, partial(body, lanes[each]), state, failed) for each in range(ranks)]
    try:
        for run in runs:
            run.start()
        for run in runs:
            run.ended.wait()  # not join(), which takes a thread for ended once an interrupt came while it waited
    except BaseException as error:  # an interrupt: ranks stop where they next wait, and one that does not is left behind
        group.fail(None, error, fatal=True)
        for run in runs:
            run.ended.wait(_GRACE / ranks)
        raise
    finally:
        device.set_random_state(state)
    for run in runs:
        run.join()
    for end in ends:
        device.follow(end)
    raise_first([(run.rank, run.error) for run in failed if run.error is not None], ranks)
    return [run.result for run in runs]


_GRACE = 2.0
"""Seconds that an interrupted launch waits for its ranks."""


class _Run(threading.Thread):
    """One rank's thread."""

    def __init__(self, group: VirtualGroup, rank: int, body: Callable[[], Any], state: Any, failed: list[_Run]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.group, self.rank, self.body, self.state, self.failed = group, rank, body, state, failed
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.group.begin(self.rank)
        stand(self.group, self.rank)
        try:
            if not self.group.parallel:
                device.set_random_state(self.state)
            self.result = self.body()
        except BaseException as error:
            self.error = error
            self.failed.append(self)
            self.group.fail(self.rank, error, fatal=True)
        finally:
            self.group.end(self.rank)
            self.ended.set()
