"""The benchmark of a vocabulary on all ranks runs without a GPU too, at a tiny size, and its two programs have the same losses."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_vocabulary.py"


def test_both_programs_have_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    benchmark = runpy.run_path(str(SCRIPT))
    assert benchmark["main"](["--small", "--microbatches", "5", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu_vocabulary.json").read_text())
    assert report["losses"]["equal"]
    assert len(report["losses"]["spread"]) == 5
    assert min(report[name][value] for name in ("cut", "spread") for value in ("predicted", "measured")) > 0
    assert "losses equal: yes" in (tmp_path / "gpu_vocabulary.md").read_text()
