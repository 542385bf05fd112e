"""Splitting and merging backwards."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PassError
from penstock.ir.program import Program
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.split_backward import SplitBackward

FULL = ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs"]
SPLIT = ["zb-h1", "zb-h2", "zbv", "dualpipe-v", "dualpipe"]


def _start(name: str, ranks: int, microbatches: int) -> Program:
    return Program.start(ps.schedule(name, ranks, microbatches))


def _texts(program: Program, rank: int) -> list[str]:
    return [str(action) for action in program[rank]]


@given(st.sampled_from(FULL), st.integers(1, 5), st.integers(1, 9))
def test_split_writes_i_and_w_for_each_b(name: str, ranks: int, microbatches: int) -> None:
    program = _start(name, ranks, microbatches)
    split = SplitBackward().apply(program)
    for rank in range(ranks):
        wanted = [part for action in program[rank] for part in _halves(action)]
        assert list(split[rank]) == wanted
    assert MergeBackward().apply(split) == program


def _halves(action: ps.Action) -> list[ps.Action]:
    if action.kind is not ps.Kind.B:
        return [action]
    return [ps.Action(action.stage, kind, action.microbatch) for kind in (ps.Kind.I, ps.Kind.W)]


def test_split_of_an_overlapped_action_keeps_the_input_gradient_inside() -> None:
    placement = ps.Placement.v(1)
    program = Program.start(ps.Schedule.from_actions([["0F0", "1F0", "0F1", "(1F1;1B0)OVERLAP_F_B", "0B0", "1B1", "0B1"]], placement))
    split = SplitBackward().apply(program)
    assert _texts(split, 0)[3:7] == ["(1F1;1I0)OVERLAP_F_B", "1W0", "0I0", "0W0"]
    assert MergeBackward().apply(split) == program


def test_limits_to_stages() -> None:
    split = SplitBackward(stages=(1,)).apply(_start("1f1b", 2, 2))
    assert _texts(split, 0) == ["0F0", "0F1", "0B0", "0B1"]
    assert _texts(split, 1) == ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]
    merged = MergeBackward(stages=(0,)).apply(SplitBackward().apply(_start("1f1b", 2, 2)))
    assert merged == split
    with pytest.raises(PassError, match="limited to stage 5, but the program has stages 0 to 1"):
        SplitBackward(stages=(5,)).apply(split)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (4, 8)])
def test_merge_apart_leaves_no_split_backward(name: str, ranks: int, microbatches: int) -> None:
    merged = MergeBackward(apart=True).apply(_start(name, ranks, microbatches))
    kinds = [part.kind for row in merged for action in row for part in action.parts]
    assert ps.Kind.I not in kinds
    assert ps.Kind.W not in kinds
    assert kinds.count(ps.Kind.B) == kinds.count(ps.Kind.F)
    ps.verify(ps.lower(merged.schedule()))


@pytest.mark.parametrize("name", SPLIT)
def test_merge_joins_only_neighbours(name: str) -> None:
    program = _start(name, 4, 9)
    for rank, row in enumerate(MergeBackward().apply(program)):
        parts = [part for action in program[rank] for part in action.parts]
        joined = sum(
            a.kind is ps.Kind.I and b.kind is ps.Kind.W and (a.stage, a.microbatch) == (b.stage, b.microbatch) for a, b in pairwise(parts)
        )
        after = [part.kind for action in row for part in action.parts]
        assert after.count(ps.Kind.B) - [p.kind for p in parts].count(ps.Kind.B) == joined


def test_lowered_programs_are_split_and_merged_too() -> None:
    lowered = ps.lower(ps.schedule("1f1b", 3, 4), fsdp=True)
    split = SplitBackward().apply(lowered)
    ps.verify(split)
    assert MergeBackward().apply(split).rows == lowered.rows
