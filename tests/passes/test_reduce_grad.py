"""Gradient reduction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.program import Program
from penstock.passes.reduce_grad import ReduceGrad

NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h2", "zbv", "dualpipe-v", "inference"]


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9))
def test_each_trained_stage_is_reduced_once_right_after_its_last_weight_gradient(name: str, ranks: int, microbatches: int) -> None:
    program = Program.start(ps.schedule(name, ranks, microbatches))
    reduced = ReduceGrad().apply(program)
    for rank in range(ranks):
        wanted: list[ps.Action] = []
        left = [(p.stage, p.kind in (ps.Kind.B, ps.Kind.W)) for action in program[rank] for p in action.parts]
        for action in program[rank]:
            wanted.append(action)
            for part in action.parts:
                left.pop(0)
                if part.kind in (ps.Kind.B, ps.Kind.W) and (part.stage, True) not in left:
                    wanted.append(ps.Action(part.stage, ps.Kind.REDUCE_GRAD))
        order = [a for a in reduced[rank] if a.kind is not ps.Kind.REDUCE_GRAD]
        assert order == list(program[rank])
        assert list(reduced[rank]) == wanted
    assert ReduceGrad().apply(reduced).rows == reduced.rows


def test_both_copies_of_a_bidirectional_stage_are_reduced() -> None:
    reduced = ReduceGrad().apply(Program.start(ps.schedule("dualpipe", 4, 8)))
    stages = [sorted(a.stage for a in row if a.kind is ps.Kind.REDUCE_GRAD) for row in reduced]
    assert stages == [[0, 3], [1, 2], [1, 2], [0, 3]]
