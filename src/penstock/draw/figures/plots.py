"""Single plots: the candidates that a plan was chosen from, by time and memory, and how a loss falls from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.draw import palette
from penstock.draw.figures.canvas import FAINT, INK, POINTS, SMALL, TEXT, make_plot, render, text_width, use_style
from penstock.draw.save import FIGURES, suffix_of
from penstock.draw.summary import choose_unit
from penstock.errors import UsageError
from penstock.ir.formats.csv_form import write_whole
from penstock.text.numbers import format_count
from penstock.text.units import SECONDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from penstock.planner.candidate import Candidate
    from penstock.planner.plan import Plan


_WIDTH, _HEIGHT = 7.2, 4.6
_MARK = 0.06
"""Inches: half the space that a mark takes."""
_NEAR = tuple(_MARK * away for away in (1.0, 2.5, 4.0, 6.0))
"""Inches between a mark and its name."""
_ANYWHERE = tuple(_MARK * (1.0 + 1.5 * step) for step in range(40))
_Box = tuple[float, float, float, float]
_Line = tuple[tuple[float, float], tuple[float, float]]
_UNKNOWN_UNIT = "in the profile's unit"
_SLOWEST = 1.5
"""Candidates that are slower than this many times the plan are not shown."""
_COLOURS = {
    "linear": palette.FORWARD.fill,
    "looped": palette.INPUT.fill,
    "v": palette.WEIGHT.fill,
    "wave": palette.OVERLAP.fill,
    "bidirectional": palette.BACKWARD.fill,
}


def save_tradeoff(plan: Plan, path: str | PathLike[str]) -> None:
    """Write the figure as `.svg`, `.pdf` or `.png`."""
    suffix = suffix_of(path, FIGURES)
    write_whole(path, render(draw_tradeoff(plan), suffix.removeprefix(".")))


def draw_tradeoff(plan: Plan) -> Figure:
    """Draw each timed candidate by the memory of its fullest rank and its time; candidates that do not fit are hollow."""
    with use_style():
        return _Plot(plan).figure()


@dataclass(frozen=True)
class _Plot:
    plan: Plan

    @cached_property
    def shown(self) -> list[Candidate]:
        """The candidates that were timed and are not far too slow."""
        if not self.timed:
            raise UsageError("the plan has no alternatives to draw: it was made without them")
        return [candidate for candidate in self.timed if (candidate.objective or 0.0) <= _SLOWEST * self.plan.objective]

    @cached_property
    def timed(self) -> list[Candidate]:
        return [candidate for candidate in self.plan.candidates if candidate.objective is not None and candidate.peak is not None]

    @cached_property
    def shares(self) -> bool:
        """Whether memory is shown as a share of the limit, because ranks have different limits."""
        return len(set(self.plan.memory_limit or ())) > 1

    @cached_property
    def scale(self) -> tuple[float, str]:
        """The divisor of a memory, and the name of the axis."""
        if self.shares:
            return 1.0, "peak memory, as a share of the rank's limit"
        label = "peak memory of the fullest rank"
        if not self.plan.in_bytes:
            return 1.0, f"{label} ({_UNKNOWN_UNIT})"
        largest = max(candidate.peak or 0.0 for candidate in self.shown)
        return (2.0**30, f"{label} (GiB)") if largest >= 2.0**30 else (2.0**20, f"{label} (MiB)")

    def _pick_memory(self, candidate: Candidate) -> float:
        peak = candidate.peak or 0.0
        if self.shares:
            return peak / (peak - (candidate.excess or 0.0))
        return peak / self.scale[0]

    @cached_property
    def time_unit(self) -> tuple[str, float]:
        """The unit of the time axis, and the factor to it."""
        unit = self.plan.profile.time_unit
        return choose_unit(self.plan.objective, unit) if unit in SECONDS else (unit or _UNKNOWN_UNIT, 1.0)

    def _time(self, candidate: Candidate) -> float:
        return (candidate.objective or 0.0) * self.time_unit[1]

    def figure(self) -> Figure:
        figure, axes = make_plot(_WIDTH, _HEIGHT)
        self._prepare(axes)
        self._draw_limits(axes)
        self._draw_marks(axes)
        self._draw_legend(figure, axes)
        figure.draw_without_rendering()  # places the axes, so that points have a place on the sheet
        self._draw_names(axes)
        return figure

    def _prepare(self, axes: Axes) -> None:
        from matplotlib.ticker import LogLocator

        plan = self.plan
        memories = [self._pick_memory(candidate) for candidate in self.shown]
        if min(memories) > 0 and max(memories) > 3 * min(memories):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(lambda value, _: "")
        what = "makespan" if plan.barrier else "longest rank span"
        axes.set_xlabel(self.scale[1], fontsize=TEXT)
        axes.set_ylabel(f"predicted {what} ({self.time_unit[0]})", fontsize=TEXT)
        timed, slow = len(self.timed), len(self.timed) - len(self.shown)
        slower = f", {slow} of them too slow to be shown" if slow else ""
        tried = format_count(len(plan.candidates), "candidate")
        title = f"{format_count(plan.placement.ranks, 'rank')}: {tried}, {timed} timed{slower}"
        axes.set_title(title, fontsize=TEXT, color=FAINT, loc="left")
        axes.margins(x=0.08, y=0.1)

    def _draw_limits(self, axes: Axes) -> None:
        plan, limits = self.plan, self.plan.memory_limit
        axes.axhline(plan.overall_bound * self.time_unit[1], color=FAINT, linewidth=0.8, linestyle=":", label="bound of all candidates")
        if limits is not None:
            axes.axvline(1.0 if self.shares else limits[0] / self.scale[0], color=INK, linewidth=0.8, linestyle="--", label="memory limit")

    def _draw_marks(self, axes: Axes) -> None:
        for kind in dict.fromkeys(candidate.placement for candidate in self.shown):
            colour = _COLOURS.get(kind, FAINT)
            for fits in (True, False):
                members = [candidate for candidate in self.shown if candidate.placement == kind and candidate.fits is fits]
                points = [self._pick_memory(candidate) for candidate in members], [self._time(candidate) for candidate in members]
                if not members:
                    continue
                label = kind if fits or not any(candidate.placement == kind and candidate.fits for candidate in self.shown) else "_"
                axes.scatter(*points, s=22, facecolors=colour if fits else "none", edgecolors=colour, linewidths=0.9, label=label, zorder=3)
        chosen = self.plan.alternatives[self.plan.chosen]
        look: dict[str, Any] = {"s": 110, "facecolors": "none", "edgecolors": INK, "linewidths": 1.3, "zorder": 4}
        axes.scatter([self._pick_memory(chosen)], [self._time(chosen)], **look, label=f"the plan: {_format_name(chosen)}")

    def _draw_legend(self, figure: Figure, axes: Axes) -> None:
        from matplotlib.lines import Line2D

        handles = axes.get_legend_handles_labels()[0]
        if not all(candidate.fits for candidate in self.shown):
            look: dict[str, Any] = {
                "linestyle": "none",
                "marker": "o",
                "markersize": 4.7,
                "markerfacecolor": "none",
                "markeredgecolor": FAINT,
            }
            handles.insert(-1, Line2D([], [], **look, label="over the memory limit"))
        figure.legend(handles=handles, fontsize=SMALL, frameon=False, loc="outside lower center", ncols=4)

    def _draw_names(self, axes: Axes) -> None:
        """Name the plan, and the Pareto front of time and memory as far as there is room."""
        chosen = self.plan.alternatives[self.plan.chosen]
        marks = (self._place(axes, candidate) for candidate in self.shown)
        taken: list[_Box] = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in marks]
        for line in axes.lines:
            left, bottom, right, top = (line.get_window_extent().get_points() / axes.figure.dpi).ravel().tolist()
            taken.append((left, bottom, right, top))
        leaders: list[_Line] = []
        for candidate in dict.fromkeys([chosen, *self._find_front()]):
            bold, name = candidate is chosen, _format_name(candidate)
            mark = self._place(axes, candidate)
            boxes = self._list_free_boxes(axes, mark, text_width(name, SMALL, bold), taken, _ANYWHERE if bold else _NEAR)
            box = next((box for box in boxes if not any(_do_cross(_find_leader(mark, box), other) for other in leaders)), None)
            if box is None:
                continue
            taken.append(box)
            leaders.append(_find_leader(mark, box))
            self._draw_leader(axes, leaders[-1])
            look: dict[str, Any] = {"color": INK, "fontweight": "bold"} if bold else {"color": FAINT}
            x, look["ha"] = (box[2], "right") if box[2] <= mark[0] else (box[0], "left")
            axes.text(x, box[1], name, transform=axes.figure.dpi_scale_trans, fontsize=SMALL, **look)

    def _place(self, axes: Axes, candidate: Candidate) -> tuple[float, float]:
        """The place of a mark in inches."""
        x, y = axes.transData.transform((self._pick_memory(candidate), self._time(candidate))) / axes.figure.dpi
        return float(x), float(y)

    def _list_free_boxes(
        self, axes: Axes, mark: tuple[float, float], width: float, taken: Sequence[_Box], distances: Sequence[float]
    ) -> Iterator[_Box]:
        """Free places for a name around its mark, inside the frame, the nearest first: left, bottom, right and top in inches."""
        (x, y), height = mark, SMALL / POINTS
        frame = axes.get_window_extent().bounds
        left, bottom, right, top = (edge / axes.figure.dpi for edge in (frame[0], frame[1], frame[0] + frame[2], frame[1] + frame[3]))
        for away in distances:
            lefts = (x + away, x - away - width, x - width / 2, x, x - width)
            bottoms = (y + away, y - away - height, y - height / 2)
            for low, start in ((low, start) for low in bottoms for start in lefts):
                box = (start, low, start + width, low + height)
                inside = left < box[0] and box[2] < right and bottom < box[1] and box[3] < top
                if inside and all(box[0] > b[2] or box[2] < b[0] or box[1] > b[3] or box[3] < b[1] for b in taken):
                    yield box

    def _draw_leader(self, axes: Axes, line: _Line) -> None:
        """Draw the line from a mark to its name if others are nearer."""
        (x, y), (end_x, end_y) = line
        if abs(end_x - x) + abs(end_y - y) > 2 * _MARK:
            look: dict[str, Any] = {"color": FAINT, "linewidth": 0.5, "scalex": False, "scaley": False}
            axes.plot([x, end_x], [y, end_y], transform=axes.figure.dpi_scale_trans, **look)

    def _find_front(self) -> Sequence[Candidate]:
        """The candidates that no other beats in both time and memory."""
        front: list[Candidate] = []
        for candidate in sorted(self.shown, key=lambda candidate: (self._pick_memory(candidate), self._time(candidate))):
            if not front or self._time(candidate) < self._time(front[-1]) * (1 - 1e-9):
                front.append(candidate)
        return front


def _find_leader(mark: tuple[float, float], box: _Box) -> _Line:
    """The line from a mark to the nearest point of its name."""
    return mark, (min(max(mark[0], box[0]), box[2]), min(max(mark[1], box[1]), box[3]))


def _do_cross(one: _Line, other: _Line) -> bool:
    """
    >>> _do_cross(((0, 0), (2, 2)), ((0, 2), (2, 0))), _do_cross(((0, 0), (1, 0)), ((0, 1), (1, 1)))
    (True, False)
    """

    def side(line: _Line, point: tuple[float, float]) -> float:
        (x, y), (end_x, end_y) = line
        return (end_x - x) * (point[1] - y) - (end_y - y) * (point[0] - x)

    return side(one, other[0]) * side(one, other[1]) < 0 and side(other, one[0]) * side(other, one[1]) < 0


def _format_name(candidate: Candidate) -> str:
    return f"{candidate.name}{', recomputed' if candidate.recompute else ''}"


_CURVE_WIDTH, _CURVE_HEIGHT = 7.2, 2.8
_WINDOW = 10
"""Steps per mean."""


def draw_loss_curve(values: Sequence[float], *, first: int = 1, name: str = "loss") -> Figure:
    """Draw the values by step, counted from `first`, as a matplotlib figure."""
    with use_style():
        from matplotlib.ticker import MaxNLocator

        figure, axes = make_plot(_CURVE_WIDTH, _CURVE_HEIGHT)
        steps = np.arange(first, first + len(values))
        axes.plot(steps, values, color=palette.FORWARD.fill, linewidth=1.0, marker="o", markersize=2.0, label="each step")
        window = min(_WINDOW, len(values) // 3)
        if window > 1:
            smooth = np.convolve(np.asarray(values, dtype=np.float64), np.ones(window) / window, mode="valid")
            axes.plot(steps[window - 1 :], smooth, color=INK, linewidth=1.4, label=f"mean of {window} steps")
        axes.set_xlabel("step", fontsize=TEXT)
        axes.set_ylabel(name, fontsize=TEXT)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=SMALL, frameon=False, loc="upper right")
        return figure
