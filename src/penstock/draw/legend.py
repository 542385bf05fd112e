"""The legend of a figure: a line of samples and what they mean, wrapped to the width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.draw.bars import is_mixed
from penstock.draw.canvas import IDLE, INK, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penstock.simulator.timeline import Timeline

SIZE = 7.5
"""Points."""
LINE = 0.19
"""Inches from one line to the next."""
_SAMPLE, _TALL, _PAD, _GAP = 0.14, 0.1, 0.05, 0.2
"""Inches: a sample's width and height, from it to its text, and between entries."""


@dataclass(frozen=True)
class Entry:
    """Samples side by side, and what they mean."""

    fills: tuple[str, ...]
    means: str

    @property
    def width(self) -> float:
        """Inches."""
        return len(self.fills) * _SAMPLE + (_PAD if self.fills else 0.0) + text_width(self.means, SIZE)


def entries(timelines: Sequence[Timeline], memory: str) -> list[Entry]:
    """What occurs in the timelines. `memory` is how memory is drawn: `curves`, `map`, `band` or `` for not at all."""
    chunks = max(timeline.table.chunks for timeline in timelines)
    found = [Entry(tuple(fills), means) for fills, means in _kinds(timelines, chunks)]
    found.append(Entry((IDLE,), "idle"))
    if chunks > 1:
        found.append(Entry((), f"shade: chunk 0 (dark) to {chunks - 1} (light)"))
    if any(is_mixed(timeline) for timeline in timelines):
        found.append(Entry((), "mixed colours: more boxes than can be seen"))
    return found + [Entry((fill,), means) for fill, means in _memory(timelines, memory)]


def _kinds(timelines: Sequence[Timeline], chunks: int) -> list[tuple[list[str], str]]:
    from penstock.draw.boxes import collective_boxes
    from penstock.draw.palette import OPTIMIZER, SHARDING, TONES, shaded
    from penstock.ir.kind import COMPUTE, Kind

    present = [kind for kind in COMPUTE if any(timeline.table.rows.is_kind(kind).any() for timeline in timelines)]
    found = [([shaded(TONES[kind], chunk, chunks).fill for chunk in range(chunks)], TONES[kind].means) for kind in present]
    if any(timeline.optimizer.any() for timeline in timelines):
        found.append(([OPTIMIZER.fill], OPTIMIZER.means))
    collective = {kind for timeline in timelines for kind in collective_boxes(timeline).kind.tolist()}
    for place, (kind, means) in enumerate(((Kind.REDUCE_GRAD, "gradients reduced"), (Kind.UNSHARD, "parameters gathered"))):
        if kind in collective:
            found.append(([shaded(SHARDING, place, 2).fill], means))
    return found


def _memory(timelines: Sequence[Timeline], memory: str) -> list[tuple[str, str]]:
    from penstock.draw.strip import FILLS, uses

    if memory == "curves":
        return [(FILLS[name], f"memory: {name}") for name in uses(timelines[0])]
    if memory == "band":
        return [(FILLS["receive buffers"], "memory, fullest rank"), (FILLS["activations"], "memory, emptiest rank")]
    return []


def wrapped(found: Sequence[Entry], width: float) -> list[list[Entry]]:
    """The entries in lines that are at most so many inches wide at the size of 1."""
    lines: list[list[Entry]] = [[]]
    for entry in found:
        if lines[-1] and sum(each.width + _GAP for each in lines[-1]) + entry.width > width:
            lines.append([])
        lines[-1].append(entry)
    return lines


def draw_legend(axes: Axes, lines: Sequence[Sequence[Entry]], zoom: float) -> None:
    """Write the lines; the axes count inches, zoomed, from the top left."""
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
