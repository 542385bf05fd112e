"""What the page says is so: its blocks run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch.distributed as dist

PAGE = Path(__file__).parents[3] / "docs" / "from-pytorch.md"


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert len(example.examples) > 15
    said: list[str] = []
    try:
        failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert failed == 0, "".join(said)


def test_the_changed_lines_are_imports_that_work() -> None:
    lines = re.findall(r"^(from penstock\S+ import [\w, ]+?)\s+# after$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        exec(line, {})
