"""Run a function on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ScheduleError, UnknownNameError, nearest
from penstock.runtime.device.gpu import keep_device_guard
from penstock.runtime.device.rng import get_rng_state, set_rng_state
from penstock.runtime.device.streams import create_streams, record_event, use_stream, wait_event
from penstock.runtime.launch.workers import Workers, raise_first
from penstock.runtime.transport.current_group import is_under_torchrun, join, set_group
from penstock.runtime.transport.threads import VirtualGroup
from penstock.text.checks import check_function
from penstock.text.units import check_count

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
    sms: int | Sequence[int] | None = None,
    losses: int = 0,
    restart: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on every rank; returns the results by rank.

    `threads` runs virtual ranks in this process, one at a time unless `parallel`. `gloo` starts one process per rank on this
    machine, and takes functions from anywhere, a notebook too. Under `torchrun` the processes are there already, so `gloo`
    starts nothing and calls the function in this one. The first failure is raised after every rank has ended. Each rank starts
    from the caller's random state, which is left as it was.

    With `losses`, up to that many of the processes that `gloo` starts may end early: pipelines on a mesh with data-parallel ranks go on
    without them (see `Pipeline(on_loss=...)`), and the result of a lost rank is None. With `restart`, a new process takes the place of
    each, and calls the function from its beginning; its pipeline joins the others at their next checkpoint.

    On a GPU each virtual rank has a stream of its own. With `sms` each stream has that many multiprocessors for itself, so that
    one GPU stands for several smaller ones; with one number per rank, for GPUs of different speeds.
    """
    check_function("fn", fn, "fn(*args), once per rank")
    ranks = check_count("ranks", ranks, error=ScheduleError)
    backend = backend.lower()
    if sms is not None and backend != "threads":
        raise ScheduleError(f"sms={sms} splits one GPU among virtual ranks, but backend {backend!r} has none")
    check_count("losses, the number of processes that may end early,", losses, 0, error=ScheduleError)
    if restart and not losses:
        raise ScheduleError("restart=True, but losses=0: give the number of processes that may end early, at least 1 to restart them")
    if losses and (backend != "gloo" or is_under_torchrun()):
        raise ScheduleError(
            f"losses={losses} is for processes that launch starts itself, with backend='gloo'; under other launchers, give the pipeline "
            "on_loss='take-over'"
        )
    if backend == "gloo":
        if is_under_torchrun():
            group = join()
            if group.ranks != ranks:
                raise ScheduleError(f"launch for {ranks} ranks, but there are {group.ranks} processes: start as many")
            return group.gather(group.rank, "launch", fn(*args), _RESULTS)
        with Workers(ranks) as workers:
            return workers.run(fn, args, losses=losses, restart=restart)
    if backend == "nccl":
        raise UnknownNameError(
            "backend 'nccl': NCCL is not a backend of launch, but how processes exchange tensors: start one process per GPU with "
            "backend='gloo' or torchrun, and ranks that each have a GPU of their own use NCCL by themselves"
        )
    if backend != "threads":
        raise UnknownNameError(f"unknown backend {backend!r}; {nearest(backend, ('threads', 'gloo'))}")
    return _run_in_threads(fn, args, VirtualGroup(ranks, parallel=parallel), create_streams(ranks, sms))


def _run_in_threads(fn: Callable[..., Any], args: Sequence[Any], group: VirtualGroup, streams: Sequence[Any]) -> list[Any]:
    keep_device_guard()
    state, begin = get_rng_state(), record_event()
    results: list[Any] = [None] * group.ranks
    failed: list[tuple[int, BaseException]] = []
    events: list[Any] = []
    ended = [threading.Event() for _ in range(group.ranks)]

    def run_rank(rank: int, stream: Any) -> None:
        group.begin(rank)
        set_group(group, rank)
        try:
            if not group.parallel:
                set_rng_state(state)
            use_stream(stream)
            wait_event(begin)
            results[rank] = fn(*args)
        except BaseException as error:
            failed.append((rank, error))
            group.fail(rank, error, fatal=True)
        finally:
            events.append(record_event())
            group.end(rank)
            ended[rank].set()

    places = enumerate(streams)
    threads = [threading.Thread(target=run_rank, args=place, name=f"rank {place[0]}", daemon=True) for place in places]
    try:
        for thread in threads:
            thread.start()
        for end in ended:
            end.wait()  # not join(): if an interrupt comes while it waits, it takes the thread for ended
    except BaseException as error:  # an interrupt: ranks stop at their next wait, and one that does not is left behind
        group.fail(None, error, fatal=True)
        for end in ended:
            end.wait(_GRACE / group.ranks)
        raise
    finally:
        set_rng_state(state)
    for thread in threads:
        thread.join()
    for event in events:
        wait_event(event)
    raise_first(failed, group.ranks)
    return results
