"""Rank rows with more boxes than can be seen apart: each slice of time in the mixed colours of what runs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.draw.canvas import IDLE
from penstock.draw.palette import TONES, shaded
from penstock.draw.slices import shares
from penstock.ir.kind import COMPUTE

if TYPE_CHECKING:
    from penstock.draw.boxes import Boxes
    from penstock.simulator.timeline import Timeline

Floats = NDArray[np.float64]
Image = NDArray[np.uint8]

MOST_LINES = 3000
"""Lines of an image in which rows are set apart."""


def mixed(timeline: Timeline, boxes: Boxes, columns: int) -> Image:
    """RGB: a line for each part that runs together in each rank, a column for each slice."""
    chunks = timeline.table.chunks
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    fills = np.array([_rgb(shaded(TONES[kind], chunk, chunks).fill) for kind in COMPUTE for chunk in range(chunks)])
    lanes, parts = boxes.kind * chunks + boxes.chunk, int(boxes.parts.max(initial=1))
    image = np.empty((timeline.ranks * parts, columns, 3))
    for part in range(parts):
        of = (boxes.part == part) | (boxes.parts == 1)
        shape = (timeline.ranks, len(fills))
        busy = shares(boxes.rank[of], lanes[of], boxes.start[of], boxes.end[of], edges, shape=shape) / np.diff(edges)
        idle = 1 - busy.sum(axis=1)
        image[part::parts] = np.einsum("rkc,kx->rcx", busy, fills) + idle[..., None] * _rgb(IDLE)
    return np.asarray((image.clip(0, 1) * 255).round(), dtype=np.uint8)


def spaced(image: Image, ranks: int, bounds: tuple[float, float]) -> Image:
    """RGBA with nothing outside the bounds of each row, where there are lines enough to show it."""
    parts = len(image) // ranks
    fine = min(24, MOST_LINES // ranks) // parts * parts
    if fine < 8 or bounds == (0.0, 1.0):
        return image
    rank, height = np.divmod((np.arange(ranks * fine) + 0.5) / fine, 1)
    inside = (height >= bounds[0]) & (height < bounds[1])
    part = ((height - bounds[0]) / (bounds[1] - bounds[0]) * parts).clip(0, parts - 1).astype(np.int64)
    opaque = np.broadcast_to(inside[:, None] * np.uint8(255), (len(inside), image.shape[1]))
    return np.dstack((image[rank.astype(np.int64) * parts + part], opaque))


def _rgb(colour: str) -> Floats:
    return np.frombuffer(bytes.fromhex(colour.removeprefix("#")), dtype=np.uint8) / 255
