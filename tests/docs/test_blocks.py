"""Every block of code in the README and the documentation runs, or says why it does not and is checked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import commands
from docs.blocks import ROOT, Block, blocks, generated, text_of, written
from docs.pages import Page
from maker.command_pages import examples
from penstock.schedules import registry

SLOW = {"docs/tutorial.md"}
"""Pages that take more than a few seconds."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own with the examples in it, and nothing left of what a page has set up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry.algorithms()))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]  # a file of this page


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """Pages may say how many threads torch has, and set up a process group."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in written()])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said by torch where it loads a checkpoint in one process
def test_blocks_of_written_pages(page: str) -> None:
    Page(page).run(text_of(page))


def test_the_readme_has_blocks_of_each_kind() -> None:
    kinds = {block.language for block in blocks(text_of("README.md"))}
    assert {"python", "console", "sh"} <= kinds


@pytest.mark.parametrize("page", [page for page in generated() if page.startswith("schedules/")])
def test_blocks_of_schedules(page: str) -> None:
    assert Page(page).run(text_of(page)) == (1 if page.endswith("index.md") else 2)


def test_examples_of_commands_have_options_that_there_are() -> None:
    lines = examples()
    assert len(lines) > 20
    for words in commands.split("\n".join(lines)):
        commands.check(words)


# The reader of blocks itself ------------------------------------------------------------------------------------------


def test_blocks_are_found_with_their_lines_titles_and_reasons() -> None:
    page = (
        "A\n\n```python\n1\n```\n<!-- parsed: two machines -->\n```sh\nmake x\n```\n"
        '  ```toml title="a.toml"\n  a = 1\n  ```\n<!-- python\nx = 1\n-->\n'
    )
    assert list(blocks(page)) == [
        Block(4, "python", "1\n"),
        Block(8, "sh", "make x\n", reason="two machines"),
        Block(11, "toml", "a = 1\n", title="a.toml"),
        Block(14, "python", "x = 1\n"),
    ]


@pytest.mark.parametrize(
    "page",
    [
        "```python\nassert False\n```",
        "```python\n>>> 1 + 1\n3\n\n```",
        "<!-- python\nassert False\n-->",
        "<!-- parsed: why -->\n```python\n1 +\n```",
        "<!-- parsed: why -->\n```sh\npenstock show zbv --no-such-option\n```",
        "```sh\npenstock show no-such-schedule\n```",
        "```console\n$ penstock show 1f1b -p 2 -m 1\nsomething else\n```",
        "```sh\nmake no-such-target\n```",
        "```sh\ntorchrun --nproc-per-node 2 no_such_file.py\n```",
        "```sh\npip install 'penstock[no-such-extra]'\n```",
        "```sh\nrm -r x\n```",
        "```bash\nls\n```",
        '```toml title="a.toml"\n= 1\n```',
        "```toml\na = 1\n```",
        '```python title="a.py"\nassert False\n```',
    ],
)
def test_a_wrong_block_is_found(page: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        Page("page").run(page + "\n")


def test_names_and_files_are_shared_by_the_blocks_of_a_page() -> None:
    page = (
        "```python\nx = 1\n```\n```python\n>>> x + 1\n2\n```\n"
        '```python title="a.py"\nprint("from a file")\n```\n```console\n$ python a.py\nfrom a file\n```\n'
    )
    assert Page("page").run(page) == 4
