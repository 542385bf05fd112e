"""The entry point: exit codes, help, imported modules, and early ends."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

import penstock
from penstock.cli.main import main

COMMANDS = ("list", "show", "lower", "verify", "simulate", "compare", "convert")
HEAVY = ("torch", "numba", "matplotlib", "ortools", "scipy", "pandas")


def loaded(*args: str) -> set[str]:
    """The top-level modules that a command loads in a fresh process."""
    code = f"import sys\nfrom penstock.cli.main import main\nassert main({list(args)!r}) == 0\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize("args", [("--help",), ("list",), ("show", "--help"), ("simulate", "--help"), ("compare", "--help")])
def test_help_and_list_load_nothing_heavy(args: tuple[str, ...]) -> None:
    assert not loaded(*args) & {"numpy", *HEAVY}


def used_by_child(*args: str) -> float:
    """CPU seconds of a process, which do not depend on what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *args], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("args", [("--help",), ("list",)])
def test_help_and_list_take_little_time(args: tuple[str, ...]) -> None:
    assert min(used_by_child("-m", "penstock", *args) for _ in range(3)) < 0.4


@pytest.mark.parametrize("args", [("show", "zbv"), ("lower", "1f1b"), ("verify", "1f1b"), ("simulate", "zbv"), ("compare", "zbv", "1f1b")])
def test_work_loads_numpy_and_nothing_heavier(args: tuple[str, ...]) -> None:
    modules = loaded(*args)
    assert "numpy" in modules
    assert not modules & set(HEAVY)


def test_help_names_every_command_and_each_has_an_example(run):
    top = run("--help")
    assert top.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in top.out
        said = run(command, "--help")
        assert said.code == 0
        assert f"Examples:\n    penstock {command}" in said.out.replace("  Examples:", "Examples:")
        assert "--json" in said.out
        assert "-o, --output" in said.out


def test_command_without_arguments_prints_help(run):
    assert run() == run("--help")


def test_version(run):
    assert run("--version").out == f"penstock {penstock.__version__}\n"


def test_running_the_module_runs_the_command():
    done = subprocess.run([sys.executable, "-m", "penstock", "list", "--json"], capture_output=True, text=True, check=True)
    assert "gpipe" in [each["name"] for each in json.loads(done.stdout)]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["shw"], "show"),
        (["show"], "NAME|FILE"),
        (["show", "gpipe", "--nope"], "--nope"),
        (["show", "gpipe", "-p", "four"], "'four' is not a whole number"),
        (["show", "gpipe", "-p", "0"], "ranks must be from 1"),
        (["show", "gpipe", "-m", "-1"], "microbatches must be from 1"),
        (["show", "gpipe", "--chunks", "3"], "chunks=3"),
        (["show", "dualpipe", "-p", "3"], "even"),
        (["show", "zvb"], "did you mean 'zbv'"),
        (["verify", "gpipe", "--semantics", "hope"], "'channels', 'rendezvous', 'both'"),
        (["convert", "gpipe", "-", "--to", "yaml"], "lowered-csv"),
        (["list", "gpipe"], "gpipe"),
    ],
)
def test_wrong_usage_exits_with_2_and_lists_the_choices(refused, args, said):
    assert said in refused(2, *args)


def test_an_unexpected_error_is_not_swallowed(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("penstock.cli.commands.list.algorithms", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["list"])


def test_an_interrupt_exits_quietly_with_130(run, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.commands.list.algorithms", interrupt)
    result = run("list")
    assert (result.code, result.out, result.err) == (130, "", "")


def test_a_closed_pipe_is_not_an_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "show", "gpipe", "-p", "16", "-m", "512"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert said == b""


def test_error_is_red_on_a_terminal_and_plain_without_colour(run, monkeypatch):
    assert "\x1b" not in run("show", "zvb").err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run("show", "zvb").err.startswith("\x1b[1;31merror:\x1b[0m ")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in run("show", "zvb").err


def test_runs_without_a_terminal():
    environment = {key: value for key, value in os.environ.items() if key not in ("TERM", "COLUMNS", "HOME")}
    done = subprocess.run([sys.executable, "-m", "penstock", "show", "1f1b"], capture_output=True, text=True, check=True, env=environment)
    assert "\x1b" not in done.stdout
