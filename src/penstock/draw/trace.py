"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process a rank; threads for its computation, for each channel it sends on, and for its collectives. An arrow leads from what
makes a message over the message to what uses it. Counters say what the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import collective_boxes, optimizer_boxes
from penstock.draw.numbers import seconds
from penstock.draw.summary import figures, title_of
from penstock.ir.kind import Kind

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline

Event = dict[str, Any]

DEFAULT_UNIT = "ms"
"""What a unit of the costs' time is taken for."""
_TICKS = 8
"""Times are rounded to eighths of a microsecond: they are exact as binary fractions and as nanoseconds, so that
slices that touch still touch wherever the trace is read."""


def trace(timeline: Timeline, *, unit: str = DEFAULT_UNIT) -> dict[str, Any]:
    """The trace as plain data; `unit` says what the costs' unit of time is: s, ms, us or ns."""
    made = _Trace(timeline, seconds(unit) * 1e6)
    events = [*made.names(), *made.computation(), *made.optimizer(), *made.collectives(), *made.messages(), *made.memory()]
    said = figures(timeline)
    del said["idle_by_cause"]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**said, "unit": unit, "name": title_of(timeline)}}


@dataclass(frozen=True)
class _Trace:
    timeline: Timeline
    scale: float
    """Microseconds for a unit of the costs' time."""

    def _at(self, time: float) -> float:
        return round(time * self.scale * _TICKS) / _TICKS

    def _slice(self, rank: int, lane: int, name: str, times: tuple[float, float], **args: Any) -> Event:
        start, end = map(self._at, times)
        return {"ph": "X", "pid": rank, "tid": lane, "name": name, "ts": start, "dur": end - start, "args": args}

    # Names ------------------------------------------------------------------------------------------------------------

    def names(self) -> Iterator[Event]:
        """What processes and threads are called, and their order."""
        for rank in range(self.timeline.ranks):
            yield _meta("process_name", rank, name=f"rank {rank}")
            yield _meta("process_sort_index", rank, sort_index=rank)
        for rank, lane, name in self._lanes():
            yield _meta("thread_name", rank, lane, name=name)
            yield _meta("thread_sort_index", rank, lane, sort_index=lane)

    def _lanes(self) -> Iterator[tuple[int, int, str]]:
        yield from ((rank, self._compute(rank), "compute") for rank in range(self.timeline.ranks))
        yield from ((rank, self._collective(rank), "collectives") for rank in np.unique(collective_boxes(self.timeline).rank).tolist())
        for channel, (source, target, kind) in enumerate(self.timeline.messages.channels):
            what = "activations" if kind is Kind.SEND_F else "gradients"
            yield source, self._channel(channel), f"{what} to rank {target}"

    # The threads' numbers, no two alike in all processes, as readers of traces expect; 0 would be the idle thread.

    def _compute(self, rank: int) -> int:
        return 1 + rank

    def _collective(self, rank: int) -> int:
        return 1 + self.timeline.ranks + rank

    def _channel(self, channel: int) -> int:
        return 1 + 2 * self.timeline.ranks + channel

    # Slices -----------------------------------------------------------------------------------------------------------

    def computation(self) -> Iterator[Event]:
        """The compute lanes."""
        for rank in range(self.timeline.ranks):
            for span in self.timeline.spans(rank):
                parts = span.action.parts
                args = {"stage": [part.stage for part in parts], "microbatch": [part.microbatch for part in parts], "wait": span.wait}
                yield self._slice(rank, self._compute(rank), " & ".join(map(str, parts)), (span.start, span.end), **args)

    def optimizer(self) -> Iterator[Event]:
        for rank, start, end in zip(*(column.tolist() for column in optimizer_boxes(self.timeline)), strict=True):
            yield self._slice(rank, self._compute(rank), "optimizer", (start, end))

    def collectives(self) -> Iterator[Event]:
        """Gathers of parameters and reductions of gradients."""
        boxes = collective_boxes(self.timeline)
        columns = (boxes.rank, boxes.kind, boxes.stage, boxes.start, boxes.end)
        for rank, kind, stage, start, end in zip(*(column.tolist() for column in columns), strict=True):
            yield self._slice(rank, self._collective(rank), f"{stage}{Kind(kind).name}", (start, end), stage=stage)

    def messages(self) -> Iterator[Event]:
        """Each message on its channel's lane where it takes time, and the arrow of it."""
        timeline, messages, group = self.timeline, self.timeline.messages, self.timeline.table.rows.group
        made, used = group[messages.maker].tolist(), group[messages.after].tolist()
        for number, transfer in enumerate(timeline.transfers()):
            lane = self._channel(int(messages.channel[number]))
            yield self._flow("s", number, transfer.source, self._compute(transfer.source), self._inside(made[number]))
            message = self._slice(
                transfer.source, lane, str(transfer.sent), (transfer.start, transfer.end), size=transfer.size, used=str(transfer.used)
            )
            if message["dur"] > 0:
                yield message
                yield self._flow("t", number, transfer.source, lane, message["ts"])
            yield self._flow("f", number, transfer.target, self._compute(transfer.target), self._at(float(timeline.start[used[number]])))

    def _inside(self, node: int) -> float:
        """The last moment of an action that is still inside it, so that an arrow from there belongs to it."""
        start, end = self._at(float(self.timeline.start[node])), self._at(float(self.timeline.end[node]))
        return max(start, end - 1 / _TICKS)

    def _flow(self, phase: str, number: int, rank: int, lane: int, at: float) -> Event:
        event = {"ph": phase, "id": number, "pid": rank, "tid": lane, "name": "message", "cat": "message", "ts": at}
        return {**event, "bp": "e"} if phase == "f" else event

    # Counters ---------------------------------------------------------------------------------------------------------

    def memory(self) -> Iterator[Event]:
        """What each rank holds from each time on: all of it, and by use where there are several."""
        for rank in range(self.timeline.ranks):
            curve = self.timeline.memory(rank)
            total = _without_remainder(curve.static + curve.total, curve.peak)
            held = {name: _without_remainder(values, curve.peak) for name, values in curve.held.items() if values.any()}
            times = [self._at(time) for time in curve.times.tolist()]
            if not times or times[0] > 0:
                yield _counter("memory", rank, 0.0, held=curve.static)
            for place in _last_of_each(times):
                yield _counter("memory", rank, times[place], held=total[place])
                if len(held) > 1:
                    yield _counter("memory by use", rank, times[place], **{name: values[place] for name, values in held.items()})


def _meta(what: str, rank: int, lane: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": args}


def _last_of_each(times: Iterable[float]) -> Iterator[int]:
    """The last place of each run of equal times."""
    following = [*times, None]
    yield from (place for place, (one, other) in enumerate(pairwise(following)) if one != other)


def _counter(name: str, rank: int, at: float, **values: float) -> Event:
    return {"ph": "C", "pid": rank, "name": name, "ts": at, "args": values}


def _without_remainder(values: NDArray[np.float64], peak: float) -> list[float]:
    """Sizes that were added and taken away again may leave a trace of rounding: that is nothing."""
    cleaned: list[float] = np.where(np.abs(values) < 1e-9 * peak, 0.0, values).tolist()
    return cleaned
