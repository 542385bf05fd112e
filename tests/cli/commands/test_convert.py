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
    with pytest.raises(ScheduleError, match="PyTorch cannot express 0OFFLOAD2 and 5 more copies of activations"):
        refuse_for_torch(ps.lower(ps.schedule("1f1b", ranks=3, microbatches=6), offload=100))


# Layouts of Megatron and torchtitan -----------------------------------------------------------------------------------

MODEL = ps.Profile.transformer(layers=14, hidden=64, heads=4, sequence=128, vocabulary=1000, flops=1e12)


@pytest.fixture
def profile(tmp_path):
    """The file of a profile: an embedding, 14 blocks and a head."""
    MODEL.save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_a_layout_becomes_a_plan_that_other_commands_take(run, tmp_path, profile):
    out = tmp_path / "plan.json"
    result = run("convert", "Et*4|t*4|t*4|ttL", out, "--from", "megatron", "--profile", profile, "-p", 4, "-m", 8)
    assert result.code == 0, result.err
    assert result.out.startswith(f"{out}: 1f1b plan: linear placement, 4 ranks, 4 stages, 8 microbatches; ")
    plan = ps.Plan.load(out)
    assert (plan.partition, plan.schedule) == ((5, 4, 4, 3), ps.schedule("1f1b", 4, 8))
    assert plan.profile == MODEL
    for command in ("verify", "simulate", "show"):
        assert run(command, out).code == 0
    ps.plan(MODEL, ranks=4, microbatches=8, schedules=["1f1b", "zb-h1"], seconds=0.0).save(tmp_path / "ours.json")
    rows = json.loads(run("compare", out, tmp_path / "ours.json", "--json").out)["results"]
    assert [row["source"] for row in rows] == [str(tmp_path / "ours.json"), str(out)]
    assert rows[1]["timeline"]["makespan"] == plan.predicted.makespan


@pytest.mark.parametrize("schedules", [["1f1b"], ["interleaved-1f1b"]])
def test_plans_go_to_megatron_and_back(run, tmp_path, profile, schedules):
    plan = ps.plan(MODEL, ranks=4, microbatches=8, schedules=schedules, seconds=0.0)
    plan.save(tmp_path / "plan.json")
    result = run("convert", tmp_path / "plan.json", tmp_path / "layout.txt", "--to", "megatron")
    assert "--pipeline-model-parallel-size 4\n" in result.out
    assert "--num-layers 14\n" in result.out
    assert ("--microbatch-group-size-per-virtual-pipeline-stage 4\n" in result.out) == (plan.placement.chunks > 1)
    text = (tmp_path / "layout.txt").read_text().strip()
    for source in (tmp_path / "layout.txt", text):
        assert run("convert", source, tmp_path / "a.json", "--from", "megatron", "--profile", profile, "-p", 4, "-m", 8).code == 0
        assert ps.Plan.load(tmp_path / "a.json").partition == plan.partition
        assert ps.load(tmp_path / "a.json") == plan.schedule
    printed = run("convert", tmp_path / "plan.json", "-", "--to", "megatron")
    assert printed.out == f"{text}\n"
    assert "--pipeline-model-parallel-size 4" in printed.err


def test_megatron_s_layout_goes_to_torchtitan(run, tmp_path, profile):
    shape = ("--profile", profile, "-p", 4, "-m", 8)
    result = run("convert", "Ett|(tt|)*6,L", tmp_path / "a.json", "--from", "megatron", "--to", "torchtitan", "--json", *shape)
    said = json.loads(result.out)
    parts = json.loads((tmp_path / "a.json").read_text())
    assert json.loads(said["layout"]) == parts
    assert said["arguments"]["--parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1"]
    assert parts[-1] == ["norm", "lm_head"]
    assert run("convert", tmp_path / "a.json", tmp_path / "b.json", "--from", "torchtitan", *shape).code == 0
    assert ps.Plan.load(tmp_path / "b.json").partition == (3, 2, 2, 2, 2, 2, 2, 1)
    assert run("convert", json.dumps(parts), tmp_path / "c.csv", "--from", "torchtitan", *shape).code == 0
    assert ps.load(tmp_path / "c.csv") == ps.schedule("interleaved-1f1b", 4, 8, chunks=2)


def test_group_size_and_kinds_are_options(run, tmp_path, profile):
    shape = ("--from", "megatron", "--profile", profile, "-p", 4, "-m", 8)
    assert run("convert", "Et|(tt|)*6,mL", tmp_path / "a.json", "--kinds", "E,t*13,m,L", "-O", "group_size=8", *shape).code == 0
    assert ps.load(tmp_path / "a.json") == ps.schedule("interleaved-1f1b", 4, 8, chunks=2, group_size=8)
    said = json.loads(run("convert", tmp_path / "a.json", tmp_path / "a.txt", "--to", "megatron", "--kinds", "E,t*13,m,L", "--json").out)
    assert said["arguments"]["--mtp-num-layers"] == "1"
    assert said["arguments"]["--microbatch-group-size-per-virtual-pipeline-stage"] == "8"
    assert said["layout"] == "Et|(tt|)*6,mL"


def test_placements_that_megatron_cannot_express_are_findings(refused, tmp_path):
    ps.plan(MODEL, ranks=4, microbatches=8, schedules=["zbv"], seconds=0.0).save(tmp_path / "plan.json")
    assert "--schedules 1f1b,interleaved-1f1b" in refused(1, "convert", tmp_path / "plan.json", tmp_path / "a.txt", "--to", "megatron")
    assert not (tmp_path / "a.txt").exists()


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (2, ("1f1b", "-", "--to", "megatron"), "--to megatron needs a plan"),
        (2, ("Et|tL", "a.json", "--from", "megatron", "-p", 2, "-m", 2), "give --profile FILE"),
        (2, ("Et|tL", "a.json", "--from", "megatron", "--profile", "p.json", "-m", 2), "give -p and -m"),
        (2, ("Et|tL", "a.json", "--from", "megatron", "--profile", "p.json", "-p", 2, "-m", 2, "--chunks", 2), "--chunks follows from"),
        (2, ("Et|tL", "a.json", "--from", "megatron", "--profile", "p.json", "-p", 2, "-m", 2, "-O", "depth=2"), "takes no depth"),
        (
            2,
            ("[[]]", "a.json", "--from", "torchtitan", "--profile", "p.json", "-p", 1, "-m", 2, "-O", "group_size=2"),
            "takes no group_size",
        ),
        (2, ("no.txt", "a.json", "--from", "megatron", "--profile", "p.json", "-p", 2, "-m", 2), "there is no file no.txt"),
        (2, ("Et|tL", "a.json", "--from", "megatron", "--profile", "no.json", "-p", 2, "-m", 2), "there is no file no.json"),
        (2, ("1f1b", "a.json", "--profile", "p.json"), "--profile goes with --from megatron"),
        (2, ("1f1b", "a.json", "--kinds", "EtL"), "--kinds goes with layouts"),
        (1, ("Et|x", "a.json", "--from", "megatron", "--profile", "p.json", "-p", 2, "-m", 2), "layout: character 4 of 'Et|x'"),
        (
            2,
            ("Et|tL", "a.json", "--from", "megatron", "--profile", "p.json", "-p", 2, "-m", 2),
            "the layout has 2 blocks (t), and the profile 14",
        ),
        (2, ("[[]]", "a.json", "--from", "torchtitan", "--profile", "p.json", "-p", 1, "-m", 2), "'tok_embeddings' is in no part"),
    ],
)
def test_layouts_with_wrong_arguments_are_refused(refused, tmp_path, monkeypatch, profile, code, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(code, "convert", *arguments)
    assert not (tmp_path / "a.json").exists()


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
