"""`penstock plan`."""

from __future__ import annotations

import io
import json
import re
import signal

import pytest

import penstock as ps
from penstock.cli.output import show_planning
from penstock.planner import plan as planning
from penstock.planner.request import Progress
from penstock.text.units import Units

MODEL = ps.Profile(
    [ps.Layer(f=5, i=7, w=3, activation=1, weight_stash=0.5, parameters=2)] * 8,
    latency=0.5,
    variants=[ps.Profile([ps.Layer(f=10, i=14, w=6, activation=2, weight_stash=1, parameters=2)] * 8, microbatch=2)],
)
TINY = "layers=6 hidden=64 heads=4 sequence=32 vocabulary=100 flops=1e9"


@pytest.fixture
def profile(tmp_path):
    MODEL.save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_report_and_plan_equal_the_library_s(run, profile, tmp_path):
    result = run("plan", "--profile", profile, "-p", 4, "--batch", 16, "--memory-limit", 14, "--seconds", 0, "-o", tmp_path / "plan.json")
    assert (result.code, result.err) == (0, "")
    wanted = ps.plan(MODEL, ranks=4, batch=16, memory_limit=14.0, seconds=0)
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded == wanted
    assert result.out == f"{wanted.report()}\n\nsaved to {tmp_path / 'plan.json'}\n"


def test_json_and_figure(run, profile, tmp_path):
    result = run("plan", "--profile", profile, "-p", 2, "-m", 4, "--seconds", 0, "--json", "--figure", tmp_path / "plan.svg")
    assert result.code == 0
    data = json.loads(result.out)
    assert (data["type"], data["objective"]) == ("plan", ps.plan(MODEL, ranks=2, microbatches=4, seconds=0).objective)
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_options_reach_the_planner(run, profile, monkeypatch):
    seen = {}

    def plan(model, **given):
        seen.update(given, model=model)
        return ps.plan(model, **{**given, "seconds": 0})

    monkeypatch.setattr(planning, "plan", plan)
    args = ["--memory-limit", "14GiB, 15GiB", "--schedules", "gpipe, 1f1b", "--recompute", "--no-barrier", "--no-split", "--seed", 3]
    args += ["--microbatch-sizes", "2,4", "--latency", 0.25, "--bandwidth", "2KB", "--seconds", 1.5]
    assert run("plan", "--profile", profile, "-p", 2, "--batch", 16, *args).code == 0
    assert seen["model"].latency == 0.25
    assert seen["model"].bandwidth == 2000
    wanted = {"memory_limit": ["14GiB", "15GiB"], "schedules": ["gpipe", "1f1b"], "recompute": True, "barrier": False, "split": False}
    wanted |= {"seed": 3, "microbatch_sizes": [2, 4], "seconds": 1.5, "batch": 16, "microbatches": None, "ranks": 2}
    assert {name: seen[name] for name in wanted} == wanted


def test_plans_a_transformer_from_its_size(run):
    result = run(
        "plan", "--transformer", f"{TINY}, microbatch=1,2  bandwidth=1GB gated=true", "-p", 2, "--batch", 8, "--seconds", 0, "--json"
    )
    assert result.code == 0, result.err
    fields = {"layers": 6, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 100, "flops": 1e9}
    profile = ps.Profile.transformer(**fields, microbatch=(1, 2), bandwidth=1e9, gated=True)
    assert json.loads(result.out)["objective"] == ps.plan(profile, ranks=2, batch=8, seconds=0).objective


def test_other_commands_read_the_plan(run, profile, tmp_path):
    plan = ps.plan(MODEL, ranks=2, microbatches=4, seconds=0)
    plan.save(tmp_path / "plan.json")
    assert json.loads(run("simulate", tmp_path / "plan.json", "--json").out)["makespan"] == plan.predicted.makespan
    assert run("show", tmp_path / "plan.json").out.startswith(plan.name)
    assert run("verify", tmp_path / "plan.json").code == 0


CLUSTER = """
latency = 0.5
bandwidth = "2KiB"
node_latency = 0.25

[[devices]]
name = "fast"
speed = 3
node = "a"

[[devices]]
name = "slow"
node = "b"
count = 2
"""


def test_a_cluster_is_read_from_a_file(run, profile, tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    args = ["--cluster", tmp_path / "cluster.toml", "-m", 6, "--seconds", 0, "--schedules", "1f1b,zbv,chimera"]
    result = run("plan", "--profile", profile, *args, "-o", tmp_path / "plan.json")
    assert (result.code, result.err) == (0, "")
    cluster = ps.Cluster.load(tmp_path / "cluster.toml")
    wanted = ps.plan(MODEL, cluster=cluster, microbatches=6, seconds=0, schedules=["1f1b", "zbv", "chimera"])
    assert ps.Plan.load(tmp_path / "plan.json") == wanted
    assert "devices: 3 devices (1 fast, 2 slow) in 2 nodes" in result.out
    shown = [line.split() for line in result.out.splitlines() if re.match(r" +\d +\d +(fast|slow)", line)]
    assert [(int(line[0]), int(line[1])) for line in shown] == list(enumerate(wanted.devices))
    for rank, line in enumerate(shown):
        layers = sum(wanted.partition[stage] for stage in wanted.placement.stages_of(rank))
        assert line[2:6] == [cluster.devices[int(line[1])].name, "ab"[int(line[1]) > 0], "31"[int(line[1]) > 0], str(layers)]
    for args, reason in ((["-p", 4], "4 ranks on a cluster of 3"), (["--latency", 1], "do not go with --cluster")):
        refused = run("plan", "--profile", profile, "--cluster", tmp_path / "cluster.toml", "-m", 6, *args)
        assert refused.code > 0
        assert reason in refused.err
    sizes = "layers=4 hidden=64 heads=2 sequence=64 vocabulary=100 flops=1e12 latency=5us bandwidth=1GB"
    refused = run("plan", "--transformer", sizes, "--cluster", tmp_path / "cluster.toml", "-m", 6)
    assert refused.code > 0
    assert "--transformer: leave out latency and bandwidth, because --cluster has the links" in refused.err


def test_a_plan_does_not_replace_its_profile(refused, profile):
    before = profile.read_text()
    said = refused(2, "plan", "--profile", profile, "-p", 2, "-m", 2, "-o", profile.parent / "." / profile.name)
    assert f"--output and --profile both name {profile}, and one would overwrite the other" in said
    assert profile.read_text() == before


@pytest.mark.slow
def test_a_vocabulary_on_a_cluster(run, tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER.partition("\n\n")[2])  # links that take no time
    sizes = {"layers": 8, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 4000}
    model = ps.Profile.transformer(**sizes, flops=1e9)
    model.save(tmp_path / "p.json")
    args = ["--cluster", tmp_path / "cluster.toml", "-m", 6, "--seconds", 0, "--schedules", "1f1b", "--memory-limit", "1GiB"]
    result = run("plan", "--profile", tmp_path / "p.json", *args, "--vocabulary", "spread")
    assert result.code == 0, result.err
    cluster = ps.Cluster.load(tmp_path / "cluster.toml")
    wanted = ps.plan(model, cluster=cluster, microbatches=6, memory_limit="1GiB", seconds=0, schedules=["1f1b"], vocabulary=True)
    assert wanted.row_shares
    assert all(f" {part:.1%} " in result.out for part in wanted.row_shares)


def test_a_model_that_does_not_fit_is_a_finding(refused, profile, tmp_path):
    said = refused(1, "plan", "--profile", profile, "-p", 4, "-m", 8, "--memory-limit", 5, "--seconds", 0, "-o", tmp_path / "plan.json")
    assert said.startswith("no plan fits: ")
    assert "what would fit (each tried):" in said
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "Missing option '-p' / '--ranks'"),
        (("-p", 2, "-m", 4), "give one model: --profile FILE or --transformer SIZES"),
        (("-p", 2, "-m", 4, "--profile", "p.json", "--transformer", TINY), "not both"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "--vocabulary", "all"), "--vocabulary: 'all' is not ends or spread"),
        (("-p", 2, "-m", 4, "--profile", "nowhere.json"), "--profile: there is no file nowhere.json"),
        (("-p", 2, "-m", 4, "--transformer", "layers 3"), "'layers 3' is not NAME=VALUE"),
        (("-p", 2, "-m", 4, "--transformer", "layers=3 layers=4"), "layers is given twice"),
        (("-p", 2, "-m", 4, "--transformer", f"{TINY} hiden=3"), "no field 'hiden': did you mean 'hidden'"),
        (("-p", 2, "-m", 4, "--transformer", TINY.replace("layers=6", "layers=6.5")), "layers must be a whole number"),
        (("-p", 2, "--transformer", TINY), "give one of the two: --microbatches, or --batch"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "--memory-limit", "40Gib"), "--memory-limit: '40Gib' is not a size"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "--memory-limit", "4MiB,5MiB,6MiB"), "3 values for 2 ranks"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "--bandwidth", "fast"), "--bandwidth: 'fast' is not a bandwidth"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "--latency", -1), "--latency"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "--schedules", "zvb"), "did you mean 'zbv'"),
        (("-p", 2, "--batch", 4, "--transformer", TINY, "--microbatch-sizes", "one"), "'one' is not a list of whole numbers"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "-o", "plan.csv"), "the suffix is not one of .json"),
        (("-p", 2, "-m", 4, "--transformer", TINY, "--figure", "plan.gif"), "the suffix is not one of .svg, .pdf, .png"),
        (
            ("-p", 2, "-m", 4, "--transformer", TINY, "--memory-limit", 40),
            "--memory-limit 40: memory is in bytes here, so write the unit, like 40GiB",
        ),
        *(
            (("-p", 2, "-m", 4, "--transformer", TINY.replace("flops=1e9", text)), said)
            for text, said in (
                ("flops=1TFLOPS", "flops=1TFLOPS: flops is the number of operations per second that a device reaches"),
                ("flops=0", "flops=0: flops is the number of operations per second"),
                ("flops=-1", "flops=-1: flops is the number of operations per second"),
                ("flops=", "flops= has no value: write"),
                ("", "a transformer: 'flops' is missing; flops is the number of operations per second"),
            )
        ),
        *(
            (("-p", 2, "-m", 4, "--transformer", TINY, *options), said)
            for options, said in (
                (("--bandwidth", 40), "--bandwidth 40: bandwidth is in bytes per second here, so write the unit, like 40GB"),
                (("--latency", 5), "--latency 5: that would be 5 s, so write the unit, like 5us"),
                (("--latency", "5 parsec"), "'5 parsec' is not a time"),
                (("--offload", "--host-bandwidth", 25), "--host-bandwidth 25: bandwidth is in bytes per second here"),
                (("--offload", "--host-memory", 25), "--host-memory 25: memory is in bytes here"),
            )
        ),
        (("-p", 2, "-m", 4, "--transformer", f"{TINY} bandwidth=40"), "--transformer: bandwidth 40: bandwidth is in bytes per second"),
        (("-p", 2, "-m", 4, "--transformer", f"{TINY} latency=5"), "--transformer: latency 5: that would be 5 s"),
        (("-p", 20, "-m", 4, "--transformer", TINY), "8 layers are too few for 20 ranks"),
    ],
)
def test_wrong_usage_exits_with_2(refused, args, said):
    assert said in refused(2, "plan", *args)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.toml", "layers = [", "p.toml: "),
        ("p.json", '{"layers": [{"f": 1, "i": 1, "w": 1, "activatin": 2}]}', "did you mean 'activation'"),
        ("p.json", '{"layers": [{"f": 1, "i": 1, "w": 1, "parameters": "3gb"}]}', "'3gb' is not a size"),
    ],
)
def test_a_bad_file_exits_with_1(refused, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    assert said in refused(1, "plan", "--profile", tmp_path / name, "-p", 1, "-m", 2)


def test_links_with_units(run, tmp_path):
    """The latency in the profile's unit, whatever unit it is written in."""
    (tmp_path / "ms.json").write_text('{"layers": [{"f": 1, "i": 1, "w": 1}, {"f": 1, "i": 1, "w": 1}], "time_unit": "ms"}')
    for text, latency in (("500us", 0.5), ("0.5", 0.5), ("0.0005s", 0.5)):
        args = ("plan", "--profile", tmp_path / "ms.json", "-p", 2, "-m", 2, "--latency", text, "--seconds", 0, "--json")
        assert json.loads(run(*args).out)["profile"]["latency"] == pytest.approx(latency)


def test_a_time_without_a_unit_is_for_profiles_without_one(run, refused, tmp_path):
    (tmp_path / "p.json").write_text('{"layers": [{"f": 1, "i": 1, "w": 1}, {"f": 1, "i": 1, "w": 1}]}')
    args = ("plan", "--profile", tmp_path / "p.json", "-p", 2, "-m", 2, "--seconds", 0, "--latency")
    assert run(*args, 5).code == 0
    assert "'5us' has a unit, but the other times have none: write a plain number" in refused(2, *args, "5us")


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


def interrupting(after: int):
    """A planner that is interrupted by Ctrl-C while it works."""

    def plan(model, *, progress, **given):
        told = 0

        def tell(what: Progress) -> None:
            nonlocal told
            told += 1
            if told == after:
                signal.raise_signal(signal.SIGINT)

        return ps.plan(model, **given, progress=tell)

    return plan


def test_ctrl_c_keeps_the_best_plan_so_far(run, profile, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "plan", interrupting(after=4))
    before = signal.getsignal(signal.SIGINT)
    result = run("plan", "--profile", profile, "-p", 4, "-m", 8, "-o", tmp_path / "plan.json")
    assert result.code == 130
    assert result.err == "interrupted: this is the best plan so far\n"
    plan = ps.Plan.load(tmp_path / "plan.json")
    assert len([each for each in plan.alternatives if each.objective]) == 4
    assert result.out.startswith(plan.report())
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_plan(run, profile, tmp_path, monkeypatch):
    monkeypatch.setattr(
        planning, "plan", lambda model, *, stop, **given: (signal.raise_signal(signal.SIGINT), ps.plan(model, stop=stop, **given))[1]
    )
    result = run("plan", "--profile", profile, "-p", 4, "-m", 8, "-o", tmp_path / "plan.json")
    assert (result.code, result.out) == (130, "")
    assert result.err.startswith("interrupted: stopped before anything was found")
    assert not (tmp_path / "plan.json").exists()


def test_a_second_ctrl_c_stops_at_once(run, profile, monkeypatch):
    def plan(model, **given):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(planning, "plan", plan)
    assert run("plan", "--profile", profile, "-p", 4, "-m", 8).code == 130


# The live display -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_the_best_so_far(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with show_planning(Units("s")) as tell:
        tell(Progress("timing named schedules", 3, 20, "zbv", 0.25, "1f1b"))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stderr.getvalue())
    assert "timing named schedules" in shown
    assert "3/20" in shown
    assert "best 250 ms (1f1b)" in shown


def test_shows_no_progress_if_stderr_is_not_a_terminal(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with show_planning(Units()) as tell:
        tell(Progress("searching", 1, 2))
    assert stderr.getvalue() == ""


LONG = "layers=6 hidden=64 heads=4 sequence=32768 vocabulary=100 flops=1e9"


def test_slices_of_long_sequences(run, tmp_path):
    args = ["--transformer", LONG, "-p", 2, "-m", 1, "--seconds", 0, "--schedules", "1f1b,seq1f1b", "-o", tmp_path / "plan.json"]
    chosen = run("plan", *args)
    assert chosen.code == 0
    plan = ps.Plan.load(tmp_path / "plan.json")
    assert plan.slices > 1
    lengths = ", ".join(f"{length:,}" for length in plan.slice_lengths)
    assert f"slices       {lengths} tokens" in chosen.out
    assert run("plan", *args, "--slices", "1,2", "--slice-granularity", 4096).code == 0
    plan = ps.Plan.load(tmp_path / "plan.json")
    assert plan.slices == 2
    assert all(length % 4096 == 0 for length in plan.slice_lengths)


def test_slices_of_an_unknown_length_are_refused(run, profile):
    result = run("plan", "--profile", profile, "-p", 2, "-m", 2, "--slices", 4)
    assert result.code != 0
    assert "the profile cannot time a slice, because it does not say how many tokens a sequence has" in result.err
