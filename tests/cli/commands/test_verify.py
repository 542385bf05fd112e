"""`penstock verify`."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.schedules.registry import algorithms


@pytest.fixture
def swapped(tmp_path):
    """A lowered file in which rank 1 receives the second message before the first."""
    path = tmp_path / "swapped.csv"
    ps.lower(ps.schedule("1f1b", ranks=2, microbatches=3)).to_csv(path)
    text = path.read_text()
    path.write_text(text.replace("1RECV_F0", "?").replace("1RECV_F1", "1RECV_F0").replace("?", "1RECV_F1"))
    return path


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_schedule_is_proved_under_both_semantics(run, name):
    result = run("verify", name, "--semantics", "both")
    assert result.code == 0
    assert result.out.count("proved") == 2


def test_the_proof_equals_the_library_s(run):
    program = ps.lower(ps.schedule("zbv", ranks=4, microbatches=8))
    assert run("verify", "zbv", "-p", 4, "-m", 8).out == f"{ps.verify(program)}\n"
    said = json.loads(run("verify", "zbv", "--semantics", "rendezvous", "--json").out)
    assert said["ok"]
    assert [(each["semantics"], each["ok"]) for each in said["results"]] == [("rendezvous", True)]
    assert said["results"][0]["proof"] == json.loads(json.dumps(ps.verify(program, semantics="rendezvous").to_json()))


def test_outstanding_sends(run, refused, tmp_path):
    """A name is lowered with the options; a file is checked against the limit as it is."""
    shape, waits = ("zbv", "-p", 4, "-m", 8), ("--max-outstanding-sends", 2, "--defer-reduce-grad-wait")
    program = ps.lower(ps.schedule("zbv", ranks=4, microbatches=8), max_outstanding_sends=2, defer_reduce_grad_wait=True)
    proof = ps.verify(program, max_outstanding_sends=2)
    assert "outstanding" in proof.rules
    assert run("verify", *shape, *waits).out == f"{proof}\n"
    path = tmp_path / "program.csv"
    program.to_csv(path)
    assert run("verify", path, "--max-outstanding-sends", 2).code == 0
    result = run("verify", path, "--max-outstanding-sends", 1)
    assert result.code == 1
    assert "sends outstanding, but at most 1 may be" in result.out
    assert "checked as it is" in refused(2, "verify", path, "--defer-reduce-grad-wait")


def test_a_refusal_equals_the_library_s_and_exits_with_1(run, swapped):
    result = run("verify", swapped)
    with pytest.raises(ps.VerifyError) as refusal:
        ps.verify(ps.load(swapped))
    assert result.code == 1
    assert result.out == f"{refusal.value}\n"
    assert result.err == ""


def test_findings_as_json(run, swapped):
    result = run("verify", swapped, "--semantics", "both", "--json")
    assert result.code == 1
    said = json.loads(result.out)
    assert not said["ok"]
    assert [each["semantics"] for each in said["results"]] == ["channels", "rendezvous"]
    assert "matching" in {finding["rule"] for finding in said["results"][0]["findings"]}


def test_an_incomplete_file_is_reported(run, tmp_path):
    (tmp_path / "a.csv").write_text("0F0,0B0\n1F0\n")
    result = run("verify", tmp_path / "a.csv", "--json")
    assert result.code == 1
    assert "complete" in {finding["rule"] for finding in json.loads(result.out)["results"][0]["findings"]}


def test_only_one_of_two_semantics_may_refuse(run, tmp_path):
    placed = ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8), receive="just-in-time")
    placed.to_csv(tmp_path / "a.csv")
    codes = {
        semantics: run("verify", tmp_path / "a.csv", "--semantics", semantics).code for semantics in ("channels", "rendezvous", "both")
    }
    assert codes == {"channels": 0, "rendezvous": 1, "both": 1}


@pytest.mark.parametrize(("limit", "code"), [("8", 0), ("7.5", 1)])
def test_memory_limit_in_activations(run, limit, code):
    """gpipe holds the whole batch."""
    assert run("verify", "gpipe", "-p", 2, "-m", 8, "--memory-limit", limit).code == code


@pytest.mark.parametrize(("limit", "code"), [("16GiB", 0), ("15.9GiB", 1)])
def test_memory_limit_in_bytes(run, limit, code):
    assert run("verify", "gpipe", "-p", 2, "-m", 8, "--memory-limit", limit, "--activation", "2GiB").code == code


@pytest.mark.parametrize(("first", "code"), [(2, 0), (1.5, 1)])
def test_each_rank_has_the_memory_of_its_device(run, refused, tmp_path, first, code):
    """1F1B on two ranks holds two activations on the first, and one on the second."""
    ps.Cluster([ps.Device(memory=first), ps.Device(memory=1)]).save(tmp_path / "cluster.toml")
    assert run("verify", "1f1b", "-m", 4, "--cluster", tmp_path / "cluster.toml").code == code
    assert "3 ranks on a cluster of 2 devices" in refused(2, "verify", "1f1b", "-p", 3, "--cluster", tmp_path / "cluster.toml")
    both = ("--memory-limit", 2, "--cluster", tmp_path / "cluster.toml")
    assert "give one of the two: --memory-limit, or --cluster" in refused(2, "verify", "1f1b", *both)
    ps.Cluster([ps.Device(), ps.Device()]).save(tmp_path / "cluster.toml")
    assert "its devices have no memory" in refused(2, "verify", "1f1b", "--cluster", tmp_path / "cluster.toml")
    ps.Cluster([ps.Device(memory="1GB")], size_unit="B").save(tmp_path / "cluster.toml")
    assert "its memory is in bytes" in refused(2, "verify", "1f1b", "--cluster", tmp_path / "cluster.toml")


@pytest.mark.parametrize(("limit", "host", "code"), [("3", "4", 0), ("3", "3", 1), ("2", "4", 1)])
def test_host_memory_limit(run, refused, tmp_path, limit, host, code):
    options = ("--offload", 100, "--memory-limit", limit, "--host-memory-limit", host)
    assert run("verify", "1f1b", "-p", 4, "-m", 8, *options).code == code
    ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8), offload=100).to_csv(tmp_path / "a.csv")
    assert run("verify", tmp_path / "a.csv", *options[2:]).code == code
    assert "a FILE is checked as it is" in refused(2, "verify", tmp_path / "a.csv", "--offload", 100)
    assert "is in bytes" in refused(2, "verify", "1f1b", "--host-memory-limit", "1GiB")


def test_weight_stash_counts(run):
    """zb-h1 runs I and W apart on the last rank, so the weight stash is held as well."""
    shape = ("verify", "zb-h1", "-p", 4, "-m", 8, "--activation", 1, "--json")
    peaks = [json.loads(run(*shape, "--weight-stash", stash).out)["results"][0]["proof"]["peak_memory"] for stash in (0, 1)]
    assert sum(peaks[1]) > sum(peaks[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--memory-limit", "40GBB"), "--memory-limit: '40GBB' is not a size"),
        (("--memory-limit", ""), "--memory-limit: '' is not a size"),
        (("--memory-limit", "-1"), "--memory-limit: "),
        (("--memory-limit", "40GiB"), "with --activation"),
        (("--memory-limit", "4", "--activation", "much"), "--activation: 'much'"),
        (("--weight-stash", "1 1"), "--weight-stash: "),
    ],
)
def test_invalid_sizes_are_refused(refused, options, said):
    assert said in refused(2, "verify", "gpipe", *options)


def test_output_files(run, swapped, tmp_path):
    for name, said in (("a.txt", run("verify", swapped).out), ("a.json", run("verify", swapped, "--json").out)):
        result = run("verify", swapped, "-o", tmp_path / name)
        assert (result.code, result.out) == (1, "")
        assert (tmp_path / name).read_text() == said
