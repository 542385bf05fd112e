"""Timelines as figures for papers: rank rows with memory below on one time axis, or a measured timeline under its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.draw.figures.canvas import FAINT, INK, POINTS, SMALL, TEXT, annotate, text_width, use_style
from penstock.draw.figures.rank_rows import MOST_CURVES, PeakLabels, RankRows, draw_band, draw_curves, draw_map
from penstock.draw.figures.sheet import Band, LegendEntry, Sheet, check_names, timeline_entries
from penstock.draw.summary import WORDS, find_fullest_rank, format_memory, format_time, memory_unit, shape_of, title_of
from penstock.ir.rows import Floats
from penstock.simulator.comparison.differences import Differences
from penstock.simulator.timeline import Timeline
from penstock.text.numbers import format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_timelines(
    timelines: Timeline | Sequence[Timeline],
    *,
    names: Sequence[str] | None = None,
    width: float | None = None,
    labels: bool = True,
    memory: bool = True,
    legend: bool = True,
    unit: str | None = None,
) -> Figure:
    """Draw one timeline, or several below each other on one time axis, as a matplotlib figure.

    `width` is in inches; `labels` writes the microbatch into each box that has room for it; `unit` is the unit of the costs' times,
    one of s, ms, us, ns, if they have none themselves; the time axis chooses the unit that suits it.
    """
    shown = list(timelines) if isinstance(timelines, Sequence) else [timelines]
    check_names("timelines", len(shown), names)
    with use_style():
        sheet = Sheet.fit(shown, width, unit=unit, legend=legend)
        panels = _Panels(sheet, shown, list(names or map(title_of, shown)), labels, memory)
        return sheet.stack(panels.bands(), timeline_entries(shown, panels.memory_form))


@dataclass(frozen=True)
class _Panels:
    """One panel per timeline: its header, its rows and its memory."""

    sheet: Sheet
    timelines: list[Timeline]
    names: list[str]
    labels: bool
    memory: bool

    @property
    def memory_form(self) -> str:
        if not self.memory:
            return ""
        if len(self.timelines) > 1:
            return "band"
        return "curves" if self.timelines[0].ranks <= MOST_CURVES else "map"

    def bands(self) -> Iterator[list[Band]]:
        """Yield the bands of each panel."""
        for panel, (name, timeline) in enumerate(zip(self.names, self.timelines, strict=True)):
            yield [self.sheet.header(name, self._facts(timeline)), self._rows(panel, timeline), *self._memory(timeline)]

    def _facts(self, timeline: Timeline) -> list[str]:
        peak, sheet = find_fullest_rank(timeline), self.sheet
        held = f"{format_memory(timeline.peak_memory[peak], timeline.units.in_bytes)} {memory_unit(timeline)}".rstrip()
        return [
            ", ".join(shape_of(timeline)),
            f"makespan {format_time(timeline.makespan, sheet.unit)}",
            f"bubble {format_percent(timeline.bubble)}",
            f"peak memory {held} (rank {peak})",
        ]

    def _rows(self, panel: int, timeline: Timeline) -> Band:
        height = _row_height(timeline.ranks, len(self.timelines))
        rows = RankRows(timeline, self.sheet.unit_points, height * POINTS, self.labels, panel)

        def draw(axes: Axes) -> None:
            axes.set_ylim(timeline.ranks, 0)
            rows.draw(axes)
            axes.set_xlim(0.0, self.sheet.end)
            self.sheet.rank_ticks(axes, np.arange(timeline.ranks) + 0.5, height, "rank")

        return Band(timeline.ranks * height, draw, timed=True)

    def _memory(self, timeline: Timeline) -> list[Band]:
        form, sheet = self.memory_form, self.sheet
        if not form:
            return []
        heights = {"curves": 0.24 * timeline.ranks, "map": float(np.clip(0.045 * timeline.ranks, 1.0, 3.0)), "band": 0.5 * sheet.zoom}
        height = heights[form]

        def draw(axes: Axes) -> None:
            columns = max(int(sheet.inner * timeline.makespan / sheet.end * 150), 1)
            peaks = PeakLabels(SMALL * sheet.zoom, timeline.units.in_bytes)
            if form == "band":
                most = max(max(timeline.peak_memory) for timeline in self.timelines) or 1.0
                draw_band(axes, timeline, most, columns, peaks)
                sheet.name_axis(axes, "memory")
            else:
                axes.set_ylim(timeline.ranks, 0)
                if form == "curves":
                    draw_curves(axes, timeline, peaks)
                else:
                    scale = axes.inset_axes((1.0 + 0.08 / sheet.inner, 0.0, 0.1 / sheet.inner, 1.0))
                    draw_map(axes, scale, timeline, columns, peaks)
                label = f"memory ({memory_unit(timeline)})"
                fits = memory_unit(timeline) and text_width(label, TEXT * sheet.zoom) < height
                sheet.rank_ticks(axes, np.arange(timeline.ranks) + 0.5, height / timeline.ranks, label if fits else "memory")
            axes.set_xlim(0.0, sheet.end)

        return [sheet.space(), Band(height, draw, timed=True)]


def _row_height(ranks: int, timelines: int) -> float:
    """Inches: the height that labels need, less for many ranks."""
    room = 4.2 if timelines == 1 else 2.4
    return float(min(np.clip(room / ranks, 0.11, 0.32), 9.0 / ranks))


# Overlays: the measured rows under the predicted ones, and how late each rank is --------------------------------------


LATE, EARLY = "#b2182b", "#2166ac"
_PALE = 0.55
"""The share of white in the colours of the prediction."""
_BETWEEN = 5.0
"""Points: the least distance between two lines that join predicted and measured ends."""


@dataclass(frozen=True)
class _RowHeights:
    """The part of one rank, in heights of a row: the predicted row is at the top, the measured row begins at `below`, the curve of
    its lateness at `strip`, and the next rank at `pitch`."""

    below: float
    strip: float
    strip_height: float
    pitch: float

    @property
    def middle(self) -> float:
        return (self.below + 1) / 2


_WIDE, _TIGHT = _RowHeights(1.42, 2.5, 0.75, 3.55), _RowHeights(1.0, 2.05, 1.1, 3.6)
_LEAST_WIDE = 0.09
"""Inches: lower rows have no lines between them."""


def draw_overlay(
    differences: Differences | Sequence[Differences],
    *,
    names: Sequence[str] | None = None,
    words: tuple[str, str] = WORDS,
    width: float | None = None,
    labels: bool = True,
    legend: bool = True,
    unit: str | None = None,
) -> Figure:
    """Draw one pair of timelines, or several below each other, as a matplotlib figure; the options are those of `draw_timelines`."""
    pairs = list(differences) if isinstance(differences, Sequence) else [differences]
    check_names("pairs of timelines", len(pairs), names)
    timelines = [timeline for pair in pairs for timeline in (pair.predicted, pair.measured)]
    titles = list(names or (title_of(pair.measured) for pair in pairs))
    with use_style():
        sheet = Sheet.fit(timelines, width, unit=unit, legend=legend)
        panels = _OverlayPanels(sheet, timelines, titles, labels, pairs, words)
        return sheet.stack(panels.bands(), panels.entries())


@dataclass(frozen=True)
class _OverlayPanels:
    """One panel per pair of timelines: its header, and both rows of each rank."""

    sheet: Sheet
    timelines: list[Timeline]
    names: list[str]
    labels: bool
    pairs: list[Differences]
    words: tuple[str, str]

    def bands(self) -> Iterator[list[Band]]:
        """Yield the bands of each panel."""
        for panel, (name, pair) in enumerate(zip(self.names, self.pairs, strict=True)):
            yield [self.sheet.header(name, self._facts(pair)), self._pair(panel, pair)]

    def _facts(self, pair: Differences) -> list[str]:
        unit, (one, other) = self.sheet.unit, self.words
        makespan, bubble = pair.makespan, pair.bubble
        ratio = "" if makespan.ratio is None else f" ({makespan.ratio:.3f} times that)"
        return [
            ", ".join(shape_of(pair.measured)),
            f"makespan {format_time(makespan.predicted, unit)} {one}, {format_time(makespan.measured, unit)} {other}{ratio}",
            f"bubble {format_percent(bubble.predicted)} {one}, {format_percent(bubble.measured)} {other}",
        ]

    def entries(self) -> list[LegendEntry]:
        """List what the legend explains."""
        one, other = self.words
        late = np.concatenate([np.zeros(1), *(pair.lateness.late for pair in self.pairs)])
        most, least = float(late.max()), float(late.min())
        entries = [*timeline_entries(self.timelines, ""), LegendEntry((), f"upper row (pale): {one}, lower row: {other}")]
        entries += [LegendEntry((LATE,), f"late, up to {format_time(most, self.sheet.unit)}")] if most > 0 else []
        entries += [LegendEntry((EARLY,), f"early, up to {format_time(-least, self.sheet.unit)}")] if least < 0 else []
        if any(pair.first is not None for pair in self.pairs):
            entries.append(LegendEntry((), f"framed: the first action that is more than {format_percent(self.pairs[0].tolerance)} off"))
        return entries

    def _pair(self, panel: int, pair: Differences) -> Band:
        ranks = pair.measured.ranks
        height = float(min(np.clip(1.6 / ranks, 0.13, 0.24), 12.0 / (_TIGHT.pitch * ranks)))  # what labels need, less for many ranks
        layout = _WIDE if height >= _LEAST_WIDE else _TIGHT

        def draw(axes: Axes) -> None:
            axes.set_ylim(ranks * layout.pitch, 0)
            _TimelinePair(pair, layout, self.sheet.unit_points, height * POINTS, self.labels, panel, self.sheet).draw(axes)
            axes.set_xlim(0.0, self.sheet.end)
            self.sheet.rank_ticks(axes, np.arange(ranks) * layout.pitch + layout.middle, height * layout.pitch, "rank")

        return Band(ranks * layout.pitch * height, draw, timed=True)


@dataclass(frozen=True)
class _TimelinePair:
    """Two timelines, drawn to scale: `unit_points` per unit of time, `row_points` per row."""

    differences: Differences
    layout: _RowHeights
    unit_points: float
    row_points: float
    labels: bool
    panel: int
    sheet: Sheet

    def draw(self, axes: Axes) -> None:
        rows = ((self.differences.predicted, 0.0, _PALE), (self.differences.measured, self.layout.below, 0.0))
        for place, (timeline, shift, pale) in enumerate(rows):
            index = 2 * self.panel + place
            RankRows(timeline, self.unit_points, self.row_points, self.labels, index, self.layout.pitch, shift, pale).draw(axes)
        if self.layout is _WIDE:
            self._draw_lines(axes)
        self._draw_lateness(axes)
        self._frame_first(axes)

    @cached_property
    def _ends(self) -> tuple[Floats, Floats]:
        """The end of each compute action, predicted and measured."""
        measured = self.differences.match.measured
        return measured.end - self.differences.lateness.late, measured.end

    def _draw_lines(self, axes: Axes) -> None:
        """Draw a line from the predicted to the measured end of each action, or of some if there are many."""
        from matplotlib.collections import LineCollection

        rank, late = self.differences.match.measured.rank, self.differences.lateness.late
        room = max(int(self.differences.measured.makespan * self.unit_points / _BETWEEN), 1)
        step = max(-(-int(np.bincount(rank, minlength=1).max()) // room), 1)
        of = np.arange(0, len(rank), step)
        lines, rows = np.empty((len(of), 2, 2)), rank[of] * self.layout.pitch
        lines[:, 0, 0], lines[:, 1, 0] = self._ends[0][of], self._ends[1][of]
        lines[:, 0, 1], lines[:, 1, 1] = rows + 0.95, rows + self.layout.below + 0.05
        apart = np.abs(late[of]) > self.differences.allowed
        colours = np.where(apart, np.where(late[of] > 0, LATE, EARLY), FAINT)
        collection = LineCollection(list(lines), colors=colours.tolist(), linewidths=0.5, clip_on=False)
        collection.set_gid(f"lines-{self.panel}")
        axes.add_collection(collection, autolim=False)

    def _draw_lateness(self, axes: Axes) -> None:
        """Draw how late each rank is after each of its actions: late above its line, early below it."""
        waits, lateness = self.differences.match.measured, self.differences.lateness.late
        most, least = float(lateness.max(initial=0.0)), float(lateness.min(initial=0.0))
        scale = self.layout.strip_height / ((most - least) or 1.0)
        bounds = np.searchsorted(waits.rank, np.arange(self.differences.measured.ranks + 1)).tolist()
        for rank, (low, high) in enumerate(pairwise(bounds)):
            base = rank * self.layout.pitch + self.layout.strip + most * scale
            times, values = np.append(0.0, waits.end[low:high]), np.append(0.0, lateness[low:high])
            for name, colour, part in (("late", LATE, values.clip(min=0)), ("early", EARLY, values.clip(max=0))):
                if part.any():
                    area = axes.fill_between(times, base, base - part * scale, step="post", color=colour, linewidth=0, clip_on=False)
                    area.set_gid(f"{name}-{self.panel}-{rank}")
            axes.plot([0, float(times[-1])], [base] * 2, color=FAINT, linewidth=0.4, clip_on=False)
            size, last = SMALL * self.sheet.zoom, float(values[-1])
            if self.row_points * self.layout.pitch > 1.3 * size and last:
                late = f"{'-' if last < 0 else '+'}{format_time(abs(last), self.sheet.unit)}"
                annotate(axes, (self.differences.measured.makespan, base), late, size)

    def _frame_first(self, axes: Axes) -> None:
        """Draw a frame around the action at which the timelines part."""
        from matplotlib.patches import Rectangle

        first = self.differences.first_place
        if first is None:
            return
        waits = self.differences.match.measured
        start, length = float(waits.start[first]), float(waits.end[first] - waits.start[first])
        corner = (start, float(waits.rank[first]) * self.layout.pitch + self.layout.below + 0.02)
        frame = Rectangle(corner, length, 0.96, fill=False, edgecolor=INK, linewidth=1.2, clip_on=False)
        frame.set_gid(f"first-{self.panel}")
        axes.add_patch(frame)
