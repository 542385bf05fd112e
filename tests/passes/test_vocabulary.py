"""The pass that spreads the vocabulary: what it keeps of a schedule, what it adds, and how close it comes to the work alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, PassError, ScheduleTypeError
from penstock.ir.costs import Costs
from penstock.ir.kind import COMPUTE, JOINS, SPREAD, Kind
from penstock.ir.schedule import Schedule
from penstock.passes.pass_list import PassList
from penstock.passes.vocabulary import Vocabulary, spread_vocabulary
from simulator.draws import schedules_of_any_kind

FORWARD, BACKWARD, WEIGHTS = (Kind.F,), (Kind.B, Kind.I), (Kind.W,)


def held(schedule: Schedule) -> list[int]:
    """The most activations that each rank holds."""
    peaks = []
    for row in schedule:
        changes = [sum((part.kind in FORWARD) - (part.kind in BACKWARD) for part in action.parts) for action in row]
        peaks.append(int(np.cumsum([0, *changes]).max()))
    return peaks


@settings(max_examples=60)
@given(
    schedules_of_any_kind.filter(lambda schedule: schedule.stages > 1),
    st.sampled_from(((True, True), (True, False), (False, True))),
    st.integers(0, 3),
)
def test_any_schedule_keeps_its_orders_and_gets_the_shares(schedule: Schedule, layers: tuple[bool, bool], ahead: int) -> None:
    spread = spread_vocabulary(schedule, vocabulary=Vocabulary(*layers, ahead))
    ps.verify(spread)
    for before, after in zip(schedule, spread, strict=True):
        for kinds in (FORWARD, BACKWARD, WEIGHTS):
            parts = [[part for action in row for part in action.parts if part.kind in kinds] for row in (before, after)]
            assert parts[0] == parts[1]
        stages = {schedule.stages - 1: layers[0], 0: layers[1]}
        wanted = {
            (stage, kind): schedule.units
            for stage, is_spread in stages.items()
            for kind in SPREAD
            if is_spread and (schedule.training or kind is Kind.S or (kind is not Kind.T and (stage or kind is Kind.COMBINE)))
        }
        assert Counter((action.stage, action.kind) for action in after if action.kind in SPREAD) == wanted
    joins = [[action for action in row if action.kind in JOINS] for row in spread]
    assert all(row == joins[0] for row in joins)
    assert all(now <= then + ahead for now, then in zip(held(spread), held(schedule), strict=True))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zbv"])
def test_nothing_but_the_work_is_added(name: str) -> None:
    """With one activation more, as the paper has it for one barrier, head and embedding cost each rank its share, and no gaps."""
    schedule = ps.schedule(name, ranks=4, microbatches=24)
    last = schedule.stages - 1
    costs = Costs(s=[0.0] * last + [0.5], t=[0.0] * last + [0.25], broadcast=0.05, combine=0.05)
    spread = spread_vocabulary(schedule, costs)
    bare, time = ps.simulate(ps.lower(schedule)).makespan, ps.simulate(ps.lower(spread), costs).makespan
    assert time <= (bare + 24 * 0.75) * 1.01


def test_the_head_on_one_rank_takes_longer() -> None:
    schedule = ps.schedule("1f1b", ranks=4, microbatches=16)
    whole = [1.0, 1.0, 1.0, 2.0]
    costs = Costs(s=[0, 0, 0, 0.5], t=[0, 0, 0, 0.25])
    assert (
        ps.simulate(spread_vocabulary(schedule, costs), costs).makespan < 0.67 * ps.simulate(schedule, Costs(whole, whole, whole)).makespan
    )


def test_the_logits_of_two_microbatches_at_most() -> None:
    costs = Costs(activation=0.0, s=1.0, t=0.5, logits=[0, 0, 0, 1.0])
    spread = spread_vocabulary(ps.schedule("1f1b", ranks=4, microbatches=12), costs, Vocabulary(embedding=False))
    assert ps.simulate(spread, costs).peak_memory == [2.0] * 4


@pytest.mark.parametrize("receive", ["paired", "just-in-time", 2])
def test_spread_schedules_are_lowered_like_others(receive: str | int) -> None:
    spread = spread_vocabulary(ps.schedule("zbv", ranks=4, microbatches=6))
    for options in ({}, {"fsdp": True}, {"waits": True}, {"merge_backward": True}, {"offload": 50}):
        program = ps.lower(spread, receive=receive, **options)  # type: ignore[arg-type]
        assert "joined" in ps.verify(program).rules
        assert ps.simulate(program).makespan > 0


def test_other_counts_of_microbatches_are_spread_too() -> None:
    spread = spread_vocabulary(ps.schedule("1f1b", ranks=2, microbatches=3))
    assert spread.remake is not None
    assert spread.remake(5) == spread_vocabulary(ps.schedule("1f1b", ranks=2, microbatches=5))
    by_unit = Costs(s=[[1.0] * 3, [2.0] * 3])
    assert spread_vocabulary(ps.schedule("1f1b", ranks=2, microbatches=3), by_unit).remake is None


def test_the_pass_prints_and_parses() -> None:
    text = "vocabulary{head=false,ahead=2},reduce-grad,send-receive,buffers"
    program = PassList.parse(text).apply(ps.schedule("1f1b", ranks=2, microbatches=3))
    assert program.passes == text
    assert {action.stage for row in program for action in row if action.kind in SPREAD} == {0}


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("vocabulary{ahead=-1}", "ahead of pass vocabulary"),
        ("vocabulary{head=1}", "head of pass vocabulary is true or false, got 1"),
        ("vocabulary{head=false,embedding=false}", "spreads nothing"),
        ("vocabulary,vocabulary", "already: run the pass first"),
        ("offload,vocabulary", "0OFFLOAD0 already: run the pass first"),
        ("send-receive,vocabulary", "run the pass first"),
    ],
)
def test_bad_input_is_refused(passes: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        PassList.parse(passes).apply(ps.schedule("1f1b", ranks=4, microbatches=6))


def test_arguments_of_another_type_are_refused() -> None:
    schedule = ps.schedule("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleTypeError, match="spread_vocabulary takes a Schedule or a Program, got NoneType"):
        spread_vocabulary(None)  # type: ignore[arg-type]
    with pytest.raises(PassError, match="takes a schedule, got a lowered program: spread the vocabulary first, then lower"):
        spread_vocabulary(ps.lower(schedule))  # type: ignore[arg-type]
    with pytest.raises(CostsError, match=r"costs must be a penstock\.Costs, got Vocabulary"):
        spread_vocabulary(schedule, Vocabulary())  # type: ignore[arg-type]
    with pytest.raises(PassError, match=r"vocabulary must be a penstock\.Vocabulary, .* got True"):
        spread_vocabulary(schedule, vocabulary=True)  # type: ignore[arg-type]


def test_one_stage_cannot_be_spread() -> None:
    with pytest.raises(PassError, match="at least two stages"):
        spread_vocabulary(ps.schedule("1f1b", ranks=1, microbatches=2))


def test_a_schedule_that_never_ends_is_refused_with_its_findings() -> None:
    broken = Schedule.from_actions([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    with pytest.raises(PassError, match="cannot be lowered"):
        spread_vocabulary(broken)


def test_compute_kinds_alone_are_taken() -> None:
    assert all(action.kind in (*COMPUTE, *SPREAD) for row in spread_vocabulary(ps.schedule("1f1b", 2, 2)) for action in row)
