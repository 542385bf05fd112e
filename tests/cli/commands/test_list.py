"""`penstock list`."""

from __future__ import annotations

import json

import pytest

from penstock.passes.pass_list import passes
from penstock.schedules.registry import algorithms


def test_one_line_per_schedule_with_its_summary_bubble_and_memory(run):
    header, *lines = run("list").out.splitlines()
    assert header.split() == ["name", "bubble", "memory", "summary"]
    assert len(lines) == len(algorithms())
    for line, each in zip(lines, algorithms().values(), strict=True):
        assert line.split(maxsplit=1)[0] == each.name
        assert line.endswith(each.summary)
        assert f"  {each.bubble}  " in line
        assert f"  {each.memory}  " in line


def test_json_has_every_schedule(run):
    listed = {each["name"]: each for each in json.loads(run("list", "--json").out)}
    assert set(listed) == set(algorithms())
    for name, each in algorithms().items():
        assert listed[name]["summary"] == each.summary
        assert listed[name]["bubble"] == each.bubble
        assert listed[name]["memory"] == each.memory
    assert listed["interleaved-1f1b"]["options"]["chunks"] == algorithms()["interleaved-1f1b"].layout.chunks
    assert "group_size" in listed["interleaved-1f1b"]["options"]
    assert listed["gpipe"]["options"] == {"slices": 1}
    assert listed["1f1b"]["options"] == {}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_fits_the_terminal_without_dropping_words(run, monkeypatch, width):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    out = run("list").out
    assert max(map(len, out.splitlines())) <= width
    for each in algorithms().values():
        for text in (each.name, each.summary, f"bubble: {each.bubble}", f"memory: {each.memory}"):
            assert " ".join(text.split()) in " ".join(out.split())


def test_passes(run):
    names = [line.split()[0] for line in run("list", "--passes").out.splitlines()]
    assert names == list(passes())
    assert [each["name"] for each in json.loads(run("list", "--passes", "--json").out)] == names


def test_output_is_json_by_suffix_and_text_otherwise(run, tmp_path):
    printed, data = run("list").out, run("list", "--json").out
    for name, said in (("list.txt", printed), ("list.json", data)):
        result = run("list", "-o", tmp_path / name)
        assert (result.code, result.out) == (0, "")
        assert (tmp_path / name).read_text() == said
