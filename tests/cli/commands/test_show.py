"""`penstock show`, and where output goes."""

from __future__ import annotations

import json
import os
import re
import stat

import pytest

import penstock as ps

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_header_grid_and_legend(run):
    schedule = ps.schedule("zbv", ranks=4, microbatches=8)
    header, *grid, blank, legend = run("show", "zbv", "-p", 4, "-m", 8).out.splitlines()
    steps = len(schedule.grid().splitlines()) - 1
    assert header == f"zbv schedule: v placement, 4 ranks, 8 stages, 8 microbatches, {steps} steps"
    assert "\n".join(grid) == schedule.grid()
    assert blank == ""
    assert legend == "F forward  I backward for the input  W backward for the weights"


def test_counts_of_one_are_singular(run):
    assert run("show", "inference", "-p", 1, "-m", 1).out.startswith(
        "inference schedule: linear placement, 1 rank, 1 stage, 1 microbatch, 1 step\n"
    )


def test_json_contains_only_the_schedule(run):
    assert json.loads(run("show", "zbv", "-p", 2, "-m", 3, "--json").out) == ps.schedule("zbv", ranks=2, microbatches=3).to_json()


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_output_can_be_loaded_and_shown(run, tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    result = run("show", "zb-h1", "-p", 3, "-m", 5, "-o", path)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert ps.load(path) == ps.schedule("zb-h1", ranks=3, microbatches=5)
    assert run("show", path).out.splitlines()[1:] == run("show", "zb-h1", "-p", 3, "-m", 5).out.splitlines()[1:]


def test_other_suffixes_get_the_printed_text(run, tmp_path):
    run("show", "gpipe", "-o", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == run("show", "gpipe").out
    run("show", "gpipe", "--json", "-o", tmp_path / "b.txt")
    assert (tmp_path / "b.txt").read_text() == run("show", "gpipe", "--json").out


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG"), ("html", b"<!doctype html>")])
def test_pictures_are_drawn(run, tmp_path, suffix, start):
    path = tmp_path / f"a.{suffix}"
    result = run("show", "zbv", "-p", 2, "-m", 3, "-o", path)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert path.read_bytes()[:20].lower().startswith(start.lower())
    if suffix == "svg":
        assert "zbv: each action takes one step" in path.read_text()


@pytest.mark.parametrize(
    ("command", "suffix"),
    [("show", "gif"), ("lower", "svg"), ("lower", "gif"), ("verify", "pdf"), ("verify", "csv")],
)
def test_suffixes_that_say_something_else_are_refused(refused, tmp_path, command, suffix):
    assert "the suffix is n" in refused(2, command, "zbv", "-o", tmp_path / f"a.{suffix}")
    assert not list(tmp_path.iterdir())


def test_json_is_not_written_into_a_picture(refused, tmp_path):
    assert "--json does not go with" in refused(2, "show", "zbv", "--json", "-o", tmp_path / "a.svg")


def test_a_dash_means_stdout(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("show", "gpipe", "-o", "-") == run("show", "gpipe")
    assert not list(tmp_path.iterdir())


def test_schedules_that_pytorch_cannot_express_are_not_written_as_csv(run, refused, tmp_path):
    assert "PyTorch cannot express a bidirectional placement" in refused(1, "show", "dualpipe", "-o", tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())
    assert run("show", "dualpipe", "-o", tmp_path / "a.json").code == 0
    assert ps.load(tmp_path / "a.json") == ps.schedule("dualpipe", ranks=4, microbatches=8)


def test_an_impossible_target_is_wrong_usage(refused, tmp_path):
    assert "is a folder" in refused(2, "show", "gpipe", "-o", tmp_path)
    assert "no folder" in refused(2, "show", "gpipe", "-o", tmp_path / "none" / "a.csv")


def test_a_failed_write_keeps_the_old_file(run, tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    run("show", "gpipe", "-o", path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.replace", full)
    result = run("show", "1f1b", "-o", path)
    assert result.code == 2
    assert result.err == f"error: {path}: No space left on device\n"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writes_to_pipes_and_follows_links(run, tmp_path):
    pipe, link, real = tmp_path / "pipe.txt", tmp_path / "link.txt", tmp_path / "real.txt"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run("show", "gpipe", "-o", pipe)
    assert os.read(reader, 1 << 16).decode() == run("show", "gpipe").out
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    real.touch()
    link.symlink_to(real)
    run("show", "gpipe", "-o", link)
    assert link.is_symlink()
    assert real.read_text() == run("show", "gpipe").out


@pytest.fixture
def terminal(monkeypatch, run):
    """Pretend to be a terminal with 256 colours and this many columns."""

    def set_width(columns: int) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(columns))

    return set_width


def test_colour_does_not_change_the_text(run, terminal):
    plain = run("show", "zbv").out
    terminal(200)
    coloured = run("show", "zbv").out
    assert coloured.count("\x1b[0m") > 4 * 8 * 2 * 3
    assert [line.rstrip() for line in ESCAPE.sub("", coloured).splitlines()] == plain.splitlines()


def test_no_colour_with_no_color_or_on_a_dumb_terminal(run, terminal, monkeypatch):
    terminal(200)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("show", "zbv").out
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run("show", "zbv").out


def test_json_is_never_coloured(run, terminal):
    terminal(40)
    json.loads(run("show", "zbv", "--json").out)


def test_ranks_that_do_not_fit_are_shown_in_further_blocks(run, terminal):
    whole = run("show", "1f1b", "-p", 16, "-m", 4).out.splitlines()
    terminal(50)
    lines = [ESCAPE.sub("", line).rstrip() for line in run("show", "1f1b", "-p", 16, "-m", 4).out.splitlines()]
    assert max(map(len, lines[1:])) <= 50
    blocks = "\n".join(lines[1:]).split("\n\n")[:-1]
    headers = [re.findall(r"rank \d+", block.splitlines()[0]) for block in blocks]
    assert len(blocks) > 1
    assert [rank for block in headers for rank in block] == [f"rank {rank}" for rank in range(16)]
    assert {len(block.splitlines()) for block in blocks} == {len(whole) - 3}
    cells = sorted(cell for block in blocks for line in block.splitlines()[1:] for cell in line.split()[1:])
    assert cells == sorted(cell for line in whole[2:-2] for cell in line.split()[1:])
