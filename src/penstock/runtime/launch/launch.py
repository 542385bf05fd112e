"""Run a function on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.errors import ScheduleError, UnknownNameError, nearest
from penstock.runtime.device.rng import RngState, get_rng_state, set_rng_state
from penstock.runtime.device.streams import create_streams, record_event, use_stream, wait_event
from penstock.runtime.launch.workers import Workers, raise_first
from penstock.runtime.transport.current_group import join, set_group, under_torchrun
from penstock.runtime.transport.threads import VirtualGroup

_RESULTS = 30 * 24 * 3600.0
"""Seconds that a rank waits for the others' results. It is long because one rank may have little to do; a lost rank is noticed at once."""
_GRACE = 2.0
"""Seconds that an interrupted launch waits for its ranks to stop."""


def launch(
    fn: Callable[..., Any],
    ranks: int,
    backend: str = "threads",
    args: Sequence[Any] = (),
    *,
    parallel: bool = False,
    sms: int | None = None,
) -> list[Any]:
    """Call `fn(*args)` on every rank; returns the results by rank.

    `threads` runs virtual ranks in this process, one at a time unless `parallel`. `gloo` starts one process per rank on this
    machine, and takes functions from anywhere, a notebook too. Under `torchrun` the processes are there already, so `gloo`
    starts nothing and calls the function in this one. The first failure is raised after every rank has ended. Each rank starts
    from the caller's random state, which is left as it was.

    On a GPU each virtual rank has a stream of its own. With `sms` each stream has that many multiprocessors for itself, so that
    one GPU stands for several smaller ones.
    """
    if ranks < 1:
        raise ScheduleError(f"{ranks} ranks: at least 1 is needed")
    if sms is not None and backend != "threads":
        raise ScheduleError(f"sms={sms} splits one GPU among virtual ranks, but backend {backend!r} has none")
    if backend == "gloo":
        return _run_in_this_process(fn, ranks, args) if under_torchrun() else _run_in_processes(fn, ranks, args)
    if backend != "threads":
        raise UnknownNameError(f"unknown backend {backend!r}; {nearest(backend, ('threads', 'gloo'))}")
    return _run_in_threads(fn, args, VirtualGroup(ranks, parallel=parallel), create_streams(ranks, sms))


def _run_in_processes(fn: Callable[..., Any], ranks: int, args: Sequence[Any]) -> list[Any]:
    with Workers(ranks) as workers:
        return workers.run(fn, args)


def _run_in_this_process(fn: Callable[..., Any], ranks: int, args: Sequence[Any]) -> list[Any]:
    group = join()
    if group.ranks != ranks:
        raise ScheduleError(f"launch for {ranks} ranks, but there are {group.ranks} processes: start as many")
    return group.gather(group.rank, "launch", fn(*args), _RESULTS)


def _run_in_threads(fn: Callable[..., Any], args: Sequence[Any], group: VirtualGroup, streams: Sequence[Any]) -> list[Any]:
    state, begin = get_rng_state(), record_event()
    failed: list[_RankThread] = []
    ends: list[Any] = []

    def body(stream: Any) -> Any:
        use_stream(stream)
        wait_event(begin)
        try:
            return fn(*args)
        finally:
            ends.append(record_event())

    threads = [_RankThread(group, rank, partial(body, stream), state, failed) for rank, stream in enumerate(streams)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.ended.wait()  # not join(): if an interrupt comes while it waits, it takes the thread for ended
    except BaseException as error:  # an interrupt: ranks stop at their next wait, and one that does not is left behind
        group.fail(None, error, fatal=True)
        for thread in threads:
            thread.ended.wait(_GRACE / group.ranks)
        raise
    finally:
        set_rng_state(state)
    for thread in threads:
        thread.join()
    for end in ends:
        wait_event(end)
    raise_first([(thread.rank, thread.error) for thread in failed if thread.error is not None], group.ranks)
    return [thread.result for thread in threads]


class _RankThread(threading.Thread):
    """One rank's thread."""

    def __init__(self, group: VirtualGroup, rank: int, body: Callable[[], Any], state: RngState, failed: list[_RankThread]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.group, self.rank, self.body, self.state, self.failed = group, rank, body, state, failed
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.group.begin(self.rank)
        set_group(self.group, self.rank)
        try:
            if not self.group.parallel:
                set_rng_state(self.state)
            self.result = self.body()
        except BaseException as error:
            self.error = error
            self.failed.append(self)
            self.group.fail(self.rank, error, fatal=True)
        finally:
            self.group.end(self.rank)
            self.ended.set()
