"""Shared parts of matplotlib figures: the style, empty plots, the width of text, and rendering."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from penstock.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, PAPER, IDLE = "#222222", "#666666", "#ffffff", "#ebebeb"
"""Text, secondary text, the background, and idle time. `recolour` replaces these and `GRID` for other backgrounds."""
GRID = "#eeeeee"
"""The lines behind a plot."""
POINTS = 72.0
"""Points per inch."""
TEXT, SMALL = 8.0, 7.0
"""Points: the sizes of text in plots."""

_STYLE = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "text.parse_math": False,  # a name may hold any character
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,  # journals refuse Type 3 fonts
    "svg.hashsalt": "penstock",  # the same figure has the same ids
}


@contextmanager
def use_style() -> Iterator[None]:
    """Apply our style for as long as a figure is drawn, whatever the user's own settings are."""
    try:
        from matplotlib import style
    except ImportError:
        raise MissingExtraError("drawing a picture", "matplotlib", "plot") from None
    with style.context(["default", _STYLE]):
        yield


@cache
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Give an upper bound on the width of a text in inches: letters are a little wider at low resolution."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return 1.05 * float(width) / POINTS


def make_plot(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure of so many inches with one plot: a faint grid, and no lines at the top and the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.tick_params(labelsize=SMALL, length=3, width=0.6)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def annotate(axes: Axes, place: tuple[float, float], text: str, size: float, va: str = "center_baseline") -> None:
    """Write a text to the right of a place."""
    axes.annotate(text, place, (4, 0), textcoords="offset points", va=va, fontsize=size, color=INK, annotation_clip=False)


def render(figure: Figure, form: str, dpi: float = 200.0) -> bytes:
    """Render the figure as `svg`, `pdf` or `png`, without anything that changes from one run to the next."""
    left_out = {"svg": ("Date", "Creator", "Format", "Type"), "pdf": ("CreationDate", "Creator", "Producer"), "png": ("Software",)}
    data = BytesIO()
    with use_style():
        figure.savefig(data, format=form, dpi=dpi, metadata=dict.fromkeys(left_out[form]))
    return data.getvalue()


def recolour(svg: str, *, ink: str, faint: str, paper: str, idle: str, grid: str) -> str:
    """Give an SVG figure of ours other colours for text, lines and idle time; its background becomes transparent.

    `paper` is the colour behind it, which also separates boxes. The fills of actions stay as they are, and so does the ink on them.
    """
    svg = re.sub(rf'(<path d="[^"]*" style=")fill: {PAPER}', r"\1fill: none", svg)
    for colour, other in ((INK, ink), (FAINT, faint), (IDLE, idle), (GRID, grid)):
        svg = svg.replace(f": {colour}", f": {other}")
    return svg.replace(f"stroke: {PAPER}", f"stroke: {paper}")
