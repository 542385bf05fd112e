"""A spread vocabulary in every form of picture."""

from __future__ import annotations

import json
from pathlib import Path

import penstock as ps
from penstock.draw.boxes import compute_boxes, list_collective_boxes
from penstock.draw.palette import TONES, shade
from penstock.draw.terminal import timeline_lines
from penstock.ir.kind import JOINS, SHARES
from penstock.passes.vocabulary import spread_vocabulary

COSTS = ps.Costs(s=[0.5, 0, 2.0], t=[0.5, 0, 1.0], broadcast=0.25, combine=0.5)
SPREAD = spread_vocabulary(ps.schedule("1f1b", ranks=3, microbatches=4), COSTS)
TIMELINE = ps.simulate(ps.lower(SPREAD), COSTS)


def test_every_share_and_collective_has_a_box() -> None:
    boxes = compute_boxes(TIMELINE)
    assert sum(int((boxes.kind == kind).sum()) for kind in SHARES) == 3 * 4 * 2 * 2
    meetings = list_collective_boxes(TIMELINE)
    assert [int((meetings.kind == kind).sum()) for kind in JOINS] == [3 * 4 * 2] * 2
    for rank in range(1, 3):
        here, first = meetings.rank == rank, meetings.rank == 0
        assert meetings.start[here].tolist() == meetings.start[first].tolist()
        assert meetings.end[here].tolist() == meetings.end[first].tolist()


def test_lines_show_shares_by_their_letters() -> None:
    pieces = [[piece if isinstance(piece, str) else piece[0] for piece in line] for line in timeline_lines(TIMELINE, width=200)]
    lines = ["".join(line) for line in pieces]
    rows = [line for line in lines if "s0" in line]
    assert len(rows) == 3
    assert all(f"{letter}{unit}" in row for row in rows for letter in "st" for unit in range(4))


def test_figures_and_traces_have_them(tmp_path: Path) -> None:
    TIMELINE.save(tmp_path / "spread.svg")
    figure = (tmp_path / "spread.svg").read_text()
    for place, kind in enumerate((*SHARES, *JOINS)):
        assert (shade(TONES[kind], place - 2, 2) if kind in JOINS else TONES[kind]).fill in figure
        assert TONES[kind].means in figure
    TIMELINE.save(tmp_path / "spread.trace.json")
    slices = [event for event in json.loads((tmp_path / "spread.trace.json").read_text())["traceEvents"] if event.get("ph") == "X"]
    assert sum(event["name"] == "2BROADCAST3" for event in slices) == 3
    assert sum(event["name"] == "0COMBINE0" for event in slices) == 3
