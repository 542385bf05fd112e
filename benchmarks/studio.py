"""The studio's page in a real browser: the first picture, frames while dragging and zooming, and retiming, against their targets.

Pages are exported as `penstock export` does, and opened from the disk without a server. Frames are those of the browser: at most 60
per second.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rows import Case, Row, within

from penstock.cli.main import main
from penstock.errors import MissingExtraError

WEB = Path(__file__).resolve().parent.parent / "web"
FIRST, FRAME, RETIME = 0.5, 1.05 / 60, 0.05
"""Seconds: a first picture, a frame at 60 frames per second with 5 in 100 for the browser's clock, a retimed picture."""
SIZES = {"192 actions": ("4", "8"), "10,000 actions": ("16", "104"), "100,000 actions": ("64", "261")}
"""Ranks and microbatches of zbv: six actions per rank and microbatch."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    if shutil.which("npm") is None:
        raise MissingExtraError("the studio's benchmark", "node", "studio")
    _install()
    with tempfile.TemporaryDirectory() as folder:
        names = list(SIZES)[:1] if short else list(SIZES)
        yield [Case(name, lambda name=name: _rows(name, Path(folder))) for name in names]


def _install() -> None:
    """Install the page's packages if they are missing; one process does it, others wait."""
    with (WEB / "package.json").open(encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (WEB / "node_modules" / ".bin" / "esbuild").exists():
            subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=WEB, check=True)


def _rows(name: str, folder: Path) -> Iterator[Row]:
    ranks, microbatches = SIZES[name]
    page = folder / "page.html"
    if main(["export", "zbv", "-p", ranks, "-m", microbatches, "-o", str(page)]):
        raise RuntimeError(f"zbv on {ranks} ranks cannot be exported")
    values = _measure(page)
    large = name.startswith("100,000")
    yield within(f"first picture, {name}", values["first"], FIRST)
    yield within(f"retime, {name}", values["retime"], RETIME)
    yield _frames(f"zoom, {name}", values["zoom"], judged=True)
    yield _frames(f"drag, {name}", values["drag"], judged=not large)


def _frames(case: str, values: list[float], judged: bool) -> Row:
    row = within(case, values, FRAME, note="time between two frames")
    return row if judged else Row(case, values, [FRAME], against="60 frames per second", note="time between two frames")


def _measure(page: Path) -> dict[str, list[float]]:
    """Run the page's own benchmark on an exported page; seconds of each case."""
    bundle = WEB / "node_modules" / ".bench.mjs"  # there it finds the packages
    esbuild = [str(WEB / "node_modules" / ".bin" / "esbuild"), str(WEB / "scripts" / "bench.ts"), "--bundle", "--platform=node"]
    subprocess.run([*esbuild, "--format=esm", "--packages=external", "--log-level=error", f"--outfile={bundle}"], check=True)
    done = subprocess.run(["node", str(bundle), str(page)], check=True, capture_output=True, text=True, timeout=600, cwd=WEB)
    said: dict[str, Any] = json.loads(done.stdout)
    return {case: [value / 1e3 for value in values] for case, values in said[page.name].items()}
