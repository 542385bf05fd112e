"""Packed rows against plain lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ir.strategies import packed, row_lists
from penstock.ir import codes
from penstock.ir.action import Action
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.rows import Rows

several = st.integers(1, 4).flatmap(row_lists)


def entries_of(rows: list[list[Action]]) -> list[tuple[int, int, Action]]:
    """Rank, index of the action in its row, and part: one for each entry."""
    return [(rank, step, part) for rank, row in enumerate(rows) for step, action in enumerate(row) for part in action.parts]


@given(several)
def test_rows_hold_what_they_were_made_of(rows: list[list[Action]]) -> None:
    made = packed(rows)
    assert [list(made.actions(rank)) for rank in range(len(made))] == rows
    assert [made.part_at(entry) for entry in range(len(made.codes))] == [part for _, _, part in entries_of(rows)]
    assert [made.action_at(entry) for entry in range(len(made.codes))] == [rows[r][s] for r, s, _ in entries_of(rows)]


@given(several)
def test_every_entry_knows_its_fields(rows: list[list[Action]]) -> None:
    made, wanted = packed(rows), entries_of(rows)
    assert made.rank.tolist() == [rank for rank, _, _ in wanted]
    assert made.step.tolist() == [step for _, step, _ in wanted]
    assert made.kind.tolist() == [part.kind for _, _, part in wanted]
    assert made.stage.tolist() == [part.stage for _, _, part in wanted]
    assert made.microbatch.tolist() == [part.microbatch or 0 for _, _, part in wanted]
    assert made.peer.tolist() == [-1 if part.peer is None else part.peer for _, _, part in wanted]
    for kinds in ((Kind.F,), COMPUTE, (Kind.SEND_F, Kind.UNSHARD), ()):
        assert made.is_kind(*kinds).tolist() == [part.kind in kinds for _, _, part in wanted]


@given(several)
def test_groups_are_the_actions(rows: list[list[Action]]) -> None:
    made = packed(rows)
    group, heads, starts, ends = [], [], [], []
    for action in (action for row in rows for action in row):
        size, number, first = len(action.parts), len(set(group)), len(group)
        group += [number] * size
        heads += [True] + [False] * (size - 1)
        starts += [first] * size
        ends += [first + size] * size
    assert made.group.tolist() == group
    assert made.heads.tolist() == heads
    assert made.group_starts.tolist() == starts
    assert made.group_ends.tolist() == ends
    lengths = [len(row) for row in rows]
    assert made.group_offsets.tolist() == [sum(lengths[:rank]) for rank in range(len(rows) + 1)]


@given(several, st.randoms(use_true_random=False))
def test_keep_leaves_the_masked_parts_in_their_groups(rows: list[list[Action]], random: object) -> None:
    mask = [random.random() < 0.6 for _ in entries_of(rows)]  # type: ignore[attr-defined]
    left, entry = [], 0
    for row in rows:
        kept: list[Action] = []
        for action in row:
            parts = [part for k, part in enumerate(action.parts) if mask[entry + k]]
            entry += len(action.parts)
            if parts:
                kept.append(parts[0] if len(parts) == 1 else Action.overlap(*parts))
        left.append(kept)
    assert packed(rows).keep(np.array(mask, dtype=bool)) == packed(left)


@given(st.data())
def test_insert_puts_new_actions_before_old_ones(data: st.DataObject) -> None:
    """Against a list of actions for each place; several at one place come in the order of the ties."""
    rows = data.draw(several)
    made = packed(rows)
    bounds = made.group_offsets.tolist()
    places = [(rank, step) for rank, row in enumerate(rows) for step in range(len(row) + 1)]
    chosen = data.draw(st.lists(st.sampled_from(places), max_size=6))
    ties = data.draw(st.permutations(range(len(chosen))))
    starts = [*np.flatnonzero(made.heads).tolist(), len(made.codes)]
    before = np.array([starts[bounds[rank] + step] for rank, step in chosen], dtype=np.int64)
    new = [Action(900 + tie, Kind.F, 0) for tie in ties]
    entries = np.array([codes.pack(action.stage, int(action.kind), 0) for action in new], dtype=np.int64)
    got = made.insert(before, entries, np.array([rank for rank, _ in chosen], dtype=np.int64), np.array(ties, dtype=np.int64))
    wanted = []
    for rank, row in enumerate(rows):
        out: list[Action] = []
        for step in range(len(row) + 1):
            out += [new[k] for k in sorted(range(len(chosen)), key=lambda k: ties[k]) if chosen[k] == (rank, step)]
            out += row[step : step + 1]
        wanted.append(out)
    assert got == packed(wanted)


def test_insert_without_ties_keeps_the_given_order() -> None:
    made = packed([[Action(0, Kind.F, 0)], []])
    new = np.array([codes.F(1, 1), codes.F(2, 2), codes.F(3, 3)])
    got = made.insert(np.array([1, 0, 1]), new, np.array([1, 0, 1]))
    assert [[str(action) for action in got.actions(rank)] for rank in range(2)] == [["2F2", "0F0"], ["1F1", "3F3"]]


@given(several)
def test_sorted_by_is_join_with_the_ranks_told(rows: list[list[Action]]) -> None:
    made = packed(rows)
    assert Rows.sorted_by(made.codes, made.rank, len(rows)) == made
    assert len(made) == len(rows)


def test_rows_differ_by_their_ranks() -> None:
    one, other = [Action(0, Kind.F, 0)], [Action(0, Kind.F, 1)]
    assert packed([one + other, []]) != packed([one, other])
    assert packed([one, other]) == packed([one, other])
