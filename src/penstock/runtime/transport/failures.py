"""How ranks in different processes learn of a failure: a board in the store that connects them.

The first rank that fails writes what happened. Every other rank, by a thread that looks at the board or because its connection
broke, adds what it was doing. The first puts both together; that report is what every rank raises.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.runtime.transport.store import Notices

_ROUND = 1.5
"""Seconds that are waited for the other ranks to say what they were doing."""
_PAUSE = 0.02
_LONGEST_PAUSE = 0.05
"""Seconds between two looks for ranks that are late, at most."""


def describe(error: BaseException) -> str:
    """What an error is and says, whatever its own code makes of that."""
    try:
        said = str(error)
    except Exception as another:
        said = f"which cannot say what it is, for that raises {type(another).__name__}"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


@dataclass(frozen=True)
class Told:
    """An exception on its way to another process, which may not be able to rebuild it."""

    pickled: bytes | None
    name: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Told:
        told = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickled = serializer().dumps(error)
        except Exception:
            pickled = None
        return cls(pickled, describe(error), told)

    def error(self) -> BaseException:
        """The exception, or a plain one of the same text, with the traceback of where it was raised."""
        try:
            error: BaseException = pickle.loads(self.pickled or b"")
        except Exception:
            error = RuntimeError(self.name)
        error.add_note(f"as it was raised there:\n{self.traceback}")
        return error


@dataclass(frozen=True)
class Report:
    """A failure as all ranks tell it."""

    text: str
    cause: Told | None
    fatal: bool


class Alarm:
    """The board of one generation of connections. A store that is gone says nothing, and ranks then report what they know.

    What the other ranks must see soon is posted as one of `notices`, which are those of all generations.
    """

    def __init__(self, store: Any, rank: int, ranks: int, notices: Notices) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.notices = notices
        self._said = False

    def heard(self) -> bool:
        """Whether any rank has failed."""
        return self._has("failure")

    def say(self, line: str) -> None:
        """Tell once what this rank was doing when it heard of the failure."""
        if not self._said:
            self._said = True
            self._set(f"doing/{self.rank}", line.encode())

    def sound(self, headline: str, cause: BaseException | None, line: str, *, fatal: bool = False) -> Report:
        """Tell all ranks of a failure; the report, which is that of another rank's failure if there was one before."""
        mine = pickle.dumps((self.rank, headline, None if cause is None else Told.of(cause), fatal))
        first = mine
        with contextlib.suppress(Exception):
            first = self.store.compare_set("failure", "", mine)
        if first == mine:
            self.notices.post(f"rank {self.rank} failed at {time.time_ns()}")
        self.say(line)
        return self._compose(mine) if first == mine else self.report()

    def _compose(self, failure: bytes) -> Report:
        _, headline, cause, fatal = pickle.loads(failure)
        self._wait(f"doing/{rank}" for rank in range(self.ranks))
        report = Report("\n".join([headline, *self._lines()]), cause, fatal)
        self._set("report", pickle.dumps(report))
        return report

    def _lines(self) -> Iterable[str]:
        for rank in range(self.ranks):
            line = self._get(f"doing/{rank}")
            yield f"  rank {rank} {'does not answer' if line is None else line.decode()}"

    def report(self) -> Report:
        """What all ranks raise; made here from what is known if the rank that failed first does not come to it."""
        self._wait(["report"], 2 * _ROUND)
        made = self._get("report")
        if made is not None:
            found: Report = pickle.loads(made)
            return found
        failure = self._get("failure")
        if failure is not None:
            return self._compose(failure)
        return Report("\n".join(["a rank failed, and the store that connects the ranks is gone", *self._lines()]), None, True)

    def tell_return(self, exchanges: int) -> None:
        """Tell the other ranks that this one is through after so many exchanges, unless one is known to be after as few."""
        mine = f"{exchanges} {self.rank}"
        with contextlib.suppress(Exception):
            known = self.store.compare_set("returned", "", mine).decode()
            while known != mine:
                if int(known.split()[0]) <= exchanges:
                    return
                known = self.store.compare_set("returned", known, mine).decode()
            self.notices.post(f"rank {self.rank} returned at {time.time_ns()}")

    def first_return(self) -> tuple[int, int] | None:
        """The fewest exchanges after which a rank was through, and that rank; None while all of them go on."""
        known = self._get("returned")
        if known is None:
            return None
        exchanges, rank = known.decode().split()
        return int(exchanges), int(rank)

    def leave(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until every rank is through, or one has failed, or it `is_over` for another reason."""
        with contextlib.suppress(Exception):
            count_arrival(self.store, "left", self.rank, self.ranks)
        pause, until = _PAUSE / 4, time.monotonic() + seconds
        while time.monotonic() < until and not self._has("left/all") and not self.heard() and not is_over():
            time.sleep(pause)
            pause = next_pause(pause)

    # The store, which may go away at any time ---------------------------------------------------------------------------

    def _has(self, *keys: str) -> bool:
        with contextlib.suppress(Exception):
            return bool(self.store.check(list(keys)))
        return False

    def _get(self, key: str) -> bytes | None:
        with contextlib.suppress(Exception):
            return bytes(self.store.get(key)) if self._has(key) else None
        return None

    def _set(self, key: str, value: bytes) -> None:
        with contextlib.suppress(Exception):
            self.store.set(key, value)

    def _wait(self, keys: Iterable[str], seconds: float = _ROUND) -> None:
        wanted, until = list(keys), time.monotonic() + seconds
        while time.monotonic() < until and not self._has(*wanted):
            time.sleep(_PAUSE)


def count_arrival(store: Any, place: str, rank: int, ranks: int) -> None:
    """Count a rank that has come to a place, once; the last one to come writes `place/all`, the one key that all need to look for."""
    if store.add(f"{place}/{rank}", 1) == 1 and store.add(place, 1) == ranks:
        store.set(f"{place}/all", b"")


def next_pause(pause: float) -> float:
    """A longer pause between two looks for ranks that are late, up to a limit."""
    return min(1.5 * pause, _LONGEST_PAUSE)


def serializer() -> Any:
    """cloudpickle, which takes functions and classes of a script or notebook along; plain pickle where it is not installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle
    return cloudpickle
