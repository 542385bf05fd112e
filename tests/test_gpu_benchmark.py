"""The benchmark of everything on a GPU runs without one too, at a tiny size."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_section_writes_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    names = ["overhead", "graphs", "split", "overlap", "conformance", "memory", "partitions", "uneven", "vocabulary"]
    assert list(found["sections"]) == names
    assert all(section["rows"] and "error" not in section for section in found["sections"].values())
    assert all(row["good"] == "yes" for row in found["sections"]["conformance"]["rows"])
    same = [row["same to the last bit"] for name in ("overlap", "graphs") for row in found["sections"][name]["rows"]]
    assert set(same) == {"yes"}
    vocabulary = [(row["vocabulary"], row["same losses"]) for row in found["sections"]["vocabulary"]["rows"]]
    assert vocabulary == [("the best uneven cut", ""), ("on all ranks", "yes")] * 2
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("\n## ") == 9
    assert found["about"]["size"].startswith("tiny")


def test_it_ends_with_1_where_a_row_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the tiny size only differing numbers fail: its figures mean nothing."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    fails = runpy.run_path(str(SCRIPT))["fails"]
    slow, other = {"rows": [{"good": "yes"}, {"good": "NO"}]}, {"rows": [{"same to the last bit": "NO"}]}
    assert fails("split", slow, False)
    assert not fails("split", slow, True)
    assert fails("conformance", slow, True)
    assert fails("graphs", other, True)
    assert fails("vocabulary", {"rows": [{"same losses": "NO"}]}, True)
    assert fails("graphs", {"error": "of any kind"}, True)
    assert not fails("memory", {"rows": [{"good": "yes"}, {"rank": 1}]}, False)


def test_an_unknown_section_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT))["main"](["--small", "--out", str(tmp_path / "none"), "--only", "splt"])
    assert "no section 'splt'; there are overhead" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
