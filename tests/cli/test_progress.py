"""The bar: only after a second, only on a terminal, and gone at the end."""

from __future__ import annotations

import io
import threading
import time

import pytest

from penstock.cli import progress as module
from penstock.cli.progress import show_steps


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by the test itself: between a fixture and its test stderr is set anew."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    return stderr


def test_what_is_quick_shows_nothing(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    before = threading.active_count()
    with show_steps(2) as step:
        step("one")
        step("two")
    assert terminal.getvalue() == ""
    assert threading.active_count() == before


def test_what_takes_long_shows_how_far_it_is(monkeypatch):
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


def test_nothing_where_stderr_is_no_terminal(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with show_steps(1) as step:
        step("one")
        time.sleep(0.05)
    assert stderr.getvalue() == ""


def test_an_error_passes_and_leaves_no_bar(monkeypatch):
    on_a_terminal(monkeypatch)

    def fail() -> None:
        with show_steps(1) as step:
            step("one")
            raise RuntimeError("broken")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert threading.active_count() == before
