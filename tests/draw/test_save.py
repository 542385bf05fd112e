"""Files by suffix, written completely or not at all."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from draw.samples import SAMPLES
from penstock.draw.save import save, save_picture
from penstock.errors import FileFormatError

TIMELINE = SAMPLES["fsdp"]


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.json", b"{"),
        ("a.trace.json", b'{"traceEvents"'),
        ("a.svg", b"<?xml"),
        ("a.pdf", b"%PDF"),
        ("a.png", b"\x89PNG"),
        ("a.html", b"<!DOCTYPE html>"),
        ("A.SVG", b"<?xml"),
    ],
)
def test_the_suffix_decides_the_format(tmp_path, name, begins):
    TIMELINE.save(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_saved_json_can_be_loaded(tmp_path):
    TIMELINE.save(tmp_path / "a.json")
    again = ps.Timeline.load(tmp_path / "a.json")
    assert again.to_json() == TIMELINE.to_json()


def test_options_reach_the_picture(tmp_path):
    save(TIMELINE, tmp_path / "a.svg", unit="us", names=["my own"])
    text = (tmp_path / "a.svg").read_text()
    assert "time (us)" in text
    assert "my own" in text
    save(TIMELINE, tmp_path / "a.trace.json", unit="s")
    assert json.loads((tmp_path / "a.trace.json").read_text())["otherData"]["unit"] == "s"
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    save(TIMELINE, small, dpi=30)
    save(TIMELINE, large, dpi=90)
    assert small.stat().st_size < large.stat().st_size


@pytest.mark.parametrize("name", ["a.gif", "a", "json", "trace.jso"])
def test_other_suffixes_are_refused_with_the_list(tmp_path, name):
    with pytest.raises(FileFormatError, match=r"not one of \.trace\.json, \.json, \.svg, \.pdf, \.png, \.html"):
        TIMELINE.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_pdf_is_the_same_every_time_and_has_fonts_that_journals_accept(tmp_path):
    one, other = tmp_path / "a.pdf", tmp_path / "b.pdf"
    TIMELINE.save(one)
    TIMELINE.save(other)
    assert one.read_bytes() == other.read_bytes()
    assert b"/Type3" not in one.read_bytes()


def test_several_timelines_can_only_be_saved_as_a_picture(tmp_path):
    save_picture([TIMELINE, SAMPLES["zbv"]], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").exists()
    with pytest.raises(FileFormatError, match=r"not one of \.svg, \.pdf, \.png, \.html"):
        save_picture([TIMELINE], tmp_path / "a.json")


def test_a_failure_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_text("old")

    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("no ink")

    monkeypatch.setattr("penstock.draw.save.render", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        TIMELINE.save(path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]
