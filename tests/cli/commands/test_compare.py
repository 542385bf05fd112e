"""`penstock compare`."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.cli.sources import divide_among_stages


def names(out: str) -> list[str]:
    """The schedules in the order of the table."""
    return [line.split()[1] for line in out.splitlines()[1:]]


def compared(run, *args) -> list[dict]:
    return json.loads(run("compare", *args, "--json").out)["results"]


def test_the_table_is_ranked_by_makespan(run):
    result = run("compare", "gpipe", "zbv", "1f1b", "dualpipe-v", "-p", 4, "-m", 16)
    assert (result.code, result.err) == (0, "")
    found = compared(run, "gpipe", "zbv", "1f1b", "dualpipe-v", "-p", 4, "-m", 16)
    assert [each["source"] for each in found] == names(result.out)
    makespans = [each["timeline"]["makespan"] for each in found]
    assert makespans == sorted(makespans)
    assert [each["relative"] for each in found] == [makespan / makespans[0] for makespan in makespans]


def test_figures_equal_the_library_s_with_costs_divided_among_stages(run):
    costs = ps.Costs(f=1, i=2, w=1.5, latency=0.1, activation=2)
    for each in compared(run, "zbv", "1f1b", "-p", 4, "-m", 8, "--costs", "f=1,i=2,w=1.5,latency=0.1,activation=2"):
        schedule = ps.schedule(each["source"], ranks=4, microbatches=8)
        wanted = ps.simulate(schedule, divide_among_stages(costs, schedule.stages, 4))
        assert each["timeline"]["makespan"] == wanted.makespan
        assert each["timeline"]["peak_memory"] == wanted.peak_memory
        assert sum(each["timeline"]["busy"]) == pytest.approx(4 * 8 * 4.5)


def test_costs_per_stage(run):
    by_rank, by_stage = (compared(run, "zbv", "--per", per)[0]["timeline"]["makespan"] for per in ("rank", "stage"))
    assert by_stage == 2 * by_rank


@pytest.mark.parametrize(("by", "key"), [("bubble", "bubble"), ("peak", "peak"), ("messages", "messages"), ("makespan", "makespan")])
def test_ranks_by_the_requested_figure(run, by, key):
    values = [each["timeline"][key] for each in compared(run, "1f1b", "gpipe", "zbv", "-m", 12, "--by", by)]
    assert values == sorted(values)
    assert f"{by} / best" in run("compare", "1f1b", "gpipe", "--by", by).out


def test_a_best_of_zero_has_no_multiples(run):
    found = compared(run, "data-parallel{ranks=1}", "1f1b", "--by", "bubble")
    assert [each["relative"] for each in found] == [1.0, None]


def test_options_of_one_schedule(run):
    found = {each["source"]: each["timeline"] for each in compared(run, "interleaved-1f1b", "interleaved-1f1b{chunks=4}", "-p", 4, "-m", 8)}
    assert {name: each["stages"] for name, each in found.items()} == {"interleaved-1f1b": 8, "interleaved-1f1b{chunks=4}": 16}
    assert compared(run, "interleaved-1f1b{chunks=2, group_size=8}", "-m", 16)[0]["timeline"]["microbatches"] == 16
    assert compared(run, "1f1b{microbatches=3}", "-m", 16)[0]["timeline"]["microbatches"] == 3


def test_compares_files_and_timelines_with_names(run, tmp_path):
    ps.schedule("gpipe", ranks=4, microbatches=8).to_csv(tmp_path / "gpipe.csv")
    saved = ps.simulate(ps.schedule("zb-h1", ranks=4, microbatches=8), ps.Costs(f=2))
    saved.save(tmp_path / "saved.json")
    found = {each["source"]: each["timeline"] for each in compared(run, "1f1b", tmp_path / "gpipe.csv", tmp_path / "saved.json", "-p", 4)}
    assert found["1f1b"]["makespan"] == found[str(tmp_path / "gpipe.csv")]["makespan"] == 33
    assert found[str(tmp_path / "saved.json")]["makespan"] == saved.makespan
    anew = compared(run, tmp_path / "saved.json", "--costs", "f=1")
    assert anew[0]["timeline"]["makespan"] == ps.simulate(saved.table).makespan


def test_different_shapes_are_reported(run):
    assert "shapes differ" in run("compare", "1f1b", "1f1b{microbatches=4}").out
    assert "shapes differ" not in run("compare", "1f1b", "gpipe").out


def test_lowers_before_comparing(run):
    wanted = ps.simulate(ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8), fsdp=True), ps.Costs(unshard=1, reduce=2))
    assert compared(run, "1f1b", "--fsdp", "--costs", "unshard=1,reduce=2")[0]["timeline"]["makespan"] == wanted.makespan


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_one_figure_shows_all_in_the_order_of_the_table(run, tmp_path, suffix):
    path = tmp_path / f"out.{suffix}"
    result = run("compare", "gpipe", "zbv", "-p", 2, "-m", 4, "--unit", "ms", "-o", path)
    assert result.code == 0
    assert names(result.out) == ["zbv", "gpipe"]
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        text = path.read_text()
        assert -1 < text.index(">zbv<") < text.index(">gpipe<")
        assert "time (ms)" in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "NAME|FILE"),
        (("zbv", "zvb"), "did you mean 'zbv'"),
        (("zbv{chunks=two}",), "chunks=two is not a whole number"),
        (("zbv{hope=1}",), "no option 'hope'"),
        (("zbv", "-o", "a.json"), "not one of .svg, .pdf, .png, .html"),
        (("zbv", "--by", "luck"), "'makespan', 'bubble', 'peak', 'messages'"),
        (("zbv", "--costs", "f"), "--costs: "),
        (("gone.csv",), "there is no file gone.csv"),
    ],
)
def test_wrong_usage_exits_with_2(refused, args, said):
    assert said in refused(2, "compare", *args)


def test_a_shape_needs_a_name(refused, tmp_path):
    ps.schedule("gpipe", ranks=4, microbatches=8).to_csv(tmp_path / "a.csv")
    assert "for schedules by name" in refused(2, "compare", tmp_path / "a.csv", "-p", 4)
    assert "has its own shape" in refused(2, "compare", f"{tmp_path / 'a.csv'}{{chunks=2}}", "zbv")


def test_makespans_have_the_unit_that_suits_them(run):
    out = run("compare", "1f1b", "gpipe", "-p", 4, "-m", 8, "--costs", "f=0.0001,i=0.0001,w=0.0001", "--unit", "s").out
    assert out.count("3.3 ms") == 2
