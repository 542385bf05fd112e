"""Time slices, compared with sums over every box and every change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draw.samples import SAMPLES
from penstock.draw.boxes import find_most_held, main_class, shares

Box = tuple[int, int, float, float]


@st.composite
def lanes(draw: st.DrawFn) -> list[Box]:
    """Boxes as row, class, start, end; those of a row do not overlap."""
    drawn: list[Box] = []
    for row in range(3):
        clock = 0.0
        for _ in range(draw(st.integers(0, 5))):
            start = clock + draw(st.sampled_from([0.0, 0.25, 1.0, 1.5]))
            clock = start + draw(st.sampled_from([0.0, 0.5, 1.0, 2.25]))
            drawn.append((row, draw(st.integers(0, 2)), start, clock))
    return draw(st.permutations(drawn))


def as_arrays(boxes: list[Box]) -> tuple[np.ndarray, ...]:
    table = np.array(boxes, dtype=float).reshape(-1, 4)
    return table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2], table[:, 3]


def overlap(box: Box, low: float, high: float) -> float:
    return max(0.0, min(box[3], high) - max(box[2], low))


@given(lanes(), st.integers(1, 9))
def test_shares_are_sums_of_overlaps(boxes, columns):
    edges = np.linspace(0.0, max([box[3] for box in boxes], default=0.0) or 1.0, columns + 1)
    busy = shares(*as_arrays(boxes), edges, shape=(3, 3))
    for row in range(3):
        for each in range(3):
            for column in range(columns):
                wanted = sum(overlap(box, edges[column], edges[column + 1]) for box in boxes if box[:2] == (row, each))
                assert busy[row, each, column] == pytest.approx(wanted, abs=1e-9)


@given(lanes(), st.integers(1, 9))
def test_main_class_takes_more_time_than_any_other_and_than_idle(boxes, columns):
    edges = np.linspace(0.0, max([box[3] for box in boxes], default=0.0) or 1.0, columns + 1)
    shared = shares(*as_arrays(boxes), edges, shape=(3, 3))
    main = main_class(shared, edges)
    for row in range(3):
        for column in range(columns):
            busy = shared[row, :, column].tolist()
            idle = edges[column + 1] - edges[column] - sum(busy)
            chosen = int(main[row, column])
            assert (idle if chosen < 0 else busy[chosen]) >= max([idle, *busy]) - 1e-9


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("columns", [1, 7, 100])
def test_most_held_equals_the_maximum_over_all_changes(name, columns):
    timeline = SAMPLES[name]
    edges = np.linspace(0.0, timeline.makespan or 1.0, columns + 1)
    for rank in range(timeline.ranks):
        curve = timeline.memory(rank)
        changes = list(zip(curve.times.tolist(), curve.total.tolist(), strict=True))
        most = find_most_held(curve, edges)
        for column in range(columns):
            low, high = edges[column], edges[column + 1]
            before = [held for time, held in changes if time < low][-1:] or [0.0]
            within = [held for time, held in changes if low <= time < high]
            assert most[column] == pytest.approx(curve.static + max(before + within))
        if changes and timeline.makespan and max(curve.total) > curve.total[-1]:
            assert most.max() == pytest.approx(curve.peak)
