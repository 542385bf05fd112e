"""The legend of a figure: samples and what they mean, wrapped to the width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.draw.boxes import collective_boxes
from penstock.draw.figures.canvas import IDLE, INK, text_width
from penstock.draw.figures.memory import FILLS, uses
from penstock.draw.figures.rank_rows import is_mixed
from penstock.draw.palette import OPTIMIZER, SHARDING, TONES, shade
from penstock.ir.kind import COMPUTE, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penstock.simulator.timeline import Timeline

SIZE = 7.5
"""Points."""
LINE = 0.19
"""Inches per line."""
_SAMPLE, _TALL, _PAD, _GAP = 0.14, 0.1, 0.05, 0.2
"""Inches: the width and height of a sample, the space to its text, and the space between entries."""


@dataclass(frozen=True)
class LegendEntry:
    """Samples side by side, and what they mean."""

    fills: tuple[str, ...]
    means: str

    @property
    def width(self) -> float:
        """Inches."""
        return len(self.fills) * _SAMPLE + (_PAD if self.fills else 0.0) + text_width(self.means, SIZE)


def timeline_entries(timelines: Sequence[Timeline], memory: str) -> list[LegendEntry]:
    """Explain what occurs in the timelines. `memory` is how memory is drawn: `curves`, `map`, `band`, or empty for not at all."""
    chunks = max(timeline.table.chunks for timeline in timelines)
    entries = [LegendEntry(tuple(fills), means) for fills, means in _kinds(timelines, chunks)]
    entries.append(LegendEntry((IDLE,), "idle"))
    if chunks > 1:
        entries.append(LegendEntry((), f"shade: chunk 0 (dark) to {chunks - 1} (light)"))
    if any(is_mixed(timeline) for timeline in timelines):
        entries.append(LegendEntry((), "mixed colours: too many boxes to show each"))
    return entries + [LegendEntry((fill,), means) for fill, means in _memory(timelines, memory)]


def _kinds(timelines: Sequence[Timeline], chunks: int) -> list[tuple[list[str], str]]:
    present = [kind for kind in COMPUTE if any(timeline.table.rows.is_kind(kind).any() for timeline in timelines)]
    kinds = [([shade(TONES[kind], chunk, chunks).fill for chunk in range(chunks)], TONES[kind].means) for kind in present]
    if any(timeline.optimizer.any() for timeline in timelines):
        kinds.append(([OPTIMIZER.fill], OPTIMIZER.means))
    collective = {kind for timeline in timelines for kind in collective_boxes(timeline).kind.tolist()}
    for place, (kind, means) in enumerate(((Kind.REDUCE_GRAD, "gradients reduced"), (Kind.UNSHARD, "parameters gathered"))):
        if kind in collective:
            kinds.append(([shade(SHARDING, place, 2).fill], means))
    return kinds


def _memory(timelines: Sequence[Timeline], memory: str) -> list[tuple[str, str]]:
    if memory == "curves":
        return [(FILLS[name], f"memory: {name}") for name in uses(timelines[0])]
    if memory == "band":
        return [(FILLS["receive buffers"], "memory, fullest rank"), (FILLS["activations"], "memory, emptiest rank")]
    return []


def wrap_entries(entries: Sequence[LegendEntry], width: float) -> list[list[LegendEntry]]:
    """Arrange the entries in lines of at most so many inches, before zooming."""
    lines: list[list[LegendEntry]] = [[]]
    for entry in entries:
        if lines[-1] and sum(other.width + _GAP for other in lines[-1]) + entry.width > width:
            lines.append([])
        lines[-1].append(entry)
    return lines


def draw_legend(axes: Axes, lines: Sequence[Sequence[LegendEntry]], zoom: float) -> None:
    """Draw the lines; the axes count zoomed inches from the top left."""
    from matplotlib.patches import Rectangle

    for number, line in enumerate(lines):
        at, middle = 0.0, (number + 0.5) * LINE
        for entry in line:
            place = at
            for fill in entry.fills:
                axes.add_patch(Rectangle((place, middle - _TALL / 2), _SAMPLE, _TALL, facecolor=fill, linewidth=0, clip_on=False))
                place += _SAMPLE
            place += _PAD if entry.fills else 0.0
            axes.text(place, middle, entry.means, fontsize=SIZE * zoom, color=INK, va="center_baseline")
            at += entry.width + _GAP
