"""The site builds without warnings, contains every page, and loads nothing from elsewhere."""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import penstock as ps
from docs.blocks import ROOT, written
from maker.api_pages import GROUPS, api_pages
from maker.command_pages import command_page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        said = _Kept()
        logging.getLogger("mkdocs").addHandler(said)
        try:
            build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
        finally:
            logging.getLogger("mkdocs").removeHandler(said)
    assert said.warnings == []
    return folder


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


class _Loads(HTMLParser):
    """Collects everything that a page loads: scripts, styles, pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(values.get("href") or "")


@pytest.mark.slow
def test_every_page_exists(site: Path) -> None:
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    wanted = [f"schedules/{name}.html" for name in ps.available()]
    wanted += [page.removeprefix("docs/").replace(".md", ".html") for page in written() if page.startswith("docs/")]
    wanted += [group.path.replace(".md", ".html") for group in GROUPS]
    assert set(wanted) <= pages


@pytest.mark.slow
def test_pages_load_only_local_files(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # it is served at any address, so its paths begin at the root
        found = _Loads()
        found.feed(page.read_text(encoding="utf-8"))
        for target in filter(None, found.found):
            assert (page.parent / re.split(r"[?#]", target)[0]).is_file(), f"{page.name} loads {target}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?https?:|@import", style.read_text(encoding="utf-8"))


def test_every_command_is_in_the_reference_and_in_the_readme() -> None:
    from penstock.cli.app import app

    page, readme = command_page(), (ROOT / "README.md").read_text(encoding="utf-8")
    names = [each.name for each in app.registered_commands]
    assert len(names) > 8
    for name in names:
        assert f"\n## penstock {name}\n" in page
        assert f"| `penstock {name}" in readme


@pytest.mark.slow
def test_search_needs_no_server(site: Path) -> None:
    """Browsers load neither JSON nor workers from a folder, so the index is a script and the worker's stand-in a local file."""
    assert (site / "search/search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    assert '<script src="assets/iframe-worker.js"' in (site / "index.html").read_text(encoding="utf-8")


def test_the_reference_begins_with_what_readers_look_for() -> None:
    pages = api_pages()
    for path, first in {"reference/penstock.md": "schedule", "reference/runtime.md": "Pipeline"}.items():
        assert pages[path].split("\n## ")[1].startswith(f"{first}\n")


def test_every_public_name_is_in_the_reference() -> None:
    pages = api_pages()
    for group in GROUPS:
        for name in group.all_names:
            assert f"\n## {name}\n" in pages[group.path]
    assert sorted({*ps.__all__} - {"__version__"}) == sorted(GROUPS[0].all_names)
