"""`penstock simulate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import penstock as ps
from penstock.draw.palette import plain_text
from penstock.draw.terminal import ASCII_BARS, timeline_lines
from penstock.schedules.registry import algorithms


@pytest.fixture
def hanging(tmp_path):
    """Rank 0 waits for the gradient of microbatch 0 before the next forward, rank 1 for both microbatches."""
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    path = tmp_path / "hanging.json"
    path.write_text(json.dumps(ps.Schedule.from_actions(rows, ps.Placement.linear(2)).to_json()))
    return path


def test_prints_the_same_picture_as_the_library(run):
    timeline = ps.simulate(ps.schedule("zbv", ranks=4, microbatches=8), ps.Costs(f=1, i=1.1, latency=0.1))
    result = run("simulate", "zbv", "-p", 4, "-m", 8, "--costs", "f=1,i=1.1,latency=0.1")
    assert (result.code, result.err) == (0, "")
    assert result.out == "".join(f"{line}\n" for line in plain_text(timeline_lines(timeline)))


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_schedule_is_timed(run, name):
    said = json.loads(run("simulate", name, "--json").out)
    assert said["name"] == name
    assert said["makespan"] > 0


def test_json_equals_values_computed_by_hand(run):
    """gpipe with 2 ranks and 3 microbatches takes (3 + 1) x (1 + 2) and holds the whole batch."""
    said = json.loads(run("simulate", "gpipe", "-p", 2, "-m", 3, "--json").out)
    assert (said["makespan"], said["bubble"], said["peak"], said["messages"]) == (12, 0.25, 3, 6)
    assert said["busy"] == [9, 9]
    assert sum(said["idle_by_cause"].values()) == 6


def test_costs_from_a_file_and_per_rank(run, tmp_path):
    (tmp_path / "costs.toml").write_text("f = 2\ni = 2\nw = 2\nactivation = 6\n")
    args = ("simulate", "zbv", "-p", 4, "-m", 8, "--costs", tmp_path / "costs.toml", "--json")
    stage, rank = (json.loads(run(*args, "--per", per).out) for per in ("stage", "rank"))
    assert stage["makespan"] == 2 * rank["makespan"]
    assert stage["peak"] == 2 * rank["peak"]


CLUSTER = """
latency = 0.5

[[devices]]

[[devices]]
speed = 0.5
"""


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path / "cluster.toml"


def test_ranks_take_as_long_as_the_devices_of_a_cluster(run, cluster):
    """gpipe with 3 microbatches: the slow rank computes from 1.5 to 19.5 without a break, and the last gradient takes 0.5 + 2."""
    said = json.loads(run("simulate", "gpipe", "-m", 3, "--cluster", cluster, "--json").out)
    assert said["makespan"] == 22
    assert said["busy"] == [9, 18]


def test_copies_of_the_model_take_as_long_as_their_own_devices(run, cluster):
    """Each rank runs half of the 4 microbatches on either stage."""
    said = json.loads(run("simulate", "chimera", "-m", 4, "--cluster", cluster, "--json").out)
    assert said["busy"] == [12, 24]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("1f1b", "-p", 4), "4 ranks on a cluster of 2 devices"),
        (("1f1b", "--costs", "f=2,latency=1"), "--costs: leave out latency, because --cluster has the links"),
        (("saved.json",), "saved.json has the costs of its own devices: give --costs"),
    ],
)
def test_a_cluster_for_another_pipeline_is_refused(run, cluster, tmp_path, monkeypatch, args, reason):
    monkeypatch.chdir(tmp_path)
    ps.simulate(ps.schedule("1f1b", 2, 4)).save("saved.json")
    result = run("simulate", *args, "--cluster", cluster)
    assert result.code > 0
    assert reason in result.err
    assert run("simulate", "saved.json", "--costs", "f=1,i=1,w=1", "--cluster", cluster).code == 0


@pytest.mark.parametrize("options", [("--lower",), ("--fsdp",), ("--receive", "just-in-time"), ("--receive", 2), ("--merge-backward",)])
def test_lowers_before_timing(run, options):
    costs = ps.Costs(latency=0.25, unshard=0.5, reduce=0.5)
    keywords = {
        "--lower": {},
        "--fsdp": {"fsdp": True},
        "--receive": {"receive": options[-1]},
        "--merge-backward": {"merge_backward": True},
    }[options[0]]
    wanted = ps.simulate(ps.lower(ps.schedule("zb-h1", ranks=4, microbatches=8), **keywords), costs)
    said = json.loads(run("simulate", "zb-h1", "--costs", "latency=0.25,unshard=0.5,reduce=0.5", "--json", *options).out)
    assert said["makespan"] == wanted.makespan
    assert said["idle_by_cause"] == wanted.idle_by_cause


def test_times_files_of_schedules_and_programs(run, tmp_path):
    schedule = ps.schedule("1f1b", ranks=3, microbatches=5)
    schedule.to_csv(tmp_path / "schedule.csv")
    ps.lower(schedule).to_csv(tmp_path / "program.csv")
    for name in ("schedule.csv", "program.csv"):
        said = json.loads(run("simulate", tmp_path / name, "--json").out)
        assert said["makespan"] == (5 + 2) * 3


def test_a_saved_timeline_is_shown_unchanged_or_timed_again_under_costs(run, tmp_path):
    path = tmp_path / "saved.json"
    args = ("simulate", "zbv", "--costs", "f=2,latency=0.5", "--json")
    first = json.loads(run(*args, "-o", path).out)
    assert json.loads(run("simulate", path, "--json").out) == first
    anew = json.loads(run("simulate", path, "--costs", "f=3", "--json").out)
    assert anew["makespan"] == ps.simulate(ps.schedule("zbv", ranks=4, microbatches=8), ps.Costs(f=3)).makespan


def test_times_with_a_unit_are_converted_and_others_get_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers = [ps.Layer(f=0.001, i=0.001, w=0.001)] * 2
    plan = ps.plan(ps.Profile(layers, time_unit="s"), ranks=2, microbatches=3, schedules=["gpipe"], seconds=0)
    plan.save("plan.json")
    assert plan.predicted.makespan == pytest.approx(0.012)
    for unit, makespan in ((), 0.012), (("--unit", "s"), 0.012), (("--unit", "ms"), 12.0), (("--unit", "us"), 12000.0):
        result = run("simulate", "plan.json", *unit)
        assert "12 ms" in result.out.splitlines()[1], result.out
        assert json.loads(run("simulate", "plan.json", *unit, "--json").out)["makespan"] == pytest.approx(makespan)
    run("simulate", "plan.json", "--unit", "us", "-o", "us.json")
    assert "12 ms" in run("simulate", "us.json").out.splitlines()[1]
    named = ("compare", "plan.json", "gpipe", "-p", 2, "-m", 3)  # the costs of the name are 1 each: in ms, as long as those of the plan
    assert json.loads(run(*named, "--unit", "ms", "--json").out)["results"][1]["relative"] == pytest.approx(1.0)


def test_a_result_does_not_replace_what_it_was_made_of(refused, tmp_path):
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(ps.schedule("gpipe", ranks=2, microbatches=3).to_json()))
    before = saved.read_text()
    assert f"--output and NAME|FILE both name {saved}, and one would overwrite the other" in refused(2, "simulate", saved, "-o", saved)
    assert saved.read_text() == before


def test_a_unit_other_than_the_cluster_s_is_refused(run, cluster):
    cluster.write_text('time_unit = "s"\n' + cluster.read_text())
    for command in ("simulate", "compare"):
        result = run(command, "gpipe", "-m", 3, "--cluster", cluster, "--unit", "ms")
        assert (result.code, result.out) == (2, "")
        assert "--unit ms: the times of --cluster are in s: give --costs in that unit, and leave out --unit" in result.err
    assert run("simulate", "gpipe", "-m", 3, "--cluster", cluster, "--unit", "s").code == 0


@pytest.mark.parametrize("suffix", ["svg", "png", "html", "json", "trace.json"])
def test_output_files_in_addition_to_stdout(run, tmp_path, suffix):
    path = tmp_path / f"out.{suffix}"
    result = run("simulate", "1f1b", "-p", 2, "-m", 3, "--unit", "us", "-o", path)
    assert result.code == 0
    assert result.out == run("simulate", "1f1b", "-p", 2, "-m", 3, "--unit", "us").out
    assert path.stat().st_size > 100


def test_output_equals_the_library_s(run, tmp_path):
    run("simulate", "1f1b", "--unit", "s", "-o", tmp_path / "a.svg")
    run("simulate", "1f1b", "--unit", "s", "-o", tmp_path / "a.trace.json")
    timeline = ps.simulate(ps.schedule("1f1b", ranks=4, microbatches=8))
    for name in ("svg", "trace.json"):
        timeline.save(tmp_path / f"b.{name}", unit="s")
        assert (tmp_path / f"a.{name}").read_bytes() == (tmp_path / f"b.{name}").read_bytes()
    ElementTree.parse(tmp_path / "a.svg")


def test_fits_a_terminal_and_is_coloured(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "70")
    out = run("simulate", "zbv").out
    assert "\x1b[" in out
    monkeypatch.setenv("NO_COLOR", "1")
    plain_out = run("simulate", "zbv").out
    assert "\x1b" not in plain_out
    assert max(map(len, plain_out.splitlines())) <= 70


def test_ascii_if_stdout_cannot_encode_more():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "penstock", "simulate", "zbv"], capture_output=True, check=True, env=environment)
    timeline = ps.simulate(ps.schedule("zbv", ranks=4, microbatches=8))
    assert done.stdout.decode("ascii").splitlines() == list(plain_text(timeline_lines(timeline, bars=ASCII_BARS)))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("zvb",), "did you mean 'zbv'"),
        (("zbv", "--costs", "f=much"), "--costs: f must be a number"),
        (("zbv", "--costs", "f=[1,2]"), "f has 2 values for 8 stages"),
        (("zbv", "--costs", "gone.toml"), "there is no file gone.toml"),
        (("zbv", "-o", "a.gif"), "not one of .trace.json, .json, .svg, .pdf, .png, .html"),
        (("zbv", "-o", "/no/such/folder/a.svg"), "no folder"),
        (("zbv", "--unit", "weeks"), "--unit: unit must be one of s, ms, us, ns"),
        (("zbv", "--receive", "later"), "--receive"),
        (("zbv", "--per", "model"), "'stage', 'rank'"),
        (("zbv", "-O", "chunks=2"), "use --chunks"),
        (("gone.json",), "there is no file gone.json"),
    ],
)
def test_wrong_usage_exits_with_2(refused, args, said):
    assert said in refused(2, "simulate", *args)


def test_a_file_that_hangs_is_a_finding(refused, hanging):
    assert "never get to their end" in refused(1, "simulate", hanging)


def test_a_bad_file_is_a_finding(refused, tmp_path):
    for name, text in (("a.json", "{"), ("b.json", '{"type": "timeline"}'), ("c.csv", "0F0junk\n"), ("costs.toml", "f = -1\n")):
        (tmp_path / name).write_text(text)
    for name in ("a.json", "b.json", "c.csv"):
        assert name in refused(1, "simulate", tmp_path / name)
    assert "costs.toml" in refused(1, "simulate", "zbv", "--costs", tmp_path / "costs.toml")


def test_a_saved_timeline_has_its_own_shape(refused, run, tmp_path):
    run("simulate", "zbv", "-o", tmp_path / "a.json")
    assert "has its own shape" in refused(2, "simulate", tmp_path / "a.json", "-p", 4)


def test_without_matplotlib_the_error_says_what_to_install(refused, run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "install the extra 'plot', pip install '.[plot]' in a clone of Penstock" in refused(
        2, "simulate", "zbv", "-o", tmp_path / "a.svg"
    )
    assert run("simulate", "zbv", "-o", tmp_path / "a.trace.json").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace.json"]
