"""A measured timeline below its prediction: rows, lines between them, lateness, the frame."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import penstock as ps
from draw.figures.test_figure import check_texts, group, texts
from draw.samples import SAMPLES
from draw.test_html import Page
from penstock.draw.boxes import compute_boxes
from penstock.draw.figures import rank_rows
from penstock.draw.figures.canvas import render
from penstock.draw.figures.timelines import EARLY, LATE, draw_overlay
from penstock.draw.html import overlay_html
from penstock.draw.save import save_overlay
from penstock.errors import UsageError
from penstock.ir.kind import COMPUTE
from penstock.simulator.comparison.differences import Differences, differences
from penstock.simulator.simulate import retime

pytestmark = pytest.mark.slow


def slowed(name: str) -> Differences:
    """A sample over itself as measured with a slow first stage, faster input gradients and slower messages."""
    predicted = SAMPLES[name]
    costs, stages = predicted.costs, predicted.table.stages
    f = tuple(
        float(each.mean()) * (1.4 if at == 0 else 1) for at, each in enumerate(costs.table("f", stages, predicted.table.microbatches))
    )
    return differences(predicted, replace(retime(predicted, replace(costs, f=f, latency=costs.latency + 0.05)), source="measured"))


def tree(found: Differences, **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(render(draw_overlay(found, **options), "svg"))


def sides(path: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, right, top and bottom."""
    numbers = [float(word) for word in path.get("d", "").split() if word not in "MLz"]
    return min(numbers[::2]), max(numbers[::2]), min(numbers[1::2]), max(numbers[1::2])


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - {"zbv", "zb-h1", "shared links"}))
def test_every_action_is_drawn_twice_and_no_text_overlaps(name):
    found = slowed(name)
    root = tree(found)
    for panel, timeline in enumerate((found.predicted, found.measured)):
        boxes = compute_boxes(timeline)
        seen = [
            box for kind in COMPUTE for chunk in range(timeline.table.chunks) for box in group(root, f"boxes-{panel}-{kind.name}{chunk}")
        ]
        assert len(seen) == len(boxes)
        assert len(group(root, f"boxes-{panel}-idle")) == timeline.ranks
    check_texts(draw_overlay(found))


def test_pairs_share_one_axis():
    found = slowed("1f1b")
    root = tree(found)
    rows = [[sides(path) for path in group(root, f"boxes-{panel}-idle")] for panel in (0, 1)]
    scale = (rows[1][0][1] - rows[1][0][0]) / found.measured.makespan
    for rank, (upper, lower) in enumerate(zip(*rows, strict=True)):
        assert upper[0] == lower[0]
        assert upper[1] - upper[0] == pytest.approx(found.predicted.makespan * scale, abs=1e-2)
        assert upper[3] < lower[2]
        assert rank == 3 or lower[3] < rows[0][rank + 1][2]


def test_a_line_joins_each_action_in_both_timelines():
    found = slowed("1f1b")
    root = tree(found)
    left, right, _, _ = sides(group(root, "boxes-1-idle")[0])
    scale = (right - left) / found.measured.makespan
    lines = group(root, "lines-0")
    late = found.lateness.late
    assert len(lines) == len(late)
    for line, by in zip(lines, late, strict=True):
        x0, x1, _, _ = sides(line)
        assert x1 - x0 == pytest.approx(abs(by) * scale, abs=1e-2)
        colour = LATE if by > found.allowed else EARLY if by < -found.allowed else "#666666"
        assert f"stroke: {colour}" in line.get("style", "")


def test_lateness_is_drawn_to_scale():
    found = slowed("1f1b")
    root = tree(found)
    assert (found.lateness.late >= 0).all()
    areas = {rank: group(root, f"late-0-{rank}") for rank in range(4)}
    most = [float(found.lateness.late[found.match.measured.rank == rank].max()) for rank in range(4)]
    heights = [sides(areas[rank][0])[3] - sides(areas[rank][0])[2] for rank in range(4)]
    np.testing.assert_allclose(np.array(heights) / heights[0], np.array(most) / most[0], atol=0.01)
    assert not any(group(root, f"early-0-{rank}") for rank in range(4))
    said = texts(root)
    assert f"late, up to {max(most):.4g}" in said
    assert not any(text.startswith("early") for text in said)


def test_early_actions_have_another_colour():
    table = SAMPLES["1f1b"].table
    found = differences(SAMPLES["1f1b"], ps.simulate(table, ps.Costs(f=[1, 0.5, 1, 1])))
    root = tree(found)
    assert any(group(root, f"early-0-{rank}") for rank in range(4))
    assert f"early, up to {-found.lateness.late.min():.4g}" in texts(root)


def test_every_text_is_inside_the_figure_and_times_have_units_that_suit_them():
    found = slowed("1f1b")
    pair = differences(found.predicted.scaled(9.997e-3), found.measured.scaled(9.997e-3), scale=1.0)
    figure = draw_overlay(pair, unit="s")
    figure.draw_without_rendering()
    frame = figure.bbox
    shown = [text for axes in figure.axes for text in (*axes.texts, axes.xaxis.label) if text.get_text()]
    for text in shown:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1, text.get_text()
    words = [text.get_text() for text in shown]
    assert "time (ms)" in words
    assert any(word.startswith("+") and word.endswith(" ms") for word in words)
    assert any(f"makespan {pair.makespan.predicted * 1e3:.4g} ms predicted" in word for word in words)


def test_the_first_difference_is_framed():
    found = slowed("1f1b")
    root = tree(found)
    (frame,) = group(root, "first-0")
    place = found.first_place
    left, right, top, bottom = sides(group(root, "boxes-1-idle")[int(found.match.measured.rank[place])])
    scale = (right - left) / found.measured.makespan
    wanted = [left + float(times[place]) * scale for times in (found.match.measured.start, found.match.measured.end)]
    assert list(sides(frame)[:2]) == pytest.approx(wanted, abs=1e-2)
    assert sides(frame)[2] < top < bottom < sides(frame)[3]
    same = differences(SAMPLES["1f1b"], SAMPLES["1f1b"])
    assert not group(tree(same), "first-0")
    assert not any("framed" in text or "late" in text for text in texts(tree(same)))


def test_figures_of_both_timelines_are_shown():
    found = slowed("1f1b")
    said = texts(tree(found, names=["mine <&> $x^2$"], unit="ms"))
    makespan = found.makespan
    assert "mine <&> $x^2$" in said
    assert any(f"makespan {makespan.predicted:g} ms predicted, {makespan.measured:.4g} ms measured" in text for text in said)
    assert "time (ms)" in said
    assert "upper row (pale): predicted, lower row: measured" in said
    bare = texts(tree(found, labels=False, legend=False))
    assert not {"7", "forward", "idle"} & set(bare)


def test_many_ranks_and_many_boxes(monkeypatch):
    table = ps.schedule("1f1b", ranks=40, microbatches=50)
    found = differences(ps.simulate(table), ps.simulate(table, ps.Costs(f=[1.0] * 39 + [1.2])))
    root = tree(found)
    assert not group(root, "lines-0")  # rows too low for lines between them
    assert group(root, "late-0-0")
    check_texts(draw_overlay(found))
    monkeypatch.setattr(rank_rows, "MOST_BOXES", 10)
    found = slowed("dualpipe-v")
    made = draw_overlay(found)
    images = [image for axes in made.axes for image in axes.images]
    assert [image.get_extent()[1] for image in images] == [found.predicted.makespan] * 3 + [found.measured.makespan] * 3
    rows = sorted((image.get_extent()[3], image.get_extent()[2]) for image in images)
    assert all(upper[1] < lower[0] for upper, lower in pairwise(rows))
    assert images[0].get_array().mean() > images[3].get_array().mean()  # the prediction is paler
    assert not group(ElementTree.fromstring(render(made, "svg")), "boxes-0-F0")
    check_texts(draw_overlay(slowed("dualpipe-v")))


def test_several_pairs():
    found = [slowed("1f1b"), slowed("fsdp")]
    check_texts(draw_overlay(found, names=["one", "a name " * 40]))
    root = ElementTree.fromstring(render(draw_overlay(found), "svg"))
    ids = [each.get("id") for each in root.iter() if each.get("id")]
    assert len(ids) == len(set(ids))
    assert group(root, "boxes-3-idle")
    assert render(draw_overlay(found), "svg") == render(draw_overlay(found), "svg")


def test_the_page_has_figure_and_tables(tmp_path):
    found = slowed("1f1b")
    page = Page(overlay_html([found], names=["<mine>"]))
    rows = {row[0]: row[1:] for row in reversed(page.rows) if row}
    assert rows["makespan"] == [f"{found.makespan.predicted:g}", f"{found.makespan.measured:.4g}", f"{found.makespan.ratio:.3f}"]
    assert rows["stage 0 F"][-1] == "1.400"
    assert "svg" in {tag for tag, _ in page.tags}
    for name, begins in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.html", b"<!DOCTYPE html>")):
        save_overlay([found], tmp_path / name, **({"dpi": 40} if name == "a.png" else {}))
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_wrong_options_are_refused():
    with pytest.raises(UsageError, match="0 pairs of timelines and 0 names: give at least one"):
        draw_overlay([])
    with pytest.raises(UsageError, match="2 names"):
        draw_overlay(slowed("1f1b"), names=["a", "b"])
    with pytest.raises(UsageError, match="'weeks'"):
        draw_overlay(slowed("1f1b"), unit="weeks")
