"""The page: self-contained, safe, and in the reader's colour theme."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from draw.samples import SAMPLES
from penstock.draw.html import timelines_html

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes and the text of cells; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "fsdp"])
def test_the_page_fetches_nothing(name):
    text = timelines_html([SAMPLES[name]])
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "img"}
    for _, attributes in page.tags:
        for key in ("src", "href", "xlink:href", "data", "action"):
            assert re.match(r"#|data:image/png;base64,", attributes.get(key) or "#")
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", text))
    assert "@import" not in text


def test_the_table_has_one_column_per_timeline():
    page = Page(timelines_html([SAMPLES["1f1b"], SAMPLES["zbv"]], unit="ms"))
    assert page.rows[0] == ["", "1f1b", "zbv"]
    table = {row[0]: row[1:] for row in page.rows[1:]}
    assert table["makespan"][0] == "33 ms"
    assert [cell.split()[0] for cell in table["bubble"]] == [f"{SAMPLES[name].bubble:.1%}" for name in ("1f1b", "zbv")]
    assert all(len(row) == 3 for row in page.rows)


def test_names_are_escaped():
    name = "<script>alert('&')</script>"
    text = timelines_html([SAMPLES["1f1b"]], names=[name])
    page = Page(text)
    assert name not in text
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert page.rows[0][1] == name


def test_text_and_idle_colours_follow_the_page_s_theme_and_kinds_do_not():
    text = timelines_html([SAMPLES["1f1b"]])
    svg = text[text.index("<svg") : text.index("</svg>")]
    for colour in ("#222222", "#666666", "#ebebeb"):
        assert colour not in svg
        assert colour in text[: text.index("<svg")]
    assert "fill: var(--idle)" in svg
    assert "fill: #0072b2" in svg
    assert 'style="fill: #ffffff"' not in svg  # no sheet of paper behind the figure
    assert "prefers-color-scheme: dark" in text


def test_the_page_is_the_same_each_time():
    assert timelines_html([SAMPLES["fsdp"]]) == timelines_html([SAMPLES["fsdp"]])
