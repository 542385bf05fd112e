"""A figure a suite: each row's ratio with its spread on a logarithmic axis, and the limit beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from benchmarks.rows import Found, Row

from penstock.draw import palette
from penstock.draw.figures.canvas import FAINT, INK, PAPER, render, text_width, use_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLOT, _ROW, _TEXT, _EDGES = 4.2, 0.21, 7.0, 0.85
"""Inches of the axis and of a row, points of the texts, and inches above and below together."""
_MET, _RED, _FREE = palette.WEIGHT.fill, palette.BACKWARD.fill, palette.FORWARD.fill


def ratios(suite: Found, judged: bool = True) -> bytes:
    """The rows of a suite as SVG."""
    with use_style():
        from matplotlib.figure import Figure

        labels = [f"{row.case}  /  {row.against}" for row in suite.rows]
        margin = max(text_width(label, _TEXT) for label in labels) + 0.2
        width, height = margin + _PLOT + 0.2, _EDGES + _ROW * len(labels)
        figure = Figure(figsize=(width, height), facecolor=PAPER)
        axes = figure.add_axes((margin / width, 0.5 / height, _PLOT / width, 1 - _EDGES / height))
        _draw(axes, suite.rows, judged)
        axes.set_yticks(range(len(labels)), labels, fontsize=_TEXT)
        axes.set_title(f"{suite.name}: ours over the other, less is better", fontsize=_TEXT + 2, color=INK)
        return render(figure, "svg")


def _draw(axes: Axes, rows: list[Row], judged: bool) -> None:
    axes.set_xscale("log")
    for at, row in enumerate(rows):
        low, high = row.spread
        colour = {True: _MET, False: _RED, None: _FREE}[row.met if judged else None]
        axes.plot([low, high], [at, at], color=colour, linewidth=2.4, alpha=0.5, solid_capstyle="butt")
        axes.plot([row.ratio], [at], marker="o", markersize=4, color=colour)
        if judged and row.limit is not None:
            axes.plot([row.limit], [at], marker="|", markersize=9, markeredgewidth=1.4, color=INK)
    axes.axvline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(*_ends(rows, judged))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", which="both", labelsize=_TEXT)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, position: "")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", which="major", color=FAINT, alpha=0.25, linewidth=0.6)


def _ends(rows: list[Row], judged: bool) -> tuple[float, float]:
    """Whole powers of ten around everything that is shown."""
    shown = [value for row in rows for value in (*row.spread, row.ratio)] + [1.0]
    shown += [row.limit for row in rows if judged and row.limit is not None]
    return 10.0 ** math.floor(math.log10(min(shown) / 1.1)), 10.0 ** math.ceil(math.log10(max(shown) * 1.1))
