"""The release: a complete wheel that works without torch; and files that say the same of the version."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## \[(\d[^\]]*)\] - (\S+)$", changelog, flags=re.MULTILINE).groups()
    assert penstock.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {version}\n" in citation
    assert f'date-released: "{date}"\n' in citation


def test_supported_versions_are_stated():
    pythons = [
        name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
    ]
    assert pythons[0] == PROJECT["requires-python"].removeprefix(">=")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"Python {pythons[0]} to {pythons[-1]}" in changelog
    torch = Requirement(next(each for each in PROJECT["optional-dependencies"]["torch"] if each.startswith("torch")))
    low, high = re.search(r"torch (2\.\d+) to (2\.\d+)", changelog).groups()
    assert low in torch.specifier
    assert high in torch.specifier
    for outside in (f"2.{int(low[2:]) - 1}", f"2.{int(high[2:]) + 1}"):
        assert outside not in torch.specifier


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the source archive, as `python -m build` does, with what is installed."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("*.tar.gz")
    (made,) = folder.glob("*.whl")
    assert f"-{penstock.__version__}" in archive.name
    assert f"-{penstock.__version__}-py3-none-any" in made.name
    return made


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment with the wheel and its plain requirements, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    site = next((folder / "lib").glob("python*/site-packages"))
    for name in needed(PROJECT["dependencies"]):
        link(metadata.distribution(name), site)
    return folder / "bin"


def needed(requirements: list[str]) -> set[str]:
    """The packages that some requirements bring, and those that these bring."""
    found: set[str] = set()
    left = list(requirements)
    while left:
        requirement = Requirement(left.pop())
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and requirement.name not in found:
            found.add(requirement.name)
            left += metadata.requires(requirement.name) or []
    return found


def link(package: metadata.Distribution, site: Path) -> None:
    """Give the environment what is installed here."""
    for name in {path.parts[0] for path in package.files or () if path.parts[0] != ".."} - {"__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(Path(str(package.locate_file(name))))


RUN_EACH = """
import json, sys
from penstock.cli.main import main
for command in json.loads(sys.argv[1]):
    if code := main(command):
        sys.exit(f"{command} ended with {code}")
"""
"""Runs several commands in one process."""


def run(bare: Path, *args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(bare / "penstock"), *map(str, args)], capture_output=True, text=True, check=False, cwd=cwd, timeout=600)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    tracked = subprocess.run(["git", "ls-files", "src/penstock"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert {str((ROOT / path).relative_to(source)) for path in tracked} <= names
    assert "penstock/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/")) or name.endswith(".pyc")]


@pytest.mark.slow
def test_commands_work_without_torch(bare, tmp_path):
    """Only what the wheel asks for is there: the commands that need no more do their work."""
    absent = subprocess.run([str(bare / "python"), "-c", "import torch"], capture_output=True, check=False)
    assert absent.returncode != 0
    assert run(bare, "--version", cwd=tmp_path).stdout == f"penstock {penstock.__version__}\n"
    commands = [
        ("list",),
        ("show", "zbv", "-p", 2, "-m", 3),
        ("lower", "zbv", "-p", 4, "-m", 8, "-o", "program.csv"),
        ("verify", "program.csv", "--semantics", "both"),
        ("simulate", "program.csv", "-o", "timeline.json"),
        ("simulate", "1f1b", "-o", "1f1b.trace.json"),
        ("compare", "zbv", "1f1b", "-p", 4, "-m", 8),
        ("convert", "program.csv", "schedule.json", "--to", "json"),
        ("plan", "--transformer", "layers=8 hidden=512 heads=8 sequence=256 vocabulary=1000 flops=1e12", "-p", 2, "-m", 4, "--seconds", 0),
    ]
    texts = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [str(bare / "python"), "-c", RUN_EACH, texts], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "timeline.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("profile", "model.py:build"), "torch"),
        (("train", "model.py", "-p", 2), "torch"),
        (("simulate", "1f1b", "-o", "picture.svg"), "plot"),
        (("train", "model.py", "-p", 2, "--report", "report.html"), "plot"),
    ],
)
def test_commands_that_need_more_say_what(bare, tmp_path, command, extra):
    (tmp_path / "model.py").write_text("def build(): ...\ndef data(): ...\n")
    done = run(bare, *command, cwd=tmp_path)
    assert done.returncode == 2
    assert f"install the extra '{extra}', pip install '.[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.svg"))
