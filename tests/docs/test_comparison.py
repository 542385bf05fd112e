"""The cases on the pages that compare with torch are those of `benchmarks/peer_cases.py`."""

from __future__ import annotations

import re
import sys

from docs.blocks import ROOT, text_of

sys.path.append(str(ROOT))  # the benchmarks are a folder of scripts

from benchmarks.peer_cases import CASES

NUMBERS = [case.number for case in CASES]


def test_every_case_has_its_row_with_both_versions_of_torch() -> None:
    section = text_of("docs/comparison.md").split("## The cases, one by one")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == NUMBERS
    assert all(len(row) == 5 and all(row) for row in rows)


def test_cases_in_brackets_exist() -> None:
    for page in ("docs/comparison.md", "docs/from-pytorch.md"):
        quoted = {
            number
            for group in re.findall(r"(?<=\s)\((?:cases? )?(\d+[abc]?(?:, \d+[abc]?)*)[);]", text_of(page))
            for number in group.split(", ")
        }
        assert len(quoted) > 5
        assert quoted <= {*NUMBERS, *(number.rstrip("abc") for number in NUMBERS)}, page
