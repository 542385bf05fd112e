"""The candidates that a plan was chosen from: time against memory, one mark per candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.draw import palette
from penstock.draw.figures.canvas import FAINT, INK, POINTS, SMALL, TEXT, make_plot, render, text_width, use_style
from penstock.draw.save import suffix_of
from penstock.errors import UsageError
from penstock.ir.formats.csv_form import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from penstock.planner.candidate import Candidate
    from penstock.planner.plan import Plan

SUFFIXES = (".svg", ".png")
_WIDTH, _HEIGHT = 7.2, 4.6
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
    """Write the figure as `.svg` or `.png`."""
    suffix = suffix_of(path, SUFFIXES)
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
        return [candidate for candidate in timed if self._time(candidate) <= _SLOWEST * self.plan.objective]

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

    def _time(self, candidate: Candidate) -> float:
        return candidate.objective or 0.0

    def figure(self) -> Figure:
        figure, axes = make_plot(_WIDTH, _HEIGHT)
        self._prepare(axes)
        self._limits(axes)
        self._marks(axes)
        axes.legend(fontsize=SMALL, frameon=False, loc="upper right")
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
        axes.set_ylabel(f"{what}{f' ({plan.profile.time_unit})' if plan.profile.time_unit else ''}", fontsize=TEXT)
        slower = sum(candidate.objective is not None for candidate in plan.alternatives) - len(self.shown)
        left_out = f"; {slower} slower ones are not shown" if slower else ""
        axes.set_title(f"{plan.placement.ranks} ranks, {len(self.shown)} candidates{left_out}", fontsize=TEXT, color=FAINT, loc="left")

    def _limits(self, axes: Axes) -> None:
        plan, limits = self.plan, self.plan.memory_limit
        axes.axhline(plan.overall_bound, color=FAINT, linewidth=0.8, linestyle=":", label="bound of all candidates")
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
        axes.scatter(
            [self._memory(chosen)],
            [self._time(chosen)],
            s=110,
            facecolors="none",
            edgecolors=INK,
            linewidths=1.3,
            zorder=4,
            label="the plan",
        )

    def _names(self, axes: Axes) -> None:
        """Name the plan and the Pareto front of time and memory, if there is room for the name."""
        chosen = self.plan.alternatives[self.plan.chosen]
        taken: list[tuple[float, float, float, float]] = []
        for candidate in dict.fromkeys([chosen, *self._front()]):
            bold = candidate is chosen
            box = self._free_box(axes, candidate, text_width(candidate.name, SMALL, bold), taken)
            if box is None:
                continue
            taken.append(box)
            axes.text(
                box[0],
                box[1],
                candidate.name,
                transform=axes.figure.dpi_scale_trans,
                fontsize=SMALL,
                color=INK if bold else FAINT,
                fontweight="bold" if bold else "normal",
            )

    def _free_box(self, axes: Axes, candidate: Candidate, width: float, taken: Sequence[tuple[float, float, float, float]]) -> Any:
        """The first free place beside a mark: left, bottom, right and top in inches."""
        at = axes.transData.transform((self._memory(candidate), self._time(candidate))) / axes.figure.dpi
        height, away = SMALL / POINTS, 0.09
        lefts, bottoms = (at[0] + away, at[0] - away - width), (at[1] + 0.03, at[1] - height, at[1] + 0.12, at[1] - 0.12 - height)
        for left, bottom in ((left, bottom) for bottom in bottoms for left in lefts):
            box = (float(left), float(bottom), float(left + width), float(bottom + height))
            free = all(box[0] > b[2] or box[2] < b[0] or box[1] > b[3] or box[3] < b[1] for b in taken)
            if free and box[0] > 0.5 and box[2] < _WIDTH and box[1] > 0.45:
                return box
        return None

    def _front(self) -> Sequence[Candidate]:
        """The candidates that no other beats in both time and memory."""
        front: list[Candidate] = []
        for candidate in sorted(self.shown, key=lambda candidate: (self._memory(candidate), self._time(candidate))):
            if not front or self._time(candidate) < self._time(front[-1]) * (1 - 1e-9):
                front.append(candidate)
        return front
