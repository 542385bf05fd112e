"""By how much each action is later than predicted, and why.

An action is as late as the action it waited for (the computation before it on its rank, or the maker of the last message), plus
its own delays: its message was longer under way, its rank hesitated longer between the two, it took longer itself. If the
prediction had it wait for something else, the slack between the two absorbs lateness. So the difference of two makespans is a sum
over the measured critical path, and nothing of it is left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
    - `between`: from when everything was there to the start of `action`: sends, gathers of parameters, and overhead of the program;
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
        """What this piece adds to the lateness; below 0 if it took less than predicted."""
        return self.measured - self.predicted

    @property
    def way(self) -> Kind | None:
        """`SEND_F` or `SEND_B` for a message."""
        if self.what != MESSAGE or self.action is None:
            return None
        return Kind.SEND_F if self.action.kind is Kind.F else Kind.SEND_B


@dataclass(frozen=True, eq=False)
class Lateness:
    """One value per computation of `match.measured`:
    `late[k] = late[cause[k]] + transit[k] + between[k] - slack[k] + own[k]`, without `late[cause[k]]` if the cause is -1."""

    match: Match

    @cached_property
    def late(self) -> Floats:
        """By how much it ends late."""
        return self.match.measured.end - self._predicted_end

    @cached_property
    def cause(self) -> Ints:
        """The computation that it waited for: the one before it on its rank, or the one that made its message; -1 for nothing."""
        measured = self.match.measured
        return np.where(measured.by_message, np.append(measured.maker, -1)[measured.message], measured.before)

    @cached_property
    def own(self) -> Floats:
        """By how much longer it takes itself."""
        return self._measured_length - self._predicted_length

    @cached_property
    def transit(self) -> Floats:
        """By how much longer its message is under way; 0 where it did not wait for one."""
        return self._transits[1] - self._transits[0]

    @cached_property
    def between(self) -> Floats:
        """By how much longer it is until it starts, once what it waited for is there."""
        return self._hesitations[1] - self._hesitations[0]

    @cached_property
    def slack(self) -> Floats:
        """How long the prediction has it wait for something else; below 0 only if ranks compute in another order."""
        return self._predicted_ready - self._predicted_cause_end - self._transits[0]

    def chain(self, place: int) -> list[Delay]:
        """Everything on the way to the end of a computation, in order; the delays add up to its lateness."""
        delays: list[Delay] = []
        seen: set[int] = set()  # a file can hold an order that leads in a circle
        while place >= 0 and place not in seen:
            seen.add(place)
            delays += reversed(self._pieces(place))
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
            ends = float(self._predicted_end[last]), float(self.match.measured.end[last])
        delays.append(Delay(AFTER, rank, None, finished[0] - step[0] - ends[0], finished[1] - step[1] - ends[1]))
        delays.append(Delay(OPTIMIZER, rank, None, *step))
        delays.append(Delay(SLACK, rank, None, predicted.makespan - finished[0], 0.0))
        return [delay for delay in delays if delay.predicted or delay.measured]

    def _pieces(self, place: int) -> list[Delay]:
        """The delays of one computation, in the order of time."""
        measured, rank = self.match.measured, int(self.match.measured.rank[place])
        action = measured.action(place)
        delays = []
        if measured.by_message[place]:
            message = int(measured.message[place])
            messages, rows = measured.timeline.messages, measured.timeline.table.rows
            maker, source = rows.part_at(int(messages.maker[message])), int(messages.source[message])
            delays.append(Delay(MESSAGE, rank, maker, *self._at(self._transits, place), source))
        delays.append(Delay(SLACK, rank, action, float(self.slack[place]), 0.0))
        delays.append(Delay(BETWEEN, rank, action, *self._at(self._hesitations, place)))
        delays.append(Delay(ACTION, rank, action, *self._at((self._predicted_length, self._measured_length), place)))
        return [delay for delay in delays if delay.predicted or delay.measured]

    @staticmethod
    def _at(pair: tuple[Floats, Floats], place: int) -> tuple[float, float]:
        return float(pair[0][place]), float(pair[1][place])

    # Times of both, one value for each computation of `measured` -------------------------------------------------------

    @cached_property
    def _predicted_end(self) -> Floats:
        return self.match.predicted.end[self.match.action]

    @cached_property
    def _predicted_ready(self) -> Floats:
        return self.match.predicted.ready[self.match.action]

    @cached_property
    def _predicted_length(self) -> Floats:
        predicted = self.match.predicted
        return (predicted.end - predicted.start)[self.match.action]

    @cached_property
    def _measured_length(self) -> Floats:
        return self.match.measured.end - self.match.measured.start

    @cached_property
    def _predicted_cause_end(self) -> Floats:
        return np.append(self._predicted_end, 0.0)[self.cause]

    @cached_property
    def _transits(self) -> tuple[Floats, Floats]:
        """From the end of what it waited for to the arrival of its message."""
        match, measured = self.match, self.match.measured
        message = measured.message
        predicted_arrival = np.append(match.predicted.timeline.arrive, 0.0)[np.append(match.message, -1)[message]]
        measured_cause_end = np.append(measured.end, 0.0)[self.cause]
        return (
            np.where(measured.by_message, predicted_arrival - self._predicted_cause_end, 0.0),
            np.where(measured.by_message, measured.arrival - measured_cause_end, 0.0),
        )

    @cached_property
    def _hesitations(self) -> tuple[Floats, Floats]:
        """From when all was there to the start: as predicted, and as measured from what it waited for."""
        match, measured = self.match, self.match.measured
        began = np.where(measured.by_message, measured.arrival, measured.free)
        return (match.predicted.start - match.predicted.ready)[match.action], measured.start - began
