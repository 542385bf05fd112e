"""docs/composition.md: its table is that of the tests, and its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from composition import matrix
from penstock.runtime.launch.workers import Workers


def test_the_table_is_up_to_date() -> None:
    """Collected in a process of its own, as pytest does not run inside of itself."""
    script = Path(matrix.__file__)
    done = subprocess.run([sys.executable, str(script), "--check"], cwd=matrix.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_follows_the_marks() -> None:
    cells = {("zbv", "FSDP2"): "tested", ("gpipe", "scaler"): "refused", ("gpipe", "something else"): "refused"}
    rows = list(matrix.lines(cells))
    of = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[2:-1]] for row in rows if row.startswith("| `")}
    assert of["zbv"] == ["untested", "tested", *["untested"] * 6]
    assert of["gpipe"] == [*["untested"] * 6, "refused", "untested"]
    assert rows[-1] == "- something else with `gpipe`: refused"
    page = matrix.replaced(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n", matrix.table(cells))
    assert page == f"before\n{matrix.table(cells)}\nafter\n"


def test_the_example_runs(workers: Workers) -> None:
    """On processes that run already; their output is captured."""
    blocks = re.findall(r"^```python\n(.*?)^```$", matrix.PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    caught = "said = []\ndef print(*words, **_): said.append(words)\ndef run():\n    train()\n    return said\n"
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile("\n".join([*blocks, caught]), "docs/composition.md", "exec"), names)
    said, *others = workers.run(names["run"])
    assert others == [[], [], []]
    losses = [loss for _, loss in said]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
