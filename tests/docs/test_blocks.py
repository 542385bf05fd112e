"""Every block of code in the README and the documentation runs, or says why it cannot and is checked without running."""

from __future__ import annotations

import doctest

import pytest

from docs import commands
from docs.blocks import Block, blocks, generated, starts_processes, takes_long, text_of, written
from docs.pages import Page
from docs.samples import missing_lines
from maker.command_pages import examples

WRITTEN = [page for page in written() if not starts_processes(page)]


@pytest.mark.usefixtures("folder", "torch_as_it_was")
@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * takes_long(page)) for page in WRITTEN])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # from torch, when it loads a checkpoint in one process
def test_blocks_of_written_pages(page: str) -> None:
    Page(page).run(text_of(page))


def test_the_readme_has_blocks_of_each_kind() -> None:
    kinds = {block.language for block in blocks(text_of("README.md"))}
    assert {"python", "console", "sh"} <= kinds


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", [page for page in generated() if page.startswith("schedules/")])
def test_blocks_of_schedules(page: str) -> None:
    assert Page(page).run(text_of(page)) == (1 if page.endswith("index.md") else 2)


@pytest.mark.usefixtures("folder")
def test_examples_of_commands_use_existing_options() -> None:
    lines = examples()
    assert len(lines) > 20
    for words in commands.split("\n".join(lines)):
        commands.check(words)


@pytest.mark.parametrize("page", written())
def test_no_ellipsis_of_a_test_reaches_the_reader(page: str) -> None:
    """Python's own form of a traceback has one, and timelines have dots for idle time."""
    for block in blocks(text_of(page)):
        if block.language == "console":
            printed = [line for line in block.text.splitlines() if not line.startswith(("$", "rank "))]
            assert not [line for line in printed if "..." in line], f"{page}:{block.line}"
        elif block.language == "python" and ">>>" in block.text:
            for example in doctest.DocTestParser().get_examples(block.text):
                printed = example.want.removeprefix("Traceback (most recent call last):\n    ...\n")
                assert "..." not in printed, f"{page}:{block.line + example.lineno}"


# The reader of blocks itself ------------------------------------------------------------------------------------------


def test_blocks_have_lines_titles_and_reasons() -> None:
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
    assert list(blocks("<!-- sample: timed -->\n```console\n$ x\n```\n")) == [Block(3, "console", "$ x\n", sample="timed")]


SAMPLE = "plan: zbv on 4 ranks\n  makespan     10.5 ms\n  stage  rank  layers\n      0     1  0-3\n"


def test_a_sample_of_another_machine_matches() -> None:
    printed = "plan: 1f1b on 4 ranks\n  makespan     9.75 s, bubble 3 %\n  bound        9 s\n  stage  rank  layers\n      0     0  0\n"
    assert missing_lines(SAMPLE, printed) == []


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        (SAMPLE.replace("makespan", "time"), ["makespan", "stage rank layers"]),
        (SAMPLE.replace("rank  layers", "rank"), ["stage rank layers"]),
        (SAMPLE.replace("plan: zbv", "zbv"), ["plan", "makespan", "stage rank layers"]),
        ("", ["plan", "makespan", "stage rank layers"]),
    ],
)
def test_a_sample_of_other_output_does_not(changed: str, missing: list[str]) -> None:
    assert missing_lines(SAMPLE, changed) == missing


@pytest.mark.usefixtures("folder")
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
def test_a_wrong_block_is_detected(page: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        Page("page").run(page + "\n")


@pytest.mark.usefixtures("folder")
def test_blocks_of_a_page_share_names_and_files() -> None:
    page = (
        "```python\nx = 1\n```\n```python\n>>> x + 1\n2\n```\n"
        '```python title="a.py"\nprint("from a file")\n```\n```console\n$ python a.py\nfrom a file\n```\n'
    )
    assert Page("page").run(page) == 4
