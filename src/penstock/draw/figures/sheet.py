"""The sheet that figures of timelines are drawn on: bands from the top down, all as wide as the time axis, and a legend at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import copy_boxes, list_collective_boxes, make_widest_label
from penstock.draw.figures.canvas import FAINT, IDLE, INK, PAPER, POINTS, SMALL, TEXT, text_width
from penstock.draw.figures.rank_rows import FILLS, LEAST_LABEL, is_mixed, list_uses
from penstock.draw.palette import HOST, MEETING, OPTIMIZER, SHARDING, TONES, shade
from penstock.draw.summary import choose_unit, unit_of
from penstock.errors import UsageError
from penstock.ir.kind import JOINS, WORK, Kind
from penstock.simulator.timeline import Timeline
from penstock.text.units import seconds_per

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NARROWEST, WIDEST = 7.2, 14.0
"""Inches: the width of a paper's two columns, and of a page for figures with more detail."""
LEAST_WIDTH, MOST_WIDTH = 3.0, 200.0
"""Inches that may be asked for."""
_TITLE = 10.0
"""Points, before zooming."""
_LEFT, _RIGHT, _EDGE = 0.5, 0.7, 0.1
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
        unit = unit_of(timelines[0], unit)
        if unit is not None:
            seconds_per(unit)
        end = max(timeline.makespan for timeline in timelines) or 1.0
        if width is not None and not LEAST_WIDTH <= width <= MOST_WIDTH:
            raise UsageError(f"a width of {width} inches: it must be from {LEAST_WIDTH} to {MOST_WIDTH}")
        return cls(end, _find_width(timelines, end) if width is None else width, unit, legend)

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

    def stack(self, panels: Iterable[Sequence[Band]], entries: Sequence[LegendEntry]) -> Figure:
        """Draw the panels from the top down with space between them, then the time axis and the legend."""
        bands: list[Band] = []
        for panel in panels:
            bands += [self.space(), *panel] if bands else panel
        return self.draw([*bands, *self.footer(entries)])

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
            name, factor = choose_unit(self.end, self.unit)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value * factor:.6g}")
            axes.set_xlabel(f"time ({name or 'in units of the costs'})", fontsize=TEXT * self.zoom, labelpad=3)
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
                axes.text(0, 0.3 + _LINE * place, line, fontsize=TEXT * self.zoom, color=FAINT, va="center_baseline")

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
        axes.set_ylabel(label, fontsize=TEXT * self.zoom)
        axes.yaxis.set_label_coords(-0.27 * self.zoom / self.inner, 0.5)


def check_names(what: str, count: int, names: Sequence[str] | None) -> None:
    """Refuse a figure of nothing, and a list of names that does not match what is drawn."""
    if not count or (names is not None and len(names) != count):
        raise UsageError(f"{count} {what} and {len(names or ())} names: give at least one, and a name for each or none")


def _find_width(timelines: Sequence[Timeline], end: float) -> float:
    needed = 0.0
    for timeline in timelines:
        lengths = (timeline.end - timeline.start)[timeline.computes & (timeline.end > timeline.start)]
        label = text_width(make_widest_label(timeline.table), LEAST_LABEL + 1.5) + 2.0 / POINTS
        needed = max(needed, end / float(np.quantile(lengths, 0.05)) * label if len(lengths) else 0.0)
    return float(np.clip(needed + _LEFT + _RIGHT, NARROWEST, WIDEST))


def _wrap_facts(facts: Sequence[str], room: float) -> list[str]:
    """Join facts into lines that fit into the inches."""
    lines = [facts[0]]
    for fact in facts[1:]:
        longer = f"{lines[-1]}  ·  {fact}"
        if text_width(longer, TEXT) <= room:
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


SIZE = 7.5
"""Points."""
LINE = 0.19
"""Inches per line."""
_SAMPLE, _TALL, _PAD, _BETWEEN = 0.14, 0.1, 0.05, 0.2
"""Inches: the width and height of a sample, the space to its text, and the space between entries."""


@dataclass(frozen=True)
class LegendEntry:
    """Samples side by side, and what they mean."""

    fills: tuple[str, ...]
    means: str

    @property
    def width(self) -> float:
        """Inches."""
        return len(self.fills) * _SAMPLE + (_PAD if self.fills else 0.0) + text_width(self.means, SIZE)


def timeline_entries(timelines: Sequence[Timeline], memory: str) -> list[LegendEntry]:
    """Explain what occurs in the timelines. `memory` is how memory is drawn: `curves`, `map`, `band`, or empty for not at all."""
    chunks = max(timeline.table.chunks for timeline in timelines)
    entries = [LegendEntry(tuple(fills), means) for fills, means in _kinds(timelines, chunks)]
    entries.append(LegendEntry((IDLE,), "idle"))
    if chunks > 1:
        entries.append(LegendEntry((), f"shade: chunk 0 (dark) to {chunks - 1} (light)"))
    if any(is_mixed(timeline) for timeline in timelines):
        entries.append(LegendEntry((), "mixed colours: too many boxes to show each"))
    return entries + [LegendEntry((fill,), means) for fill, means in _memory(timelines, memory)]


def _kinds(timelines: Sequence[Timeline], chunks: int) -> list[tuple[list[str], str]]:
    present = [kind for kind in WORK if any(timeline.table.rows.is_kind(kind).any() for timeline in timelines)]
    kinds = [([shade(TONES[kind], chunk, chunks).fill for chunk in range(chunks)], TONES[kind].means) for kind in present]
    if any(timeline.optimizer.any() for timeline in timelines):
        kinds.append(([OPTIMIZER.fill], OPTIMIZER.means))
    collective = {kind for timeline in timelines for kind in list_collective_boxes(timeline).kind.tolist()}
    for place, (kind, means) in enumerate(((Kind.REDUCE_GRAD, "gradients reduced"), (Kind.UNSHARD, "parameters gathered"))):
        if kind in collective:
            kinds.append(([shade(SHARDING, place, 2).fill], means))
    if collective & set(JOINS):
        kinds.append(([shade(MEETING, place, 2).fill for place in range(2)], MEETING.means))
    if any(len(copy_boxes(timeline)) for timeline in timelines):
        kinds.append(([shade(HOST, place, 2).fill for place in range(2)], HOST.means))
    return kinds


def _memory(timelines: Sequence[Timeline], memory: str) -> list[tuple[str, str]]:
    if memory == "curves":
        return [(FILLS[name], f"memory: {name}") for name in list_uses(timelines[0])]
    if memory == "band":
        return [(FILLS["receive buffers"], "memory, fullest rank"), (FILLS["activations"], "memory, emptiest rank")]
    return []


def wrap_entries(entries: Sequence[LegendEntry], width: float) -> list[list[LegendEntry]]:
    """Arrange the entries in lines of at most so many inches, before zooming."""
    lines: list[list[LegendEntry]] = [[]]
    for entry in entries:
        if lines[-1] and sum(other.width + _BETWEEN for other in lines[-1]) + entry.width > width:
            lines.append([])
        lines[-1].append(entry)
    return lines


def draw_legend(axes: Axes, lines: Sequence[Sequence[LegendEntry]], zoom: float) -> None:
    """Draw the lines; the axes count zoomed inches from the top left."""
    from matplotlib.patches import Rectangle

    for number, line in enumerate(lines):
        at, middle = 0.0, (number + 0.5) * LINE
        for entry in line:
            place = at
            for fill in entry.fills:
                axes.add_patch(Rectangle((place, middle - _TALL / 2), _SAMPLE, _TALL, facecolor=fill, linewidth=0, clip_on=False))
                place += _SAMPLE
            place += _PAD if entry.fills else 0.0
            axes.text(place, middle, entry.means, fontsize=SIZE * zoom, color=INK, va="center_baseline")
            at += entry.width + _BETWEEN
