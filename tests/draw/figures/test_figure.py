"""Figures: the contents of the SVG, text that does not overlap, and no side effects."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import penstock as ps
from draw.samples import SAMPLES
from penstock.draw.boxes import compute_boxes, list_collective_boxes
from penstock.draw.figures import rank_rows
from penstock.draw.figures.canvas import IDLE, render, use_style
from penstock.draw.figures.rank_rows import mix_colours, space_rows
from penstock.draw.figures.timelines import draw_timelines
from penstock.draw.palette import TONES, shade
from penstock.errors import MissingExtraError, UsageError
from penstock.ir.kind import Kind
from penstock.text.units import Units

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"


def tree(*timelines: ps.Timeline, **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(render(draw_timelines(timelines, **options), "svg"))


def group(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """The boxes of a collection."""
    found = [each for each in root.iter(f"{SVG}g") if each.get("id") == name]
    assert len(found) <= 1
    return [path for each in found for path in each.iter(f"{SVG}path")]


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", SAMPLES)
def test_one_box_per_part_of_each_action(name):
    timeline = SAMPLES[name]
    root, boxes, chunks = tree(timeline), compute_boxes(timeline), timeline.table.chunks
    seen = 0
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        for chunk in range(chunks):
            found = group(root, f"boxes-0-{kind.name}{chunk}")
            assert len(found) == np.count_nonzero((boxes.kind == kind) & (boxes.chunk == chunk))
            assert all(f"fill: {shade(TONES[kind], chunk, chunks).fill}" in box.get("style", "") for box in found)
            seen += len(found)
    assert seen == len(boxes) > 0
    assert len(group(root, "boxes-0-idle")) == timeline.ranks
    assert len(group(root, "boxes-0-optimizer")) == np.count_nonzero(timeline.optimizer)
    collective = sum(len(group(root, f"boxes-0-{kind.name}")) for kind in (Kind.UNSHARD, Kind.REDUCE_GRAD))
    assert collective == len(list_collective_boxes(timeline))


def test_boxes_are_at_their_times():
    """The left and right edge of each F of 1f1b, at the scale of the idle row behind it."""
    timeline = SAMPLES["1f1b"]
    root, boxes = tree(timeline), compute_boxes(timeline)

    def sides(path: ElementTree.Element) -> tuple[float, float]:
        numbers = [float(word) for word in path.get("d", "").split() if word not in "MLz"]
        return min(numbers[::2]), max(numbers[::2])

    low, high = sides(group(root, "boxes-0-idle")[0])
    scale = (high - low) / timeline.makespan
    of = boxes.kind == Kind.F
    for path, start, end in zip(group(root, "boxes-0-F0"), boxes.start[of], boxes.end[of], strict=True):
        assert sides(path) == pytest.approx((low + start * scale, low + end * scale), abs=1e-3)


def test_text_is_stored_as_text_and_contains_the_figures():
    root = tree(SAMPLES["1f1b"], unit="ms")
    said = texts(root)
    assert "1f1b" in said
    assert any("4 ranks, 8 microbatches" in text and "makespan 33 ms" in text and "bubble 27.3%" in text for text in said)
    assert any("peak memory 4 activations (rank 0)" in text for text in said)
    assert {"time (ms)", "rank", "memory", "forward", "full backward", "idle"} <= set(said)
    labels = [text for text in said if text.isdecimal()]
    assert labels.count("7") == 2 * 4  # microbatch 7, forward and backward on each rank; no tick and no rank has this number


def test_labels_memory_and_legend_are_optional():
    bare = texts(tree(SAMPLES["1f1b"], labels=False, memory=False, legend=False))
    assert "7" not in bare
    assert not {"memory", "peak", "forward", "idle"} & set(bare)


@pytest.mark.parametrize("width", [3.5, None])
@pytest.mark.parametrize("name", SAMPLES)
def test_no_text_overlaps_another_or_the_edge(name, width):
    check_texts(draw_timelines(SAMPLES[name], width=width))


def test_no_text_of_several_timelines_overlaps():
    check_texts(draw_timelines([SAMPLES[name] for name in ("1f1b", "zbv", "zb-h1")], names=["one", "a name " * 40, "$x^2$ <&>"]))


def check_texts(made: Any) -> None:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    with use_style():
        made.canvas.draw()
        ticks = [
            (tick, *sorted(axis.get_view_interval()))
            for axes in made.findobj(Axes)
            for axis in (axes.xaxis, axes.yaxis)
            for tick in axis.get_major_ticks()
        ]
        outside = {label for tick, low, high in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)}
        shown = [text for text in made.findobj(Text) if text.get_visible() and text.get_text() and text not in outside]
        extents = {text: text.get_window_extent() for text in shown}
    for text, extent in extents.items():
        assert extent.x0 >= 0, text
        assert extent.y0 >= 0, text
        assert extent.x1 <= made.bbox.x1, text
        assert extent.y1 <= made.bbox.y1, text
    for one, other in combinations(extents, 2):
        a, b = extents[one], extents[other]
        wide, tall = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 0.5 or tall <= 0.35 * min(a.height, b.height), (one, other)  # an extent has room for letters that reach below


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v", "fsdp", "interleaved"])
def test_labels_are_inside_their_boxes(name):
    timeline = SAMPLES[name]
    made = draw_timelines(timeline)
    boxes = compute_boxes(timeline)
    middles = {(round((s + e) / 2, 9), r): e - s for s, e, r in zip(boxes.start, boxes.end, boxes.rank, strict=True)}
    axes = made.axes[1]
    with use_style():
        made.canvas.draw()
        assert axes.texts
        for label in axes.texts:
            x, y = label.get_position()
            length = middles[round(float(x), 9), int(y)]
            left, right = (axes.transData.transform((side, y))[0] for side in (x - length / 2, x + length / 2))
            extent = label.get_window_extent()
            assert left - 0.1 <= extent.x0 <= extent.x1 <= right + 0.1


def test_several_timelines_share_one_axis():
    timelines = [SAMPLES["1f1b"], SAMPLES["zbv"]]
    made = draw_timelines(timelines)
    rows = [axes for axes in made.axes if axes.get_ylabel() == "rank"]
    assert len(rows) == 2
    assert {axes.get_xlim() for axes in rows} == {(0.0, max(timeline.makespan for timeline in timelines))}
    assert len({(axes.get_position().x0, axes.get_position().x1) for axes in rows}) == 1


def test_ids_are_unique():
    root = tree(SAMPLES["fsdp"], SAMPLES["dualpipe-v"], SAMPLES["zb-h1"])
    ids = [each.get("id") for each in root.iter() if each.get("id")]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_same_picture_gives_the_same_file(form):
    assert render(draw_timelines(SAMPLES["fsdp"]), form) == render(draw_timelines(SAMPLES["fsdp"]), form)


@pytest.mark.parametrize(("width", "dpi"), [(7.2, 100), (5.0, 200)])
def test_png_has_the_requested_size(width, dpi):
    made = draw_timelines(SAMPLES["1f1b"], width=width)
    data = render(made, "png", dpi)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    wanted = [made.get_figwidth() * dpi, made.get_figheight() * dpi]
    assert list(struct.unpack(">II", data[16:24])) == pytest.approx(wanted, abs=1)
    assert wanted[0] == pytest.approx(width * dpi)


def test_names_are_not_read_as_formulas_or_markup():
    name = "$\\frac{a$ <b>&amp;"
    assert name in texts(tree(SAMPLES["1f1b"], names=[name]))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"names": ["a", "b"]}, "2 names"), ({"width": 1.0}, "1.0 inches"), ({"unit": "weeks"}, "'weeks'")],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        draw_timelines(SAMPLES["1f1b"], **options)
    with pytest.raises(UsageError, match="at least one"):
        draw_timelines([])


def test_drawing_leaves_matplotlib_s_settings_alone(tmp_path):
    """Drawing neither imports pyplot nor changes settings, and does not depend on the user's settings."""
    code = """
import sys, matplotlib, penstock as ps
matplotlib.rcParams.update({"text.usetex": True, "font.size": 33, "axes.facecolor": "red"})
settings = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}  # asking for it loads pyplot
before = settings()
ps.simulate(ps.schedule("1f1b", 2, 2)).save(sys.argv[1])
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path / "a.svg"], check=True)
    usual = render(draw_timelines(ps.simulate(ps.schedule("1f1b", 2, 2))), "svg")
    assert (tmp_path / "a.svg").read_bytes() == usual


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[plot\]' in a clone"):
        draw_timelines(SAMPLES["1f1b"])


# More boxes than can be seen apart ------------------------------------------------------------------------------------


def test_many_boxes_become_an_image(monkeypatch):
    monkeypatch.setattr(rank_rows, "MOST_BOXES", 10)
    root = tree(SAMPLES["dualpipe-v"])
    assert not group(root, "boxes-0-F0")
    assert any(each.get("id") == "boxes-0-mixed" for each in root.iter())
    assert any(text.startswith("mixed colours") for text in texts(root))
    check_texts(draw_timelines(SAMPLES["dualpipe-v"]))


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v", "interleaved"])
def test_mixed_colours_are_averages(name):
    """Compare each pixel with the boxes under it, one by one."""
    timeline = SAMPLES[name]
    boxes, chunks, columns = compute_boxes(timeline), timeline.table.chunks, 23
    image = mix_colours(timeline, boxes, columns)
    parts = int(boxes.parts.max())
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    wanted = np.zeros((timeline.ranks * parts, columns, 3))
    left = np.ones((timeline.ranks * parts, columns))
    for box in range(len(boxes)):
        fill = np.frombuffer(bytes.fromhex(shade(TONES[Kind(int(boxes.kind[box]))], int(boxes.chunk[box]), chunks).fill[1:]), np.uint8)
        share = np.clip(np.minimum(boxes.end[box], edges[1:]) - np.maximum(boxes.start[box], edges[:-1]), 0, None) / np.diff(edges)
        lines = range(parts) if boxes.parts[box] == 1 else [int(boxes.part[box])]
        for line in lines:
            wanted[boxes.rank[box] * parts + line] += share[:, None] * fill
            left[boxes.rank[box] * parts + line] -= share
    wanted += left[..., None] * np.frombuffer(bytes.fromhex(IDLE[1:]), np.uint8)
    assert np.abs(image - wanted).max() <= 1.0


def test_rows_are_separated_if_there_is_room():
    image = np.arange(6, dtype=np.uint8).reshape(6, 1, 1).repeat(3, axis=2)  # three ranks of two parts each
    apart = space_rows(image, 3, (0.25, 0.75))
    assert len(apart) == 3 * 24
    assert [line[0, 0] for line in apart if line[0, 3]] == sorted([0, 1, 2, 3, 4, 5] * 6)
    assert sum(line[0, 3] == 0 for line in apart) == 3 * 12
    assert space_rows(image.repeat(1000, axis=0), 3000, (0.25, 0.75)).shape == (6000, 1, 3)


def test_times_and_sizes_have_units_that_suit_them():
    """A makespan of 0.33 s is 330 ms, on the axis too; memory in bytes is written in binary units, inside the figure."""
    timeline = SAMPLES["1f1b"].scaled(0.01)
    bytes_held = replace(timeline.costs, activation=5.0 * 2**20)
    timeline = replace(timeline, costs=bytes_held).in_units(Units("s", in_bytes=True))
    figure = draw_timelines(timeline)
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in axes.texts]
    written = " ".join(text.get_text() for text in texts)
    assert f"makespan {timeline.makespan * 1e3:.4g} ms" in written
    assert f"{max(timeline.peak_memory) / 2**20:.4g}MiB" in written
    (axis,) = [axes for axes in figure.axes if axes.get_xlabel()]
    assert axis.get_xlabel() == "time (ms)"
    ticks = [float(label.get_text()) for label in axis.get_xticklabels()]
    assert ticks == pytest.approx([place * 1e3 for place in axis.get_xticks()])
    assert all(figure.bbox.x0 <= text.get_window_extent().x0 and text.get_window_extent().x1 <= figure.bbox.x1 for text in texts)
