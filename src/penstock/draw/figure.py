"""Timelines as a figure for papers: rank rows, memory below, on one time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw import legend as legends
from penstock.draw import strip
from penstock.draw.bars import LEAST_LABEL, Bars
from penstock.draw.canvas import FAINT, INK, PAPER, POINTS, style, text_width
from penstock.draw.numbers import number, percent, seconds
from penstock.draw.summary import fullest_rank, shape_of, title_of
from penstock.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from penstock.simulator.timeline import Timeline

NARROWEST, WIDEST = 7.2, 14.0
"""Inches: the two columns of a paper, and a page of its own for what would not be seen there."""
LEAST_WIDTH, MOST_WIDTH = 3.0, 200.0
"""Inches that may be asked for."""
_LEFT, _RIGHT, _EDGE = 0.5, 0.5, 0.1
_HEADER, _LINE, _GAP, _AXIS = 0.42, 0.15, 0.16, 0.42
"""Inches: margins; a timeline's first two lines of text and each further one, the space between parts, the time axis. All zoomed."""
_TITLE, _TEXT, _SMALL = 10.0, 8.0, 7.0
"""Points, zoomed too."""


def figure(
    timelines: Timeline | Sequence[Timeline],
    *,
    names: Sequence[str] | None = None,
    width: float | None = None,
    labels: bool = True,
    memory: bool = True,
    legend: bool = True,
    unit: str | None = None,
) -> Figure:
    """One timeline, or several below each other on one time axis, as a matplotlib figure.

    `width` is in inches; `labels` are the microbatches in the boxes, where they fit; `unit` is the unit of the costs' times,
    one of s, ms, us, ns, for the axis.
    """
    given = [timelines] if not isinstance(timelines, Sequence) else list(timelines)
    if not given or (names is not None and len(names) != len(given)):
        raise UsageError(f"{len(given)} timelines and {len(names or ())} names: give at least one timeline, and a name for each or none")
    if unit is not None:
        seconds(unit)
    with style():
        return Sheet(given, list(names or map(title_of, given)), width, labels, memory, legend, unit).figure()


@dataclass(frozen=True)
class Band:
    """A part of the sheet over its whole width, from the top down; one with `timed` has the time axis."""

    height: float
    draw: Callable[[Axes], None] | None = None
    timed: bool = False


@dataclass(frozen=True)
class Sheet:
    """Timelines below each other."""

    timelines: list[Timeline]
    names: list[str]
    asked_width: float | None
    labels: bool
    memory: bool
    legend: bool
    unit: str | None

    @cached_property
    def end(self) -> float:
        return max(timeline.makespan for timeline in self.timelines) or 1.0

    @cached_property
    def width(self) -> float:
        """As asked for, or what labels in the shortest boxes take, within reason."""
        if self.asked_width is not None:
            if not LEAST_WIDTH <= self.asked_width <= MOST_WIDTH:
                raise UsageError(f"a width of {self.asked_width} inches: it must be from {LEAST_WIDTH} to {MOST_WIDTH}")
            return self.asked_width
        needed = 0.0
        for timeline in self.timelines:
            lengths = (timeline.end - timeline.start)[timeline.computes & (timeline.end > timeline.start)]
            label = text_width("0" * len(str(timeline.table.microbatches - 1)), LEAST_LABEL + 1.5) + 2.0 / POINTS
            needed = max(needed, self.end / float(np.quantile(lengths, 0.05)) * label if len(lengths) else 0.0)
        return float(np.clip(needed + _LEFT + _RIGHT, NARROWEST, WIDEST))

    @cached_property
    def zoom(self) -> float:
        """Wide figures are shown smaller, so that their text is larger."""
        return math.sqrt(max(self.width / NARROWEST, 0.5))

    @property
    def inner(self) -> float:
        """The width of the time axis."""
        return self.width - (_LEFT + _RIGHT) * self.zoom

    @property
    def _memory_form(self) -> str:
        if not self.memory:
            return ""
        if len(self.timelines) > 1:
            return "band"
        return "curves" if self.timelines[0].ranks <= strip.MOST_CURVES else "map"

    def figure(self) -> Figure:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        bands = [Band(_EDGE), *self.bands(), Band(_EDGE)]
        height = sum(band.height for band in bands)
        made = Figure(figsize=(self.width, height), facecolor=PAPER)
        FigureCanvasAgg(made)
        timed = max(place for place, band in enumerate(bands) if band.timed)
        at = height
        for place, band in enumerate(bands):
            at -= band.height
            if band.draw is not None:
                axes = made.add_axes((_LEFT * self.zoom / self.width, at / height, self.inner / self.width, band.height / height))
                self._prepare(axes, band, last=place == timed)
                band.draw(axes)
        return made

    def _prepare(self, axes: Axes, band: Band, last: bool) -> None:
        axes.patch.set_visible(False)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_yticks([])
        if not band.timed:
            axes.set(xlim=(0, self.inner / self.zoom), ylim=(band.height / self.zoom, 0), xticks=[])
            return
        axes.set_xlim(0.0, self.end)
        if last:
            axes.tick_params(axis="x", labelsize=_SMALL * self.zoom, length=3, width=0.6)
            axes.spines["bottom"].set(visible=True, linewidth=0.6)
            axes.set_xlabel(f"time ({self.unit})" if self.unit else "time (in units of the costs)", fontsize=_TEXT * self.zoom, labelpad=3)
        else:
            axes.tick_params(axis="x", bottom=False, labelbottom=False)

    def bands(self) -> list[Band]:
        """Everything from the top down."""
        found: list[Band] = []
        for panel, (name, timeline) in enumerate(zip(self.names, self.timelines, strict=True)):
            found += [self.space()] if found else []
            found += [self.header(name, self._facts(timeline)), self._rows(panel, timeline), *self._memory(timeline)]
        return found + self.footer(legends.entries(self.timelines, self._memory_form))

    def space(self) -> Band:
        """Nothing, between two parts."""
        return Band(_GAP * self.zoom)

    def footer(self, entries: Sequence[legends.Entry]) -> list[Band]:
        """The room of the time axis, and the legend if there is to be one."""
        found = [Band(_AXIS * self.zoom)]
        if self.legend:
            lines = legends.wrapped(entries, self.inner / self.zoom + _RIGHT - _EDGE)
            found.append(Band(len(lines) * legends.LINE * self.zoom, lambda axes: legends.draw_legend(axes, lines, self.zoom)))
        return found

    def _facts(self, timeline: Timeline) -> list[str]:
        peak = fullest_rank(timeline)
        return [
            ", ".join(shape_of(timeline)),
            f"makespan {number(timeline.makespan)}{f' {self.unit}' if self.unit else ''}",
            f"bubble {percent(timeline.bubble)}",
            f"peak memory {number(timeline.peak_memory[peak])} (rank {peak})",
        ]

    def header(self, name: str, facts: Sequence[str]) -> Band:
        """The name, and the facts in as many lines as they take."""
        room = self.inner / self.zoom + _RIGHT - _EDGE
        lines = _flowed(facts, room)

        def draw(axes: Axes) -> None:
            axes.text(0, 0.13, _cut(name, room), fontsize=_TITLE * self.zoom, fontweight="bold", color=INK, va="center_baseline")
            for place, line in enumerate(lines):
                axes.text(0, 0.3 + _LINE * place, line, fontsize=_TEXT * self.zoom, color=FAINT, va="center_baseline")

        return Band((_HEADER + _LINE * (len(lines) - 1)) * self.zoom, draw)

    def _rows(self, panel: int, timeline: Timeline) -> Band:
        height = row_height(timeline.ranks, len(self.timelines))
        bars = Bars(timeline, self.inner * POINTS / self.end, height * POINTS, self.labels, panel)

        def draw(axes: Axes) -> None:
            axes.set_ylim(timeline.ranks, 0)
            bars.draw(axes)
            axes.set_xlim(0.0, self.end)
            self.rank_ticks(axes, np.arange(timeline.ranks) + 0.5, height, "rank")

        return Band(timeline.ranks * height, draw, timed=True)

    def _memory(self, timeline: Timeline) -> list[Band]:
        form = self._memory_form
        if not form:
            return []
        height = {"curves": 0.24 * timeline.ranks, "map": float(np.clip(0.045 * timeline.ranks, 1.0, 3.0)), "band": 0.5 * self.zoom}[form]

        def draw(axes: Axes) -> None:
            columns, size = max(int(self.inner * timeline.makespan / self.end * 150), 1), _SMALL * self.zoom
            if form == "band":
                strip.draw_band(axes, timeline, max(max(each.peak_memory) for each in self.timelines) or 1.0, columns, size)
                self._name_axis(axes, "memory")
            else:
                axes.set_ylim(timeline.ranks, 0)
                if form == "curves":
                    strip.draw_curves(axes, timeline, size)
                else:
                    scale = axes.inset_axes((1.0 + 0.08 / self.inner, 0.0, 0.1 / self.inner, 1.0))
                    strip.draw_map(axes, scale, timeline, columns, size)
                self.rank_ticks(axes, np.arange(timeline.ranks) + 0.5, height / timeline.ranks, "memory")
            axes.set_xlim(0.0, self.end)

        return [Band(_GAP * self.zoom), Band(height, draw, timed=True)]

    def rank_ticks(self, axes: Axes, middles: NDArray[np.floating], height: float, label: str) -> None:
        """Numbers at the middle of rows that are so many inches high, as many as can be read."""
        step = 1
        while step * height < 0.12 * self.zoom:
            step *= 2
        shown = np.arange(0, len(middles), step)
        axes.set_yticks(middles[shown], [str(rank) for rank in shown], fontsize=_SMALL * self.zoom)
        axes.tick_params(axis="y", length=0, pad=3)
        self._name_axis(axes, label)

    def _name_axis(self, axes: Axes, label: str) -> None:
        """At the same distance from all axes."""
        axes.set_ylabel(label, fontsize=_TEXT * self.zoom)
        axes.yaxis.set_label_coords(-0.27 * self.zoom / self.inner, 0.5)


def row_height(ranks: int, timelines: int) -> float:
    """Inches: what labels take, less where there are many ranks."""
    room = 4.2 if timelines == 1 else 2.4
    return float(min(np.clip(room / ranks, 0.11, 0.32), 9.0 / ranks))


def _flowed(facts: Sequence[str], room: float) -> list[str]:
    """The facts in lines that fit into the inches."""
    lines = [facts[0]]
    for fact in facts[1:]:
        longer = f"{lines[-1]}  ·  {fact}"
        if text_width(longer, _TEXT) <= room:
            lines[-1] = longer
        else:
            lines.append(fact)
    return lines


def _cut(name: str, room: float) -> str:
    """A name that is too long for the inches, without its middle."""
    shown, keep = name, len(name) // 2
    while text_width(shown, _TITLE, bold=True) > room and keep > 1:
        keep -= 1
        shown = f"{name[:keep]}…{name[-keep:]}"
    return shown
