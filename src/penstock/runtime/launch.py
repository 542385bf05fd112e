"""Run a function on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime.group import Group


class _Here(threading.local):
    """Which rank of which group this thread is."""

    group: Group | None = None
    rank: int = 0


_here = _Here()


def rank() -> int:
    """The rank that this code runs on; 0 outside `launch`."""
    return _here.rank


def current() -> tuple[Group, int]:
    """The group and rank that this code runs on; outside `launch`, a group of one."""
    if _here.group is None:
        return Group(1), 0
    return _here.group, _here.rank


def launch(fn: Callable[..., Any], ranks: int, backend: str = "threads", args: Sequence[Any] = (), *, parallel: bool = False) -> list[Any]:
    """Call `fn(*args)` on every rank; the results by rank.

    `threads` runs virtual ranks in this process, one at a time unless `parallel`. The first failure is raised, after every
    rank has ended. Each rank starts from the caller's random state, which is left as it was.
    """
    if backend != "threads":
        raise ScheduleError(f"backend {backend!r}: only 'threads', virtual ranks in one process, is there")
    if ranks < 1:
        raise ScheduleError(f"{ranks} ranks: at least 1 is needed")
    group = Group(ranks, parallel=parallel)
    state = torch.get_rng_state()
    failed: list[_Run] = []
    runs = [_Run(group, each, lambda: fn(*args), state, failed) for each in range(ranks)]
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
        torch.set_rng_state(state)
    for run in runs:
        run.join()
    _raise_first(failed)
    return [run.result for run in runs]


_GRACE = 2.0
"""Seconds that an interrupted launch waits for its ranks."""


class _Run(threading.Thread):
    """One rank's thread."""

    def __init__(self, group: Group, rank: int, body: Callable[[], Any], state: torch.Tensor, failed: list[_Run]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.group, self.rank, self.body, self.state, self.failed = group, rank, body, state, failed
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.group.begin(self.rank)
        _here.group, _here.rank = self.group, self.rank
        try:
            if not self.group.parallel:
                torch.set_rng_state(self.state)
            self.result = self.body()
        except BaseException as error:
            self.error = error
            self.failed.append(self)
            self.group.fail(self.rank, error, fatal=True)
        finally:
            self.group.end(self.rank)
            self.ended.set()


def _raise_first(failed: Sequence[_Run]) -> None:
    """The failure that came first, and a rank's own error rather than the report of another's."""
    first = next((run for run in failed if not isinstance(run.error, PipelineError)), failed[0] if failed else None)
    if first is not None and first.error is not None:
        first.error.add_note(f"raised on rank {first.rank} of {first.group.ranks}")
        raise first.error
