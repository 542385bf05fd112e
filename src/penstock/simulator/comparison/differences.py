"""A measured timeline laid over its prediction: every figure of both, and the place where they diverge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.ir.action import Action
from penstock.ir.kind import WORK, Kind
from penstock.ir.rows import Floats
from penstock.simulator.comparison.lateness import Delay, Lateness, totals
from penstock.simulator.comparison.matching import Match, match
from penstock.simulator.timeline import Timeline
from penstock.text.units import SECONDS

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
class ChannelTimes:
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


def differences(predicted: Timeline, measured: Timeline, *, scale: float | str | None = None, tolerance: float = TOLERANCE) -> Differences:
    """Lay a measured timeline over its prediction; both may also be simulated.

    The predicted times are multiplied by `scale`; `auto` is the scale at which the median action takes as long as predicted. By
    default the scale follows from the units of both. If those are not known and the times are far apart, and for timelines of other
    work, a `UsageError` says so.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"a tolerance of {tolerance}: it is a share of the predicted makespan, like 0.01")
    pair = match(predicted, measured)
    factor = median_ratio(pair) if scale == AUTO else _scale_between(pair) if scale is None else scale
    if isinstance(factor, str) or not 0 < factor < math.inf:
        raise UsageError(f"a scale of {scale!r}: predicted times are multiplied by it: give a number above 0, or {AUTO!r}")
    return Differences(replace(pair, predicted=predicted.scaled(factor).waits), factor, tolerance)


def _scale_between(pair: Match) -> float:
    """One unit of the predicted times, in measured ones; 1 if it is not known and the times are alike."""
    one, other = pair.predicted.timeline, pair.measured.timeline
    seconds = [SECONDS.get(timeline.units.time_unit) for timeline in (one, other)]
    if seconds[0] is not None and seconds[1] is not None:
        return seconds[0] / seconds[1]
    ratio = median_ratio(pair)
    if one.source != other.source and not is_alike(ratio):
        raise UsageError(
            f"the unit of the predicted times is not known, and the median action takes {ratio:.4g} times as long as predicted: "
            f"predict with costs in the unit of the measured times, give the factor as scale= (--scale), or let {AUTO!r} find it"
        )
    return 1.0


def is_alike(ratio: float) -> bool:
    """Whether times that differ by this factor can be in the same unit."""
    return 1 / OTHER_UNIT < ratio < OTHER_UNIT


def median_ratio(pair: Match) -> float:
    """The time of the median action as a multiple of its prediction; 1 if nothing takes any time."""
    predicted, measured = _list_lengths(pair)
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
        return _list_pairs(self.predicted.busy, self.measured.busy)

    @property
    def idle(self) -> list[Both]:
        """How long each rank stands idle until the end of all."""
        return _list_pairs(self.predicted.makespan - self.predicted.busy, self.measured.makespan - self.measured.busy)

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
        lengths = _list_lengths(self.match)
        places: dict[Work, list[int]] = {}
        for place, work in enumerate(_works(self.measured)):
            places.setdefault(work, []).append(place)
        order = sorted(places, key=lambda work: (len(work), work))
        return [Lengths(work, len(places[work]), _average(*lengths, np.array(places[work]))) for work in order]

    @cached_property
    def channels(self) -> list[ChannelTimes]:
        """By ranks and kind."""
        messages, order = self.measured.messages, self.match.message
        held = [waits.timeline.depart - waits.end[waits.maker] for waits in (self.match.predicted, self.match.measured)]
        travel = [timeline.arrive - timeline.depart for timeline in (self.predicted, self.measured)]
        channels = []
        for index, (source, target, kind) in enumerate(messages.channels):
            of = np.flatnonzero(messages.channel == index)
            means = [_average(one[order], other, of) for one, other in (held, travel)]
            channels.append(ChannelTimes(source, target, kind, len(of), *means))
        return channels

    # Where they part --------------------------------------------------------------------------------------------------

    @cached_property
    def unlike(self) -> float | None:
        """The scale that the median action asks for, if it is so far from 1 that the units must differ; else None."""
        ratio = median_ratio(self.match)
        return None if is_alike(ratio) else ratio

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


def _list_lengths(pair: Match) -> tuple[Floats, Floats]:
    """The predicted and the measured time of each computation."""
    return (pair.predicted.end - pair.predicted.start)[pair.action], pair.measured.end - pair.measured.start


def _list_pairs(predicted: Floats, measured: Floats) -> list[Both]:
    return [Both(*pair) for pair in zip(predicted.tolist(), measured.tolist(), strict=True)]


def _average(predicted: Floats, measured: Floats, of: NDArray[np.int64]) -> Both:
    return Both(float(predicted[of].mean()), float(measured[of].mean()))


def _works(timeline: Timeline) -> Iterable[Work]:
    """The stage and kind of each computation."""
    rows = timeline.table.rows
    entries = np.flatnonzero(rows.is_kind(*WORK))
    parts = zip(rows.stage[entries].tolist(), map(Kind, rows.kind[entries].tolist()), rows.heads[entries].tolist(), strict=True)
    works: list[list[tuple[int, Kind]]] = []
    for stage, kind, head in parts:
        if head:
            works.append([(stage, kind)])
        else:
            works[-1].append((stage, kind))
    return map(tuple, works)


# As plain data --------------------------------------------------------------------------------------------------------


def encode(differences: Differences) -> dict[str, Any]:
    """Everything, each action of each rank included, as plain data."""
    return {
        "scale": differences.scale,
        "tolerance": differences.tolerance,
        "other_unit": differences.unlike,
        "other_order": _order(differences),
        "makespan": _write_both(differences.makespan),
        "bubble": _write_both(differences.bubble),
        "communication": _write_both(differences.communication),
        "idle_by_cause": {cause: _write_both(idle) for cause, idle in differences.idle_by_cause.items()},
        "ranks": [
            {"busy": _write_both(busy), "idle": _write_both(idle)} for busy, idle in zip(differences.busy, differences.idle, strict=True)
        ],
        "stages": list(_write_stages(differences)),
        "channels": list(_write_channels(differences)),
        "first": None if differences.first is None else _write_parting(differences.first),
        "delays": [{"what": t.what, "name": t.name, "count": len(t.delays), "added": t.added} for t in totals(differences.way)],
        "path": [_write_delay(delay) for delay in differences.way],
        "actions": list(_write_actions(differences)),
    }


def _write_both(both: Both) -> dict[str, float | None]:
    return {"predicted": both.predicted, "measured": both.measured, "ratio": both.ratio}


def _order(differences: Differences) -> dict[str, Any] | None:
    if differences.match.other_order is None:
        return None
    rank, predicted, measured = differences.match.other_order
    return {"rank": rank, "predicted": str(predicted), "measured": str(measured)}


def _write_stages(differences: Differences) -> Iterator[dict[str, Any]]:
    for lengths in differences.lengths:
        parts = [{"stage": stage, "kind": kind.name} for stage, kind in lengths.work]
        yield {"parts": parts, "count": lengths.count, "mean": _write_both(lengths.mean)}


def _write_channels(differences: Differences) -> Iterator[dict[str, Any]]:
    for channel in differences.channels:
        ends = {"source": channel.source, "target": channel.target, "kind": channel.kind.name}
        yield {**ends, "count": channel.count, "held": _write_both(channel.held), "travel": _write_both(channel.travel)}


def _write_parting(parting: Parting) -> dict[str, Any]:
    where = {"rank": parting.rank, "action": str(parting.action), "end": _write_both(parting.end), "late": parting.late}
    return {**where, "path": [_write_delay(delay) for delay in parting.way]}


def _write_delay(delay: Delay) -> dict[str, Any]:
    action = None if delay.action is None else str(delay.action)
    who = {"what": delay.what, "rank": delay.rank, "action": action, "source": delay.source}
    return {**who, "predicted": delay.predicted, "measured": delay.measured, "added": delay.added}


def _write_actions(differences: Differences) -> Iterator[dict[str, Any]]:
    """Each computation: its times, the computation that it waited for, and the parts of its lateness."""
    pair, lateness = differences.match, differences.lateness
    names = [str(action) for row in differences.measured.table for action in row if action.is_compute]
    columns = {
        "predicted_start": pair.predicted.start[pair.action],
        "predicted_end": pair.predicted.end[pair.action],
        "start": pair.measured.start,
        "end": pair.measured.end,
        "late": lateness.late,
        "inherited": np.append(lateness.late, 0.0)[lateness.cause],
        "message": lateness.transit,
        "between": lateness.between,
        "slack": lateness.slack,
        "own": lateness.own,
    }
    rank, cause = pair.measured.rank.tolist(), lateness.cause.tolist()
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    for place, row in enumerate(values):
        waited_for = None if cause[place] < 0 else {"rank": rank[cause[place]], "action": names[cause[place]]}
        yield {"rank": rank[place], "action": names[place], **dict(zip(columns, row, strict=True)), "waited_for": waited_for}
