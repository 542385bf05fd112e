"""By how much each action is later than predicted, and why.

An action is as late as the action it waited for (the computation before it on its rank, or the maker of the last message), plus
its own delays: its message was longer under way, its rank hesitated longer between the two, it took longer itself. If the
prediction had it wait for something else, the slack between the two absorbs lateness. So the difference of two makespans is a sum
over the measured critical path, and nothing of it is left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.rows import Floats, Ints
from penstock.simulator.comparison.matching import Match

ACTION, MESSAGE, BETWEEN, AFTER, OPTIMIZER, SLACK = "action", "message", "between", "after", "optimizer", "slack"


@dataclass(frozen=True)
class Delay:
    """One piece of the way to an action, or to the end: its measured and its predicted time.

    - `action`: a computation;
    - `message`: from the end of its maker (`action` on rank `source`) to its arrival on `rank`;
    - `between`: from when everything was there to the start of `action`: sends, collectives, and overhead of the program;
    - `after`: from the rank's last computation to its end, and `optimizer`: the optimizer's step;
    - `slack`: the slack of the prediction; `measured` is 0.
    """

    what: str
    rank: int
    action: Action | None
    predicted: float
    measured: float
    source: int | None = None
    """The rank that a message comes from."""

    @property
    def added(self) -> float:
        """The share of this piece in the lateness; below 0 if it took less than predicted."""
        return self.measured - self.predicted

    @property
    def way(self) -> Kind | None:
        """`SEND_F` or `SEND_B` for a message."""
        if self.what != MESSAGE or self.action is None:
            return None
        return Kind.SEND_F if self.action.kind is Kind.F else Kind.SEND_B


class Lateness:
    """One value per computation of `match.measured`:
    `late[k] = late[cause[k]] + transit[k] + between[k] - slack[k] + own[k]`, without `late[cause[k]]` if the cause is -1."""

    def __init__(self, match: Match) -> None:
        self.match = match
        predicted, measured, action = match.predicted, match.measured, match.action
        by_message = measured.by_message
        predicted_end = predicted.end[action]
        self.late: Floats = measured.end - predicted_end
        """By how much it ends late."""
        self.cause: Ints = np.where(by_message, np.append(measured.maker, -1)[measured.message], measured.before)
        """The computation that it waited for: the one before it on its rank, or the one that made its message; -1 for nothing."""
        self._lengths = (predicted.end - predicted.start)[action], measured.end - measured.start
        self.own: Floats = self._lengths[1] - self._lengths[0]
        """By how much longer it takes itself."""
        predicted_arrival = np.append(predicted.timeline.arrive, 0.0)[np.append(match.message, -1)[measured.message]]
        cause_ends = np.append(predicted_end, 0.0)[self.cause], np.append(measured.end, 0.0)[self.cause]
        arrivals = predicted_arrival, measured.arrival
        self._transits = tuple(np.where(by_message, arrival - end, 0.0) for arrival, end in zip(arrivals, cause_ends, strict=True))
        self.transit: Floats = self._transits[1] - self._transits[0]
        """By how much longer its message is under way; 0 if it did not wait for one."""
        began = np.where(by_message, measured.arrival, measured.free)
        self._hesitations = (predicted.start - predicted.ready)[action], measured.start - began
        self.between: Floats = self._hesitations[1] - self._hesitations[0]
        """By how much longer it is until it starts, once what it waited for is there."""
        self.slack: Floats = predicted.ready[action] - cause_ends[0] - self._transits[0]
        """How long the prediction has it wait for something else; below 0 only if ranks compute in another order."""

    def chain(self, place: int) -> list[Delay]:
        """Everything on the way to the end of a computation, in order; the delays add up to its lateness."""
        delays: list[Delay] = []
        seen: set[int] = set()  # a file can hold an order that leads in a circle
        while place >= 0 and place not in seen:
            seen.add(place)
            delays += reversed(self._list_pieces(place))
            place = int(self.cause[place])
        return delays[::-1]

    def to_end(self) -> list[Delay]:
        """Everything on the way to the measured end; the delays add up to the difference of the makespans."""
        predicted, measured = self.match.predicted.timeline, self.match.measured.timeline
        rank = int(np.argmax(measured.finished))
        step = float(predicted.optimizer[rank]), float(measured.optimizer[rank])
        finished = float(predicted.finished[rank]), float(measured.finished[rank])
        last = int(np.searchsorted(self.match.measured.rank, rank, side="right")) - 1
        ends = (0.0, 0.0)
        delays: list[Delay] = []
        if last >= 0 and self.match.measured.rank[last] == rank:
            delays = self.chain(last)
            end = float(self.match.measured.end[last])
            ends = end - float(self.late[last]), end
        delays.append(Delay(AFTER, rank, None, finished[0] - step[0] - ends[0], finished[1] - step[1] - ends[1]))
        delays.append(Delay(OPTIMIZER, rank, None, *step))
        delays.append(Delay(SLACK, rank, None, predicted.makespan - finished[0], 0.0))
        return [delay for delay in delays if delay.predicted or delay.measured]

    def _list_pieces(self, place: int) -> list[Delay]:
        """The delays of one computation, in the order of time."""
        measured, rank = self.match.measured, int(self.match.measured.rank[place])
        action = measured.action(place)
        delays = []
        if measured.by_message[place]:
            message = int(measured.message[place])
            messages, rows = measured.timeline.messages, measured.timeline.table.rows
            maker, source = rows.part_at(int(messages.maker[message])), int(messages.source[message])
            delays.append(Delay(MESSAGE, rank, maker, *_take_pair(self._transits, place), source))
        delays.append(Delay(SLACK, rank, action, float(self.slack[place]), 0.0))
        delays.append(Delay(BETWEEN, rank, action, *_take_pair(self._hesitations, place)))
        delays.append(Delay(ACTION, rank, action, *_take_pair(self._lengths, place)))
        return [delay for delay in delays if delay.predicted or delay.measured]


def _take_pair(pair: Sequence[Floats], place: int) -> tuple[float, float]:
    return float(pair[0][place]), float(pair[1][place])


@dataclass(frozen=True)
class Total:
    """The sum of several delays of one sort: computations of a stage and kind, messages between two ranks, or pauses of a rank."""

    what: str
    name: str
    delays: list[Delay]

    @property
    def added(self) -> float:
        return sum(delay.added for delay in self.delays)


def totals(delays: Iterable[Delay]) -> list[Total]:
    """Sum up delays. The largest sums come first, and slack, which nothing causes, comes last."""
    by_name: dict[tuple[str, str], list[Delay]] = {}
    for delay in delays:
        by_name.setdefault((delay.what, name_of(delay)), []).append(delay)
    sums = [Total(what, name, group) for (what, name), group in by_name.items()]
    return sorted(sums, key=lambda total: (total.what == SLACK, -abs(total.added)))


def name_of(delay: Delay) -> str:
    """The name under which a delay is counted."""
    if delay.what == ACTION and delay.action is not None:
        return work_name((part.stage, part.kind) for part in delay.action.parts)
    if delay.what == MESSAGE:
        return channel_name(delay.source, delay.rank, delay.way)
    return {
        BETWEEN: f"rank {delay.rank} between actions",
        AFTER: f"rank {delay.rank} after its last action",
        OPTIMIZER: f"the optimizer's step of rank {delay.rank}",
        SLACK: "slack in the prediction",
    }[delay.what]


def work_name(work: Iterable[tuple[int, Kind]]) -> str:
    """
    >>> work_name([(3, Kind.F), (0, Kind.B)])
    'stage 3 F & stage 0 B'
    """
    return " & ".join(f"stage {stage} {kind.name}" for stage, kind in work)


def channel_name(source: int | None, target: int, kind: Kind | None) -> str:
    """
    >>> channel_name(0, 1, Kind.SEND_F)
    'activations from rank 0 to 1'
    """
    return f"{'activations' if kind is Kind.SEND_F else 'gradients'} from rank {source} to {target}"
