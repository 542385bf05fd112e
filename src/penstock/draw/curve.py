"""How a loss falls: a value a step, and its mean over some steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.draw import palette
from penstock.draw.canvas import FAINT, GRID, INK, PAPER, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 7.2, 2.8
_TEXT, _SMALL = 8.0, 7.0
_WINDOW = 10
"""Steps that a point of the smooth line is the mean of."""


def curve(values: Sequence[float], *, first: int = 1, name: str = "loss") -> Figure:
    """The values by step, counted from `first`, as a matplotlib figure."""
    with style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        made = Figure(figsize=(_WIDTH, _HEIGHT), facecolor=PAPER, layout="constrained")
        FigureCanvasAgg(made)
        axes = made.add_subplot()
        steps = np.arange(first, first + len(values))
        axes.plot(steps, values, color=palette.FORWARD.fill, linewidth=1.0, marker="o", markersize=2.0, label="each step")
        window = min(_WINDOW, len(values) // 3)
        if window > 1:
            smooth = np.convolve(np.asarray(values, dtype=np.float64), np.ones(window) / window, mode="valid")
            axes.plot(steps[window - 1 :], smooth, color=INK, linewidth=1.4, label=f"mean of {window} steps")
        axes.set_xlabel("step", fontsize=_TEXT)
        axes.set_ylabel(name, fontsize=_TEXT)
        axes.tick_params(labelsize=_SMALL, length=3, width=0.6, color=FAINT)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(fontsize=_SMALL, frameon=False, loc="upper right")
        return made
