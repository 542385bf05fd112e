"""The pages, and the blocks of code in them.

A block is run unless the line before it says `<!-- parsed: why -->`; then it is read and checked, not run. With `<!-- sample: why -->`
it is run, and shows what it printed on one machine: elsewhere only the form has to be the same, see `docs.samples`.
A line like `[50 lines left out]` in what a block prints stands for any lines. Readers are told that way, and never by an ellipsis.
A comment that begins with `<!-- python` holds code that is run and not shown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maker.command_pages import command_page
from maker.schedule_pages import schedule_index, schedule_page
from penstock.schedules.registry import algorithms

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "console", "sh", "toml", "json", "text"}
"""Languages of a block; `text` is not code."""

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>parsed|sample): (?P<reason>[^\n]+?) -->\n\n?)?"
    r"(?P<indent>[ ]*)```(?P<language>[^\s`]*)(?: +title=\"(?P<title>[^\"]+)\")?[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block: its first line, its language and text, the file it is written to, and why it is not run or only a sample."""

    line: int
    language: str
    text: str
    title: str | None = None
    reason: str | None = None
    sample: str | None = None


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, from the top down."""
    for found in _FENCE.finditer(page):
        hidden = found["hidden"]
        text = hidden if hidden is not None else found["text"]
        start = found.start("hidden" if hidden is not None else "text")
        language = "python" if hidden is not None else found["language"]
        reasons = {"parsed": None, "sample": None, found["mark"]: found["reason"]}
        line = page.count("\n", 0, start) + 1
        yield Block(line, language, textwrap.dedent(text), found["title"], reasons["parsed"], reasons["sample"])


def written() -> list[str]:
    """The hand-written pages."""
    return ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def starts_processes(page: str) -> bool:
    """Whether a block of the page starts one process per rank."""
    return any('backend="gloo"' in block.text for block in blocks(text_of(page)) if block.language == "python" and block.reason is None)


def takes_long(page: str) -> bool:
    """Whether the page measures or plans, which takes more than a few seconds."""
    return re.search(r"^(?:\$ )?penstock (?:profile|plan|train) |ps\.plan\(", text_of(page), flags=re.MULTILINE) is not None


def generated() -> list[str]:
    """The generated pages, except those made of docstrings, whose examples are doctests of the library."""
    return ["reference/commands.md", "schedules/index.md", *(f"schedules/{name}.md" for name in algorithms())]


def text_of(page: str) -> str:
    """A page's Markdown."""
    if page in written():
        return (ROOT / page).read_text(encoding="utf-8")
    if page == "reference/commands.md":
        return command_page()
    return schedule_index() if page == "schedules/index.md" else schedule_page(algorithms()[Path(page).stem])
