"""`penstock plan --gpus`: whole jobs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import typer

import penstock as ps
from penstock.cli.app import app

SIZES = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 512}
TEXT = " ".join(f"{name}={value}" for name, value in SIZES.items())
LINKS = ["--peak-flops", "1e12", "--memory-bandwidth", "100GB", "--node-bandwidth", "20GB", "--bandwidth", "2GB", "--memory-limit", "64MB"]
ARGS = ["plan", "--transformer", TEXT, "--gpus", 4, "--gpus-per-node", 4, "--global-batch", 8, "--schedules", "1f1b", *LINKS]


def job() -> ps.Job:
    rates = {"flops": 1e12, "memory": 64e6, "memory_bandwidth": 1e11, "node_bandwidth": 2e10, "bandwidth": 2e9}
    return ps.Job(model=SIZES, machines=ps.Machines(gpus=4, gpus_per_node=4, **rates), batch=8)


def test_report_and_file_equal_the_library_s(run, tmp_path):
    result = run(*ARGS, "--save", tmp_path / "job.json")
    assert (result.code, result.err) == (0, "")
    wanted = ps.plan_job(job(), schedules="1f1b")
    assert result.out == f"{wanted.report()}\n\nsaved to {tmp_path / 'job.json'}\n"
    assert json.loads((tmp_path / "job.json").read_text()) == json.loads(json.dumps(wanted.to_json()))


def test_other_commands_read_the_plan_of_a_job(run, tmp_path):
    file, script = tmp_path / "job.json", tmp_path / "train.py"
    plan = ps.plan_job(job(), pipeline=2, tensor=1, sharding=1, vocabulary="ends", schedules="1f1b")
    plan.save(file)
    script.write_text("")
    assert json.loads(run("simulate", file, "--json").out)["makespan"] == plan.seconds
    assert " ms" in run("simulate", file).out  # in seconds, as the plan
    assert json.loads(run("compare", file, "--json").out)["results"][0]["timeline"]["makespan"] == plan.seconds
    assert run("show", file).out.startswith("1f1b schedule: linear placement, 2 ranks")
    assert run("verify", file).code == 0
    assert f"{file} is the plan of a whole job" in run("train", script, "--schedule", file).err


def test_a_profile_is_planned_as_by_the_library(run, tmp_path):
    layers = [ps.Layer(f=1.0, i=1.0, w=1.0, activation=1e5, output=1e4, parameters=1e5, gradients=1e5, optimizer=2e5)] * 4
    profile = ps.Profile(layers, time_unit="ms", size_unit="B")
    profile.save(tmp_path / "profile.json")
    args = ["plan", "--profile", tmp_path / "profile.json", *ARGS[3:]]
    result = run(*args)
    assert (result.code, result.err) == (0, "")
    assert result.out.rstrip() == ps.plan_job(replace(job(), model=profile), schedules="1f1b").report()
    assert "needs the sizes of the model" in run(*args, "--tensor", "2").err


def test_json_and_pins(run):
    result = run(*ARGS, "--json", "--tensor", "2", "--sharding", "1,2", "--microbatch-sizes", "1", "--vocabulary", "ends", "--context", "1")
    assert result.code == 0
    chosen = json.loads(result.out)["configuration"]
    assert (chosen["tensor"], chosen["microbatch"], chosen["vocabulary"], chosen["context"]) == (2, 1, "ends", 1)


def test_a_known_gpu_needs_no_rates(run):
    result = run("plan", "--transformer", TEXT, "--gpus", 4, "--gpu", "h100", "--global-batch", 8, "--schedules", "1f1b", "--json")
    machines = json.loads(result.out)["job"]["machines"]
    assert machines["flops"] == 989e12
    shares = run(*ARGS, "--shares", "matmul=0.5, link=0.25", "--optimizer", "muon", "--json")
    found = json.loads(shares.out)["job"]
    assert (found["machines"]["matmul_share"], found["machines"]["link_share"], found["optimizer"]) == (0.5, 0.25, "muon")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "--gpus", 4, "--global-batch", 8], "--gpus plans one model: give --transformer SIZES or --profile FILE"),
        (["plan", "--transformer", TEXT, "--profile", "p.json", "--gpus", 4, "--global-batch", 8], "or --profile FILE, not both"),
        (["plan", "--transformer", TEXT, "--gpus", 4], "--gpus needs --global-batch"),
        (["plan", "--transformer", TEXT + " flops=1e12", "--gpus", 4, "--global-batch", 8], "leave out flops with --gpus"),
        (["plan", "--transformer", TEXT, "--gpus", 4, "--global-batch", 8], "or --peak-flops, --memory-limit, --memory-bandwidth, --node"),
        (["plan", "--transformer", TEXT, "--gpus", 4, "--global-batch", 8, "--peak-flops", "1T"], "'1T' is not a number"),
        (["plan", "--transformer", TEXT, "--gpus", 4, "--global-batch", 8, "--gpu", "h100", "--bandwidth", "1Gbit"], "100 Gbit are 12.5GB"),
        (["plan", "--transformer", TEXT, "--gpus", 4, "--global-batch", 8, "--node-bandwidth", 20], "write the unit, like 20GB"),
        (["plan", "--transformer", TEXT, "--gpus", 4, "--global-batch", 8, "--node-latency", 2], "write the unit, like 2us"),
        ([*ARGS, "-p", 2], "--ranks does not go with --gpus"),
        ([*ARGS, "--shares", "matmul=2"], "matmul_share must be a number above 0 and at most 1, got 2"),
        ([*ARGS, "--optimizer", "sgd"], "there is no optimizer 'sgd'"),
        ([*ARGS, "--node-bandwidth", "0GB"], "node_bandwidth must be more than 0, because every link needs one"),
        ([*ARGS, "--tensor", "a"], "--tensor: 'a' is not a list of whole numbers"),
    ],
)
def test_wrong_usage_exits_with_2(refused, args, message):
    assert message in refused(2, *args)


FOR_BOTH = "profile transformer memory_limit headroom schedules microbatch_sizes latency bandwidth vocabulary recompute as_json output gpus"


def list_options() -> list[str]:
    """Every option of the command that is for a whole job or for one pipeline only, as it is written."""
    command = typer.main.get_command(app).commands["plan"]
    rest = [one for one in command.params if one.name not in FOR_BOTH.split()]
    return [(one.secondary_opts or one.opts)[-1] for one in rest]


@pytest.mark.parametrize("option", list_options())
def test_no_option_is_ignored(run, option):
    """Each is refused either with --gpus or without; other mistakes of these commands are found after that."""
    given = [option] if option in ("--offload", "--no-barrier", "--no-split") else [option, "x.svg" if option == "--figure" else "4"]
    job = run("plan", "--transformer", TEXT, "--gpus", 4, *given)
    pipeline = run("plan", "--transformer", TEXT, *given)
    is_refused = [f"{option} does not go with --gpus" in job.err, f"{option} is for planning a whole job: add --gpus" in pipeline.err]
    assert (job.code, pipeline.code, sorted(is_refused)) == (2, 2, [False, True])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tensor", "3"], "tensor=3 does not divide gpus=4"),
        (["--data", "3"], "data=3 does not divide gpus=4"),
        (["--memory-limit", "900KB"], "no configuration fits"),
    ],
)
def test_jobs_that_cannot_be_planned_exit_with_1(refused, args, message):
    assert message in refused(1, *ARGS, *args)
