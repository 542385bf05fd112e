"""Single plots: the candidates that a plan was chosen from, by time and memory, and how a loss falls from step to step."""

from __future__ import annotations

from collections.abc import Sequence
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
from penstock.text.units import SECONDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from penstock.planner.candidate import Candidate
    from penstock.planner.plan import Plan


_WIDTH, _HEIGHT = 7.2, 4.6
_MARK = 0.06
"""Inches: half the space that a mark takes."""
_Box = tuple[float, float, float, float]
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
        timed = [candidate for candidate in self.plan.alternatives if candidate.objective is not None and candidate.peak is not None]
        if not timed:
            raise UsageError("the plan has no alternatives to draw: it was made without them")
        return [candidate for candidate in timed if (candidate.objective or 0.0) <= _SLOWEST * self.plan.objective]

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
            return 1.0, label
        largest = max(candidate.peak or 0.0 for candidate in self.shown)
        return (2.0**30, f"{label} (GiB)") if largest >= 2.0**30 else (2.0**20, f"{label} (MiB)")

    def _memory(self, candidate: Candidate) -> float:
        peak = candidate.peak or 0.0
        if self.shares:
            return peak / (peak - (candidate.excess or 0.0))
        return peak / self.scale[0]

    @cached_property
    def time_unit(self) -> tuple[str, float]:
        """The unit of the time axis, and the factor to it."""
        unit = self.plan.profile.time_unit
        return choose_unit(self.plan.objective, unit) if unit in SECONDS else (unit, 1.0)

    def _time(self, candidate: Candidate) -> float:
        return (candidate.objective or 0.0) * self.time_unit[1]

    def figure(self) -> Figure:
        figure, axes = make_plot(_WIDTH, _HEIGHT)
        self._prepare(axes)
        self._limits(axes)
        self._marks(axes)
        figure.legend(fontsize=SMALL, frameon=False, loc="outside lower center", ncols=6)
        figure.draw_without_rendering()  # places the axes, so that points have a place on the sheet
        self._names(axes)
        return figure

    def _prepare(self, axes: Axes) -> None:
        from matplotlib.ticker import LogLocator

        plan = self.plan
        memories = [self._memory(candidate) for candidate in self.shown]
        if min(memories) > 0 and max(memories) > 3 * min(memories):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(lambda value, _: "")
        what = "makespan" if plan.barrier else "longest rank span"
        axes.set_xlabel(self.scale[1], fontsize=TEXT)
        axes.set_ylabel(f"predicted {what}{f' ({self.time_unit[0]})' if self.time_unit[0] else ''}", fontsize=TEXT)
        timed = sum(candidate.objective is not None for candidate in plan.alternatives)
        slower = f", of which {timed - len(self.shown)} are too slow to be shown" if timed > len(self.shown) else ""
        title = f"{plan.placement.ranks} ranks: {timed} of {len(plan.alternatives)} candidates were timed{slower}"
        axes.set_title(title, fontsize=TEXT, color=FAINT, loc="left")
        axes.margins(x=0.08, y=0.1)

    def _limits(self, axes: Axes) -> None:
        plan, limits = self.plan, self.plan.memory_limit
        axes.axhline(plan.overall_bound * self.time_unit[1], color=FAINT, linewidth=0.8, linestyle=":", label="bound of all candidates")
        if limits is not None:
            axes.axvline(1.0 if self.shares else limits[0] / self.scale[0], color=INK, linewidth=0.8, linestyle="--", label="memory limit")

    def _marks(self, axes: Axes) -> None:
        for kind in dict.fromkeys(candidate.placement for candidate in self.shown):
            colour = _COLOURS.get(kind, FAINT)
            for fits in (True, False):
                members = [candidate for candidate in self.shown if candidate.placement == kind and candidate.fits is fits]
                points = [self._memory(candidate) for candidate in members], [self._time(candidate) for candidate in members]
                if not members:
                    continue
                label = kind if fits or not any(candidate.placement == kind and candidate.fits for candidate in self.shown) else "_"
                axes.scatter(*points, s=22, facecolors=colour if fits else "none", edgecolors=colour, linewidths=0.9, label=label, zorder=3)
        chosen = self.plan.alternatives[self.plan.chosen]
        look: dict[str, Any] = {"s": 110, "facecolors": "none", "edgecolors": INK, "linewidths": 1.3, "zorder": 4}
        axes.scatter([self._memory(chosen)], [self._time(chosen)], **look, label="the plan")

    def _names(self, axes: Axes) -> None:
        """Name the plan and the Pareto front of time and memory, if there is room for the name."""
        chosen = self.plan.alternatives[self.plan.chosen]
        marks = (self._place(axes, candidate) for candidate in self.shown)
        taken: list[_Box] = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in marks]
        for line in axes.lines:
            left, bottom, right, top = (line.get_window_extent().get_points() / axes.figure.dpi).ravel().tolist()
            taken.append((left, bottom, right, top))
        for candidate in dict.fromkeys([chosen, *self._find_front()]):
            bold, name = candidate is chosen, f"{candidate.name}{', recomputed' if candidate.recompute else ''}"
            box = self._free_box(axes, candidate, text_width(name, SMALL, bold), taken)
            if box is None:
                continue
            taken.append(box)
            self._join(axes, candidate, box)
            look: dict[str, Any] = {"color": INK, "fontweight": "bold"} if bold else {"color": FAINT}
            axes.text(box[0], box[1], name, transform=axes.figure.dpi_scale_trans, fontsize=SMALL, **look)

    def _place(self, axes: Axes, candidate: Candidate) -> tuple[float, float]:
        """The place of a mark in inches."""
        x, y = axes.transData.transform((self._memory(candidate), self._time(candidate))) / axes.figure.dpi
        return float(x), float(y)

    def _free_box(self, axes: Axes, candidate: Candidate, width: float, taken: Sequence[_Box]) -> _Box | None:
        """The nearest free place for a name around its mark, inside the frame: left, bottom, right and top in inches."""
        (x, y), height = self._place(axes, candidate), SMALL / POINTS
        frame = axes.get_window_extent().bounds
        left, bottom, right, top = (edge / axes.figure.dpi for edge in (frame[0], frame[1], frame[0] + frame[2], frame[1] + frame[3]))
        for away in (_MARK, 2.5 * _MARK, 4 * _MARK, 6 * _MARK):
            lefts = (x + away, x - away - width, x - width / 2)
            bottoms = (y + away, y - away - height, y - height / 2)
            for low, start in ((low, start) for low in bottoms for start in lefts):
                box = (start, low, start + width, low + height)
                inside = left < box[0] and box[2] < right and bottom < box[1] and box[3] < top
                if inside and all(box[0] > b[2] or box[2] < b[0] or box[1] > b[3] or box[3] < b[1] for b in taken):
                    return box
        return None

    def _join(self, axes: Axes, candidate: Candidate, box: _Box) -> None:
        """Draw a line from a mark to its name if others are nearer."""
        x, y = self._place(axes, candidate)
        end = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
        if abs(end[0] - x) + abs(end[1] - y) > 2 * _MARK:
            axes.plot(
                [x, end[0]], [y, end[1]], color=FAINT, linewidth=0.5, transform=axes.figure.dpi_scale_trans, scalex=False, scaley=False
            )

    def _find_front(self) -> Sequence[Candidate]:
        """The candidates that no other beats in both time and memory."""
        front: list[Candidate] = []
        for candidate in sorted(self.shown, key=lambda candidate: (self._memory(candidate), self._time(candidate))):
            if not front or self._time(candidate) < self._time(front[-1]) * (1 - 1e-9):
                front.append(candidate)
        return front


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
