"""Run the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock.cli.main import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("show", "gpipe", "-p", 2)` returns exit code, stdout and stderr, whatever terminal the tests run in."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: object) -> Result:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Run a command that must fail with this exit code, one `error:` message and no stdout; returns the message."""

    def refused(code: int, *args: object) -> str:
        result = run(*args)
        assert result.code == code, result
        assert not result.out
        assert result.err.startswith("error: ")
        assert "Traceback" not in result.err
        return result.err.removeprefix("error: ").strip()

    return refused
