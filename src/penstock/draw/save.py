"""Write timelines to files by suffix; among them the trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

A trace has one process per rank, with threads for its computation, for each channel it sends on, and for its collectives. An arrow leads
from the action that makes a message, over the message, to the action that uses it. Counters show the memory of the rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import copy_boxes, list_collective_boxes, list_optimizer_boxes
from penstock.draw.figures.canvas import render
from penstock.draw.figures.timelines import draw_overlay, draw_timelines
from penstock.draw.html import overlay_html, timelines_html
from penstock.draw.summary import summarize, title_of
from penstock.errors import FileFormatError
from penstock.ir.formats.csv_form import write_whole
from penstock.ir.kind import Kind
from penstock.simulator.comparison.differences import Differences
from penstock.simulator.timeline import Timeline
from penstock.text.units import seconds_per

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FIGURES = (".svg", ".pdf", ".png")
PICTURES = (*FIGURES, ".html")
SUFFIXES = (".trace.json", ".json", *PICTURES)


def save(timeline: Timeline, path: str | PathLike[str], **options: Any) -> None:
    """Write one timeline to a file, whole or not at all.

    `.json` is the timeline itself, for `Timeline.load`; `.trace.json` is for Perfetto, with the option `unit`; `.svg`, `.pdf`, `.png`
    and `.html` are pictures, with the options of `penstock.draw.figures.timelines.draw_timelines`, and `dpi` for `.png`.
    """
    suffix = suffix_of(path, SUFFIXES)
    if suffix in PICTURES:
        save_picture([timeline], path, **options)
    elif suffix == ".json":
        write_whole(path, json.dumps(timeline.to_json(**options)) + "\n")
    else:
        write_whole(path, json.dumps(build_trace(timeline, **options), separators=(",", ":")) + "\n")


def save_picture(timelines: Sequence[Timeline], path: str | PathLike[str], **options: Any) -> None:
    """Write several timelines as one `.svg`, `.pdf`, `.png` or `.html` picture on one time axis."""
    _write_picture(path, timelines, timelines_html, draw_timelines, options)


def save_overlay(pairs: Sequence[Differences], path: str | PathLike[str], **options: Any) -> None:
    """Write measured timelines under their predictions as one picture; the options are those of `draw_overlay`."""
    _write_picture(path, pairs, overlay_html, draw_overlay, options)


def _write_picture(
    path: str | PathLike[str], shown: Sequence[Any], page: Callable[..., str], draw: Callable[..., Figure], options: dict[str, Any]
) -> None:
    suffix = suffix_of(path, PICTURES)
    if suffix == ".html":
        write_whole(path, page(shown, **options))
        return
    dpi = {"dpi": options.pop("dpi")} if suffix == ".png" and "dpi" in options else {}
    write_whole(path, render(draw(shown, **options), suffix.removeprefix("."), **dpi))


def suffix_of(path: str | PathLike[str], known: Sequence[str]) -> str:
    """Find which of the known suffixes the path ends in."""
    file = os.fspath(path)
    suffix = next((known_suffix for known_suffix in known if file.lower().endswith(known_suffix)), None)
    if suffix is None:
        raise FileFormatError(file, f"the suffix is not one of {', '.join(known)}")
    return suffix


# A trace for Perfetto and chrome://tracing ----------------------------------------------------------------------------


TraceEvent = dict[str, Any]

DEFAULT_UNIT = "ms"
"""The unit of the costs' times, if none is named."""
_TICKS = 8
"""Times are rounded to eighths of a microsecond. These are exact as binary fractions and as nanoseconds, so slices that touch
still touch in every trace viewer."""


def build_trace(timeline: Timeline, *, unit: str = DEFAULT_UNIT) -> dict[str, Any]:
    """Build the trace as plain data; `unit` is the unit of the costs' times: s, ms, us or ns."""
    parts = _TraceEvents(timeline, seconds_per(unit) * 1e6)
    events = [
        *parts.names(),
        *parts.computation(),
        *parts.optimizer(),
        *parts.collectives(),
        *parts.copies(),
        *parts.messages(),
        *parts.memory(),
    ]
    summary = summarize(timeline)
    del summary["idle_by_cause"]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**summary, "unit": unit, "name": title_of(timeline)}}


@dataclass(frozen=True)
class _TraceEvents:
    timeline: Timeline
    scale: float
    """Microseconds for a unit of the costs' time."""

    def _to_ticks(self, time: float) -> float:
        return round(time * self.scale * _TICKS) / _TICKS

    def _make_slice(self, rank: int, lane: int, name: str, times: tuple[float, float], **args: Any) -> TraceEvent:
        start, end = map(self._to_ticks, times)
        return {"ph": "X", "pid": rank, "tid": lane, "name": name, "ts": start, "dur": end - start, "args": args}

    # Names ------------------------------------------------------------------------------------------------------------

    def names(self) -> Iterator[TraceEvent]:
        """The names of processes and threads, and their order."""
        for rank in range(self.timeline.ranks):
            yield _make_meta("process_name", rank, name=f"rank {rank}")
            yield _make_meta("process_sort_index", rank, sort_index=rank)
        for rank, lane, name in self._name_lanes():
            yield _make_meta("thread_name", rank, lane, name=name)
            yield _make_meta("thread_sort_index", rank, lane, sort_index=lane)

    def _name_lanes(self) -> Iterator[tuple[int, int, str]]:
        yield from ((rank, self._compute(rank), "compute") for rank in range(self.timeline.ranks))
        yield from ((rank, self._collective(rank), "collectives") for rank in np.unique(list_collective_boxes(self.timeline).rank).tolist())
        boxes = copy_boxes(self.timeline)
        for rank, kind in sorted(set(zip(boxes.rank.tolist(), boxes.kind.tolist(), strict=True))):
            yield rank, self._copy(rank, kind), "copies to the host" if kind == Kind.OFFLOAD else "copies from the host"
        for channel, (source, target, kind) in enumerate(self.timeline.messages.channels):
            traffic = "activations" if kind is Kind.SEND_F else "gradients"
            yield source, self._channel(channel), f"{traffic} to rank {target}"

    # Thread ids, unique over all processes, as trace viewers expect; 0 would be the idle thread.

    def _compute(self, rank: int) -> int:
        return 1 + rank

    def _collective(self, rank: int) -> int:
        return 1 + self.timeline.ranks + rank

    def _channel(self, channel: int) -> int:
        return 1 + 2 * self.timeline.ranks + channel

    def _copy(self, rank: int, kind: int) -> int:
        return 1 + (2 + (kind == Kind.RELOAD)) * self.timeline.ranks + len(self.timeline.messages.channels) + rank

    # Slices -----------------------------------------------------------------------------------------------------------

    def computation(self) -> Iterator[TraceEvent]:
        """The compute lanes."""
        for rank in range(self.timeline.ranks):
            for span in self.timeline.spans(rank):
                parts = span.action.parts
                args = {"stage": [part.stage for part in parts], "microbatch": [part.microbatch for part in parts], "wait": span.wait}
                args |= {"slice": [part.slice for part in parts]} if self.timeline.table.slices > 1 else {}
                yield self._make_slice(rank, self._compute(rank), " & ".join(map(str, parts)), (span.start, span.end), **args)

    def optimizer(self) -> Iterator[TraceEvent]:
        for rank, start, end in zip(*(column.tolist() for column in list_optimizer_boxes(self.timeline)), strict=True):
            yield self._make_slice(rank, self._compute(rank), "optimizer", (start, end))

    def collectives(self) -> Iterator[TraceEvent]:
        """All-gathers of parameters, reductions of gradients, and collectives of all ranks."""
        boxes = list_collective_boxes(self.timeline)
        columns = (boxes.rank, boxes.kind, boxes.stage, boxes.start, boxes.end)
        for box, (rank, kind, stage, start, end) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            of = boxes.name_unit(box) if Kind(kind).has_microbatch else ""
            yield self._make_slice(rank, self._collective(rank), f"{stage}{Kind(kind).name}{of}", (start, end), stage=stage)

    def copies(self) -> Iterator[TraceEvent]:
        """Copies of activations to host memory and back."""
        boxes = copy_boxes(self.timeline)
        columns = (boxes.rank, boxes.kind, boxes.stage, boxes.start, boxes.end)
        for box, (rank, kind, stage, start, end) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            name = f"{stage}{Kind(kind).name}{boxes.name_unit(box)}"
            microbatch, part = divmod(int(boxes.microbatch[box]), boxes.slices)
            args = {"stage": stage, "microbatch": microbatch, **({"slice": part} if boxes.slices > 1 else {})}
            yield self._make_slice(rank, self._copy(rank, kind), name, (start, end), **args)

    def messages(self) -> Iterator[TraceEvent]:
        """Each message on the lane of its channel, if it takes time, and its arrow."""
        timeline, messages, group = self.timeline, self.timeline.messages, self.timeline.table.rows.group
        makers, users = group[messages.maker].tolist(), group[messages.after].tolist()
        for number, transfer in enumerate(timeline.transfers()):
            lane = self._channel(int(messages.channel[number]))
            yield self._make_flow("s", number, transfer.source, self._compute(transfer.source), self._find_inside(makers[number]))
            message = self._make_slice(
                transfer.source, lane, str(transfer.sent), (transfer.start, transfer.end), size=transfer.size, used=str(transfer.used)
            )
            if message["dur"] > 0:
                yield message
                yield self._make_flow("t", number, transfer.source, lane, message["ts"])
            yield self._make_flow(
                "f", number, transfer.target, self._compute(transfer.target), self._to_ticks(float(timeline.start[users[number]]))
            )

    def _find_inside(self, node: int) -> float:
        """The last moment inside an action, so that an arrow from there belongs to it."""
        start, end = self._to_ticks(float(self.timeline.start[node])), self._to_ticks(float(self.timeline.end[node]))
        return max(start, end - 1 / _TICKS)

    def _make_flow(self, phase: str, number: int, rank: int, lane: int, at: float) -> TraceEvent:
        event = {"ph": phase, "id": number, "pid": rank, "tid": lane, "name": "message", "cat": "message", "ts": at}
        return {**event, "bp": "e"} if phase == "f" else event

    # Counters ---------------------------------------------------------------------------------------------------------

    def memory(self) -> Iterator[TraceEvent]:
        """The memory of each rank from each time on: in total, and by use if there are several uses."""
        for rank in range(self.timeline.ranks):
            curve = self.timeline.memory(rank)
            total = _remove_rounding(curve.static + curve.total, curve.peak)
            series = {name: _remove_rounding(values, curve.peak) for name, values in curve.held.items() if values.any()}
            times = [self._to_ticks(time) for time in curve.times.tolist()]
            if not times or times[0] > 0:
                yield _make_counter("memory", rank, 0.0, held=curve.static)
            for place in _find_last_of_each(times):
                yield _make_counter("memory", rank, times[place], held=total[place])
                if len(series) > 1:
                    yield _make_counter("memory by use", rank, times[place], **{name: values[place] for name, values in series.items()})


def _make_meta(what: str, rank: int, lane: int = 0, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": args}


def _find_last_of_each(times: Iterable[float]) -> Iterator[int]:
    """The last index of each run of equal times."""
    following = [*times, None]
    yield from (place for place, (one, other) in enumerate(pairwise(following)) if one != other)


def _make_counter(name: str, rank: int, at: float, **values: float) -> TraceEvent:
    return {"ph": "C", "pid": rank, "name": name, "ts": at, "args": values}


def _remove_rounding(values: NDArray[np.float64], peak: float) -> list[float]:
    """Replace by 0 the rounding errors that sizes leave when they are added and subtracted again."""
    cleaned: list[float] = np.where(np.abs(values) < 1e-9 * peak, 0.0, values).tolist()
    return cleaned
