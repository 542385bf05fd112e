"""How processes report a failure: on a board in the store that connects them.

The first rank that fails writes what happened. Every other rank adds what it was doing, when its watching thread sees the failure or
its connection breaks. The first rank combines both into the report that every rank raises. If ranks may be lost, the report also says
which ranks are gone, so that the others agree on who goes on.

A rank that has something to tell writes it under a key of its own kind, then posts a notice. The others look only for the next notice, and
read the other keys when there is one. So a look takes the same number of requests for any number of ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from penstock.runtime.tensors.boundary import load_pickler
from penstock.runtime.transport.group import RETURNED

PrefixStore, TCPStore = dist.PrefixStore, dist.TCPStore  # type: ignore[attr-defined]
_ANSWER = 1.5
"""Seconds for the other ranks to say what they were doing."""
_GIVE_UP = 5.0
"""Seconds after which a rank that does not answer counts as lost, if ranks may be lost and its process is not known to have ended."""
_SILENT = "does not answer"
_NO_STORE = (
    "the others cannot go on without a lost rank, because the store that connects the ranks is gone, which under env:// is in the process "
    "of rank 0: start again from the last checkpoint"
)
_PAUSE = 0.02
_NAMED = 3
"""How many ranks a headline names."""
_LONGEST_PAUSE = 0.05
"""The longest pause in seconds between two looks for ranks that are late."""


def describe_error(error: BaseException) -> str:
    """The class and message of an error, even if its own code fails to say it."""
    try:
        message = str(error)
    except Exception as another:
        message = f"its message cannot be read: str() raises {type(another).__name__}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@dataclass(frozen=True)
class PickledError:
    """An exception on its way to another process, which may not be able to unpickle it."""

    pickled: bytes | None
    description: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> PickledError:
        trace = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickled = load_pickler().dumps(error)
        except Exception:
            pickled = None
        return cls(pickled, describe_error(error), trace)

    def rebuild(self) -> BaseException:
        """The exception, or a `RuntimeError` with its description, with the traceback of where it was raised as a note."""
        try:
            error: BaseException = pickle.loads(self.pickled or b"")
        except Exception:
            error = RuntimeError(self.description)
        error.add_note(f"as it was raised there:\n{self.traceback}")
        return error


@dataclass(frozen=True)
class FailureReport:
    """A failure as all ranks report it."""

    text: str
    cause: PickledError | None
    fatal: bool
    lost: tuple[int, ...] | None = None
    """The ranks that are gone, if the others can go on without them; empty if only a connection was lost. None for any other failure."""


class Notices:
    """The notices of one store, and how many of them this reader has seen. Each reader has an object of its own."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen = 0

    def post(self, text: str) -> None:
        """Post a notice after the last one. The write is atomic: a process that dies here leaves no gap that would stop readers."""
        number = self._seen + 1
        with contextlib.suppress(Exception):  # the store may be gone
            while bytes(self._store.compare_set(f"notice/{number}", "", text)) != text.encode():
                number += 1

    def have_come(self) -> bool:
        """Whether there are new notices since the last call; one request if not."""
        before = self._seen
        with contextlib.suppress(Exception):
            while self._store.check([f"notice/{self._seen + 1}"]):
                self._seen += 1
        return self._seen > before


class FailureBoard:
    """Reports of ranks about failures and returns, in one generation of connections.

    The store may go away at any time. Writes are lost then, reads find nothing, and ranks report what they know by themselves.
    `notices` are those of all generations: one is posted for everything that the other ranks should see soon. `members` are the ranks that
    take part. If they go on after losses, `list_ended` lists those whose processes are known to have ended; it is None if they do not.
    """

    def __init__(
        self, store: Any, rank: int, members: Sequence[int], notices: Notices, list_ended: Callable[[], Collection[int]] | None = None
    ) -> None:
        self.store, self.rank, self.members = store, rank, members
        self.notices, self.list_ended = notices, list_ended
        self._posted_activity = False

    def has_failure(self) -> bool:
        """Whether any rank has failed."""
        return self._has("failure")

    def post_activity(self, line: str) -> None:
        """Write what this rank was doing when it learned of the failure; only the first call counts."""
        if not self._posted_activity:
            self._posted_activity = True
            self._set(f"doing/{self.rank}", line.encode())

    def post_failure(
        self,
        headline: str,
        cause: BaseException | None,
        line: str,
        *,
        fatal: bool = False,
        late: bool = False,
        disconnected: bool = False,
    ) -> FailureReport:
        """Tell all ranks of a failure; returns the report, which is of another rank's failure if that came first.

        If this rank's wait was too long (`late`), the report's headline says which ranks hold it up. If a connection was lost and nobody
        says why (`disconnected`), or a late rank does not answer, the report says which ranks are gone.
        """
        failure = pickle.dumps((self.rank, headline, None if cause is None else PickledError.of(cause), fatal, late, disconnected))
        first = failure
        with contextlib.suppress(Exception):
            first = self.store.compare_set("failure", "", failure)
        if first == failure:
            self.notices.post(f"rank {self.rank} failed at {time.time_ns()}")
        self.post_activity(line)
        return self._compose(failure) if first == failure else self.read_report()

    def _compose(self, failure: bytes) -> FailureReport:
        reporter, headline, cause, fatal, late, disconnected = pickle.loads(failure)
        may_be_lost = self.list_ended is not None and (late or disconnected) and not fatal
        if may_be_lost and not self._has(f"doing/{self.rank}"):  # this rank has just written it
            return FailureReport(f"{headline}; {_NO_STORE}", cause, True)
        self._wait_for_answers(_GIVE_UP if may_be_lost else _ANSWER)
        lines = self._list_activities()
        lost = tuple(rank for rank, line in lines.items() if line in (_SILENT, RETURNED)) if may_be_lost else None
        if late:
            headline += _describe_holdup(reporter, lines)
        report = FailureReport(_join(headline, lines), cause, fatal, lost if lost or disconnected else None)
        known = written = pickle.dumps(report)
        with contextlib.suppress(Exception):
            known = bytes(self.store.compare_set("report", "", written))
        return report if known == written else _load_report(known)

    def _wait_for_answers(self, seconds: float) -> None:
        """Wait until every rank has said what it was doing; not for ranks whose processes are known to have ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ended = () if self.list_ended is None else self.list_ended()
            if self._has(*(f"doing/{rank}" for rank in self.members if rank not in ended)):
                return
            time.sleep(_PAUSE)

    def _list_activities(self) -> dict[int, str]:
        """The activity of each rank, as its `Activity` describes it."""
        lines = {rank: self._get(f"doing/{rank}") for rank in self.members}
        return {rank: _SILENT if line is None else line.decode() for rank, line in lines.items()}

    def read_report(self) -> FailureReport:
        """The report that all ranks raise. If the rank that failed first does not write it, it is composed here."""
        self._wait("report", 2 * (_ANSWER if self.list_ended is None else _GIVE_UP))
        pickled = self._get("report")
        if pickled is not None:
            return _load_report(pickled)
        failure = self._get("failure")
        if failure is not None:
            return self._compose(failure)
        headline = "a rank failed, and the store that connects the ranks is gone"
        return FailureReport(_join(headline, self._list_activities()), None, True)

    def post_return(self, exchanges: int) -> None:
        """Tell the other ranks that this one has returned after so many exchanges, unless another has after as few."""
        entry = f"{exchanges} {self.rank}"
        with contextlib.suppress(Exception):
            known = self.store.compare_set("returned", "", entry).decode()
            while known != entry:
                if int(known.split()[0]) <= exchanges:
                    return
                known = self.store.compare_set("returned", known, entry).decode()
            self.notices.post(f"rank {self.rank} returned at {time.time_ns()}")

    def find_first_return(self) -> tuple[int, int] | None:
        """The fewest exchanges after which a rank has returned, and that rank; None while none has."""
        known = self._get("returned")
        if known is None:
            return None
        exchanges, rank = known.decode().split()
        return int(exchanges), int(rank)

    def wait_until_all_leave(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until every rank has come here, one has failed, or `is_over` says that waiting is useless."""
        with contextlib.suppress(Exception):
            count_arrival(self.store, "left", self.rank, len(self.members))
        pause, until = _PAUSE / 4, time.monotonic() + seconds
        while time.monotonic() < until and not self._has("left/all") and not self.has_failure() and not is_over():
            time.sleep(pause)
            pause = lengthen_pause(pause)

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

    def _wait(self, key: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._has(key):
            time.sleep(_PAUSE)


def _load_report(pickled: bytes) -> FailureReport:
    report: FailureReport = pickle.loads(pickled)
    return report


def _join(headline: str, lines: Mapping[int, str]) -> str:
    return "\n".join([headline, *(f"  rank {rank} {line}" for rank, line in lines.items())])


def _describe_holdup(reporter: int, lines: Mapping[int, str]) -> str:
    """The end of a headline: which ranks hold up the one that has waited too long. These are all ranks that wait for no other."""
    busy = [
        f"rank {rank}, which {line.partition(';')[0]}"
        for rank, line in lines.items()
        if rank != reporter and not line.startswith("waits for ")
    ]
    more = [f"{len(busy) - _NAMED} more ranks"] if len(busy) > _NAMED else []
    return f"; held up by {' and '.join(busy[:_NAMED] + more)}" if busy else ""


def is_timeout(error: Exception) -> bool:
    """Whether an error says that a wait was too long: gloo's wait has `timed out`, and NCCL's work ran so long `before timing out`."""
    return re.search(r"tim(ed|ing) out|timeout", str(error), re.IGNORECASE) is not None


def count_arrival(store: Any, place: str, rank: int, ranks: int) -> None:
    """Count a rank that has arrived at a place, once. The last to arrive writes `place/all`, the one key that all look for."""
    if store.add(f"{place}/{rank}", 1) == 1 and store.add(place, 1) == ranks:
        store.set(f"{place}/all", b"")


def lengthen_pause(pause: float) -> float:
    """A longer pause between two looks for ranks that are late, up to a limit."""
    return min(1.5 * pause, _LONGEST_PAUSE)
