"""The benchmarks stay alive: a short run of all of them, and how a run is judged, interrupted and told."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # the benchmarks are a folder of scripts

from benchmarks import run as script  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from benchmarks.rows import Case, Found, Row, amount, within  # noqa: E402

Suites = Callable[..., None]


WITHOUT_EXTRAS = ["simulation", "planner", "overhead", "runtime"]
"""Suites that are run without optional packages, one of each kind: arrays, the planner, threads, and processes that the script starts."""


@pytest.mark.filterwarnings("default")  # as when it is run by itself
def test_a_short_run_fills_the_report(tmp_path: Path) -> None:
    """In this process; the suites of the next test are run by the command."""
    suites = [name for name in script.SUITES if name not in WITHOUT_EXTRAS]
    threads = torch.get_num_threads()
    try:
        assert script.main([*suites, "--short", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(found["suites"]) == suites
    assert found["machine"].keys() >= {"cores", "processor", "Python", "torch", "numpy"}
    assert "load" in found["begun"]
    assert "load" in found["ended"]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for name, suite in found["suites"].items():
        assert suite["rows"], name
        assert not suite["errors"]
        assert f"\n## {name}\n" in text
        assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")
        for row in suite["rows"]:
            low, high = row["spread"]
            assert 0 < low <= row["ratio"] <= high < math.inf, row
            assert row["met"] is None, "a short run is not judged"
            assert f"| {row['case']} | {row['against']} |" in text


_HIDES = """
import os
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in ("ortools", "numba", "llvmlite", "matplotlib", "starlette", "uvicorn")
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
if SOURCE not in os.environ["PYTHONPATH"].split(os.pathsep):  # a process that the script starts has it there
    sys.path[:] = [entry for entry in sys.path if not os.path.isdir(os.path.join(entry, "penstock"))]
"""
"""Makes a process find no optional packages and no penstock, as if they were not installed."""


def test_a_short_run_from_the_source_tree_without_optional_packages(tmp_path: Path) -> None:
    """Nothing but torch is installed."""
    (tmp_path / "sitecustomize.py").write_text(f"SOURCE = {str(ROOT / 'src')!r}\n{_HIDES}", encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *WITHOUT_EXTRAS, "--short", "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert list(found["suites"]) == WITHOUT_EXTRAS
    assert all(suite["rows"] and not suite["errors"] for suite in found["suites"].values())
    assert "left out" in done.stdout


# Rows -----------------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    row = Row("x", [1.0, 20.0, 3.0], [2.0, 10.0, 3.0])  # the second round was slow for both
    assert row.ratios == [0.5, 2.0, 1.0]
    assert row.ratio == 1.0
    assert row.spread == (0.5, 2.0)
    assert row.met is None


def test_unlike_counts_of_rounds_are_held_against_the_median() -> None:
    assert Row("x", [1.0, 2.0, 3.0, 4.0, 5.0], [2.0]).ratios == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert Row("x", [1.0, 2.0, 3.0, 4.0, 5.0], [2.0]).spread == (1.0, 2.0)


def test_a_limit_is_kept_up_to_its_value() -> None:
    assert Row("x", [3.0], [2.0], limit=1.5).met
    assert Row("x", [3.1], [2.0], limit=1.5).met is False
    assert within("x", 1.0, 2.0).met
    assert within("x", 2.1, 2.0).met is False


def test_amounts_are_told_in_fitting_units() -> None:
    assert [amount(value, "s") for value in (2.5, 0.25, 0.00025)] == ["2.50 s", "250.0 ms", "250 us"]
    assert amount(33.90625, "MB") == "33.91 MB"
    assert amount(8500.0, "") == "8500"


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> Suites:
    """Puts suites of one's own in the place of the real ones: each a name and the works of its cases."""

    def put(**works: list[Callable[[], Any]]) -> None:
        monkeypatch.setattr(script, "SUITES", tuple(works))
        for name, cases in works.items():
            module: Any = ModuleType(f"benchmarks.{name}", f"About {name}.")
            module.suite = _suite([Case(f"case {at}", work) for at, work in enumerate(cases)])
            monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)

    return put


def _suite(cases: list[Case]) -> Any:
    @contextmanager
    def suite(short: bool) -> Iterator[list[Case]]:
        yield cases

    return suite


def _rows(*ratios: float, limit: float | None = 1.0) -> Callable[[], list[Row]]:
    return lambda: [Row(f"row of {ratio:g}", [ratio], [1.0], limit=limit) for ratio in ratios]


def _fails() -> list[Row]:
    raise ValueError("no such\nthing")


def _is_stopped() -> Iterator[Row]:
    yield Row("before", [0.5], [1.0], limit=1.0)
    raise KeyboardInterrupt


def _report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_a_red_row_gives_1_and_is_named_at_the_end(suites: Suites, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suites(one=[_rows(0.5, 1.5)], two=[_rows(3.0, limit=None)])
    assert script.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 rows with a limit are met." in said
    assert "not met: row of 1.5, against torch: 1.5, at most 1" in said
    assert said.rstrip().endswith(str(tmp_path / "report.md"))
    assert [row["met"] for row in _report(tmp_path)["suites"]["one"]["rows"]] == [True, False]
    assert "**not met**" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_short_run_judges_nothing(suites: Suites, tmp_path: Path) -> None:
    suites(one=[_rows(1.5)])
    assert script.main(["--short", "--out", str(tmp_path)]) == 0
    assert "not met" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_all_green_gives_0_and_suites_can_be_chosen(suites: Suites, tmp_path: Path) -> None:
    suites(one=[_rows(1.5)], two=[_rows(0.5)])
    assert script.main(["two", "--out", str(tmp_path)]) == 0
    assert list(_report(tmp_path)["suites"]) == ["two"]


def test_a_failure_loses_nothing_else(suites: Suites, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suites(one=[_rows(0.5), _fails, _rows(0.25)], two=[_rows(0.5)])
    assert script.main(["--out", str(tmp_path)]) == 1
    found = _report(tmp_path)["suites"]
    assert [row["ratio"] for row in found["one"]["rows"]] == [0.5, 0.25]
    assert found["one"]["errors"] == [{"case": "case 1", "error": "ValueError: no such thing"}]
    assert found["two"]["rows"]
    assert "failed: one, case 1: ValueError: no such thing" in capsys.readouterr().out


def test_a_suite_that_cannot_begin_is_noted(tmp_path: Path) -> None:
    report = Report("command", {}, {})
    script.collect("no_such_suite", report, lambda what, done, of: None)
    assert [(suite, case) for suite, case, _ in report.errors] == [("no_such_suite", "the whole suite")]
    assert report.code == 1
    assert "ModuleNotFoundError" in report.write(tmp_path).read_text(encoding="utf-8")


def test_ctrl_c_writes_what_there_is(suites: Suites, tmp_path: Path) -> None:
    suites(one=[_rows(0.25)], two=[_is_stopped], three=[_rows(0.5)])
    assert script.main(["--out", str(tmp_path)]) == 130
    found = _report(tmp_path)
    assert found["interrupted"]
    assert {name: [row["ratio"] for row in suite["rows"]] for name, suite in found["suites"].items()} == {"one": [0.25], "two": [0.5]}
    assert "interrupted" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_an_unknown_suite_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(["lowring", "--out", str(tmp_path / "none")])
    assert end.value.code == 2
    assert "no suite 'lowring'; there are generation, lowering" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_figure_shows_limits_where_they_count() -> None:
    from benchmarks.figures import ratios

    found = Found("one", "", [Row("a row", [0.5, 0.7], [1.0, 1.0], limit=0.25)])
    assert ratios(found) != ratios(found, judged=False)
    assert b"a row" in ratios(found)


# Cases of torch's own package -----------------------------------------------------------------------------------------


def _peer_cases(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "peer_cases.py"), *arguments, "--json", str(tmp_path / "cases.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    return done, json.loads((tmp_path / "cases.json").read_text(encoding="utf-8"))


def test_cases_are_run_on_every_engine(tmp_path: Path) -> None:
    """A step, an order and a count."""
    done, found = _peer_cases(tmp_path, "4", "12b", "15")
    assert done.returncode == 0, done.stderr
    assert list(found["cases"]) == ["4", "12b", "15"]
    for number, case in found["cases"].items():
        assert case["Penstock"]["symptom"] == case["drop-in"]["symptom"] == "right", number
        assert case["torch"]["text"]
        assert f"| {number} | {case['title']} |" in done.stdout


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.peer_cases import main

    with pytest.raises(SystemExit, match="2"):
        main(["22"])
    assert "no case '22'; there are 1a, 1b" in capsys.readouterr().err


def test_the_state_follows_from_what_was_measured() -> None:
    from benchmarks.cases.outcome import Case, Outcome
    from benchmarks.peer_cases import judge

    case = Case("1", "", "missing", lambda engine: Outcome("right", ""))
    states = [judge(case, Outcome(symptom, "")) for symptom in ("right", "missing", "hangs")]
    assert states == ["fixed", "still wrong", "changed"]


def test_hanging_crashing_and_raising_are_results() -> None:
    """In a process of its own, because ranks are forked."""
    code = """
import os, time, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.peer_cases import run_case
from benchmarks.cases.outcome import Case, Outcome
import torch.distributed as dist
def hang(engine):
    time.sleep(100)
def crash(engine):
    os.abort()
def fail(engine):
    raise ValueError("no such thing")
def wrong_on_one(engine):
    return Outcome("differs" if dist.get_rank() else "right", f"rank {dist.get_rank()}")
for run, ranks in ((hang, 1), (crash, 1), (fail, 2), (wrong_on_one, 2)):
    outcome = run_case(Case("0", "", "", run, ranks=ranks), None, 2 if run is hang else 100)
    print(outcome.symptom, "|", outcome.text)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.stdout.splitlines() == [
        "hangs | 1 of 1 ranks hang",
        "crashes | the process crashes: SIGABRT",
        "raises | raises ValueError: no such thing",
        "differs | rank 1",
    ], done.stderr


def test_gradients_are_compared_by_kind() -> None:
    from benchmarks.cases.outcome import compare_gradients
    from torch import nn

    mine, wanted = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    wanted.weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert compare_gradients([mine], [wanted]).symptom == "missing"
    for grad, symptom in ((1.0, "right"), (1.25, "scaled"), (None, "differs")):
        mine.weight.grad = torch.ones(2, 2) if grad is None else grad * wanted.weight.grad
        assert compare_gradients([mine], [wanted]).symptom == symptom


def test_the_fewest_loads() -> None:
    """By hand: 0, 1 and 2 are loaded; 1 makes room for 3, because 0 and 2 are needed before; 1 comes again."""
    from benchmarks.cases.waste import least_loads

    assert least_loads([0, 1, 2, 3, 0, 2, 1], 3) == 5
    assert least_loads([0, 1, 0, 1], 2) == 2
