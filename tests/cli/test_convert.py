"""`penstock convert`."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.formats.csv_form import refuse_for_torch
from penstock.ir.formats.files import save
from penstock.passes.deepspeed.instructions import stream

SCHEDULE = ps.schedule("zbv", ranks=3, microbatches=6)
PROGRAM = ps.lower(SCHEDULE)


@pytest.fixture(params=["csv", "json"])
def files(request, tmp_path):
    """Files with this suffix that contain a schedule and a program."""
    paths = tmp_path / f"schedule.{request.param}", tmp_path / f"program.{request.param}"
    for table, path in zip((SCHEDULE, PROGRAM), paths, strict=True):
        save(table, path)
    return paths


def test_a_schedule_stays_a_schedule_and_a_program_a_program(run, files, tmp_path):
    for path, table in zip(files, (SCHEDULE, PROGRAM), strict=True):
        for suffix in ("csv", "json"):
            out = tmp_path / f"out.{suffix}"
            result = run("convert", path, out)
            assert result.code == 0
            assert result.out.startswith(f"{out}: ")
            assert ps.load(out) == table


def test_csv_has_compute_only_and_lowered_csv_the_program(run, files, tmp_path):
    for path in files:
        assert run("convert", path, tmp_path / "a.csv", "--to", "csv").code == 0
        assert ps.load(tmp_path / "a.csv") == SCHEDULE
        assert run("convert", path, tmp_path / "b.csv", "--to", "lowered-csv").code == 0
        assert ps.load(tmp_path / "b.csv") == PROGRAM


def test_converts_to_stdout(run, files):
    schedule, program = files
    assert json.loads(run("convert", schedule, "-", "--to", "json").out)["rows"] == SCHEDULE.to_json()["rows"]
    cells = run("convert", program, "-", "--to", "csv").out.replace("\r", "").splitlines()
    assert [[cell for cell in row.split(",") if cell] for row in cells] == SCHEDULE.to_json()["rows"]


def test_a_named_schedule_can_be_converted(run, tmp_path):
    assert run("convert", "zbv", tmp_path / "a.csv", "-p", 3, "-m", 6).code == 0
    assert ps.load(tmp_path / "a.csv") == SCHEDULE


def test_output_option_is_the_second_argument(run, files, tmp_path):
    assert run("convert", files[0], "-o", tmp_path / "a.json").code == 0
    assert ps.load(tmp_path / "a.json") == SCHEDULE


def test_json_says_what_was_written(run, files, tmp_path):
    said = json.loads(run("convert", files[1], tmp_path / "a.csv", "--json").out)
    assert said["file"] == str(tmp_path / "a.csv")
    assert (said["format"], said["type"]) == ("lowered-csv", "program")
    assert (said["ranks"], said["stages"], said["microbatches"]) == (3, 6, 6)


def test_from_reads_files_of_any_name(run, refused, tmp_path):
    SCHEDULE.to_csv(tmp_path / "schedule")
    assert "none of .csv, .json" in refused(2, "convert", tmp_path / "schedule", tmp_path / "a.json")
    assert run("convert", tmp_path / "schedule", tmp_path / "a.json", "--from", "csv").code == 0
    assert ps.load(tmp_path / "a.json") == SCHEDULE
    assert "holds a schedule, not lowered-csv" in refused(1, "convert", tmp_path / "schedule", tmp_path / "b.json", "--from", "lowered-csv")
    assert "not a JSON file" in refused(1, "convert", tmp_path / "schedule", tmp_path / "b.json", "--from", "json")
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize("name", ["1f1b", "inference"])
def test_deepspeed_stream_holds_every_rank_and_step(run, tmp_path, name):
    assert run("convert", name, tmp_path / "a.ds", "-p", 3, "-m", 4).code == 0
    schedule = ps.schedule(name, ranks=3, microbatches=4)
    wanted = []
    for rank in range(3):
        wanted.append(f"rank {rank}")
        wanted += [f"{step}: {', '.join(map(str, each))}".strip() for step, each in enumerate(stream(schedule, rank))]
    assert [line.strip() for line in (tmp_path / "a.ds").read_text().splitlines()] == wanted
    assert run("convert", name, "-", "--to", "deepspeed", "-p", 3, "-m", 4).out == (tmp_path / "a.ds").read_text()


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "inference"])
def test_deepspeed_stream_is_read_back(run, refused, tmp_path, name):
    assert run("convert", name, tmp_path / "a.ds", "-p", 3, "-m", 4).code == 0
    assert run("convert", tmp_path / "a.ds", tmp_path / "a.csv").code == 0
    assert ps.load(tmp_path / "a.csv") == ps.schedule(name, 3, 4)
    (tmp_path / "bad.ds").write_text("rank 0\n  0: Nap()\n")
    assert "line 2: 'Nap()' is not an instruction" in refused(1, "convert", tmp_path / "bad.ds", tmp_path / "b.csv")


@pytest.mark.parametrize("name", ["zbv", "interleaved-1f1b", "dualpipe", "zb-h1"])
def test_schedules_that_deepspeed_cannot_express_are_findings(refused, tmp_path, name):
    assert "DeepSpeed" in refused(1, "convert", name, tmp_path / "a.ds")
    assert not list(tmp_path.iterdir())


def test_schedules_that_pytorch_cannot_express_are_findings(refused, tmp_path):
    skipping = ps.schedule("1f1b", ranks=4, microbatches=4, graph=ps.StageGraph.chain(4, skips=[(0, 3)]))
    save(skipping, tmp_path / "skips.json")
    for form in ("csv", "lowered-csv"):
        assert "edge 0 -> 3" in refused(1, "convert", tmp_path / "skips.json", tmp_path / "a.csv", "--to", form)
        assert "bidirectional" in refused(1, "convert", "dualpipe", tmp_path / "a.csv", "--to", form)
    assert not (tmp_path / "a.csv").exists()


def test_schedules_that_pytorch_can_express_are_not_refused():
    for table in (
        SCHEDULE,
        PROGRAM,
        ps.schedule("dualpipe-v", ranks=2, microbatches=4),
        ps.schedule("looped-bfs", ranks=2, microbatches=4),
    ):
        refuse_for_torch(table)
    with pytest.raises(ScheduleError, match="bidirectional"):
        refuse_for_torch(ps.schedule("dualpipe", ranks=2, microbatches=4))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "OUT or -o FILE"),
        (("a.json", "-o", "b.json"), "not both"),
        (("a.yaml",), "none of .csv, .json, .ds"),
        (("-",), "give --to"),
        (("-", "--to", "json", "--json"), "stdout already"),
        (("a.json", "--from", "deepspeed"), "there is no file gpipe"),
        (("nowhere/a.json",), "no folder nowhere"),
    ],
)
def test_wrong_arguments_are_refused(refused, arguments, said):
    assert said in refused(2, "convert", "gpipe", *arguments)
