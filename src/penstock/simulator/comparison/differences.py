"""A measured timeline laid over its prediction: every figure of both, and the place where they diverge."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.ir.action import Action
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.rows import Floats
from penstock.simulator.comparison.lateness import Delay, Lateness
from penstock.simulator.comparison.matching import Match, match
from penstock.simulator.comparison.scaling import scaled
from penstock.simulator.timeline import Timeline

TOLERANCE = 0.01
"""Share of the predicted makespan: an action that is less late than this counts as predicted."""
AUTO = "auto"
"""The scale at which the median action agrees."""
OTHER_UNIT = 10.0
"""If the median action takes this many times its prediction, or this small a part of it, the units probably differ."""


@dataclass(frozen=True)
class Both:
    """One figure, predicted and measured."""

    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        return self.measured - self.predicted

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if the prediction is 0."""
        return self.measured / self.predicted if self.predicted else None


Work = tuple[tuple[int, Kind], ...]
"""A stage and a kind, or several that run together."""


@dataclass(frozen=True)
class Lengths:
    """The mean time of the actions of one stage and kind."""

    work: Work
    count: int
    mean: Both


@dataclass(frozen=True)
class Channel:
    """The messages from one rank to another, `SEND_F` activations or `SEND_B` gradients, with their mean times.

    `held` is from the end of the action that makes a message to its departure, `travel` from there to its arrival.
    """

    source: int
    target: int
    kind: Kind
    count: int
    held: Both
    travel: Both


@dataclass(frozen=True)
class Parting:
    """An action that ends earlier or later than predicted, and the delays on the way to it, which add up to `late`."""

    rank: int
    action: Action
    end: Both
    way: list[Delay]

    @property
    def late(self) -> float:
        return self.end.difference


def differences(predicted: Timeline, measured: Timeline, *, scale: float | str = 1.0, tolerance: float = TOLERANCE) -> Differences:
    """Lay a measured timeline over its prediction; both may also be simulated.

    The predicted times are multiplied by `scale`, if the prediction is in another unit; `auto` is the scale at which the median
    action takes as long as predicted. Timelines of other work are refused with a `UsageError` that says how they differ.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"a tolerance of {tolerance}: it is a share of the predicted makespan, like 0.01")
    pair = match(predicted, measured)
    factor = median_ratio(pair) if scale == AUTO else scale
    if isinstance(factor, str) or not 0 < factor < math.inf:
        raise UsageError(f"a scale of {scale!r}: predicted times are multiplied by it: give a number above 0, or {AUTO!r}")
    return Differences(replace(pair, predicted=scaled(predicted, factor).waits), factor, tolerance)


def median_ratio(pair: Match) -> float:
    """The time of the median action as a multiple of its prediction; 1 if nothing takes any time."""
    predicted, measured = _lengths(pair)
    real = (predicted > 0) & (measured > 0)
    return float(np.median(measured[real] / predicted[real])) if real.any() else 1.0


@dataclass(frozen=True, eq=False)
class Differences:
    """Two timelines of the same work; the times of `predicted` are already multiplied by `scale`."""

    match: Match
    scale: float
    tolerance: float

    @property
    def predicted(self) -> Timeline:
        return self.match.predicted.timeline

    @property
    def measured(self) -> Timeline:
        return self.match.measured.timeline

    @cached_property
    def lateness(self) -> Lateness:
        return Lateness(self.match)

    # Figures of both --------------------------------------------------------------------------------------------------

    @property
    def makespan(self) -> Both:
        return Both(self.predicted.makespan, self.measured.makespan)

    @property
    def bubble(self) -> Both:
        return Both(self.predicted.bubble, self.measured.bubble)

    @property
    def busy(self) -> list[Both]:
        """How long each rank computes."""
        return _pairs(self.predicted.busy, self.measured.busy)

    @property
    def idle(self) -> list[Both]:
        """How long each rank stands idle until the end of all."""
        return _pairs(self.predicted.makespan - self.predicted.busy, self.measured.makespan - self.measured.busy)

    @cached_property
    def idle_by_cause(self) -> dict[str, Both]:
        """Over all ranks."""
        one, other = self.predicted.idle_by_cause, self.measured.idle_by_cause
        return {cause: Both(one.get(cause, 0.0), other.get(cause, 0.0)) for cause in {**one, **other}}

    @cached_property
    def communication(self) -> Both:
        """How long all messages travel, one after the other."""
        one, other = self.predicted, self.measured
        return Both(float((one.arrive - one.depart).sum()), float((other.arrive - other.depart).sum()))

    @cached_property
    def lengths(self) -> list[Lengths]:
        """By stage and kind; actions that run together come last."""
        lengths = _lengths(self.match)
        places: dict[Work, list[int]] = {}
        for place, work in enumerate(_works(self.measured)):
            places.setdefault(work, []).append(place)
        order = sorted(places, key=lambda work: (len(work), work))
        return [Lengths(work, len(places[work]), _mean(*lengths, np.array(places[work]))) for work in order]

    @cached_property
    def channels(self) -> list[Channel]:
        """By ranks and kind."""
        messages, order = self.measured.messages, self.match.message
        held = [waits.timeline.depart - waits.end[waits.maker] for waits in (self.match.predicted, self.match.measured)]
        travel = [timeline.arrive - timeline.depart for timeline in (self.predicted, self.measured)]
        channels = []
        for index, (source, target, kind) in enumerate(messages.channels):
            of = np.flatnonzero(messages.channel == index)
            means = [_mean(one[order], other, of) for one, other in (held, travel)]
            channels.append(Channel(source, target, kind, len(of), *means))
        return channels

    # Where they part --------------------------------------------------------------------------------------------------

    @cached_property
    def unlike(self) -> float | None:
        """The scale that the median action asks for, if it is so far from 1 that the units must differ; else None."""
        ratio = median_ratio(self.match)
        return None if 1 / OTHER_UNIT < ratio < OTHER_UNIT else ratio

    @property
    def allowed(self) -> float:
        """How late an action may be and still be as predicted."""
        return self.tolerance * self.predicted.makespan

    @cached_property
    def first_place(self) -> int | None:
        """In the order of time the first computation of `measured` that does not end as predicted."""
        apart = np.flatnonzero(np.abs(self.lateness.late) > self.allowed + 1e-9 * self.predicted.makespan)
        return int(apart[np.argmin(self.match.measured.end[apart])]) if len(apart) else None

    @cached_property
    def first(self) -> Parting | None:
        """That computation, and the delays that made it early or late."""
        place, waits = self.first_place, self.match.measured
        if place is None:
            return None
        end, late = float(waits.end[place]), float(self.lateness.late[place])
        return Parting(int(waits.rank[place]), waits.action(place), Both(end - late, end), self.lateness.chain(place))

    @cached_property
    def way(self) -> list[Delay]:
        """The delays on the way to the measured end, in order; they add up to the difference of the makespans."""
        return self.lateness.to_end()


def _lengths(pair: Match) -> tuple[Floats, Floats]:
    """The predicted and the measured time of each computation."""
    return (pair.predicted.end - pair.predicted.start)[pair.action], pair.measured.end - pair.measured.start


def _pairs(predicted: Floats, measured: Floats) -> list[Both]:
    return [Both(*pair) for pair in zip(predicted.tolist(), measured.tolist(), strict=True)]


def _mean(predicted: Floats, measured: Floats, of: NDArray[np.int64]) -> Both:
    return Both(float(predicted[of].mean()), float(measured[of].mean()))


def _works(timeline: Timeline) -> Iterable[Work]:
    """The stage and kind of each computation."""
    rows = timeline.table.rows
    entries = np.flatnonzero(rows.is_kind(*COMPUTE))
    parts = zip(rows.stage[entries].tolist(), map(Kind, rows.kind[entries].tolist()), rows.heads[entries].tolist(), strict=True)
    works: list[list[tuple[int, Kind]]] = []
    for stage, kind, head in parts:
        if head:
            works.append([(stage, kind)])
        else:
            works[-1].append((stage, kind))
    return map(tuple, works)
