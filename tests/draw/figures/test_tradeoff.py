"""Time against memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.draw.figures.plots import draw_tradeoff
from penstock.errors import FileFormatError, UsageError

MODEL = ps.Profile([ps.Layer(f=5, i=7, w=3, activation=1, weight_stash=0.5, parameters=2)] * 8, latency=0.5)


@pytest.fixture(scope="module")
def plan() -> ps.Plan:
    return ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=14.0, seconds=0)


def marks(figure) -> list[tuple[float, float]]:
    """Every mark except the ring around the plan, which comes last."""
    return [tuple(point) for points in figure.axes[0].collections[:-1] for point in points.get_offsets()]


def test_one_mark_per_candidate_that_is_not_far_too_slow(plan):
    timed = [each for each in plan.alternatives if each.objective is not None and each.objective <= 1.5 * plan.objective]
    assert sorted(marks(draw_tradeoff(plan))) == sorted((each.peak, each.objective) for each in timed)
    assert any(not each.fits for each in timed)


def test_the_ring_is_around_the_plan(plan):
    ring = draw_tradeoff(plan).axes[0].collections[-1].get_offsets()[0]
    assert tuple(ring) == (max(plan.predicted.peak_memory), plan.objective)


def test_candidates_that_do_not_fit_are_hollow_and_beyond_the_limit(plan):
    for points in draw_tradeoff(plan).axes[0].collections[:-1]:
        for memory, _ in points.get_offsets():
            assert (memory > 14.0) == (len(points.get_facecolors()) == 0)


def test_limit_and_bound_are_drawn(plan):
    lines = {line.get_label(): line for line in draw_tradeoff(plan).axes[0].lines}
    assert set(lines["memory limit"].get_xdata()) == {14.0}
    assert set(lines["bound of all candidates"].get_ydata()) == {plan.overall_bound}


def test_with_different_limits_the_share_is_shown():
    plan = ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=[14.0, 20.0, 20.0, 20.0], seconds=0)
    axes = draw_tradeoff(plan).axes[0]
    assert "share" in axes.get_xlabel()
    chosen = plan.alternatives[plan.chosen]
    shares = [peak / limit for peak, limit in zip(plan.predicted.peak_memory, plan.memory_limit, strict=True)]
    assert axes.collections[-1].get_offsets()[0][0] == pytest.approx(shares[chosen.peak_rank])


def test_names_do_not_cover_each_other(plan):
    figure = draw_tradeoff(plan)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert plan.name in [text.get_text() for text in figure.axes[0].texts]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


def test_names_are_inside_the_frame_and_off_marks_and_lines(plan):
    figure = draw_tradeoff(plan)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    frame = axes.get_window_extent()
    places = [axes.transData.transform(mark) for mark in marks(figure)]
    edges = [line.get_window_extent() for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert len(edges) == 2
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1
        assert frame.y0 <= box.y0
        assert box.y1 <= frame.y1
        assert not any(box.contains(*place) for place in places), text.get_text()
        assert not any(box.x0 < edge.x1 and edge.x0 < box.x1 and box.y0 < edge.y1 and edge.y0 < box.y1 for edge in edges)


def test_the_legend_is_off_the_data(plan):
    figure = draw_tradeoff(plan)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 < figure.axes[0].get_window_extent().y0


def test_times_have_a_unit_that_suits_them(plan):
    profile = replace(MODEL, layers=[replace(layer, f=0.005, i=0.007, w=0.003) for layer in MODEL.layers], latency=0.0005, time_unit="s")
    axes = draw_tradeoff(ps.plan(profile, ranks=4, microbatches=8, memory_limit=14.0, seconds=0)).axes[0]
    assert axes.get_ylabel() == "predicted makespan (ms)"
    assert axes.collections[-1].get_offsets()[0][1] == pytest.approx(plan.objective)


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_files(plan, tmp_path, suffix):
    path = tmp_path / f"plan.{suffix}"
    plan.save(path)
    again = path.read_bytes()
    plan.save(path)
    assert path.read_bytes() == again
    assert again.startswith({"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[suffix])
    if suffix == "svg":
        assert plan.name in again.decode()


def test_plans_that_cannot_be_drawn_are_refused(plan, tmp_path):
    with pytest.raises(FileFormatError, match="not one of"):
        plan.save(tmp_path / "plan.gif")
    with pytest.raises(UsageError, match="no alternatives"):
        draw_tradeoff(replace(plan, alternatives=()))
