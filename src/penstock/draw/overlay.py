"""A measured timeline under its prediction, rank by rank on one time axis, with how late it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw import legend as legends
from penstock.draw.bars import Bars
from penstock.draw.canvas import FAINT, INK, POINTS, style
from penstock.draw.differences import WORDS, signed
from penstock.draw.figure import Band, Sheet
from penstock.draw.numbers import number, percent, seconds
from penstock.draw.summary import shape_of, title_of
from penstock.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from penstock.simulator.differences import Differences

Floats = NDArray[np.float64]

LATE, EARLY = "#b2182b", "#2166ac"
_PALE = 0.55
"""How much white is in the colours of the prediction."""
_BETWEEN = 5.0
"""Points: the least from one line that joins an action with itself to the next."""


@dataclass(frozen=True)
class _Layout:
    """A rank's part, in heights of a row: where its measured row begins, where its lateness does and how high that is, and where the
    next rank begins. The predicted row is at the top."""

    below: float
    strip: float
    strip_height: float
    pitch: float

    @property
    def middle(self) -> float:
        return (self.below + 1) / 2


_WIDE, _TIGHT = _Layout(1.42, 2.5, 0.75, 3.55), _Layout(1.0, 2.05, 1.1, 3.6)
_LEAST_WIDE = 0.09
"""Inches: rows that are less high stand without lines between them."""


def overlay(
    found: Differences | Sequence[Differences],
    *,
    names: Sequence[str] | None = None,
    words: tuple[str, str] = WORDS,
    width: float | None = None,
    labels: bool = True,
    legend: bool = True,
    unit: str | None = None,
) -> Figure:
    """One pair of timelines, or several below each other, as a matplotlib figure; the options are those of `figure`."""
    given = list(found) if isinstance(found, Sequence) else [found]
    if not given or (names is not None and len(names) != len(given)):
        raise UsageError(
            f"{len(given)} pairs of timelines and {len(names or ())} names: give at least one pair, and a name for each or none"
        )
    if unit is not None:
        seconds(unit)
    timelines = [timeline for each in given for timeline in (each.predicted, each.measured)]
    named = list(names or (title_of(each.measured) for each in given))
    with style():
        return _Pairs(timelines, named, width, labels, False, legend, unit, given, words).figure()


@dataclass(frozen=True)
class _Pairs(Sheet):
    """Pairs of timelines below each other; a name for each pair."""

    found: list[Differences]
    words: tuple[str, str]

    def bands(self) -> list[Band]:
        made: list[Band] = []
        for panel, (name, found) in enumerate(zip(self.names, self.found, strict=True)):
            made += [self.space()] if made else []
            made += [self.header(name, self._both_facts(found)), self._pair(panel, found)]
        return [*made, *self.footer(self._entries())]

    def _both_facts(self, found: Differences) -> list[str]:
        unit, (one, other) = f" {self.unit}" if self.unit else "", self.words
        makespan, bubble = found.makespan, found.bubble
        ratio = "" if makespan.ratio is None else f" ({makespan.ratio:.3f} times that)"
        return [
            ", ".join(shape_of(found.measured)),
            f"makespan {number(makespan.predicted)}{unit} {one}, {number(makespan.measured)}{unit} {other}{ratio}",
            f"bubble {percent(bubble.predicted)} {one}, {percent(bubble.measured)} {other}",
        ]

    def _entries(self) -> list[legends.Entry]:
        one, other = self.words
        late = [found.lateness.late for found in self.found if len(found.lateness.late)]
        most, least = max((float(each.max()) for each in late), default=0.0), min((float(each.min()) for each in late), default=0.0)
        entries = [*legends.entries(self.timelines, ""), legends.Entry((), f"upper row (pale): {one}, lower row: {other}")]
        entries += [legends.Entry((LATE,), f"late, up to {signed(most)}")] if most > 0 else []
        entries += [legends.Entry((EARLY,), f"early, up to {signed(least)}")] if least < 0 else []
        if any(found.first is not None for found in self.found):
            entries.append(legends.Entry((), f"framed: the first action that is more than {percent(self.found[0].tolerance)} off"))
        return entries

    def _pair(self, panel: int, found: Differences) -> Band:
        ranks = found.measured.ranks
        height = _row_height(ranks)
        layout = _WIDE if height >= _LEAST_WIDE else _TIGHT

        def draw(axes: Axes) -> None:
            axes.set_ylim(ranks * layout.pitch, 0)
            _Pair(found, layout, self.inner * POINTS / self.end, height * POINTS, self.labels, panel, 7.0 * self.zoom).draw(axes)
            axes.set_xlim(0.0, self.end)
            self.rank_ticks(axes, np.arange(ranks) * layout.pitch + layout.middle, height * layout.pitch, "rank")

        return Band(ranks * layout.pitch * height, draw, timed=True)


@dataclass(frozen=True)
class _Pair:
    """Two timelines at a scale: points for a unit of time, and for a row."""

    found: Differences
    layout: _Layout
    unit_points: float
    row_points: float
    labels: bool
    panel: int
    size: float
    """Points of the text beside it."""

    def draw(self, axes: Axes) -> None:
        rows = ((self.found.predicted, 0.0, _PALE), (self.found.measured, self.layout.below, 0.0))
        for place, (timeline, shift, pale) in enumerate(rows):
            number_of = 2 * self.panel + place
            Bars(timeline, self.unit_points, self.row_points, self.labels, number_of, self.layout.pitch, shift, pale).draw(axes)
        if self.layout is _WIDE:
            self._draw_lines(axes)
        self._draw_lateness(axes)
        self._frame_first(axes)

    @cached_property
    def _ends(self) -> tuple[Floats, Floats]:
        """When each computation ends, predicted and measured."""
        measured = self.found.match.measured
        return measured.end - self.found.lateness.late, measured.end

    def _draw_lines(self, axes: Axes) -> None:
        """A line from where an action was predicted to end to where it ends; of many, some."""
        from matplotlib.collections import LineCollection

        rank, late = self.found.match.measured.rank, self.found.lateness.late
        room = max(int(self.found.measured.makespan * self.unit_points / _BETWEEN), 1)
        step = max(-(-int(np.bincount(rank, minlength=1).max()) // room), 1)
        of = np.arange(0, len(rank), step)
        lines, rows = np.empty((len(of), 2, 2)), rank[of] * self.layout.pitch
        lines[:, 0, 0], lines[:, 1, 0] = self._ends[0][of], self._ends[1][of]
        lines[:, 0, 1], lines[:, 1, 1] = rows + 0.95, rows + self.layout.below + 0.05
        apart = np.abs(late[of]) > self.found.allowed
        colours = np.where(apart, np.where(late[of] > 0, LATE, EARLY), FAINT)
        made = LineCollection(list(lines), colors=colours.tolist(), linewidths=0.5, clip_on=False)
        made.set_gid(f"lines-{self.panel}")
        axes.add_collection(made, autolim=False)

    def _draw_lateness(self, axes: Axes) -> None:
        """How late each rank is after each of its actions: above its line late, below it early."""
        waits, late = self.found.match.measured, self.found.lateness.late
        most, least = float(late.max(initial=0.0)), float(late.min(initial=0.0))
        scale = self.layout.strip_height / ((most - least) or 1.0)
        bounds = np.searchsorted(waits.rank, np.arange(self.found.measured.ranks + 1)).tolist()
        for rank, (low, high) in enumerate(pairwise(bounds)):
            base = rank * self.layout.pitch + self.layout.strip + most * scale
            times, values = np.append(0.0, waits.end[low:high]), np.append(0.0, late[low:high])
            for name, colour, part in (("late", LATE, values.clip(min=0)), ("early", EARLY, values.clip(max=0))):
                if part.any():
                    area = axes.fill_between(times, base, base - part * scale, step="post", color=colour, linewidth=0, clip_on=False)
                    area.set_gid(f"{name}-{self.panel}-{rank}")
            axes.plot([0, float(times[-1])], [base] * 2, color=FAINT, linewidth=0.4, clip_on=False)
            if self.row_points * self.layout.pitch > 1.3 * self.size and values[-1]:
                self._say(axes, (self.found.measured.makespan, base), signed(float(values[-1])))

    def _frame_first(self, axes: Axes) -> None:
        """A frame around the action at which the timelines part."""
        from matplotlib.patches import Rectangle

        first = self.found.first_place
        if first is None:
            return
        waits = self.found.match.measured
        start, length = float(waits.start[first]), float(waits.end[first] - waits.start[first])
        corner = (start, float(waits.rank[first]) * self.layout.pitch + self.layout.below + 0.02)
        frame = Rectangle(corner, length, 0.96, fill=False, edgecolor=INK, linewidth=1.2, clip_on=False)
        frame.set_gid(f"first-{self.panel}")
        axes.add_patch(frame)

    def _say(self, axes: Axes, place: tuple[float, float], text: str) -> None:
        axes.annotate(
            text, place, (4, 0), textcoords="offset points", va="center_baseline", fontsize=self.size, color=INK, annotation_clip=False
        )


def _row_height(ranks: int) -> float:
    """Inches: what labels take, less where there are many ranks."""
    return float(min(np.clip(1.6 / ranks, 0.13, 0.24), 12.0 / (_TIGHT.pitch * ranks)))
