"""NAME|FILE: what counts as a file, and the errors for files that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.cli.sources import ScheduleSource, parse_options
from penstock.errors import UsageError
from penstock.ir.formats.files import save


def test_a_name_has_defaults_and_takes_its_shape():
    assert ScheduleSource("1f1b").table() == ps.schedule("1f1b", ranks=4, microbatches=8)
    assert ScheduleSource("1f1b", 2, 3).table() == ps.schedule("1f1b", ranks=2, microbatches=3)
    shaped = ScheduleSource("interleaved-1f1b", 2, 8, 3, ["group_size=4"]).table()
    assert shaped == ps.schedule("interleaved-1f1b", ranks=2, microbatches=8, chunks=3, group_size=4)


def test_a_schedule_of_one_rank_needs_no_rank_count():
    assert ScheduleSource("data-parallel").table().ranks == 1


def test_given_ranks_are_not_overridden(refused):
    assert "ranks=3" in refused(2, "show", "data-parallel", "-p", 3)


def test_a_registered_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpipe").mkdir()
    assert ScheduleSource("gpipe").table().name == "gpipe"


def test_files_by_suffix(tmp_path):
    schedule = ps.schedule("zbv", ranks=2, microbatches=4)
    for suffix in ("csv", "json", "CSV"):
        path = tmp_path / f"one.{suffix}"
        save(schedule, path)
        assert ScheduleSource(str(path)).table() == schedule


@pytest.mark.parametrize("option", [("-p", 4), ("-m", 8), ("--chunks", 2), ("-O", "group_size=2")])
def test_a_file_has_its_own_shape(refused, tmp_path, option):
    ps.schedule("gpipe", ranks=2, microbatches=2).to_csv(tmp_path / "a.csv")
    assert "has its own shape" in refused(2, "show", tmp_path / "a.csv", *option)


def test_missing_files_folders_and_unknown_suffixes_are_wrong_usage(refused, tmp_path):
    assert f"no file {tmp_path / 'no.csv'}" in refused(2, "show", tmp_path / "no.csv")
    assert f"no file {tmp_path / 'no'}" in refused(2, "show", tmp_path / "no")
    assert "is a folder" in refused(2, "verify", tmp_path)
    (tmp_path / "a.txt").write_text("0F0")
    assert "none of .csv, .json" in refused(2, "show", tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("junk.csv", b"0F0,0B0\n1F0,1B0junk\n", "row 2 (rank 1), cell 2"),
        ("short.csv", b"0F0,0B0\n1F0\n", "stage 1 has no B"),
        ("empty.csv", b"", "empty"),
        ("binary.csv", b"\xff\xfe\x00", "not a CSV file"),
        ("cut.json", b"{", "not a JSON file"),
        ("other.json", b"[1, 2]", "not a Penstock schedule"),
    ],
)
@pytest.mark.parametrize("command", ["show", "lower"])
def test_bad_content_is_a_finding_and_names_the_file(refused, tmp_path, command, name, content, said):
    (tmp_path / name).write_bytes(content)
    message = refused(1, command, tmp_path / name)
    assert str(tmp_path / name) in message
    assert said in message


def test_options_are_read_as_values():
    given = ["a=8", "b=0.5", "c=true", "d=word", "e=none", "f=x=y"]
    assert parse_options(given) == {"a": 8, "b": 0.5, "c": True, "d": "word", "e": None, "f": "x=y"}


@pytest.mark.parametrize("text", ["group_size", "=8", "group size=8", ""])
def test_malformed_options_are_refused(text):
    with pytest.raises(UsageError, match="KEY=VALUE"):
        parse_options([text])


def test_an_option_twice_or_unknown_is_refused(refused):
    assert "group_size is given twice" in refused(2, "show", "interleaved-1f1b", "-O", "group_size=4", "-O", "group_size=8")
    assert "no option 'groups'; its options: group_size, slices, chunks" in refused(2, "show", "interleaved-1f1b", "-O", "groups=4")


@pytest.mark.parametrize(
    ("text", "shape", "options"),
    [
        ("interleaved-1f1b{chunks=4}", (2, 8), {"chunks": 4}),
        ("Interleaved1F1B{ chunks = 3, group_size=4 }", (2, 8), {"chunks": 3, "group_size": 4}),
        ("hanayo{waves=2}", (4, 8), {"chunks": 4}),
        ("zbv{}", (4, 8), {}),
    ],
)
def test_options_in_braces_are_those_of_the_options(text, shape, options):
    name = text.partition("{")[0]
    wanted = ps.schedule(name, *shape, **options)
    assert ps.schedule(text, *shape) == wanted
    assert ScheduleSource(text, *shape).table() == wanted


def test_counts_may_be_in_braces_on_the_command_line():
    assert ScheduleSource("1f1b{ranks=2,microbatches=3}").table() == ps.schedule("1f1b", 2, 3)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["interleaved-1f1b{chunks=4}", "--chunks", "2"], "chunks is given twice: in 'interleaved-1f1b{chunks=4}' and with --chunks"),
        (["interleaved-1f1b{chunks=four}"], "chunks=four is not a whole number"),
        (["interleaved-1f1b{group_size=4}", "-O", "group_size=8"], "group_size is given twice"),
        (["interleaved-1f1b{groups=4}"], "has no option 'groups'"),
        (["interleaved-1f1b{group_size}"], "is not NAME=VALUE"),
        (["zvb{chunks=2}"], "did you mean 'zbv'"),
    ],
)
def test_wrong_braces_are_refused(refused, args, said):
    assert said in refused(2, "show", *args)
