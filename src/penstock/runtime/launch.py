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
    rank has ended.
    """
    if backend != "threads":
        raise ScheduleError(f"backend {backend!r}: only 'threads', virtual ranks in one process, is there")
    if ranks < 1:
        raise ScheduleError(f"{ranks} ranks: at least 1 is needed")
    group = Group(ranks, parallel=parallel)
    runs = [_Run(group, each, fn, args) for each in range(ranks)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    _raise_first(group, runs)
    return [run.result for run in runs]


class _Run(threading.Thread):
    """One rank's thread; its random state starts as that of the caller."""

    def __init__(self, group: Group, rank: int, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.group, self.rank, self.fn, self.args = group, rank, fn, args
        self.state = torch.get_rng_state()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.group.begin(self.rank)
        _here.group, _here.rank = self.group, self.rank
        try:
            if not self.group.parallel:
                torch.set_rng_state(self.state)
            self.result = self.fn(*self.args)
        except BaseException as error:
            self.error = error
            self.group.fail(error)
        finally:
            self.group.end(self.rank)


def _raise_first(group: Group, runs: Sequence[_Run]) -> None:
    """The failure that came first, or a rank's own error rather than the report of another's."""
    failed = [run for run in runs if run.error is not None]
    if not failed:
        return
    first = next((run for run in failed if not isinstance(run.error, PipelineError)), failed[0])
    assert first.error is not None
    first.error.add_note(f"raised on rank {first.rank} of {group.ranks}")
    raise first.error
