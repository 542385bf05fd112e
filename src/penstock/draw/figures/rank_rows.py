"""The rows of a figure, one per rank: its actions as boxes, or as mixed colours if there are too many to see, and its memory over time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import (
    Boxes,
    compute_boxes,
    copy_boxes,
    find_most_held,
    list_classes,
    list_collective_boxes,
    list_optimizer_boxes,
    make_widest_label,
    shares,
)
from penstock.draw.figures.canvas import FAINT, IDLE, PAPER, POINTS, annotate, text_width
from penstock.draw.palette import HOST, MEETING, OPTIMIZER, SHARDING, TONES, Tone, lighten, rgb, shade
from penstock.draw.summary import format_memory
from penstock.ir.kind import COPIES, JOINS, WORK, Kind
from penstock.ir.rows import Floats, Ints
from penstock.simulator.memory import Curve
from penstock.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Image = NDArray[np.uint8]

MOST_BOXES = 60_000
"""Above this many boxes, only mixed colours are drawn: single boxes could not be seen."""
MOST_LINES = 3000
"""Lines of an image of mixed colours in which rows are set apart."""
LEAST_LABEL, MOST_LABEL = 4.5, 7.5
_PAD = 1.6
"""Points: the smallest and largest label, and the space beside a label."""
_MARGIN, _STRIP = 0.08, 0.78
"""As shares of a row's height: the margin at its top and bottom, and where the strip of collectives and copies begins."""
_THIN = 5.0
"""Points: thinner rows have no gap between them."""


def is_mixed(timeline: Timeline) -> bool:
    """Whether there are too many boxes to draw each of them."""
    return int(timeline.table.rows.is_kind(*WORK).sum()) > MOST_BOXES


@dataclass(frozen=True)
class RankRows:
    """The rows of a timeline, drawn to scale: `unit_points` per unit of time, `row_points` per row."""

    timeline: Timeline
    unit_points: float
    row_points: float
    labels: bool = True
    panel: int = 0
    """The index of the timeline in the figure."""
    pitch: float = 1.0
    shift: float = 0.0
    """The distance between two rows and the start of the first one, in heights of a row."""
    pale: float = 0.0
    """The share of white in the colours."""

    @cached_property
    def boxes(self) -> Boxes:
        return compute_boxes(self.timeline)

    @cached_property
    def collectives(self) -> Boxes:
        return list_collective_boxes(self.timeline)

    @cached_property
    def copies(self) -> Boxes:
        return copy_boxes(self.timeline)

    def _id(self, name: str) -> str:
        """The id of a collection of boxes in an SVG file."""
        return f"boxes-{self.panel}-{name}"

    @property
    def _top(self) -> float:
        """The top of the boxes in their row."""
        return _MARGIN if self.row_points >= _THIN else 0.0

    @property
    def _floor(self) -> float:
        """The bottom of the compute boxes in their row."""
        return _STRIP - 0.06 if len(self.collectives) + len(self.copies) else 1 - self._top

    def draw(self, axes: Axes) -> None:
        """Draw the rows; row r has a height of 1 and begins at `r * pitch + shift`."""
        if is_mixed(self.timeline):
            self._draw_mixed(axes)
        else:
            rows, none = self._rows(np.arange(self.timeline.ranks)), np.zeros(self.timeline.ranks)
            _add(axes, (rows, none, none + self.timeline.makespan), (self._top, self._floor), fill=IDLE, name=self._id("idle"))
            self._draw_boxes(axes)
        self._draw_collectives(axes)
        self._draw_copies(axes)
        rank, start, end = list_optimizer_boxes(self.timeline)
        fill = lighten(OPTIMIZER, self.pale).fill
        _add(axes, (self._rows(rank), start, end), (self._top, self._floor), fill=fill, name=self._id("optimizer"))

    def _draw_boxes(self, axes: Axes) -> None:
        boxes, chunks = self.boxes, self.timeline.table.chunks
        top, bottom = self._bounds(boxes)
        line = self._line_width(boxes)
        fits = self._label_size()
        for kind, chunk in sorted(set(zip(boxes.kind.tolist(), boxes.chunk.tolist(), strict=True))):
            tone = lighten(shade(TONES[Kind(kind)], chunk, chunks), self.pale)
            of = np.flatnonzero((boxes.kind == kind) & (boxes.chunk == chunk))
            places = self._rows(boxes.rank[of]), boxes.start[of], boxes.end[of]
            _add(axes, places, (top[of], bottom[of]), fill=tone.fill, name=self._id(f"{tone.sample}{chunk}"), line=line)
            if fits is not None:
                self._label(axes, of, tone, (top, bottom), fits)

    def _bounds(self, boxes: Boxes) -> tuple[Floats, Floats]:
        """Top and bottom of each box in its row; boxes that run together share the height."""
        height = (self._floor - self._top) / boxes.parts
        return self._top + boxes.part * height, self._top + (boxes.part + 1) * height

    def _line_width(self, boxes: Boxes) -> float:
        """The width of the lines between boxes: thinner for narrow boxes, 0 if lines would cover them."""
        real = boxes.length[boxes.length > 0]
        line = min(0.6, 0.1 * float(np.quantile(real, 0.05)) * self.unit_points) if len(real) else 0.0
        return line if line >= 0.15 else 0.0

    def _label_size(self) -> float | None:
        """One size for all labels, the largest at which the most of them fit; None for no labels at all."""
        if not self.labels or not len(self.boxes):
            return None
        boxes = self.boxes
        heights = (self._floor - self._top) / boxes.parts * self.row_points
        widths = boxes.length * self.unit_points
        room = np.minimum(heights / 1.25, (widths - _PAD) / (text_width(self._widest, 1.0) * POINTS))
        roomy = room[room >= LEAST_LABEL]
        return float(np.clip(roomy.min(), LEAST_LABEL, MOST_LABEL)) if len(roomy) else None

    @property
    def _widest(self) -> str:
        """A text as wide as any label, so that all boxes of a kind are labelled or none."""
        return make_widest_label(self.timeline.table)

    def _label(self, axes: Axes, of: Ints, tone: Tone, bounds: tuple[Floats, Floats], size: float) -> None:
        boxes, (top, bottom) = self.boxes, bounds
        middles = self._rows(boxes.rank) + (top + bottom) / 2
        room = text_width(self._widest, size) * POINTS + 0.99 * _PAD
        for box in of[(boxes.length[of] * self.unit_points >= room) & ((bottom - top)[of] * self.row_points >= 1.24 * size)].tolist():
            place, text = (boxes.start[box] + boxes.end[box]) / 2, boxes.name_unit(box)
            axes.text(place, middles[box], text, color=tone.ink, fontsize=size, ha="center", va="center_baseline")

    def _draw_collectives(self, axes: Axes) -> None:
        boxes = self.collectives
        for place, kind in enumerate((Kind.REDUCE_GRAD, Kind.UNSHARD)):
            of = boxes.kind == kind
            if of.any():
                places = self._rows(boxes.rank[of]), boxes.start[of], boxes.end[of]
                fill = lighten(shade(SHARDING, place, 2), self.pale).fill
                _add(axes, places, (_STRIP, 1 - self._top), fill=fill, name=self._id(kind.name))
        for place, kind in enumerate(JOINS):
            of = boxes.kind == kind
            if of.any():
                places = self._rows(boxes.rank[of]), boxes.start[of], boxes.end[of]
                fill = lighten(shade(MEETING, place, 2), self.pale).fill
                _add(axes, places, (_STRIP, 1 - self._top), fill=fill, name=self._id(kind.name))

    def _draw_copies(self, axes: Axes) -> None:
        """Draw copies to the host in the upper half of the strip, and back from it in the lower half."""
        boxes, height = self.copies, (1 - self._top - _STRIP) / 2
        for place, kind in enumerate(COPIES):
            of = boxes.kind == kind
            if of.any():
                places, top = (self._rows(boxes.rank[of]), boxes.start[of], boxes.end[of]), _STRIP + place * height
                fill = lighten(shade(HOST, place, 2), self.pale).fill
                _add(axes, places, (top, top + height), fill=fill, name=self._id(kind.name))

    def _draw_mixed(self, axes: Axes) -> None:
        columns = max(int(self.timeline.makespan * self.unit_points * 3), 1)
        image, ranks = mix_colours(self.timeline, self.boxes, columns), self.timeline.ranks
        image = np.asarray(image + (255 - image) * self.pale, dtype=np.uint8)
        if self.pitch == 1.0 and not self.shift:
            self._show(axes, space_rows(image, ranks, (self._top, self._floor)), (ranks, 0.0), "mixed")
            return
        for rank, (lines, row) in enumerate(zip(np.split(image, ranks), self._rows(np.arange(ranks)), strict=True)):
            self._show(axes, lines, (row + self._floor, row + self._top), f"mixed-{rank}")

    def _show(self, axes: Axes, image: Image, bounds: tuple[float, float], name: str) -> None:
        """Draw an image between two bounds."""
        extent = (0.0, self.timeline.makespan, *bounds)
        axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest").set_gid(self._id(name))

    def _rows(self, rank: Ints) -> Floats:
        """The tops of the rows of ranks."""
        return np.asarray(rank * self.pitch + self.shift, dtype=np.float64)


def mix_colours(timeline: Timeline, boxes: Boxes, columns: int) -> Image:
    """Mix the colours of what runs in each slice of time: an RGB image with one line per rank (or per part that runs together)."""
    chunks = timeline.table.chunks
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    fills = np.array([_unit_rgb(shade(TONES[kind], chunk, chunks).fill) for kind in WORK for chunk in range(chunks)])
    lanes, parts = list_classes(boxes.kind) * chunks + boxes.chunk, int(boxes.parts.max(initial=1))
    image = np.empty((timeline.ranks * parts, columns, 3))
    for part in range(parts):
        of = (boxes.part == part) | (boxes.parts == 1)
        shape = (timeline.ranks, len(fills))
        busy = shares(boxes.rank[of], lanes[of], boxes.start[of], boxes.end[of], edges, shape=shape) / np.diff(edges)
        idle = 1 - busy.sum(axis=1)
        image[part::parts] = np.einsum("rkc,kx->rcx", busy, fills) + idle[..., None] * _unit_rgb(IDLE)
    return np.asarray((image.clip(0, 1) * 255).round(), dtype=np.uint8)


def space_rows(image: Image, ranks: int, bounds: tuple[float, float]) -> Image:
    """Set rows apart: an RGBA image that is transparent outside the bounds of each row, if there are enough lines to show it."""
    parts = len(image) // ranks
    fine = min(24, MOST_LINES // ranks) // parts * parts
    if fine < 8 or bounds == (0.0, 1.0):
        return image
    rank, height = np.divmod((np.arange(ranks * fine) + 0.5) / fine, 1)
    inside = (height >= bounds[0]) & (height < bounds[1])
    part = ((height - bounds[0]) / (bounds[1] - bounds[0]) * parts).clip(0, parts - 1).astype(np.int64)
    opaque = np.broadcast_to(inside[:, None] * np.uint8(255), (len(inside), image.shape[1]))
    return np.dstack((image[rank.astype(np.int64) * parts + part], opaque))


def _unit_rgb(colour: str) -> Floats:
    return np.frombuffer(rgb(colour), dtype=np.uint8) / 255


_Bounds = tuple[Floats | float, Floats | float]


def _add(axes: Axes, boxes: tuple[Floats, Floats, Floats], bounds: _Bounds, *, fill: str, name: str, line: float = 0.0) -> None:
    """Add one collection of boxes, given by the tops of their rows, their start and end, and their bounds within the row.

    `name` is its id in an SVG file, and `line` the width of the lines between boxes in points.
    """
    from matplotlib.collections import PolyCollection

    row, start, end = boxes
    corners = np.empty((len(row), 4, 2))
    corners[:, :2, 0], corners[:, 2:, 0] = start[:, None], end[:, None]
    corners[:, (0, 3), 1] = (row + bounds[0])[:, None]
    corners[:, (1, 2), 1] = (row + bounds[1])[:, None]
    edges = PAPER if line else "none"
    collection = PolyCollection(list(corners), facecolors=fill, edgecolors=edges, linewidths=line, clip_on=False)
    collection.set_gid(name)
    axes.add_collection(collection, autolim=False)


# Memory ---------------------------------------------------------------------------------------------------------------


FILLS = {"parameters": "#d9d2e9", "activations": "#5e4fa2", "weight stash": "#9a8bc9", "receive buffers": "#bfb4de"}
"""The uses of memory, from the bottom up, with their colours."""
SHADES = ("#f3f1f9", "#bfb4de", "#5e4fa2", "#2a1b57")
"""From empty to the highest peak."""
MOST_CURVES = 8
"""Up to this many ranks have a curve each; more are drawn as a map of colours."""
_HEADROOM = 0.12
"""The share of a row above the highest curve."""


@dataclass(frozen=True)
class PeakLabels:
    """How peaks are written: their size in points, and whether memory is in bytes."""

    points: float
    in_bytes: bool

    def text(self, value: float) -> str:
        return format_memory(value, self.in_bytes)


def layers(curve: Curve) -> dict[str, Floats]:
    """Split the memory of a rank by use, from each of its times on; the static part counts as parameters."""
    return {name: curve.held[name] + (curve.static if name == "parameters" else 0.0) for name in FILLS}


def list_uses(timeline: Timeline) -> list[str]:
    """List the uses that occur."""
    curves = [layers(timeline.memory(rank)) for rank in range(timeline.ranks)]
    return [name for name in FILLS if any(curve[name].any() for curve in curves)]


def draw_curves(axes: Axes, timeline: Timeline, labels: PeakLabels) -> None:
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
        annotate(axes, (timeline.makespan, rank + 0.5), labels.text(timeline.peak_memory[rank]), labels.points)
    annotate(axes, (timeline.makespan, 0.0), "peak", labels.points, va="bottom")


def draw_map(axes: Axes, scale: Axes, timeline: Timeline, columns: int, labels: PeakLabels) -> None:
    """Draw one row per rank, darker for more memory, and the scale of the colours."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("memory", SHADES)
    most = max(timeline.peak_memory) or 1.0
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    held = np.array([find_most_held(timeline.memory(rank), edges) for rank in range(timeline.ranks)])
    extent = (0.0, timeline.makespan, float(timeline.ranks), 0.0)
    axes.imshow(held, extent=extent, aspect="auto", interpolation="nearest", cmap=colours, vmin=0.0, vmax=most)
    scale.imshow(np.linspace(most, 0.0, 64)[:, None], extent=(0, 1, 0, most), aspect="auto", cmap=colours, vmin=0.0, vmax=most)
    scale.set_xticks([])
    scale.set_yticks([0.0, most], ["0", labels.text(most)], fontsize=labels.points)
    scale.yaxis.tick_right()
    scale.tick_params(length=0, pad=2)
    for side in scale.spines.values():
        side.set_visible(False)


def draw_band(axes: Axes, timeline: Timeline, most: float, columns: int, labels: PeakLabels) -> None:
    """Draw the fullest rank in a light colour and the emptiest in a dark one, from 0 to `most`."""
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    held = np.array([find_most_held(timeline.memory(rank), edges) for rank in range(timeline.ranks)])
    for level, fill in ((held.max(axis=0), FILLS["receive buffers"]), (held.min(axis=0), FILLS["activations"])):
        axes.stairs(level, edges, fill=True, color=fill, clip_on=False)
    axes.plot([0, timeline.makespan], [0, 0], color=FAINT, linewidth=0.4, clip_on=False)
    axes.set_ylim(0.0, most * (1 + _HEADROOM))
    peak = max(timeline.peak_memory)
    annotate(axes, (timeline.makespan, peak), labels.text(peak), labels.points)
