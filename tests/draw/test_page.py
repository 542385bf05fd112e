"""The report's page and the loss curve."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import penstock as ps
from penstock.draw.figures.canvas import GRID, INK
from penstock.draw.figures.plots import draw_loss_curve
from penstock.draw.figures.timelines import draw_timelines
from penstock.draw.html import Card, Section, report_html
from penstock.draw.summary import TextSection

VOID = {"meta", "br", "hr", "img", "link", "path", "use", "rect", "stop"}


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def made() -> str:
    timeline = ps.simulate(ps.schedule("zbv", 2, 4))
    sections = [
        Section("One", "A < B").figure(draw_timelines(timeline), "a picture"),
        Section("Two").table(("name", "value"), [("a", "1"), ("<b>", "2")], chosen=1),
        Section("Three").texts([TextSection("inner", ("x",), [("y",)], ["said"])], "more").code("penstock list > here"),
        Section("Four").figure(draw_loss_curve([3.0, 2.0, 1.0]), "the loss"),
    ]
    return report_html(
        "A report & more",
        ["What it is", "and why"],
        [Card("loss", "1 → 2", "note", good=True), Card("other", "3", good=False)],
        sections,
        "made",
    )


def test_the_page_is_complete_and_works_offline(made):
    parser = Balanced(made)
    assert not parser.open
    assert parser.seen.count("svg") == 2
    assert parser.seen.count("section") == 4
    assert not re.search(r'(?:src|href)="(?!#)', made)
    assert "http" not in re.sub(r'xmlns(?::xlink)?="[^"]*"', "", made)


def test_statements_are_on_the_page_as_text(made):
    assert "<title>A report &amp; more</title>" in made
    assert "<p>A &lt; B</p>" in made
    assert '<tr class="chosen"><th scope="row">&lt;b&gt;</th><td>2</td></tr>' in made
    assert "<pre>penstock list &gt; here</pre>" in made
    assert '<dd class="good">1 → 2<small>note</small></dd>' in made
    assert '<dd class="bad">3</dd>' in made
    assert "<summary>more</summary>" in made


def test_pictures_take_the_page_s_colours(made):
    assert "prefers-color-scheme: dark" in made
    drawings = "".join(re.findall(r"<svg.*?</svg>", made, flags=re.DOTALL))
    assert f": {INK}" not in drawings
    assert f": {GRID}" not in drawings
    assert "var(--ink)" in drawings


def test_a_curve_shows_every_value_and_their_mean():
    values = [float(value) for value in np.linspace(5, 1, 30)]
    axes = draw_loss_curve(values, first=11, name="loss").axes[0]
    each, mean = axes.lines
    assert list(each.get_xdata()) == list(range(11, 41))
    assert list(each.get_ydata()) == values
    assert list(mean.get_xdata()) == list(range(20, 41))
    assert mean.get_ydata()[0] == pytest.approx(sum(values[:10]) / 10)
    assert axes.get_ylabel() == "loss"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_short_curve_has_no_mean(count):
    axes = draw_loss_curve([1.0] * count).axes[0]
    assert len(axes.lines) == 1
