"""The ranks of a training run: processes that are started here, or those that `torchrun` has started."""

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
from penstock.runtime.transport.current_group import join, under_torchrun

Tell = Callable[[Any], None]
"""Is told how far a run is, in the process that speaks for all."""
PATIENCE = 3600.0
"""Seconds that ranks wait for what one does for all."""


class Crew(ABC):
    """Ranks that call one function after another."""

    ranks: int
    first: bool
    """Whether this process speaks for all."""

    @abstractmethod
    def run(self, fn: Callable[..., Any], *args: Any, tell: Tell) -> list[Any]:
        """Call `fn(*args, tell)` on every rank; the results by rank."""

    @abstractmethod
    def once(self, fn: Callable[[], Any]) -> Any:
        """What `fn()` gives, called once for all."""


@contextlib.contextmanager
def crew(ranks: int | None) -> Iterator[Crew]:
    """So many processes on this machine, which end with the block; under `torchrun` those that are there."""
    if under_torchrun():
        group = join()
        if ranks is not None and ranks != group.ranks:
            raise ScheduleError(f"{ranks} ranks, but torchrun has started {group.ranks} processes: start as many, or leave the number out")
        yield _Joined(group)
        return
    if ranks is None:
        raise ScheduleError("how many ranks are there to be? Say so with --ranks N, or start them with torchrun")
    with Workers(ranks) as workers:
        yield _Started(workers)


class _Started(Crew):
    first = True

    def __init__(self, workers: Workers) -> None:
        self.workers, self.ranks = workers, workers.ranks

    def run(self, fn: Callable[..., Any], *args: Any, tell: Tell) -> list[Any]:
        with _heard(tell) as telling:
            return self.workers.run(_told, (fn, args, telling))

    def once(self, fn: Callable[[], Any]) -> Any:
        return fn()


class _Joined(Crew):
    def __init__(self, group: Any) -> None:
        self.group, self.ranks, self.first = group, group.ranks, group.rank == 0

    def run(self, fn: Callable[..., Any], *args: Any, tell: Tell) -> list[Any]:
        return self.group.gather(self.group.rank, "run", fn(*args, tell), PATIENCE)  # type: ignore[no-any-return]

    def once(self, fn: Callable[[], Any]) -> Any:
        mine: tuple[Any, Exception | None] = (None, None)
        if self.first:
            try:
                mine = fn(), None
            except Exception as error:  # all are to know why there is nothing
                mine = None, error
        value, failed = self.group.gather(self.group.rank, "once", mine, PATIENCE)[0]
        if failed is not None:
            raise failed
        return value


@dataclass
class Telling:
    """Tells the process that started this one; it is sent to the ranks, and connects when it is first used."""

    address: str
    key: bytes
    _connection: Connection | None = field(default=None, repr=False)

    def __call__(self, what: Any) -> None:
        if self._connection is None:
            self._connection = Client(self.address, family="AF_UNIX", authkey=self.key)
        self._connection.send(what)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _told(fn: Callable[..., Any], args: tuple[Any, ...], telling: Telling) -> Any:
    """Call a function on a rank; what it tells ends with it."""
    try:
        return fn(*args, telling)
    finally:
        telling.close()


@contextlib.contextmanager
def _heard(tell: Tell) -> Iterator[Telling]:
    """Gives what ranks tell to the callback for as long as the block lasts."""
    key = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory(prefix="penstock") as folder:
        address = str(Path(folder) / "told")
        listener = Listener(address, family="AF_UNIX", backlog=64, authkey=key)
        heard = threading.Thread(target=_listen, args=(listener, tell), daemon=True)
        heard.start()
        try:
            yield Telling(address, key)
        finally:
            with contextlib.suppress(OSError, EOFError):
                Client(address, family="AF_UNIX", authkey=key).send(None)  # nothing more will come
            heard.join()
            listener.close()


def _listen(listener: Listener, tell: Tell) -> None:
    """Take connections one after the other: of the rank that speaks, and the last one, which ends it."""
    while True:
        with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
            while True:
                what = connection.recv()
                if what is None:
                    return
                tell(what)
