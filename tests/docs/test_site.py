"""The site builds without warnings, contains every page, and loads nothing from elsewhere."""

from __future__ import annotations

import logging
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from docs.blocks import ROOT, written
from maker.api_pages import GROUPS, api_pages
from maker.command_pages import command_page
from penstock.draw import palette
from penstock.planner.named_schedules import is_training
from penstock.schedules.registry import algorithms


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


def test_the_numbers_of_schedules_are_those_of_the_registry() -> None:
    every = algorithms()
    training = sum(is_training(entry) for entry in every.values())
    sliced = sum(entry.is_sliced for entry in every.values())
    readme, comparison = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs/comparison.md"))
    assert f"\n{len(every)} schedules ship with Penstock" in readme
    assert f" {training} of them train (the other one is for inference), and three of these also cut sequences" in readme
    assert (len(every) - training, sliced) == (1, 3)
    for page in (readme, comparison):
        assert f"| {training} to train with, your own, and searched ones |" in page


def test_the_screenshot_has_the_colours_of_the_page() -> None:
    """`make pictures` takes it again."""
    from PIL import Image

    with Image.open(ROOT / "docs/studio.png") as picture:
        counted = {colour: count for count, colour in picture.convert("RGB").getcolors(maxcolors=2**24)}
    for tone in (palette.FORWARD, palette.BACKWARD, palette.INPUT, palette.WEIGHT):
        assert counted.get(tuple(palette.rgb(tone.fill)), 0) > 1000, tone.means


def test_extras_are_the_same_everywhere() -> None:
    """Every extra for users is named in the README and explained on the first page; nothing says that the package is on PyPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    extras = set(project) - {"all", "dev", "release"}
    readme, index = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/index.md"))
    for extra in extras:
        assert f"`{extra}`" in readme, extra
        assert re.search(rf"^\| [^|]*`{extra}`[^|]* \|", index, flags=re.MULTILINE), extra
    for page in written():
        assert "pip install 'penstock" not in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_page_of_train_explains_every_option() -> None:
    import typer

    from penstock.cli.app import app

    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    command: Any = typer.main.get_command(app)
    options = {name for option in command.commands["train"].params for name in option.opts if name.startswith("--")} - {"--help"}
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `--"))
    assert {name for name in options if f"`{name}" not in table and f"{name}`" not in table} == set()
