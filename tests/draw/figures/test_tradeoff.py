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
    timed = [each for each in plan.candidates if each.objective is not None and each.objective <= 1.5 * plan.objective]
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


def test_axes_without_a_unit_say_so(plan):
    axes = draw_tradeoff(plan).axes[0]
    assert axes.get_ylabel() == "predicted makespan (in the profile's unit)"
    assert axes.get_xlabel() == "peak memory of the fullest rank (in the profile's unit)"


def test_a_crowded_winner_is_named_and_the_legend_explains_hollow_marks(plan):
    model = ps.Profile.transformer(layers=16, hidden=2048, heads=16, sequence=2048, vocabulary=32000, flops=100e12)
    crowded = ps.plan(model, ranks=4, microbatches=8, memory_limit="8GiB", seconds=0)
    for chosen in (crowded, plan):
        figure = draw_tradeoff(chosen)
        assert [text.get_text() for text in figure.axes[0].texts if text.get_fontweight() == "bold"] == [chosen.name]
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert f"the plan: {chosen.name}" in labels
        assert "over the memory limit" in labels
    without_limit = draw_tradeoff(ps.plan(MODEL, ranks=4, microbatches=8, seconds=0))
    assert "over the memory limit" not in [text.get_text() for text in without_limit.legends[0].get_texts()]


def test_no_two_leaders_cross(plan):
    figure = draw_tradeoff(plan)
    leaders = [line.get_xydata() for line in figure.axes[0].lines if str(line.get_label()).startswith("_")]
    assert leaders
    for place, one in enumerate(leaders):
        for other in leaders[:place]:
            start, along = one[0], one[1] - one[0]
            sides = [along[0] * (point[1] - start[1]) - along[1] * (point[0] - start[0]) for point in other]
            begin, reach = other[0], other[1] - other[0]
            backs = [reach[0] * (point[1] - begin[1]) - reach[1] * (point[0] - begin[0]) for point in one]
            assert not (sides[0] * sides[1] < 0 and backs[0] * backs[1] < 0)


def test_the_figure_counts_as_the_report_does(plan):
    title = draw_tradeoff(plan).axes[0].get_title(loc="left")
    counted = plan.tally.partition(":")[0]
    assert counted == f"{len(plan.candidates)} candidates"
    assert title.startswith(f"4 ranks: {counted}, ")
    assert counted in plan.report()


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
