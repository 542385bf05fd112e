"""`penstock compare predicted.json measured.json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.text.units import Units

TABLE = ps.schedule("1f1b", ranks=4, microbatches=8)
USUAL = ps.Costs(latency=0.125)
SLOW = ps.Costs(f=[1, 1, 1.5, 1], latency=0.125)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A prediction, a measured run in the same unit with a slow stage 2, and that run in thousandths of the unit."""
    monkeypatch.chdir(tmp_path)
    ran = replace(ps.simulate(ps.lower(TABLE), SLOW), source="measured")
    ps.simulate(TABLE, USUAL).save("predicted.json")
    ran.save("measured.json")
    ran.scaled(1e-3).save("seconds.json")
    return ran


def compared(run, *args) -> dict:
    result = run("compare", *args, "--json")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_the_ranking_comes_before_the_differences(run, files):
    result = run("compare", "predicted.json", "measured.json")
    assert (result.code, result.err) == (0, "")
    out = result.out.splitlines()
    assert [line.split()[1] for line in out[1:3]] == ["predicted.json", "measured.json"]
    assert "measured.json against predicted.json, in s" in out
    whole = ps.simulate(TABLE, USUAL).makespan, files.makespan
    assert next(line for line in out if line.startswith("  makespan")).split() == [
        "makespan",
        f"{whole[0]:g}",
        f"{whole[1]:g}",
        f"{whole[1] / whole[0]:.3f}",
    ]
    assert next(line for line in out if "stage 2 F" in line).split() == ["stage", "2", "F", "8", "1", "1.5", "1.500"]
    parting = out.index("where they part")
    assert out[parting + 1].startswith("  first at 2F0 on rank 2: it ends at 3.75 instead of 3.25,")
    causes = out[next(at for at, line in enumerate(out) if line.startswith("what makes it")) :]
    assert causes[2].startswith("  stage 2 F")
    assert "+0.5: 2F0 on rank 2 takes 1.5 instead of 1" in "\n".join(causes)


def test_the_order_of_arguments_does_not_matter(run, files):
    one, other = (
        compared(run, *names)["differences"] for names in (("predicted.json", "measured.json"), ("measured.json", "predicted.json"))
    )
    assert one == other
    assert (one[0]["predicted"], one[0]["measured"]) == ("predicted.json", "measured.json")


def test_json_has_every_figure(run, files):
    (found,) = compared(run, "predicted.json", "measured.json")["differences"]
    assert found["makespan"]["measured"] == files.makespan
    assert [each["busy"]["measured"] for each in found["ranks"]] == files.busy.tolist()
    assert len(found["actions"]) == 4 * 16
    assert sum(each["added"] for each in found["path"]) == pytest.approx(found["makespan"]["measured"] - found["makespan"]["predicted"])
    assert sum(each["added"] for each in found["delays"]) == pytest.approx(found["makespan"]["measured"] - found["makespan"]["predicted"])
    assert (found["first"]["rank"], found["first"]["action"]) == (2, "2F0")
    ratios = {(part["stage"], part["kind"]): each["mean"]["ratio"] for each in found["stages"] for part in each["parts"]}
    assert {key for key, ratio in ratios.items() if ratio != 1} == {(2, "F")}
    assert found["idle_by_cause"]["fill"]["measured"] == files.idle_by_cause["fill"]


def test_a_prediction_by_name_and_costs_leaves_measured_times_alone(run, files):
    found = compared(run, "1f1b", "measured.json", "-p", 4, "-m", 8, "--costs", "latency=0.125", "--lower")
    (differences,) = found["differences"]
    assert differences["makespan"]["measured"] == files.makespan
    assert differences["makespan"]["predicted"] == pytest.approx(ps.simulate(TABLE, USUAL).makespan)


def test_units(run, files):
    """Measured times are seconds; converted to the prediction's unit they have its magnitude."""
    apart = run("compare", "predicted.json", "seconds.json")
    assert apart.code == 2
    assert "the unit of the predicted times is not known" in apart.err
    assert "--scale" in apart.err
    assert "the units must differ" in run("compare", "predicted.json", "seconds.json", "--scale", "1").out
    result = run("compare", "predicted.json", "seconds.json", "--unit", "ms")
    assert "the units must differ" not in result.out
    assert "seconds.json against predicted.json, in ms" in result.out
    (found,) = compared(run, "predicted.json", "seconds.json", "--unit", "ms")["differences"]
    assert found["unit"] == "ms"
    assert found["makespan"]["measured"] == pytest.approx(files.makespan)


@pytest.mark.parametrize("scale", ["auto", "0.001"])
def test_scale(run, files, scale):
    said = compared(run, "predicted.json", "seconds.json", "--scale", scale)
    (found,) = said["differences"]
    assert found["scale"] == pytest.approx(1e-3)
    assert found["first"]["action"] == "2F0"
    ranked = {each["source"]: each["timeline"]["makespan"] for each in said["results"]}
    assert ranked["predicted.json"] == pytest.approx(ps.simulate(TABLE, USUAL).makespan / 1000)
    assert "multiplied by 0.001" in run("compare", "predicted.json", "seconds.json", "--scale", scale).out


SHAPE = ("-p", 4, "-m", 8)


@pytest.mark.parametrize("prediction", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("overlay", [(), ("--no-overlay",)])
def test_a_prediction_without_a_unit_is_not_ranked_with_a_measured_one(run, refused, files, prediction, overlay):
    """Whether or not the two do the same work, and are laid over each other."""
    args = ("compare", prediction, "seconds.json", *SHAPE, *overlay)
    assert "the unit of the predicted times is not known" in refused(2, *args)
    whole = ps.simulate(ps.schedule(prediction, 4, 8), ps.Costs()).makespan
    for options, makespan in ((("--unit", "ms"), whole), (("--scale", "0.001"), whole / 1000)):
        ranked = {entry["source"]: entry["timeline"]["makespan"] for entry in json.loads(run(*args, *options, "--json").out)["results"]}
        assert ranked[prediction] == pytest.approx(makespan)
        assert ranked["seconds.json"] == pytest.approx(files.makespan * (1 if options[0] == "--unit" else 1e-3))


def test_each_prediction_is_converted_from_its_own_unit(run, files):
    ps.simulate(TABLE, USUAL).in_units(Units("ms")).save("ms.json")
    files.scaled(1e-3).in_units(Units("s")).save("seconds.json")
    said = compared(run, "ms.json", "seconds.json", "--no-overlay")
    ranked = {entry["source"]: entry["timeline"]["makespan"] for entry in said["results"]}
    assert ranked["ms.json"] == pytest.approx(ps.simulate(TABLE, USUAL).makespan / 1000)
    assert said["differences"] == []


def test_a_named_unit_is_believed_even_if_the_times_are_far_apart(run, files):
    result = run("compare", "1f1b", "seconds.json", *SHAPE, "--unit", "s")
    assert result.code == 0
    assert "the units must differ" in result.out


def test_tolerance(run, files):
    assert "nowhere" in run("compare", "predicted.json", "measured.json", "--tolerance", 0.5).out
    (found,) = compared(run, "predicted.json", "measured.json", "--tolerance", 0.02)["differences"]
    assert found["first"]["action"] == "2F1"


def test_compares_two_simulated_timelines_on_request(run, files):
    assert "where they part" not in run("compare", "1f1b", "gpipe").out
    result = run("compare", "1f1b", "gpipe", "--overlay")
    assert "gpipe against 1f1b" in result.out
    assert "the orders differ on rank 0: first 0B0, second 0F4" in result.out
    assert "where they part" not in run("compare", "predicted.json", "measured.json", "--no-overlay").out


def test_several_measured_timelines(run, files):
    replace(files, source="measured").save("again.json")
    said = compared(run, "predicted.json", "measured.json", "again.json")
    assert [each["measured"] for each in said["differences"]] == ["measured.json", "again.json"]
    assert run("compare", "predicted.json", "measured.json", "again.json", "-o", "both.svg").code == 0


def test_two_measured_timelines(run, files):
    replace(ps.simulate(ps.lower(TABLE), USUAL), source="measured").save("before.json")
    result = run("compare", "before.json", "measured.json")
    assert "measured.json against before.json, in s" in result.out
    assert "first  second" in result.out
    assert "first at 2F0 on rank 2" in result.out


def test_timelines_of_other_work_are_ranked_with_the_reason(run, files):
    result = run("compare", "zb-h1", "measured.json", "-p", 4, "-m", 8, "-o", "two.svg")
    assert result.code == 0
    assert "measured.json is not laid over the prediction: they do not compute the same: 0I0 of rank 0 is in the first alone" in result.out
    assert "where they part" not in result.out
    said = compared(run, "zb-h1", "measured.json", "-p", 4, "-m", 8)
    assert said["differences"] == []
    assert said["refused"][0]["source"] == "measured.json"


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_one_figure_of_the_pair(run, files, suffix):
    result = run("compare", "predicted.json", "measured.json", "-o", f"out.{suffix}", "--unit", "s")
    assert result.code == 0
    made = Path(f"out.{suffix}").read_bytes()
    if suffix == "png":
        assert made.startswith(b"\x89PNG")
    else:
        assert b">measured.json against predicted.json<" in made
        assert b"time (s)" in made
        assert b"upper row (pale): predicted, lower row: measured" in made
    if suffix == "html":
        assert b"<h3>where they part</h3>" in made
        assert b"2F0 on rank 2 takes 1.5 instead of 1" in made


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("1f1b", "gpipe", "--scale", "2"), "--scale is for timelines laid over each other"),
        (("1f1b", "gpipe", "--tolerance", "0.1"), "--tolerance is for timelines laid over each other"),
        (("1f1b", "--overlay"), "give two or more"),
        (("1f1b", "zbv", "--overlay"), "zbv cannot be laid over 1f1b: one has 4 stages and the other 8"),
        (("1f1b", "gpipe", "--overlay", "--scale", "car"), "neither a number above 0 nor 'auto'"),
        (("1f1b", "gpipe", "--overlay", "--scale", "-1"), "neither a number above 0 nor 'auto'"),
        (("1f1b", "gpipe", "--overlay", "--tolerance", "-1"), "--tolerance"),
    ],
)
def test_wrong_usage_exits_with_2(refused, args, said):
    assert said in refused(2, "compare", *args)
