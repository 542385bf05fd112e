"""A timeline cut into time slices: what runs in each, and the most that is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock.ir.rows import Ints
    from penstock.simulator.memory import Curve

Floats = NDArray[np.float64]


def shares(rows: Ints, classes: Ints, start: Floats, end: Floats, edges: Floats, *, shape: tuple[int, int]) -> Floats:
    """How long each class runs in each row and slice: an array of rows x classes x slices.

    `rows` and `classes` say where each box belongs, `shape` how many of both there are. Boxes of one row and class do not overlap.
    """
    lane = rows * shape[1] + classes
    order = np.lexsort((end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    bounds = np.searchsorted(lane, np.arange(shape[0] * shape[1] + 1))
    found = np.zeros((shape[0] * shape[1], len(edges) - 1))
    for each in np.unique(lane).tolist():
        part = slice(bounds[each], bounds[each + 1])
        found[each] = _busy(start[part], end[part], edges)
    return found.reshape(*shape, len(edges) - 1)


def _busy(start: Floats, end: Floats, edges: Floats) -> Floats:
    """The busy time in each slice: differences of the busy time up to each edge."""
    times = np.column_stack((start, end)).ravel()
    done = np.cumsum(np.column_stack((np.zeros(len(start)), end - start)).ravel())
    return np.diff(np.interp(edges, times, done))


def main_class(found: Floats, edges: Floats) -> Ints:
    """For each row and slice the class that runs the longest, -1 where that is none."""
    idle = np.diff(edges) - found.sum(axis=1)
    longest = found.argmax(axis=1)
    return np.where(found.max(axis=1) >= np.maximum(idle, np.diff(edges) * 1e-9), longest, -1)


def most_held(curve: Curve, edges: Floats) -> Floats:
    """The most that a rank holds in each slice, the static part included."""
    before = np.searchsorted(curve.times, edges[:-1], side="left") - 1
    total = np.append(curve.total, 0.0)  # index -1: nothing has changed yet
    most = total[before]
    place = np.searchsorted(edges, curve.times, side="right") - 1
    inside = (place >= 0) & (place < len(most))
    np.maximum.at(most, place[inside], curve.total[inside])
    return most + curve.static
