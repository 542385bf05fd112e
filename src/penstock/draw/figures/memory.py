"""The memory of ranks over time, drawn below their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.draw.figures.canvas import FAINT, annotate
from penstock.draw.time_slices import most_held
from penstock.ir.rows import Floats
from penstock.text.numbers import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penstock.simulator.memory import Curve
    from penstock.simulator.timeline import Timeline


FILLS = {"parameters": "#d9d2e9", "activations": "#5e4fa2", "weight stash": "#9a8bc9", "receive buffers": "#bfb4de"}
"""The uses of memory, from the bottom up, with their colours."""
SHADES = ("#f3f1f9", "#bfb4de", "#5e4fa2", "#2a1b57")
"""From empty to the highest peak."""
MOST_CURVES = 8
"""Up to this many ranks have a curve each; more are drawn as a map of colours."""
_HEADROOM = 0.12
"""The share of a row above the highest curve."""


def layers(curve: Curve) -> dict[str, Floats]:
    """Split the memory of a rank by use, from each of its times on; the static part counts as parameters."""
    return {name: curve.held[name] + (curve.static if name == "parameters" else 0.0) for name in FILLS}


def uses(timeline: Timeline) -> list[str]:
    """List the uses that occur."""
    curves = [layers(timeline.memory(rank)) for rank in range(timeline.ranks)]
    return [name for name in FILLS if any(curve[name].any() for curve in curves)]


def draw_curves(axes: Axes, timeline: Timeline, size: float) -> None:
    """Draw one curve per rank, all to one scale, with its peak at the right; row r reaches from r to r + 1."""
    most = max(timeline.peak_memory) or 1.0
    for rank in range(timeline.ranks):
        curve = timeline.memory(rank)
        times = np.concatenate(([0.0], curve.times, [timeline.makespan]))
        base = np.zeros(len(times))
        for name, held in layers(curve).items():
            first, last = (curve.static if name == "parameters" else 0.0), held[-1] if len(held) else 0.0
            top = base + np.concatenate(([first], held, [last]))
            if (top > base).any():
                low, high = (rank + 1 - level / most * (1 - _HEADROOM) for level in (base, top))
                axes.fill_between(times, low, high, step="post", color=FILLS[name], linewidth=0, clip_on=False)
            base = top
        axes.plot([0, timeline.makespan], [rank + 1] * 2, color=FAINT, linewidth=0.4, clip_on=False)
        annotate(axes, (timeline.makespan, rank + 0.5), format_number(timeline.peak_memory[rank]), size)
    annotate(axes, (timeline.makespan, 0.0), "peak", size, va="bottom")


def draw_map(axes: Axes, scale: Axes, timeline: Timeline, columns: int, size: float) -> None:
    """Draw one row per rank, darker for more memory, and the scale of the colours."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("memory", SHADES)
    most = max(timeline.peak_memory) or 1.0
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    held = np.array([most_held(timeline.memory(rank), edges) for rank in range(timeline.ranks)])
    extent = (0.0, timeline.makespan, float(timeline.ranks), 0.0)
    axes.imshow(held, extent=extent, aspect="auto", interpolation="nearest", cmap=colours, vmin=0.0, vmax=most)
    scale.imshow(np.linspace(most, 0.0, 64)[:, None], extent=(0, 1, 0, most), aspect="auto", cmap=colours, vmin=0.0, vmax=most)
    scale.set_xticks([])
    scale.set_yticks([0.0, most], ["0", format_number(most)], fontsize=size)
    scale.yaxis.tick_right()
    scale.tick_params(length=0, pad=2)
    for side in scale.spines.values():
        side.set_visible(False)


def draw_band(axes: Axes, timeline: Timeline, most: float, columns: int, size: float) -> None:
    """Draw the fullest rank in a light colour and the emptiest in a dark one, from 0 to `most`."""
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    held = np.array([most_held(timeline.memory(rank), edges) for rank in range(timeline.ranks)])
    for level, fill in ((held.max(axis=0), FILLS["receive buffers"]), (held.min(axis=0), FILLS["activations"])):
        axes.stairs(level, edges, fill=True, color=fill, clip_on=False)
    axes.plot([0, timeline.makespan], [0, 0], color=FAINT, linewidth=0.4, clip_on=False)
    axes.set_ylim(0.0, most * (1 + _HEADROOM))
    peak = max(timeline.peak_memory)
    annotate(axes, (timeline.makespan, peak), format_number(peak), size)
