"""The report on paper, in small: its figures are those of the library."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import penstock as ps

FILE = Path(__file__).parents[1] / "benchmarks" / "paper.py"


@pytest.fixture(scope="module")
def paper():
    spec = importlib.util.spec_from_file_location("paper", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["paper"]


def test_the_default_is_a_trillion_parameters_on_4096_gpus(paper):
    setting = paper.Setting()
    assert setting.gpus == 4096
    assert setting.model.parameters == pytest.approx(12 * setting.hidden**2 * setting.layers, rel=0.01)
    assert setting.model.parameters >= 1e12
    assert setting.tokens == 64 * 128 * 2048


def test_a_small_report(paper, tmp_path, capsys):
    options = "--pipe 4 --data 8 --microbatches 8 --layers 8 --hidden 256 --heads 4 --sequence 128 --vocabulary 1000 --flops 1e12"
    assert paper.main([*options.split(), "--memory-limit", "16MiB", "--seconds", "0", "--out", str(tmp_path)]) == 0
    report = (tmp_path / "report.md").read_text()
    assert str(tmp_path / "report.md") in capsys.readouterr().out
    assert "on 32 GPUs, on paper" in report
    for figure in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", report):
        assert (tmp_path / figure).stat().st_size > 1000
    rows = {cells[0]: cells[1:] for line in report.splitlines() if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) >= 6}
    setting = paper.Setting(4, 8, 8, 8, 256, 4, 128, 1000, 1e12, memory_limit="16MiB", seconds=0.0)
    plan = ps.plan(setting.model.profile(), ranks=4, microbatches=8, memory_limit="16MiB", recompute=True, schedules="1f1b", seconds=0.0)
    free = ps.plan(setting.model.profile(), ranks=4, microbatches=8, schedules="1f1b", seconds=0.0)
    # Both tables have a row for it: the last one, of the start-up, counts the actions of rank 2.
    assert rows["1f1b"][0] == f"{len(ps.lower(ps.schedule('1f1b', 4, 8))[2])}"
    assert re.search(rf"^\| 1f1b \| {re.escape(plan.units.time(plan.objective))} \|", report, flags=re.MULTILINE)
    assert re.search(rf"^\| 1f1b \|.*\| {re.escape(free.units.time(free.objective))}, ", report, flags=re.MULTILINE)
