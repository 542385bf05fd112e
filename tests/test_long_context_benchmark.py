"""The benchmark of long sequences runs without a GPU too, at a tiny size."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "long_context.py"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--cpu", "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_every_case_writes_its_row(tmp_path: Path) -> None:
    done = run(tmp_path, "--tokens", "32", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "long_context.json").read_text())
    cases = ["1f1b", "1f1b, recomputed", "seq1f1b", "slimpipe"]
    assert [row["schedule"] for row in report["rows"]] == [label + more for label in cases for more in ("", ", offload")]
    assert {row["same loss"] for row in report["rows"]} == {"yes"}
    assert all(row["predicted s"] > 0 and row["measured s"] > 0 for row in report["rows"])
    moved = {row["schedule"]: int(row["moved"].split()[0]) for row in report["rows"]}
    assert moved["seq1f1b"] == 0 < moved["seq1f1b, offload"]
    held = {row["schedule"]: row["predicted GiB"] for row in report["rows"]}
    assert held["seq1f1b, offload"] < held["seq1f1b"] < held["1f1b"]
    assert [row["longest predicted"] for row in report["longest"]] == [32] * 8
    assert (tmp_path / "long_context.md").read_text().startswith("# Long sequences")


def test_it_ends_with_1_if_a_row_says_no(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At the tiny size only if losses differ: its figures mean nothing."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    benchmark = runpy.run_path(str(SCRIPT))
    fails, full = benchmark["fails"], benchmark["FULL"]
    with pytest.raises(SystemExit, match="2"):
        benchmark["main"](["--only", "seq1fb"])
    assert "no schedule 'seq1fb'; there are 1f1b, seq1f1b, slimpipe" in capsys.readouterr().err
    assert fails([{"good": "NO", "same loss": "yes"}], False)
    assert not fails([{"good": "NO", "same loss": "yes"}], True)
    assert fails([{"good": "yes", "same loss": "no"}], True)
    assert fails([{"error": "of any kind"}], True)
    assert 0.9e9 < full.parameters < 1.2e9
    rows = [
        {"tokens": tokens, "schedule": "seq1f1b", "predicted to fit": "yes", "predicted tokens/s": 1.0, "fits": fits, "tokens/s": 2.0}
        for tokens, fits in ((16, "yes"), (32, "yes"), (64, "no"))
    ]
    assert benchmark["summarise"](rows) == [{"schedule": "seq1f1b", "longest predicted": 64, "longest measured": 32, "tokens/s there": 2.0}]
