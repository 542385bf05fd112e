"""Timelines as a figure for papers: rank rows with memory below, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.draw.figures import memory as memories
from penstock.draw.figures.canvas import POINTS, use_style
from penstock.draw.figures.legend import timeline_entries
from penstock.draw.figures.rank_rows import RankRows
from penstock.draw.figures.sheet import SMALL, Band, Sheet, check_names
from penstock.draw.summary import fullest_rank, shape_of, title_of
from penstock.text.numbers import format_number, format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from penstock.simulator.timeline import Timeline


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

    `width` is in inches; `labels` writes the microbatch into each box that has room for it; `unit` names the time axis and is the
    unit of the costs' times, one of s, ms, us, ns.
    """
    shown = list(timelines) if isinstance(timelines, Sequence) else [timelines]
    check_names("timelines", len(shown), names)
    with use_style():
        sheet = Sheet.fit(shown, width, unit=unit, legend=legend)
        return sheet.draw(_Panels(sheet, shown, list(names or map(title_of, shown)), labels, memory).bands())


@dataclass(frozen=True)
class _Panels:
    """One panel per timeline: its header, its rows and its memory."""

    sheet: Sheet
    timelines: list[Timeline]
    names: list[str]
    labels: bool
    memory: bool

    @property
    def _memory_form(self) -> str:
        if not self.memory:
            return ""
        if len(self.timelines) > 1:
            return "band"
        return "curves" if self.timelines[0].ranks <= memories.MOST_CURVES else "map"

    def bands(self) -> list[Band]:
        """All bands from the top down."""
        bands: list[Band] = []
        for panel, (name, timeline) in enumerate(zip(self.names, self.timelines, strict=True)):
            bands += [self.sheet.space()] if bands else []
            bands += [self.sheet.header(name, self._facts(timeline)), self._rows(panel, timeline), *self._memory(timeline)]
        return bands + self.sheet.footer(timeline_entries(self.timelines, self._memory_form))

    def _facts(self, timeline: Timeline) -> list[str]:
        peak, unit = fullest_rank(timeline), self.sheet.unit
        return [
            ", ".join(shape_of(timeline)),
            f"makespan {format_number(timeline.makespan)}{f' {unit}' if unit else ''}",
            f"bubble {format_percent(timeline.bubble)}",
            f"peak memory {format_number(timeline.peak_memory[peak])} (rank {peak})",
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
        form, sheet = self._memory_form, self.sheet
        if not form:
            return []
        heights = {"curves": 0.24 * timeline.ranks, "map": float(np.clip(0.045 * timeline.ranks, 1.0, 3.0)), "band": 0.5 * sheet.zoom}
        height = heights[form]

        def draw(axes: Axes) -> None:
            columns, size = max(int(sheet.inner * timeline.makespan / sheet.end * 150), 1), SMALL * sheet.zoom
            if form == "band":
                most = max(max(each.peak_memory) for each in self.timelines) or 1.0
                memories.draw_band(axes, timeline, most, columns, size)
                sheet.name_axis(axes, "memory")
            else:
                axes.set_ylim(timeline.ranks, 0)
                if form == "curves":
                    memories.draw_curves(axes, timeline, size)
                else:
                    scale = axes.inset_axes((1.0 + 0.08 / sheet.inner, 0.0, 0.1 / sheet.inner, 1.0))
                    memories.draw_map(axes, scale, timeline, columns, size)
                sheet.rank_ticks(axes, np.arange(timeline.ranks) + 0.5, height / timeline.ranks, "memory")
            axes.set_xlim(0.0, sheet.end)

        return [sheet.space(), Band(height, draw, timed=True)]


def _row_height(ranks: int, timelines: int) -> float:
    """Inches: the height that labels need, less for many ranks."""
    room = 4.2 if timelines == 1 else 2.4
    return float(min(np.clip(room / ranks, 0.11, 0.32), 9.0 / ranks))
