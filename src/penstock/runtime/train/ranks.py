"""The processes of a training run: started here, or by `torchrun`."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from penstock.errors import ScheduleError
from penstock.runtime.launch.workers import Workers
from penstock.runtime.transport.current_group import is_under_torchrun, join

OnProgress = Callable[[Any], None]
"""Receives the progress of a run, in the process of the command."""
PATIENCE = 3600.0
"""Seconds that ranks wait for a result that one computes for all."""


class RankProcesses(ABC):
    """The processes of a training run, one per rank, which call one function after another.

    The command gets one from `open_ranks`. Under `torchrun` the command itself runs in every process; then each makes the same calls in
    the same order. Otherwise the command runs in a process of its own, which has no rank.
    """

    ranks: int
    is_first: bool
    """Whether this process speaks for the run: prints, saves results."""

    @abstractmethod
    def run(self, fn: Callable[..., Any], *args: Any, report: OnProgress) -> list[Any]:
        """Call `fn(*args, report)` on every rank and return the results by rank. What a rank reports reaches `report` here."""

    @abstractmethod
    def run_once(self, fn: Callable[[], Any]) -> Any:
        """Call `fn` in one process and return its result in all; an error is raised in all."""


@contextlib.contextmanager
def open_ranks(ranks: int | None) -> Iterator[RankProcesses]:
    """Start this many processes, which end with the block; under `torchrun`, use those that it started."""
    if is_under_torchrun():
        group = join()
        if ranks is not None and ranks != group.ranks:
            raise ScheduleError(f"{ranks} ranks, but torchrun has started {group.ranks} processes: start as many, or leave the number out")
        yield _TorchrunProcesses(group)
        return
    if ranks is None:
        raise ScheduleError("the number of ranks is not known: give --ranks N, or start the ranks with torchrun")
    with Workers(ranks) as workers:
        yield _StartedProcesses(workers)


class _StartedProcesses(RankProcesses):
    is_first = True

    def __init__(self, workers: Workers) -> None:
        self.workers, self.ranks = workers, workers.ranks

    def run(self, fn: Callable[..., Any], *args: Any, report: OnProgress) -> list[Any]:
        with _receive_progress(report) as sender:
            return self.workers.run(_call_with_sender, (fn, args, sender))

    def run_once(self, fn: Callable[[], Any]) -> Any:
        return fn()


class _TorchrunProcesses(RankProcesses):
    def __init__(self, group: Any) -> None:
        self.group, self.ranks, self.is_first = group, group.ranks, group.rank == 0

    def run(self, fn: Callable[..., Any], *args: Any, report: OnProgress) -> list[Any]:
        return self.group.gather(self.group.rank, "run", fn(*args, report), PATIENCE)  # type: ignore[no-any-return]

    def run_once(self, fn: Callable[[], Any]) -> Any:
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_first:
            try:
                outcome = fn(), None
            except Exception as error:  # all ranks raise it
                outcome = None, error
        value, error_of_first = self.group.gather(self.group.rank, "once", outcome, PATIENCE)[0]
        if error_of_first is not None:
            raise error_of_first
        return value


@dataclass
class ProgressSender:
    """Sends progress to the process that started this one. It is pickled to the ranks, and connects when it is first called."""

    address: str
    key: bytes
    _connection: Connection | None = field(default=None, repr=False)

    def __call__(self, progress: Any) -> None:
        if self._connection is None:
            self._connection = Client(self.address, family="AF_UNIX", authkey=self.key)
        self._connection.send(progress)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _call_with_sender(fn: Callable[..., Any], args: tuple[Any, ...], sender: ProgressSender) -> Any:
    try:
        return fn(*args, sender)
    finally:
        sender.close()


@contextlib.contextmanager
def _receive_progress(report: OnProgress) -> Iterator[ProgressSender]:
    """Pass on what ranks send until the block ends."""
    key = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory(prefix="penstock") as folder:
        address = str(Path(folder) / "reports")
        listener = Listener(address, family="AF_UNIX", backlog=64, authkey=key)
        thread = threading.Thread(target=_listen, args=(listener, report), daemon=True)
        thread.start()
        try:
            yield ProgressSender(address, key)
        finally:
            with contextlib.suppress(OSError, EOFError):
                Client(address, family="AF_UNIX", authkey=key).send(None)  # ends the thread
            thread.join()
            listener.close()


def _listen(listener: Listener, report: OnProgress) -> None:
    """Serve one connection after the other: that of the rank that reports, and the last one, which sends None."""
    while True:
        with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
            while True:
                progress = connection.recv()
                if progress is None:
                    return
                report(progress)
