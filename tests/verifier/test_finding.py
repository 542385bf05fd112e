"""The picture of the place."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import penstock as ps
from penstock.ir.action import unpack_actions
from penstock.ir.grid import Grid
from penstock.verifier.finding import excerpt
from verifier.build import only, schedule


def test_the_excerpt_is_the_grid_around_the_step() -> None:
    table = ps.lower(ps.schedule("1f1b", 4, 8))
    whole = Grid.dense(table)
    assert excerpt(table, 2, 10) == whole.text(mark=10, steps=range(7, 14), ranks=range(4))
    assert excerpt(table, 0, 1) == whole.text(mark=1, steps=range(5), ranks=range(4))


def test_the_excerpt_ends_with_the_rows() -> None:
    table = schedule("0F0 0F1 0F2", "1F0", microbatches=3)
    shown = excerpt(table, 0, 2).splitlines()
    assert [line.split() for line in shown] == [["rank", "0", "rank", "1"], ["0", "0F0", "1F0"], ["1", "0F1"], ["2", "0F2", "<--", "here"]]


def test_overlaps_are_one_cell() -> None:
    table = ps.schedule("dualpipe-v", 2, 8)
    steps = range(len(table[0]))
    at = next(step for step in steps if table[0][step].sub_actions)
    assert excerpt(table, 0, at) == Grid.dense(table).text(mark=at, steps=range(at - 3, at + 4), ranks=range(2))


def test_the_excerpt_of_many_ranks_is_eight_wide() -> None:
    table = ps.schedule("1f1b", 30, 4)
    for rank, first in ((0, 0), (3, 0), (15, 11), (29, 22)):
        header = excerpt(table, rank, 0).splitlines()[0].split()
        assert header == [word for r in range(first, first + 8) for word in ("rank", str(r))]


def test_the_excerpt_unpacks_only_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []

    def counted(row: list[int], slices: int) -> Iterator[ps.Action]:
        unpacked.extend(row)
        return unpack_actions(row, slices)

    monkeypatch.setattr("penstock.verifier.finding.unpack_actions", counted)
    table = ps.schedule("gpipe", 2, 2000)
    assert "<-- here" in excerpt(table, 1, 3990)
    assert 0 < len(unpacked) < 20  # of 8000


def test_text_and_json() -> None:
    found = only(schedule("0F0 0B0 0F1"))
    assert str(found) == f"complete: rank 0, step 2 (0B1): {found.message}. {found.remedy}."
    data = json.loads(json.dumps(found.to_json()))
    assert (data["rule"], data["severity"], data["rank"], data["step"], data["action"]) == ("complete", "wrong", 0, 2, "0B1")
    assert data["excerpt"] == found.excerpt
    assert "0F1  <-- here" in found.excerpt
