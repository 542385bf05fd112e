"""The table of docs/composition.md, made from the tests: `python tests/composition/matrix.py` writes it anew.

A test shows a cell by its mark: `@pytest.mark.matrix(family="zbv", feature="FSDP2")`, and with `refused=True` that the combination is
refused with a clear error. What no test shows is untested.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.schedules.registry import algorithms

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "composition.md"
BEGIN, END = "<!-- begin: made by tests/composition/matrix.py -->", "<!-- end -->"
FEATURES = ("replicate", "FSDP2", "HSDP", "tensor parallel", "activation checkpointing", "autocast", "scaler", "checkpoints")
NOT_TRAINED = ("inference",)

Cells = dict[tuple[str, str], str]


class Marks:
    """Collects the marks of all tests."""

    def __init__(self) -> None:
        self.cells: Cells = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("matrix"):
                if item.get_closest_marker("skip") or item.get_closest_marker("xfail"):
                    continue
                key = mark.kwargs["family"], mark.kwargs["feature"]
                self.cells[key] = "refused" if mark.kwargs.get("refused") else "tested"


def collect() -> Cells:
    """The cells that the tests show, from the files that have such marks."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.matrix" in path.read_text()]
    marks = Marks()
    code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *files], plugins=[marks])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected: {code!r}")
    return marks.cells


def lines(cells: Cells) -> Iterable[str]:
    families = [name for name, each in algorithms().items() if name not in NOT_TRAINED and not each.is_sliced]
    yield f"| schedule | {' | '.join(FEATURES)} |"
    yield "|---" * (len(FEATURES) + 1) + "|"
    for family in families:
        yield f"| `{family}` | {' | '.join(cells.get((family, feature), 'untested') for feature in FEATURES)} |"
    known = {(family, feature) for family in families for feature in FEATURES}
    others = sorted(key for key in cells if key not in known)
    if others:
        yield ""
        yield "Beyond the table:"
        yield ""
        yield from (f"- {feature} with `{family}`: {cells[family, feature]}" for family, feature in others)


def table(cells: Cells) -> str:
    """The generated part of the page."""
    return "\n".join([BEGIN, "", *lines(cells), "", END])


def replaced(page: str, part: str) -> str:
    """The page with its generated part replaced."""
    before, rest = page.split(BEGIN)
    return before + part + rest.split(END)[1]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    made = replaced(PAGE.read_text(), table(collect()))
    if "--check" in sys.argv:
        sys.exit(0 if made == PAGE.read_text() else f"{PAGE} is out of date: run python {Path(__file__).relative_to(ROOT)}")
    PAGE.write_text(made)
