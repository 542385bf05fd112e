"""The walk against a clock that ticks step by step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.naive import naive_walk
from ir.strategies import packed, row_lists
from penstock.ir.action import Action
from penstock.ir.dependencies import Needs
from penstock.ir.rows import Rows, pack_rows
from penstock.ir.steps import Walk, walk

Wait = tuple[int, int, int]


def both(rows: Rows, waits: list[Wait]) -> tuple[Walk, list[int]]:
    """The library's steps, and those of the clock; waits are (before, after, lag) between entries."""
    before, after, lag = (np.array([wait[k] for wait in waits], dtype=np.int64) for k in range(3))
    group = rows.group.tolist()
    lengths = np.diff(rows.group_offsets).tolist()
    return walk(rows, Needs(before, after), lag), naive_walk(lengths, [(group[b], group[a], gap) for b, a, gap in waits])


@given(st.data(), st.integers(1, 4))
def test_steps_are_those_of_the_clock(data: st.DataObject, ranks: int) -> None:
    """Waits between any two entries, also the wrong way round on one rank, within a group and in cycles; messages may take longer."""
    rows = packed(data.draw(row_lists(ranks, longest=6)))
    count = len(rows.codes)
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)) if count else st.nothing()
    found = data.draw(st.lists(pairs, max_size=8)) if count else []
    waits = [(b, a, 1 if rows.rank[b] == rows.rank[a] else data.draw(st.integers(0, 3))) for b, a in found]
    got, wanted = both(rows, waits)
    assert got.step.tolist() == wanted
    assert got.complete == (-1 not in wanted)
    bounds = rows.group_offsets.tolist()
    assert got.done.tolist() == [sum(step >= 0 for step in wanted[a:b]) for a, b in pairwise(bounds)]


@given(st.integers(1, 5), st.integers(1, 6))
def test_a_pipeline_of_forwards_takes_p_plus_m_minus_1_steps(ranks: int, microbatches: int) -> None:
    rows = pack_rows([[f"{rank}F{m}" for m in range(microbatches)] for rank in range(ranks)])
    waits = [((r - 1) * microbatches + m, r * microbatches + m) for r in range(1, ranks) for m in range(microbatches)]
    got = walk(rows, Needs(*(np.array([wait[k] for wait in waits], dtype=np.int64) for k in range(2))))
    assert got.step.tolist() == [r + m for r in range(ranks) for m in range(microbatches)]


@pytest.mark.parametrize(
    ("rows", "waits", "done"),
    [
        ([["0F0", "0B0"], ["1F0"]], [(2, 0, 1), (1, 2, 1)], [0, 0]),  # a cycle between two ranks
        ([["0F0", "0B0"]], [(1, 0, 1)], [0]),  # the wrong way round on one rank
        ([["(0F0;0B1)OVERLAP_F_B"]], [(0, 1, 1)], [0]),  # a part that feeds another part of its group
        ([["0F0", "0F1", "0F2"], ["1F0", "1F1"]], [(4, 1, 1), (2, 4, 1)], [1, 1]),  # stuck half way
    ],
)
def test_a_stuck_walk_says_how_far_each_rank_came(rows: list[list[str]], waits: list[Wait], done: list[int]) -> None:
    got, wanted = both(pack_rows(rows), waits)
    assert not got.complete
    assert got.done.tolist() == done
    assert got.step.tolist() == wanted


def test_an_empty_table_is_walked() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert walk(packed([[], []]), Needs(nothing, nothing)).complete
    assert walk(packed([[Action.parse("0F0")], []]), Needs(nothing, nothing)).done.tolist() == [1, 0]
