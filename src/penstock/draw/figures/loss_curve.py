"""How a loss falls: one point per step, and a running mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.draw import palette
from penstock.draw.figures.canvas import INK, SMALL, TEXT, make_plot, use_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 7.2, 2.8
_WINDOW = 10
"""Steps per mean."""


def draw_loss_curve(values: Sequence[float], *, first: int = 1, name: str = "loss") -> Figure:
    """Draw the values by step, counted from `first`, as a matplotlib figure."""
    with use_style():
        from matplotlib.ticker import MaxNLocator

        figure, axes = make_plot(_WIDTH, _HEIGHT)
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
