"""What the pages say is so: their blocks run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("page", "count"), [("hugging-face", 16), ("torchtitan", 4), ("compile", 18)])
def test_the_blocks_run(page, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = DOCS / f"{page}.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, path.name, str(path), 0)
    assert len(example.examples) >= count
    said: list[str] = []
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("page", ["hugging-face", "torchtitan", "compile"])
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", (DOCS / f"{page}.md").read_text()):
        assert (DOCS / link).exists(), link
