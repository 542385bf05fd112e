"""Gradient reduction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

import penstock as ps
from ir.peers import order_of, texts
from penstock.errors import PassError
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


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.sampled_from(("now", "deferred")))
def test_each_reduction_is_waited_for_once(name: str, ranks: int, microbatches: int, wait: str) -> None:
    """At once, or before the rank's next reduction and at the end."""
    program = Program.start(ps.schedule(name, ranks, microbatches))
    plain, waiting = ReduceGrad().apply(program), ReduceGrad(wait).apply(program)
    for rank in range(ranks):
        wanted: list[ps.Action] = []
        pending: list[ps.Action] = []
        for action in plain[rank]:
            if action.kind is ps.Kind.REDUCE_GRAD:
                wanted += pending
                pending = [ps.Action(action.stage, ps.Kind.WAIT_REDUCE_GRAD)]
            wanted.append(action)
            if wait == "now":
                wanted += pending
                pending = []
        assert list(waiting[rank]) == wanted + pending
    assert ReduceGrad(wait).apply(waiting).rows == waiting.rows


@pytest.mark.skipif(not hasattr(schedules, "_add_wait_send"), reason="PyTorch waits for reductions since 2.15")
@pytest.mark.parametrize("wait", ["now", "deferred"])
def test_the_waits_are_pytorchs(wait: str) -> None:
    order = order_of("Interleaved1F1B", 2, 6, 2)
    compute = {rank: [a for a in row if a is not None and a.is_compute_op] for rank, row in order.items()}
    theirs = {rank: schedules._add_reduce_grad(row, 6, defer_reduce_grad_wait=wait == "deferred") for rank, row in compute.items()}
    ours = ReduceGrad(wait).apply(Program.start(ps.Schedule.from_actions(texts(compute), ps.Placement.looped(2, 2))))
    assert [list(map(str, row)) for row in ours] == texts(theirs)


def test_other_waits_are_refused() -> None:
    with pytest.raises(PassError, match="none, now, deferred"):
        ReduceGrad("later")
