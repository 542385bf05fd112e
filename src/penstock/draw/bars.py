"""The rank rows of a figure: every action as a box."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.boxes import Boxes, collective_boxes, compute_boxes, optimizer_boxes
from penstock.draw.canvas import IDLE, PAPER, POINTS, text_width
from penstock.draw.mixed import mixed, spaced
from penstock.draw.palette import OPTIMIZER, SHARDING, TONES, Tone, paler, shaded
from penstock.ir.kind import COMPUTE, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penstock.ir.rows import Ints
    from penstock.simulator.timeline import Timeline

Floats = NDArray[np.float64]

MOST_BOXES = 60_000
"""Of more boxes only their mixed colours can be seen, so that is what is drawn."""
LEAST_LABEL, MOST_LABEL = 4.5, 7.5
_PAD = 1.6
"""Points: the sizes of labels, and what is left free beside them."""
_MARGIN, _STRIP = 0.08, 0.78
"""Of a row's height of 1: what is free at its top and bottom, and where the strip of the collectives begins."""
_THIN = 5.0
"""Points: thinner rows stand without a gap."""


def is_mixed(timeline: Timeline) -> bool:
    """Whether there are too many boxes to draw each."""
    return int(timeline.table.rows.is_kind(*COMPUTE).sum()) > MOST_BOXES


@dataclass(frozen=True)
class Bars:
    """A timeline's rows at a scale: points for a unit of time, and for a row."""

    timeline: Timeline
    unit_points: float
    row_points: float
    labels: bool = True
    panel: int = 0
    """Its place among the timelines of the figure."""
    pitch: float = 1.0
    shift: float = 0.0
    """From one row to the next, and where the first begins, in heights of a row."""
    pale: float = 0.0
    """How much white is in the colours."""

    @cached_property
    def boxes(self) -> Boxes:
        return compute_boxes(self.timeline)

    @cached_property
    def collectives(self) -> Boxes:
        return collective_boxes(self.timeline)

    def _id(self, name: str) -> str:
        """What a collection of boxes is called in an SVG file."""
        return f"boxes-{self.panel}-{name}"

    @property
    def _top(self) -> float:
        """Where a rank's row begins."""
        return _MARGIN if self.row_points >= _THIN else 0.0

    @property
    def _floor(self) -> float:
        """Where a rank's computation ends in its row."""
        return _STRIP - 0.06 if len(self.collectives) else 1 - self._top

    def draw(self, axes: Axes) -> None:
        """Fill the axes; row r has a height of 1 and begins at `r * pitch + shift`."""
        if is_mixed(self.timeline):
            self._draw_mixed(axes)
        else:
            rows, none = self._rows(np.arange(self.timeline.ranks)), np.zeros(self.timeline.ranks)
            _add(axes, (rows, none, none + self.timeline.makespan), (self._top, self._floor), _Fill(IDLE, self._id("idle")))
            self._draw_boxes(axes)
        self._draw_collectives(axes)
        rank, start, end = optimizer_boxes(self.timeline)
        _add(axes, (self._rows(rank), start, end), (self._top, self._floor), _Fill(paler(OPTIMIZER, self.pale).fill, self._id("optimizer")))

    def _draw_boxes(self, axes: Axes) -> None:
        boxes, chunks = self.boxes, self.timeline.table.chunks
        top, bottom = self._bounds(boxes)
        line = self._line_width(boxes)
        fits = self._label_size()
        for kind, chunk in sorted(set(zip(boxes.kind.tolist(), boxes.chunk.tolist(), strict=True))):
            tone = paler(shaded(TONES[Kind(kind)], chunk, chunks), self.pale)
            of = np.flatnonzero((boxes.kind == kind) & (boxes.chunk == chunk))
            fill = _Fill(tone.fill, self._id(f"{tone.sample}{chunk}"), line)
            _add(axes, (self._rows(boxes.rank[of]), boxes.start[of], boxes.end[of]), (top[of], bottom[of]), fill)
            if fits is not None:
                self._label(axes, of, tone, (top, bottom), fits)

    def _bounds(self, boxes: Boxes) -> tuple[Floats, Floats]:
        """Top and bottom of each box in its row; what runs together shares the height."""
        height = (self._floor - self._top) / boxes.parts
        return self._top + boxes.part * height, self._top + (boxes.part + 1) * height

    def _line_width(self, boxes: Boxes) -> float:
        """Lines between boxes, thinner where boxes are narrow, none where they would cover them."""
        real = boxes.length[boxes.length > 0]
        line = min(0.6, 0.1 * float(np.quantile(real, 0.05)) * self.unit_points) if len(real) else 0.0
        return line if line >= 0.15 else 0.0

    def _label_size(self) -> float | None:
        """One size for all labels: the largest at which the most of them fit; None for no labels at all."""
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
        """As wide as any label, so that all microbatches of a kind are labelled or none."""
        return "0" * len(str(self.timeline.table.microbatches - 1))

    def _label(self, axes: Axes, of: Ints, tone: Tone, bounds: tuple[Floats, Floats], size: float) -> None:
        boxes, (top, bottom) = self.boxes, bounds
        middles = self._rows(boxes.rank) + (top + bottom) / 2
        room = text_width(self._widest, size) * POINTS + 0.99 * _PAD
        for box in of[(boxes.length[of] * self.unit_points >= room) & ((bottom - top)[of] * self.row_points >= 1.24 * size)].tolist():
            place, text = (boxes.start[box] + boxes.end[box]) / 2, str(boxes.microbatch[box])
            axes.text(place, middles[box], text, color=tone.ink, fontsize=size, ha="center", va="center_baseline")

    def _draw_collectives(self, axes: Axes) -> None:
        boxes = self.collectives
        for place, kind in enumerate((Kind.REDUCE_GRAD, Kind.UNSHARD)):
            of = boxes.kind == kind
            if of.any():
                fill = _Fill(paler(shaded(SHARDING, place, 2), self.pale).fill, self._id(kind.name))
                _add(axes, (self._rows(boxes.rank[of]), boxes.start[of], boxes.end[of]), (_STRIP, 1 - self._top), fill)

    def _draw_mixed(self, axes: Axes) -> None:
        columns = max(int(self.timeline.makespan * self.unit_points * 3), 1)
        image, ranks = mixed(self.timeline, self.boxes, columns), self.timeline.ranks
        image = np.asarray(image + (255 - image) * self.pale, dtype=np.uint8)
        if self.pitch == 1.0 and not self.shift:
            self._show(axes, spaced(image, ranks, (self._top, self._floor)), (ranks, 0.0), "mixed")
            return
        for rank, (lines, row) in enumerate(zip(np.split(image, ranks), self._rows(np.arange(ranks)), strict=True)):
            self._show(axes, lines, (row + self._floor, row + self._top), f"mixed-{rank}")

    def _show(self, axes: Axes, image: NDArray[np.uint8], bounds: tuple[float, float], name: str) -> None:
        """Lines of colours from the one bound up to the other."""
        extent = (0.0, self.timeline.makespan, *bounds)
        axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest").set_gid(self._id(name))

    def _rows(self, rank: Ints) -> Floats:
        """Where the rows of ranks begin."""
        return np.asarray(rank * self.pitch + self.shift, dtype=np.float64)


@dataclass(frozen=True)
class _Fill:
    """How boxes are filled: the colour, the width of the lines between them in points, and their name in an SVG file."""

    colour: str
    name: str
    line: float = 0.0


def _add(axes: Axes, boxes: tuple[Floats, Floats, Floats], bounds: tuple[Floats | float, Floats | float], fill: _Fill) -> None:
    """One collection of boxes, given by where their rows begin, start and end, between top and bottom of their rows."""
    from matplotlib.collections import PolyCollection

    row, start, end = boxes
    corners = np.empty((len(row), 4, 2))
    corners[:, :2, 0], corners[:, 2:, 0] = start[:, None], end[:, None]
    corners[:, (0, 3), 1] = (row + bounds[0])[:, None]
    corners[:, (1, 2), 1] = (row + bounds[1])[:, None]
    made = PolyCollection(
        list(corners), facecolors=fill.colour, edgecolors=PAPER if fill.line else "none", linewidths=fill.line, clip_on=False
    )
    made.set_gid(fill.name)
    axes.add_collection(made, autolim=False)
