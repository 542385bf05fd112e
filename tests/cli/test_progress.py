"""The progress bar: shown only after a second and only on a terminal, and removed at the end."""

from __future__ import annotations

import io
import threading
import time

import pytest

from penstock.cli import output as module
from penstock.cli.main import main
from penstock.cli.output import show_steps


class Terminal(io.StringIO):
    """A stderr that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by the test itself, because stderr is replaced between a fixture and its test."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    return stderr


def test_quick_work_shows_no_bar(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    before = threading.active_count()
    with show_steps(2) as step:
        step("one")
        step("two")
    assert terminal.getvalue() == ""
    assert threading.active_count() == before


def test_slow_work_shows_its_progress(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    with show_steps(2) as step:
        step("first part")
        time.sleep(0.3)
        step("second part")
        time.sleep(0.3)
    shown = terminal.getvalue()
    assert "first part" in shown
    assert "0/2" in shown
    assert "1/2" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the line is taken away


def test_no_bar_if_stderr_is_not_a_terminal(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with show_steps(1) as step:
        step("one")
        time.sleep(0.05)
    assert stderr.getvalue() == ""


def test_an_error_propagates_and_removes_the_bar(monkeypatch):
    on_a_terminal(monkeypatch)

    def fail() -> None:
        with show_steps(1) as step:
            step("one")
            raise RuntimeError("broken")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert threading.active_count() == before


@pytest.mark.parametrize("command", [("verify", "zbv"), ("lower", "zbv"), ("export", "zbv", "-o", "page.html")])
def test_long_work_of_commands_shows_its_progress(command, monkeypatch, tmp_path, capsys):
    """Each command that builds, proves or writes for long names its work."""
    monkeypatch.chdir(tmp_path)
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    assert main([*command, "-p", "2", "-m", "2"]) == 0
    assert any(word in terminal.getvalue() for word in ("proving", "lowering and proving", "building the page"))
