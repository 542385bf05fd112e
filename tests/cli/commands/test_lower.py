"""`penstock lower`."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.ir.program import Program


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ((), {}),
        (("--fsdp",), {"fsdp": True}),
        (("--merge-backward",), {"merge_backward": True}),
        (("--receive", "just-in-time"), {"receive": "just-in-time"}),
        (("--receive", "2", "--fsdp"), {"receive": 2, "fsdp": True}),
        (("--waits",), {"waits": True}),
        (("--offload", "50"), {"offload": 50}),
        (("--offload", "100+0+50", "--fsdp"), {"offload": (100, 0, 50), "fsdp": True}),
        (("--max-outstanding-sends", "2"), {"max_outstanding_sends": 2}),
        (("--defer-reduce-grad-wait", "--receive", "just-in-time"), {"defer_reduce_grad_wait": True, "receive": "just-in-time"}),
    ],
)
def test_options_equal_the_library_s(run, tmp_path, options, keywords):
    schedule = ps.schedule("zbv", ranks=3, microbatches=5)
    wanted = ps.lower(schedule, **keywords)
    shape = ("zbv", "-p", 3, "-m", 5)
    assert json.loads(run("lower", *shape, *options, "--json").out) == wanted.to_json()
    assert run("lower", *shape, *options).out.splitlines()[1:-2] == wanted.grid().splitlines()
    for rank in range(3):
        one = json.loads(run("lower", *shape, *options, "--rank", rank, "--json").out)
        assert one["actions"] == [str(action) for action in wanted[rank]]
        assert one["rank"] == rank
    run("lower", *shape, *options, "-o", tmp_path / "a.json")
    assert ps.load(tmp_path / "a.json") == wanted
    if "offload" not in keywords:
        run("lower", *shape, *options, "-o", tmp_path / "a.csv")
        assert ps.load(tmp_path / "a.csv") == wanted


def test_offload_options_that_cannot_be_read(refused, tmp_path):
    shape = ("lower", "zbv", "-p", 3, "-m", 5)
    assert "--offload: share of pass offload" in refused(2, *shape, "--offload", "101")
    assert "--offload: option share=50+half" in refused(2, *shape, "--offload", "50+half")
    assert "3 ranks" in refused(1, *shape, "--offload", "50+50")
    assert "PyTorch cannot express" in refused(1, *shape, "--offload", "50", "-o", tmp_path / "a.csv")


def test_limits_on_sends_that_cannot_be_kept(refused):
    assert "give 1 or more, got 0" in refused(2, "lower", "zbv", "-p", 3, "-m", 5, "--max-outstanding-sends", 0)
    assert "the options for waits" in refused(2, "lower", "zbv", "-p", 3, "-m", 5, "--waits", "--passes", "reduce-grad")


def test_one_rank_is_a_numbered_list(run):
    header, titles, *lines, _, _ = run("lower", "1f1b", "-p", 2, "-m", 2, "--rank", 1).out.splitlines()
    actions = ps.lower(ps.schedule("1f1b", ranks=2, microbatches=2))[1]
    assert header.endswith(f"rank 1: {len(actions)} actions")
    assert titles.split() == ["rank", "1"]
    assert [line.split() for line in lines] == [[str(number), str(action)] for number, action in enumerate(actions)]


def test_passes_run_as_written(run):
    text = "split-backward,reduce-grad,shard{lookahead=2,residency=1},send-receive{receive=just-in-time}"
    said = json.loads(run("lower", "1f1b", "-p", 2, "-m", 4, "--passes", text, "--json").out)
    assert said == ps.PassList.parse(text).apply(ps.schedule("1f1b", ranks=2, microbatches=4)).to_json()


def test_a_program_can_only_be_changed_by_passes(run, refused, tmp_path):
    path = tmp_path / "a.json"
    run("lower", "1f1b", "-p", 2, "-m", 4, "-o", path)
    assert "already a program" in refused(2, "lower", path)
    program = ps.load(path)
    assert isinstance(program, Program)
    moved = json.loads(run("lower", path, "--passes", "receive{place=just-in-time}", "--json").out)
    assert moved["rows"] == ps.PassList.parse("receive{place=just-in-time}").apply(program).to_json()["rows"]
    alone = json.loads(run("lower", path, "--passes", "receive{place=just-in-time}", "--rank", 1, "--json").out)
    assert alone["actions"] == moved["rows"][1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--receive", "whenever"), "--receive: "),
        (("--receive", "-1"), "depth of at least 0"),
        (("--passes", "reduce-grad,shrd"), "did you mean 'shard'"),
        (("--passes", "shard{lookahead}"), "--passes: "),
        (("--passes", "reduce-grad", "--fsdp"), "leave out --fsdp"),
        (("--rank", "4"), "0 to 3, got --rank 4"),
        (("--rank", "-1"), "0 to 3"),
        (("--rank", "one"), "'one' is not a whole number"),
        (("--rank", "1", "-o", "a.csv"), "holds all ranks"),
    ],
)
def test_wrong_options_are_refused(refused, options, said):
    assert said in refused(2, "lower", "1f1b", "-p", 4, "-m", 8, *options)


def test_a_pass_that_cannot_be_applied_is_a_finding(refused):
    assert "send-receive" in refused(1, "lower", "1f1b", "--passes", "receive{place=just-in-time}")


def test_a_schedule_that_cannot_run_is_refused_with_the_reason(refused, tmp_path):
    (tmp_path / "a.csv").write_text("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")
    refused(1, "lower", tmp_path / "a.csv")
