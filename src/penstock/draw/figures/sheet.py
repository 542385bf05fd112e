"""The sheet that figures of timelines are drawn on: bands from the top down, all as wide as the time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.figures.canvas import FAINT, INK, PAPER, POINTS, text_width
from penstock.draw.figures.legend import LINE, LegendEntry, draw_legend, wrap_entries
from penstock.draw.figures.rank_rows import LEAST_LABEL
from penstock.errors import UsageError
from penstock.text.units import seconds_per

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from penstock.simulator.timeline import Timeline

NARROWEST, WIDEST = 7.2, 14.0
"""Inches: the width of a paper's two columns, and of a page for figures with more detail."""
LEAST_WIDTH, MOST_WIDTH = 3.0, 200.0
"""Inches that may be asked for."""
SMALL = 7.0
_TITLE, _TEXT = 10.0, 8.0
"""Points, before zooming."""
_LEFT, _RIGHT, _EDGE = 0.5, 0.5, 0.1
_HEADER, _LINE, _GAP, _AXIS = 0.42, 0.15, 0.16, 0.42
"""Inches, before zooming: the margins; the first two lines of a header and each further one, the space between bands, the time axis."""


@dataclass(frozen=True)
class Band:
    """A part of the sheet over its whole width; a `timed` one has the time axis."""

    height: float
    draw: Callable[[Axes], None] | None = None
    timed: bool = False


@dataclass(frozen=True)
class Sheet:
    """The scale that all bands share: `end` is the last moment of the time axis, `width` is in inches."""

    end: float
    width: float
    unit: str | None
    legend: bool

    @classmethod
    def fit(cls, timelines: Sequence[Timeline], width: float | None, *, unit: str | None, legend: bool) -> Sheet:
        """Make a sheet for these timelines; without a width, it is as wide as labels in the shortest boxes need, within limits."""
        if unit is not None:
            seconds_per(unit)
        end = max(timeline.makespan for timeline in timelines) or 1.0
        if width is not None and not LEAST_WIDTH <= width <= MOST_WIDTH:
            raise UsageError(f"a width of {width} inches: it must be from {LEAST_WIDTH} to {MOST_WIDTH}")
        return cls(end, _needed_width(timelines, end) if width is None else width, unit, legend)

    @property
    def zoom(self) -> float:
        """Wide figures are shown smaller, so their text is larger."""
        return math.sqrt(max(self.width / NARROWEST, 0.5))

    @property
    def inner(self) -> float:
        """The width of the time axis."""
        return self.width - (_LEFT + _RIGHT) * self.zoom

    @property
    def unit_points(self) -> float:
        """Points per unit of time."""
        return self.inner * POINTS / self.end

    @property
    def _text_room(self) -> float:
        return self.inner / self.zoom + _RIGHT - _EDGE

    def draw(self, bands: Sequence[Band]) -> Figure:
        """Draw the bands from the top down; the last timed one gets the ticks of the time axis."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        bands = [Band(_EDGE), *bands, Band(_EDGE)]
        height = sum(band.height for band in bands)
        figure = Figure(figsize=(self.width, height), facecolor=PAPER)
        FigureCanvasAgg(figure)
        timed = max(place for place, band in enumerate(bands) if band.timed)
        at = height
        for place, band in enumerate(bands):
            at -= band.height
            if band.draw is not None:
                axes = figure.add_axes((_LEFT * self.zoom / self.width, at / height, self.inner / self.width, band.height / height))
                self._prepare(axes, band, last=place == timed)
                band.draw(axes)
        return figure

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
            axes.tick_params(axis="x", labelsize=SMALL * self.zoom, length=3, width=0.6)
            axes.spines["bottom"].set(visible=True, linewidth=0.6)
            axes.set_xlabel(f"time ({self.unit})" if self.unit else "time (in units of the costs)", fontsize=_TEXT * self.zoom, labelpad=3)
        else:
            axes.tick_params(axis="x", bottom=False, labelbottom=False)

    def space(self) -> Band:
        """An empty band between two others."""
        return Band(_GAP * self.zoom)

    def header(self, name: str, facts: Sequence[str]) -> Band:
        """A name, and facts in as many lines as they need."""
        lines = _wrap_facts(facts, self._text_room)

        def draw(axes: Axes) -> None:
            title = _shorten(name, self._text_room)
            axes.text(0, 0.13, title, fontsize=_TITLE * self.zoom, fontweight="bold", color=INK, va="center_baseline")
            for place, line in enumerate(lines):
                axes.text(0, 0.3 + _LINE * place, line, fontsize=_TEXT * self.zoom, color=FAINT, va="center_baseline")

        return Band((_HEADER + _LINE * (len(lines) - 1)) * self.zoom, draw)

    def footer(self, entries: Sequence[LegendEntry]) -> list[Band]:
        """The space of the time axis, and the legend if one is wanted."""
        axis = Band(_AXIS * self.zoom)
        if not self.legend:
            return [axis]
        lines = wrap_entries(entries, self._text_room)
        return [axis, Band(len(lines) * LINE * self.zoom, lambda axes: draw_legend(axes, lines, self.zoom))]

    def rank_ticks(self, axes: Axes, middles: NDArray[np.floating], height: float, label: str) -> None:
        """Number the rows, which are `height` inches high, at their middles; as many numbers as can be read."""
        step = 1
        while step * height < 0.12 * self.zoom:
            step *= 2
        shown = np.arange(0, len(middles), step)
        axes.set_yticks(middles[shown], [str(rank) for rank in shown], fontsize=SMALL * self.zoom)
        axes.tick_params(axis="y", length=0, pad=3)
        self.name_axis(axes, label)

    def name_axis(self, axes: Axes, label: str) -> None:
        """Name the vertical axis, at the same distance in every band."""
        axes.set_ylabel(label, fontsize=_TEXT * self.zoom)
        axes.yaxis.set_label_coords(-0.27 * self.zoom / self.inner, 0.5)


def check_names(what: str, count: int, names: Sequence[str] | None) -> None:
    """Refuse a figure of nothing, and a list of names that does not match what is drawn."""
    if not count or (names is not None and len(names) != count):
        raise UsageError(f"{count} {what} and {len(names or ())} names: give at least one, and a name for each or none")


def _needed_width(timelines: Sequence[Timeline], end: float) -> float:
    needed = 0.0
    for timeline in timelines:
        lengths = (timeline.end - timeline.start)[timeline.computes & (timeline.end > timeline.start)]
        label = text_width("0" * len(str(timeline.table.microbatches - 1)), LEAST_LABEL + 1.5) + 2.0 / POINTS
        needed = max(needed, end / float(np.quantile(lengths, 0.05)) * label if len(lengths) else 0.0)
    return float(np.clip(needed + _LEFT + _RIGHT, NARROWEST, WIDEST))


def _wrap_facts(facts: Sequence[str], room: float) -> list[str]:
    """Join facts into lines that fit into the inches."""
    lines = [facts[0]]
    for fact in facts[1:]:
        longer = f"{lines[-1]}  ·  {fact}"
        if text_width(longer, _TEXT) <= room:
            lines[-1] = longer
        else:
            lines.append(fact)
    return lines


def _shorten(name: str, room: float) -> str:
    """Cut the middle out of a name that is too long for the inches."""
    shown, keep = name, len(name) // 2
    while text_width(shown, _TITLE, bold=True) > room and keep > 1:
        keep -= 1
        shown = f"{name[:keep]}…{name[-keep:]}"
    return shown
