"""The benchmark of metrics stays alive."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "metrics.py"


def test_every_option_is_timed() -> None:
    measure = runpy.run_path(str(FILE))["measure"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measure.__globals__, "ROUNDS", 7)
        times = measure(8)
    assert set(times) == {"plain", "on_step", "record"}
    assert min(times.values()) > 0
