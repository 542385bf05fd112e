"""What a newcomer runs first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_proves_and_refuses_without_torch():
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('examples/demo.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "zbv schedule: v placement, 4 ranks" in done.stdout
    assert "proved: 'zbv', a program on 4 ranks" in done.stdout
    assert re.search(r"deadlock, rank 0.*\n.*0SEND_F0, which is step \d+ of rank 0", done.stdout)


def test_make_alone_lists_the_targets():
    done = subprocess.run(["make", "--no-print-directory"], capture_output=True, text=True, check=True, cwd=ROOT)
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    assert listed == ["help", "setup", "demo", "test", "quick", "bench", "docs", "deepspeed"]


def test_only_the_tests_need_torch(tmp_path):
    def plan(target: str) -> str:
        """What make would run where nothing is installed yet."""
        return subprocess.run(["make", "-n", f"VENV={tmp_path}/venv", target], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert "install torch" not in plan("demo")
    setup = plan("setup")
    assert setup.index("install torch==") < setup.index("install -e '.[dev]'")
