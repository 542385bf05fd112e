"""Commands on the pages: run if they are ours, otherwise checked without running."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.blocks import ROOT
from penstock.cli.app import app
from penstock.cli.main import main

Said = tuple[int, str]
"""Exit code and output."""


def split(text: str) -> list[list[str]]:
    """Split a text into commands, one per line; a backslash joins lines, and # starts a comment."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words: list[str]) -> Said:
    """Run one of our commands in this process, or check any other."""
    known: dict[str, Callable[[list[str]], Said]] = {"penstock": _penstock, "python": _python}
    if words[0] in known:
        return known[words[0]](words[1:])
    check(words)
    return 0, ""


def check(words: list[str]) -> None:
    """Check that a command could run: its options are known, and its files, targets and extras exist."""
    known = {"penstock": _parsed, "python": _compiled, "make": _targets, "torchrun": _torchrun, "pip": _extras}
    assert words[0] in known, f"no test knows how to check {words}"
    known[words[0]](words[1:])


def _captured(call: Callable[[], int]) -> Said:
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = call()
    return code, said.getvalue()


def _penstock(words: list[str]) -> Said:
    return _captured(lambda: main(words))


def _python(words: list[str]) -> Said:
    def call() -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            try:
                runpy.run_path(words[0], run_name="__main__")
            except SystemExit as end:
                return int(end.code or 0)
        return 0

    return _captured(call)


def _parsed(words: list[str]) -> None:
    """Check that every option exists and has a value of its type."""
    whole: Any = typer.main.get_command(app)
    if words and not words[0].startswith("-"):
        assert words[0] in whole.commands, words
        whole.commands[words[0]].make_context(words[0], words[1:])


def _compiled(words: list[str]) -> None:
    ast.parse(Path(words[0]).read_text(encoding="utf-8"))


def _targets(words: list[str]) -> None:
    known = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(known), words


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(words)
    if Path(read.training_script).name == "penstock":
        _parsed(read.training_script_args)
    else:
        _compiled([read.training_script])


def _extras(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        extras = re.fullmatch(r"\.\[([\w,]+)\]", word)  # it is installed from a clone: the package is not on PyPI
        assert word in ("-e", ".") or (extras is not None and set(extras[1].split(",")) <= set(known)), word
