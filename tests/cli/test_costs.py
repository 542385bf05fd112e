"""Costs on the command line."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.cli.sources import divide_among_stages, read_costs
from penstock.errors import FileFormatError, UsageError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("f=1,i=1.5,w=0.5,latency=0.1", ps.Costs(f=1, i=1.5, w=0.5, latency=0.1)),
        (" f = 2 , b=3", ps.Costs(f=2, b=3)),
        ("f=[1,2,3],latency=1", ps.Costs(f=[1, 2, 3], latency=1)),
        ("f=[[1,2],[3,4]],w=2", ps.Costs(f=[[1, 2], [3, 4]], w=2)),
        ("activation=1.5GiB,output=64MB", ps.Costs(activation=1.5 * 2**30, output=64e6)),
        ("contention=pair,bandwidth=1e9", ps.Costs(contention="pair", bandwidth=1e9)),
        ("bandwidth=null", ps.Costs()),
    ],
)
def test_costs_as_text(text, wanted):
    assert read_costs(text) == wanted


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_files(tmp_path, suffix):
    costs = ps.Costs(f=[1, 2], latency=0.5, contention="rank")
    costs.save(tmp_path / f"costs.{suffix}")
    assert read_costs(str(tmp_path / f"costs.{suffix}")) == costs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f", "'f' is not NAME=VALUE"),
        ("", "'' is not NAME=VALUE"),
        ("f=1,,w=2", "'' is not NAME=VALUE"),
        ("f=1,f=2", "f is given twice"),
        ("forward=1", "there is no field 'forward'"),
        ("latncy=1", "did you mean 'latency'"),
        ("f=much", "f must be a number"),
        ("f=-1", "f must be a finite number of at least 0"),
        ("f=NaN", "f must be a finite number"),
        ("contention=hope", "contention must be one of"),
        ("nowhere.toml", "there is no file nowhere.toml"),
    ],
)
def test_mistakes_are_reported_by_name(text, said):
    with pytest.raises(UsageError, match=f"^--costs: .*{said}"):
        read_costs(text)


def test_a_bad_costs_file_is_named_in_the_error(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text("f = -1\n")
    with pytest.raises(FileFormatError, match=r"costs\.toml.*f must be"):
        read_costs(str(path))


def test_a_rank_s_costs_are_divided_among_its_stages():
    costs = ps.Costs(f=4, i=2, w=1, b=3, activation=8, parameters=6, optimizer=2, latency=5, output=7, bandwidth=9, overlap=0.9)
    assert divide_among_stages(costs, stages=8, ranks=4) == ps.Costs(
        f=2, i=1, w=0.5, b=1.5, activation=4, parameters=3, optimizer=1, latency=5, output=7, bandwidth=9, overlap=0.9
    )
    assert divide_among_stages(costs, stages=4, ranks=4) == costs
    listed = ps.Costs(f=[1, 2, 3, 4], i=2)
    assert divide_among_stages(listed, stages=4, ranks=2) == ps.Costs(f=[1, 2, 3, 4], i=1, w=0.5, activation=0.5)


@pytest.mark.parametrize("name", ["zbv", "interleaved-1f1b", "1f1b", "dualpipe"])
def test_every_schedule_does_the_same_work_for_a_rank_s_costs(name):
    """Busy time over all ranks: microbatches x ranks x (F + I + W), however the model is cut."""
    schedule = ps.schedule(name, ranks=4, microbatches=8)
    timeline = ps.simulate(schedule, divide_among_stages(ps.Costs(f=1, i=2, w=3), schedule.stages, schedule.ranks))
    assert timeline.busy.sum() == pytest.approx(8 * 4 * 6)


def test_a_time_of_full_backwards_needs_full_backwards(run, refused):
    assert run("simulate", "1f1b", "--costs", "b=40").code == 0
    assert run("simulate", "zbv", "--costs", "i=1,w=39,b=40").code == 0
    said = refused(2, "simulate", "ZBVZeroBubble", "--costs", "b=40")
    assert said.startswith("--costs: b is the time of a full backward, and zbv runs none: give i and w")


def test_costs_of_a_rank_are_divided_among_slices_too() -> None:
    costs = ps.Costs(f=4, i=4, w=4, activation=8, output=2, parameters=6)
    assert divide_among_stages(costs, stages=4, ranks=2, slices=2) == ps.Costs(f=1, i=1, w=1, activation=2, output=1, parameters=3)


def test_memory_that_is_given_in_bytes_is_printed_in_bytes(run):
    assert "peak memory  8GiB on rank 0" in run("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", "activation=2GiB").out
    assert "4 activations on rank 0" in run("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", "bandwidth=4GiB").out
