"""What mkdocs calls while it builds: adds the generated pages and pictures, and puts them into the navigation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

HERE = Path(__file__).parents[1]


def generated_pages() -> dict[str, str]:
    """Every page that is made and not written, by its path."""
    from maker.api_pages import api_pages
    from maker.command_pages import command_page
    from maker.schedule_pages import schedule_pages

    return {**schedule_pages(), "reference/commands.md": command_page(), **api_pages()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that have no pages of their own, and add guides that are not named in it."""
    sys.path.insert(0, str(HERE))
    from maker.api_pages import GROUPS
    from penstock.schedules.registry import algorithms

    nav: list[dict[str, Any]] = config.nav or []
    parts: dict[str, Any] = {title: pages for part in nav for title, pages in part.items()}
    parts["Schedules"] += [{name: f"schedules/{name}.md"} for name in algorithms()]
    parts["Reference"] += [{group.title: group.path} for group in GROUPS]
    named = set(_paths(nav))
    parts["Guides"] += [each.name for each in sorted(HERE.glob("*.md")) if each.name not in named]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show examples with their output as a session of the interpreter, empty lines as such, and pictures in the theme's colours."""
    from maker.pictures import dark_path

    def both(match: re.Match[str]) -> str:
        return f"![{match[1]}]({match[2]}#only-light)![{match[1]}]({dark_path(match[2])}#only-dark)"

    markdown = re.sub(r"!\[([^\]]*)\]\(([^)]*\bpictures/[^)]*\.svg)\)", both, markdown)
    return re.sub(r"^( *)```python\n(?=\1>>> )", r"\1```pycon\n", markdown, flags=re.MULTILINE).replace("<BLANKLINE>", "")


def _paths(part: Any) -> Iterator[str]:
    """Every path in a part of the navigation."""
    if isinstance(part, str):
        yield part
        return
    for each in part.values() if isinstance(part, dict) else part:
        yield from _paths(each)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is generated."""
    from mkdocs.structure.files import File

    from maker.pictures import pictures

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    for path, draw in pictures().items():
        files.append(File.generated(config, path, content=draw()))
    return files
