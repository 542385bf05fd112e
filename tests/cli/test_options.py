"""Options that several commands share, their help, and what shells complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from penstock.cli.options import complete_schedules, expand_groups
from penstock.schedules.registry import algorithms

COMMANDS = ("list", "show", "lower", "verify", "simulate", "compare", "plan", "train", "profile", "read", "convert", "studio", "export")


@dataclass(frozen=True)
class Pair:
    one: Annotated[int, typer.Option("--one")]
    two: Annotated[str, typer.Option("--two")] = "b"
    own: tuple[int, ...] = ()
    """Not an option."""


def test_a_group_of_options_becomes_the_parameters_of_a_command():
    def command(pair: Pair, *, three: Annotated[bool, typer.Option("--three")] = False) -> tuple[Pair, bool]:
        """Do it."""
        return pair, three

    globals()["Pair"] = Pair
    expanded = expand_groups(command)
    assert (expanded.__name__, expanded.__doc__) == ("command", "Do it.")
    assert list(expanded.__annotations__) == ["one", "two", "three"]
    assert expanded(one=1, two="x", three=True) == (Pair(1, "x"), True)


def test_names_are_completed_in_any_case():
    assert complete_schedules("zb") == [name for name in algorithms() if name.startswith("zb")]
    assert complete_schedules("ZBV") == ["ZBV", "ZBVZeroBubble"]
    assert "Zb-h1" in complete_schedules("Zb")
    for typed in ("Z", "I", "1f1", "DualP", "G"):
        names = complete_schedules(typed)
        assert names
        assert all(name.startswith(typed) and name in algorithms() for name in names)
    assert complete_schedules("file.c") == []


@pytest.mark.parametrize("words", ["penstock show zb", "penstock train f.py --schedule zb", "penstock compare 1f1b zb"])
def test_the_shell_gets_the_names(words):
    """What the script that `--install-completion` installs for bash asks."""
    environment = {**os.environ, "_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-m", "penstock"], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == complete_schedules("zb")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("penstock show ZB", complete_schedules("ZB")),
        ("penstock plan --schedules 1f1b,zb", [f"1f1b,{name}" for name in complete_schedules("zb")]),
        ("penstock plan --schedules sear", ["searched"]),
    ],
)
def test_the_shell_gets_names_in_the_typed_case_and_the_last_of_a_list(words, completed):
    environment = {**os.environ, "_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-m", "penstock"], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == completed


def test_completion_can_be_installed(run):
    assert "--install-completion" in run("--help").out


@pytest.mark.parametrize("width", [50, 80, 200])
def test_no_help_text_is_cut(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    listed = " ".join(run("--help").out.split())
    for command in COMMANDS:
        text = run(command, "--help").out
        first = " ".join(text.split("\n\n")[1].split())
        assert f"{command} {first.removesuffix('.')}" in listed
        assert not re.search(r"<[^>]*>", text)
        assert "{" not in text.partition("\n\n")[0]  # the usage line
