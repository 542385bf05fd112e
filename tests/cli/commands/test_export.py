"""`penstock export`, and what it shares with `penstock studio`."""

from __future__ import annotations

import json
import re

import pytest

import penstock as ps
from penstock.ir.formats.csv_form import csv_text
from penstock.simulator.simulate import simulate
from penstock.studio.document import document
from penstock.studio.page import source


def documents(text: str) -> list:
    """The documents in a page, as the page reads them."""
    (found,) = re.findall(r'<script type="application/json" id="penstock-documents">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


@pytest.fixture
def export(run, tmp_path):
    def export(*args: object) -> list:
        result = run("export", *args, "-o", tmp_path / "page.html")
        assert (result.code, result.out, result.err) == (0, "", "")
        return documents((tmp_path / "page.html").read_text(encoding="utf-8"))

    return export


def test_one_schedule_in_one_file(export, tmp_path):
    (made,) = export("zbv", "-p", 8, "-m", 32, "--costs", "f=2,latency=0.5", "--memory-limit", "12")
    said = {"kind": "schedule", "name": "zbv", "ranks": 8, "microbatches": 32, "chunks": 2, "options": {}}
    said |= {"lower": False, "fsdp": False, "offload": ""}
    wanted = document(ps.schedule("zbv", 8, 32), ps.Costs(f=2, latency=0.5), source=said, memory_limit=12.0)
    assert made == json.loads(json.dumps(wanted))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    start, end = source().split("null</script>", 1)
    assert text.startswith(start)
    assert text.endswith(end)


def test_several_schedules_do_the_same_work_per_rank(export):
    made = export("zbv", "1f1b", "interleaved-1f1b{chunks=4}", "-p", 4, "-m", 8)
    assert [each["costs"].get("f", 1.0) for each in made] == [0.5, 1.0, 0.25]
    assert made[2]["source"]["chunks"] == 4
    assert [each["costs"] for each in export("zbv", "1f1b", "--per", "stage")] == [{}, {}]


def test_lowered_and_sharded(export):
    (made,) = export("1f1b", "--fsdp")
    assert (made["source"]["lower"], made["source"]["fsdp"]) == (True, True)
    assert made["entries"] == json.loads(json.dumps(document(ps.lower(ps.schedule("1f1b", 4, 8), fsdp=True), source={})))["entries"]


def test_devices_of_a_cluster(export, run, tmp_path):
    """Named in the order of the ranks, by `--cluster` and in plans."""
    cluster = ps.Cluster([ps.Device("slow", speed=0.5, memory=9), ps.Device("fast", memory=20, node="b")], latency=0.25)
    cluster.save(tmp_path / "cluster.toml")
    (made,) = export("1f1b", "-m", 4, "--cluster", tmp_path / "cluster.toml")
    names = [{"name": "slow", "speed": "0.5", "rate": 0.5, "node": ""}, {"name": "fast", "speed": "1", "rate": 1.0, "node": "b"}]
    assert (made["devices"], made["memory_limit"]) == (names, [9, 20])
    assert made["costs"] == ps.Costs(f=[2, 1], i=[2, 1], w=[2, 1], latency=0.25).to_json()
    model = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=1)] * 6)
    plan = ps.plan(model, cluster=cluster, microbatches=4, schedules=["1f1b"], seconds=0)
    plan.save(tmp_path / "plan.json")
    (planned,) = export(tmp_path / "plan.json")
    assert planned["devices"] == [names[device] for device in plan.devices]
    refused = run("export", tmp_path / "plan.json", "--cluster", tmp_path / "cluster.toml", "-o", tmp_path / "page.html")
    assert "--cluster is for schedules by name" in refused.err


def test_files_of_every_kind(export, tmp_path):
    schedule = ps.schedule("1f1b", 2, 3)
    (tmp_path / "good.csv").write_text(csv_text(schedule))
    (tmp_path / "bad.csv").write_text(csv_text(schedule).replace("1F1", "", 1))
    simulate(ps.lower(schedule), ps.Costs(f=3)).save(tmp_path / "timeline.json")
    profile = ps.Profile([ps.Layer(f=1, i=1, w=1)] * 4)
    plan = ps.plan(profile, ranks=2, microbatches=2, seconds=0)
    plan.save(tmp_path / "plan.json")
    names = ["good.csv", "bad.csv", "timeline.json", "plan.json"]
    good, bad, timeline, planned = export(*(tmp_path / name for name in names))
    assert (good["timed"], good["num_findings"]) == (True, 0)
    assert (bad["timed"], bad["num_findings"] > 0) == (False, True)
    assert timeline["costs"] == {"f": 3.0}
    assert (planned["source"]["name"], planned["costs"]) == (plan.name, json.loads(json.dumps(plan.costs.to_json())))


def test_costs_for_a_file(export, tmp_path):
    ps.schedule("zbv", 2, 3).to_csv(tmp_path / "zbv.csv")
    (made,) = export(tmp_path / "zbv.csv", "--costs", "f=2", "--memory-limit", "3")
    assert (made["costs"], made["memory_limit"]) == ({"f": 2.0}, 3.0)


def test_names_in_files_cannot_end_the_script(export, tmp_path):
    data = ps.schedule("1f1b", 2, 2).to_json() | {"name": "</script><script>alert(1)</script>\u2028"}
    (tmp_path / "x.json").write_text(json.dumps(data))
    (made,) = export(tmp_path / "x.json")
    assert made["table"]["name"] == data["name"]
    assert "<script>alert" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_is_not_printed_to_a_terminal(refused, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "-o FILE.html" in refused(2, "export", "zbv")


def test_exports_to_stdout(run):
    result = run("export", "gpipe", "-p", 2, "-m", 2)
    assert (result.code, len(documents(result.out))) == (0, 1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["zbw"], "did you mean 'zbv'"),
        (["nowhere.csv"], "there is no file nowhere.csv"),
        (["zbv", "-o", "x.svg"], "not one of .html, .htm"),
        (["zbv", "--memory-limit", "much"], "--memory-limit"),
        (["zbv", "-p", "512", "-m", "4096"], "more than the studio takes"),
    ],
)
def test_sources_that_cannot_be_exported_are_refused(refused, args, said):
    assert said in refused(2, "export", *args)


def test_a_file_of_another_kind_is_refused(refused, tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refused(1, "export", tmp_path / "x.csv")
    (tmp_path / "x.json").write_text('{"type": "other"}')
    assert "not a Penstock schedule, program, timeline or plan" in refused(1, "export", tmp_path / "x.json")
