"""Finds ranks whose times drift against their own past: a GPU that throttles, a process that shares its cores, a link that degrades.

The first steps of a series of times are its reference. A change is reported when the last steps and the reference hardly overlap: the
lower fifth of the one lies above the upper fifth of the other, so that single slow steps, and noise of any shape, count for nothing; and
the medians differ by enough to matter. Then the series gets a new reference, so that a change is reported once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.text.units import Units

WINDOW = 30
"""Steps of the reference, and of the past that is compared with it."""
HISTORY = 3 * WINDOW
"""Steps in which the beginning of a change is looked for."""
WARM_UP = 5
"""Steps that are left out at first: they connect, allocate and compile."""
LEAST = 0.1
"""The least relative change of a median that is reported."""
LEAST_COMPUTE, LEAST_WAIT = 0.02, 0.05
"""The least change that is reported, as a part of the step's makespan."""
EVERY = 5
"""Steps between two comparisons."""
SUSPECT = WINDOW // 3
"""Steps after which a change of compute time is suspected, though not yet certain: waits that change meanwhile are its consequence."""
SHAPES = 16
"""How many shapes of steps are told apart."""
COMPUTE = ("forward", "backward", "overlapped")


class RankSeconds(Protocol):
    """How one rank spent a step."""

    @property
    def waits(self) -> Mapping[int, float]: ...


@dataclass(frozen=True)
class Drift:
    """One rank that takes longer, or less long, than it used to; `str` says so in a sentence."""

    rank: int
    kind: str
    """`forward`, `backward` or `overlapped` if the rank's compute time has changed, else `waiting`."""
    peer: int | None
    """The rank whose messages are waited for; None if `kind` is not `waiting`."""
    since: int
    """The step that the change began with."""
    step: int
    """The step at which it became certain."""
    before: float
    after: float
    """Seconds per step: the medians of the reference, and of the steps since the change."""
    waiting: Mapping[int, float] = field(default_factory=dict)
    """The ranks that wait longer for this one meanwhile, and by how many seconds per step."""

    @property
    def change(self) -> float:
        """The relative change, 0.5 for half as long again; infinite if there was nothing before."""
        return self.after / self.before - 1 if self.before else float("inf")

    def __str__(self) -> str:
        seconds = Units("s")
        before, after = seconds.time(self.before), seconds.time(self.after)
        percent = f" ({self.change:+.0%})" if self.before else ""
        doing = (
            f"waits {after} per step for rank {self.peer}" if self.peer is not None else f"takes {after} per step in {_NAMES[self.kind]}"
        )
        text = f"rank {self.rank} {doing} since step {self.since}, {before} before{percent}"
        for rank, longer in self.waiting.items():
            text += f"; rank {rank} waits {seconds.time(longer)} longer for it"
        return text if self.peer is None else f"{text}, while the compute times of all ranks have stayed as they were"


_NAMES = {"forward": "its forwards", "backward": "its backwards", "overlapped": "overlapped forwards and backwards"}


class DriftWatch:
    """Watches the times of all ranks of a pipeline, step by step.

    Steps are compared with steps of the same shape. A change of compute time explains changes of waits on all ranks, so waits are
    compared only while compute times are steady, and only the one that changed most is reported.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, int | None], _ShapeWatch] = {}

    def add(self, step: int, shape: tuple[int, int | None], makespan: float, ranks: Sequence[RankSeconds]) -> tuple[Drift, ...]:
        """Add the times of a step; return the changes that it has made certain. `shape` is what a step's times depend on."""
        if shape not in self._shapes and len(self._shapes) == SHAPES:
            return ()
        watch = self._shapes.setdefault(shape, _ShapeWatch())
        return tuple(watch.add(step, makespan, ranks))


class _ShapeWatch:
    """The series of one shape of steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.makespans: deque[float] = deque(maxlen=WINDOW)
        self.compute: dict[tuple[int, str], Series] = {}
        self.waits: dict[tuple[int, int], Series] = {}

    def add(self, step: int, makespan: float, ranks: Sequence[RankSeconds]) -> list[Drift]:
        self.steps += 1
        if self.steps <= WARM_UP:
            return []
        self.makespans.append(makespan)
        for rank, seconds in enumerate(ranks):
            for kind in COMPUTE:
                self.compute.setdefault((rank, kind), Series()).add(step, getattr(seconds, kind))
            for peer, wait in seconds.waits.items():
                self.waits.setdefault((rank, peer), Series()).add(step, wait)
        if self.steps % EVERY:
            return []
        usual = _find_middle(sorted(self.makespans))
        drifts = self._compare_compute(usual)
        if not drifts and not any(series.is_suspect(LEAST_COMPUTE * usual) for series in self.compute.values()):
            drifts = self._compare_waits(LEAST_WAIT * usual)
        if drifts:
            for series in self.waits.values():
                series.restart()
        return drifts

    def _compare_compute(self, usual: float) -> list[Drift]:
        drifts = []
        for (rank, kind), series in self.compute.items():
            if series.has_changed(LEAST_COMPUTE * usual):
                on_rank = {other: wait for (other, peer), wait in self.waits.items() if peer == rank and wait.is_full}
                waiting = {other: wait.shift for other, wait in on_rank.items() if wait.shift > LEAST_WAIT * usual}
                drifts.append(Drift(rank, kind, None, *series.locate_change(), waiting))
                series.restart()
        return drifts

    def _compare_waits(self, least: float) -> list[Drift]:
        changed = [key for key, series in self.waits.items() if series.has_changed(least)]
        if not changed:
            return []
        rank, peer = max(changed, key=lambda key: abs(self.waits[key].shift))
        return [Drift(rank, "waiting", peer, *self.waits[rank, peer].locate_change())]


class Series:
    """One quantity of one rank, step by step: the first steps as a reference, and the last ones."""

    def __init__(self) -> None:
        self.reference: list[float] = []
        self.recent: deque[tuple[int, float]] = deque(maxlen=HISTORY)

    def add(self, step: int, seconds: float) -> None:
        if len(self.reference) < WINDOW:
            self.reference.append(seconds)
            self.reference.sort()
        else:
            self.recent.append((step, seconds))

    def restart(self) -> None:
        """Take the steps from here on as the reference."""
        self.reference, self.recent = [], deque(maxlen=HISTORY)

    @property
    def is_full(self) -> bool:
        return len(self.recent) >= WINDOW

    @property
    def shift(self) -> float:
        """By how much the median has changed."""
        return _find_middle(sorted(self._list_recent())) - _find_middle(self.reference)

    def has_changed(self, least: float) -> bool:
        """Whether the last steps differ from the reference by more than noise, by more than `least`, and by enough to matter."""
        if not self.is_full:
            return False
        reference, recent = self.reference, sorted(self._list_recent())
        apart = _take_lower_fifth(recent) > _take_upper_fifth(reference) or _take_upper_fifth(recent) < _take_lower_fifth(reference)
        return apart and abs(_find_middle(recent) - _find_middle(reference)) > max(least, LEAST * _find_middle(reference))

    def is_suspect(self, least: float) -> bool:
        """Whether the very last steps alone look as if there were a change, even half as large as one that is reported."""
        if len(self.recent) < SUSPECT:
            return False
        last, middle = _find_middle(sorted(self._list_recent()[-SUSPECT:])), _find_middle(self.reference)
        apart = last > _take_upper_fifth(self.reference) or last < _take_lower_fifth(self.reference)
        return apart and abs(last - middle) > max(least, LEAST * middle) / 2

    def locate_change(self) -> tuple[int, int, float, float]:
        """The step that a change began with, the last step, and the medians before and since."""
        values, before, after = (
            [seconds for _, seconds in self.recent],
            _find_middle(self.reference),
            _find_middle(sorted(self._list_recent())),
        )
        near = abs(after - before) / 2
        is_old, is_new = ([abs(value - level) < near for value in values] for level in (before, after))
        # The beginning leaves as few new values before it, and as few old ones after it, as possible.
        begin = min(range(len(values) - WINDOW // 2), key=lambda at: sum(is_new[:at]) + sum(is_old[at:]))
        return self.recent[begin][0], self.recent[-1][0], before, _find_middle(sorted(values[begin:]))

    def _list_recent(self) -> list[float]:
        return [seconds for _, seconds in list(self.recent)[-WINDOW:]]


def _take_lower_fifth(ordered: Sequence[float]) -> float:
    """The lower fifth of values in ascending order."""
    return ordered[len(ordered) // 5]


def _take_upper_fifth(ordered: Sequence[float]) -> float:
    return ordered[-1 - len(ordered) // 5]


def _find_middle(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
