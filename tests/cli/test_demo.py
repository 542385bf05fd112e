"""What a newcomer runs first."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SMALLER = {"context: int = 256": "context: int = 64", "width: int = 192": "width: int = 64", "blocks: int = 16": "blocks: int = 6"}


@pytest.mark.slow
def test_the_demo_trains_and_reports(tmp_path):
    """A short version with a smaller model, from the command's first line to the page."""
    model = (ROOT / "examples" / "gpt.py").read_text()
    for shape, smaller in SMALLER.items():
        assert shape in model
        model = model.replace(shape, smaller)
    (tmp_path / "gpt.py").write_text(model)
    shutil.copy(ROOT / "examples" / "demo.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    command = [sys.executable, "demo.py", "--steps", "4", "--seconds", "0", "--memory-limit", "6MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    heads = re.findall(r"^\d\. (\w+)", done.stdout, flags=re.MULTILINE)
    assert heads == ["Measure", "Plan", "Prove", "Train", "Compare", "Overlay", "Measure"]
    assert re.search(r"\d+ candidates: \d+ fit", done.stdout)
    limit = re.search(r".*--memory-limit (\w+)", done.stdout, flags=re.DOTALL)
    assert limit is not None
    assert re.search(rf"peak memory: [\d.]+MiB of {limit[1]} allowed", done.stdout)
    for step in (1, 4):
        assert re.search(rf"step {step}, microbatch loop: equal (to the last bit|up to rounding)", done.stdout)
    assert "step 4 of 4: loss" in done.stderr
    assert f"The report is in {Path('demo') / 'report.html'}" in done.stdout
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "<h2>Measured over predicted</h2>" in page
    sentence = done.stdout.rstrip().splitlines()[-1]
    assert re.match(rf"Within the same {limit[1]} per rank, the plan (trains|takes) [\d.]+ times as (fast|long) as 1f1b \(", sentence)
    assert re.search(r"with the loss and gradients of the unpipelined model, (to the last bit|up to rounding)\.$", sentence)
    assert f"<p>{sentence}</p>" in page
    counts = re.search(r"\d+ candidates: .*", done.stdout)
    assert counts is not None
    assert counts[0] in page


def test_the_example_of_a_refusal_needs_no_torch():
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('examples/refused.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "zbv schedule: v placement, 4 ranks" in done.stdout
    assert "proved: 'zbv', a program on 4 ranks" in done.stdout
    assert re.search(r"deadlock, rank 0.*\n.*0SEND_F0, which is step \d+ of rank 0", done.stdout)


def test_make_alone_lists_the_targets():
    done = subprocess.run(["make", "--no-print-directory"], capture_output=True, text=True, check=True, cwd=ROOT)
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    assert listed == [
        "help",
        "setup",
        "demo",
        "test",
        "quick",
        "matrix",
        "fuzz",
        "page",
        "bench",
        "cases",
        "paper",
        "docs",
        "pictures",
        "deepspeed",
        "titan",
        "sky",
    ]


@pytest.mark.parametrize(("target", "package"), [("demo", "'.[torch,fast,solve,plot]'"), ("setup", "'.[dev,release]'")])
def test_torch_is_installed_first_and_in_the_version_that_is_tested(tmp_path, target, package):
    """The commands that make would run before anything is installed."""
    planned = subprocess.run(["make", "-n", f"VENV={tmp_path}/venv", target], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert planned.index("install torch==2.13.0") < planned.index(f"install -e {package}")
