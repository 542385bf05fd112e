"""The page's own code, run by node: questions go in line by line, answers come back."""

from __future__ import annotations

import fcntl
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WEB = Path(__file__).parents[2] / "web"


class Page:
    """The core of the page in a node process."""

    def __init__(self, bundle: Path) -> None:
        self.process = subprocess.Popen(["node", str(bundle)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def ask(self, document: Any, costs: dict[str, Any] | None) -> dict[str, Any]:
        """What the page computes from a document under these costs; None means the measured times."""
        return self._answer({"document": document, "costs": costs})

    def edit(self, document: Any, edits: str) -> dict[str, Any]:
        """What the page makes of a document after changes to its order."""
        return self._answer({"document": document, "costs": None, "edits": edits})

    def lay(self, document: Any, files: list[tuple[str, str]]) -> dict[str, Any]:
        """The times of a recorded run, from names and texts of files, for a document."""
        return self._answer({"document": document, "costs": None, "recorded": [{"name": name, "text": text} for name, text in files]})

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """The core, bundled into the folder and running."""
    bundle = folder / "driver.mjs"
    install()
    esbuild = WEB / "node_modules" / ".bin" / "esbuild"
    options = ["--bundle", "--platform=node", "--format=esm", "--log-level=error"]
    subprocess.run([str(esbuild), str(WEB / "tests" / "core" / "driver.ts"), *options, f"--outfile={bundle}"], check=True)
    running = Page(bundle)
    try:
        yield running
    finally:
        running.close()


def install() -> None:
    """Install the page's packages if they are missing; one process does it, others wait."""
    with (WEB / "package.json").open(encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (WEB / "node_modules" / ".bin" / "esbuild").exists():
            subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=WEB, check=True)
