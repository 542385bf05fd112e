"""The supported versions of torch: the range in the code, and everything that repeats it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from penstock.errors import PenstockError, TorchVersionError
from penstock.runtime.torch_internals.version import FIRST, LAST, check_torch_version, describe_range, is_supported

ROOT = Path(__file__).parents[3]
MINORS = [(FIRST[0], minor) for minor in range(FIRST[1], LAST[1] + 1)]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_variable(name: str) -> list[str]:
    """The words of a variable of the Makefile."""
    found = re.search(rf"^{name} :?\??= (.*)$", read("Makefile"), flags=re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_the_range_is_one_major_version() -> None:
    """The list of minor versions above is made on this."""
    assert FIRST[0] == LAST[0]
    assert FIRST < LAST


def test_the_installed_torch_is_in_the_range() -> None:
    check_torch_version(torch.__version__)


@pytest.mark.parametrize("suffix", [".0", ".1", ".0+cpu", ".1+cu126", ".0a0+git1234"])
def test_versions_inside_the_range_are_accepted(suffix: str) -> None:
    for major, minor in MINORS:
        check_torch_version(f"{major}.{minor}{suffix}")


@pytest.mark.parametrize("version", [f"{FIRST[0]}.{FIRST[1] - 1}.1", f"{LAST[0]}.{LAST[1] + 1}.0a0+git1", "1.13.1", "3.0.0"])
def test_versions_outside_are_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(TorchVersionError) as caught:
        check_torch_version(version)
    assert isinstance(caught.value, PenstockError)
    assert isinstance(caught.value, ImportError)
    message = str(caught.value)
    assert describe_range() in message
    assert version in message
    assert "\n" not in message


def test_pyproject_has_the_range() -> None:
    extra = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]["torch"]
    allowed = next(Requirement(text) for text in extra if text.startswith("torch")).specifier
    for minor in range(FIRST[1] - 3, LAST[1] + 4):
        for patch in (0, 1, 5):
            version = f"{FIRST[0]}.{minor}.{patch}"
            assert (version in allowed) == is_supported(version), version


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_pages_quote_the_range(page: str) -> None:
    """The changelog has older ranges below; the first one in it is today's."""
    quoted = re.findall(r"torch`?\s+(2\.\d+ to 2\.\d+)", read(page))
    assert quoted
    assert (quoted[:1] if page == "CHANGELOG.md" else sorted(set(quoted))) == [describe_range()]


def test_make_and_the_workflow_test_one_release_of_each_minor_version() -> None:
    versions = read_variable("TORCH_VERSIONS")
    assert [tuple(map(int, version.split(".")[:2])) for version in versions] == MINORS
    assert read_variable("DEFAULT_TORCH")[0] in versions
    listed = re.search(r"^ +torch: \[(.*)\]$", read(".github/workflows/torch-versions.yml"), flags=re.MULTILINE)
    assert listed is not None
    assert re.findall(r'"([^"]*)"', listed[1]) == versions


def test_make_titan_runs_every_test_that_needs_torchtitan() -> None:
    """Elsewhere they are skipped: torchtitan is installed apart."""
    needing = [path for path in (ROOT / "tests").rglob("test_*.py") if 'find_spec("torchtitan")' in path.read_text(encoding="utf-8")]
    mine = Path(__file__)
    assert sorted(read_variable("TITAN_TESTS")) == sorted(path.relative_to(ROOT).as_posix() for path in needing if path != mine)
    assert "make titan" in read(".github/workflows/torch-versions.yml")


def test_the_readme_names_what_make_installs() -> None:
    assert f"`make` installs {read_variable('DEFAULT_TORCH')[0]}" in " ".join(read("README.md").split())
