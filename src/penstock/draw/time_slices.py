"""A timeline cut into time slices: what runs in each slice, and the most memory held in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.ir.rows import Floats, Ints
    from penstock.simulator.memory import Curve


def shares(rows: Ints, classes: Ints, start: Floats, end: Floats, edges: Floats, *, shape: tuple[int, int]) -> Floats:
    """Measure how long each class runs in each row and slice: an array of rows x classes x slices.

    `rows` and `classes` say where each box belongs, and `shape` how many rows and classes there are. Boxes of one row and class
    do not overlap.
    """
    lane = rows * shape[1] + classes
    order = np.lexsort((end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    bounds = np.searchsorted(lane, np.arange(shape[0] * shape[1] + 1))
    busy = np.zeros((shape[0] * shape[1], len(edges) - 1))
    for place in np.unique(lane).tolist():
        part = slice(bounds[place], bounds[place + 1])
        busy[place] = _busy(start[part], end[part], edges)
    return busy.reshape(*shape, len(edges) - 1)


def _busy(start: Floats, end: Floats, edges: Floats) -> Floats:
    """The busy time in each slice: differences of the busy time up to each edge."""
    times = np.column_stack((start, end)).ravel()
    done = np.cumsum(np.column_stack((np.zeros(len(start)), end - start)).ravel())
    return np.diff(np.interp(edges, times, done))


def main_class(busy: Floats, edges: Floats) -> Ints:
    """Find the class that runs longest in each row and slice; -1 if the row is idle for longer."""
    idle = np.diff(edges) - busy.sum(axis=1)
    longest = busy.argmax(axis=1)
    return np.where(busy.max(axis=1) >= np.maximum(idle, np.diff(edges) * 1e-9), longest, -1)


def most_held(curve: Curve, edges: Floats) -> Floats:
    """Find the most that a rank holds in each slice, including the static part."""
    before = np.searchsorted(curve.times, edges[:-1], side="left") - 1
    total = np.append(curve.total, 0.0)  # index -1: nothing has changed yet
    most = total[before]
    place = np.searchsorted(edges, curve.times, side="right") - 1
    inside = (place >= 0) & (place < len(most))
    np.maximum.at(most, place[inside], curve.total[inside])
    return most + curve.static
