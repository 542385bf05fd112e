"""The README says what is so: its table is the registry's, and its examples run."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.schedules.registry import algorithms

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def table() -> str:
    """The table of schedules, as the registry has it."""
    rows = [("name", "idea", "bubble", "memory"), ("---",) * 4]
    rows += [(f"`{each.name}`", each.summary, each.bubble, each.memory) for each in algorithms().values()]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def test_the_table_of_schedules_is_the_registry_s():
    found = re.search(r"<!-- schedules:[^>]*-->\n(.*?)\n?<!-- end of schedules -->", README.read_text(), flags=re.DOTALL)
    assert found is not None
    assert found[1] == table(), f"put this table into the README:\n{table()}"


def test_python_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks("python")), {}, "README", str(README), 0)
    assert len(example.examples) > 5
    said: list[str] = []
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed == 0, "".join(said)


def commands() -> list[tuple[list[str], str]]:
    """Every `$ penstock ...` of the README with what it is said to print."""
    parts = [part for block in blocks("console") for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    found = [(shlex.split(line), wanted) for line, _, wanted in (part.partition("\n") for part in parts)]
    assert all(words[0] == "penstock" for words, _ in found)
    return [(words[1:], wanted) for words, wanted in found]


def test_commands_print_what_the_readme_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert len(commands()) > 3
    for words, wanted in commands():
        assert main(words) == 0, words
        printed = capsys.readouterr().out
        assert doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS), f"{words} printed\n{printed}"


@pytest.mark.parametrize("command", ["list", "show", "lower", "verify", "convert"])
def test_every_command_is_named(command):
    assert f"| `penstock {command}" in README.read_text()
