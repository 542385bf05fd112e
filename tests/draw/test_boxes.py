"""Boxes, compared with the spans of the timeline one by one."""

from __future__ import annotations

import pytest

from draw.samples import SAMPLES
from penstock.draw.boxes import collective_boxes, compute_boxes, optimizer_boxes
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
    boxes = collective_boxes(timeline)
    actions = [action for row in timeline.table for action in row]
    for kind, takes in ((Kind.UNSHARD, 0.6), (Kind.REDUCE_GRAD, 0.8)):
        of = boxes.kind == kind
        assert of.sum() == sum(action.kind is kind for action in actions) > 0
        assert boxes.length[of] == pytest.approx(takes)
    assert len(collective_boxes(SAMPLES["zb-h1"])) == 0  # its reductions take none


def test_optimizer_ends_each_rank():
    timeline = SAMPLES["fsdp"]
    rank, start, end = optimizer_boxes(timeline)
    assert rank.tolist() == list(range(4))
    assert end.tolist() == timeline.finished.tolist()
    assert (end - start).tolist() == pytest.approx([2 * 1.3] * 4)  # two stages a rank
    assert len(optimizer_boxes(SAMPLES["1f1b"])[0]) == 0
