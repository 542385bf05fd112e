"""Boxes, compared with the spans of the timeline one by one."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from draw.samples import SAMPLES
from penstock.draw.boxes import compute_boxes, list_collective_boxes, list_optimizer_boxes, make_widest_label
from penstock.ir.kind import Kind


@pytest.mark.parametrize("name", SAMPLES)
def test_boxes_equal_the_parts_of_the_spans(name):
    timeline = SAMPLES[name]
    placement, boxes = timeline.table.placement, compute_boxes(timeline)
    columns = (boxes.rank, boxes.start, boxes.end, boxes.kind, boxes.stage, boxes.microbatch, boxes.part, boxes.parts, boxes.chunk)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    wanted = [
        (rank, span.start, span.end, part.kind, part.stage, part.microbatch, place, len(span.action.parts))
        for rank in range(timeline.ranks)
        for span in timeline.spans(rank)
        for place, part in enumerate(span.action.parts)
    ]
    assert [each[:-1] for each in found] == wanted
    for *_, stage, microbatch, _, _, chunk in found:
        assert chunk == placement.chunk_of(stage, microbatch)


def test_collectives_that_take_time():
    timeline = SAMPLES["fsdp"]
    boxes = list_collective_boxes(timeline)
    actions = [action for row in timeline.table for action in row]
    for kind, takes in ((Kind.UNSHARD, 0.6), (Kind.REDUCE_GRAD, 0.8)):
        of = boxes.kind == kind
        assert of.sum() == sum(action.kind is kind for action in actions) > 0
        assert boxes.length[of] == pytest.approx(takes)
    assert len(list_collective_boxes(SAMPLES["zb-h1"])) == 0  # its reductions take none


def test_optimizer_ends_each_rank():
    timeline = SAMPLES["fsdp"]
    rank, start, end = list_optimizer_boxes(timeline)
    assert rank.tolist() == list(range(4))
    assert end.tolist() == timeline.finished.tolist()
    assert (end - start).tolist() == pytest.approx([2 * 1.3] * 4)  # two stages a rank
    assert len(list_optimizer_boxes(SAMPLES["1f1b"])[0]) == 0


@pytest.mark.parametrize(("microbatches", "slices"), [(2, 3), (12, 11), (11, 1)])
def test_labels_name_the_slice(microbatches, slices):
    timeline = ps.simulate(ps.schedule("seq1f1b", ranks=2, microbatches=microbatches, slices=slices))
    boxes = compute_boxes(timeline)
    labels = [boxes.name_unit(box) for box in range(len(boxes))]
    actions = [span.action for rank in range(2) for span in timeline.spans(rank)]
    assert labels == [str(action).split(action.kind.name)[1] for action in actions]
    assert boxes.unit_widths().tolist() == list(map(len, labels))
    assert len(make_widest_label(timeline.table)) == max(map(len, labels))


def test_pictures_and_traces_name_slices(tmp_path):
    timeline = ps.simulate(ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=2))
    timeline.save(tmp_path / "slices.svg")
    timeline.save(tmp_path / "slices.trace.json")
    assert "2 microbatches of 2 slices" in (tmp_path / "slices.svg").read_text()
    events = json.loads((tmp_path / "slices.trace.json").read_text())["traceEvents"]
    assert {event["name"]: event["args"]["slice"] for event in events if event["name"] in ("0F1.1", "1B0.1")} == {
        "0F1.1": [1],
        "1B0.1": [1],
    }
