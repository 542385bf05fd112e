"""Passes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PassError
from penstock.passes.base import Pass
from penstock.passes.buffers import Buffers
from penstock.passes.lower import lowering
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.pass_list import PassList, passes
from penstock.passes.receive import Receive
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard
from penstock.passes.split_backward import SplitBackward

STAGES = st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(tuple)
PLACES = st.sampled_from(["paired", "just-in-time"]) | st.integers(0, 20)
ANY: st.SearchStrategy[Pass] = st.one_of(
    st.builds(SplitBackward, STAGES),
    st.builds(MergeBackward, STAGES, st.booleans()),
    st.builds(ReduceGrad),
    st.builds(Shard, st.integers(0, 9), st.none() | st.integers(1, 9)),
    st.builds(SendReceive, PLACES),
    st.builds(Receive, PLACES),
    st.builds(Buffers, st.none() | st.integers(1, 9)),
)


@given(st.lists(ANY, max_size=5))
def test_prints_and_parses_back(chosen: list[Pass]) -> None:
    made = PassList.of(chosen)
    assert PassList.parse(str(made)) == made


def test_spaces_do_not_matter() -> None:
    text = " merge-backward{ stages=0+2 , apart=true } ,shard{residency=all}, send-receive{receive=3}"
    assert PassList.parse(text) == PassList((MergeBackward((0, 2), True), Shard(), SendReceive(3)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shrad", "there is no pass 'shrad': did you mean 'shard'?"),
        ("shard{residence=2}", "pass shard has no option 'residence'; its options: lookahead, residency"),
        ("shard{residency}", "'residency' is not an option of pass shard: write option=value"),
        ("shard{residency=2,residency=3}", "each option once"),
        ("shard{residency=two}", "residency of pass shard must be a whole number"),
        ("split-backward{stages=a}", "option stages=a of pass split-backward is not a list of stages"),
        ("receive", "pass receive needs the option 'place'"),
        ("shard{residency=2", "is not a list of passes"),
        ("shard;buffers", "is not a list of passes, at 'shard;buffers'"),
        ("shard,", "ends in a comma"),
        ("shard,,buffers", "is not a list of passes"),
    ],
)
def test_bad_texts_say_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(PassError) as caught:
        PassList.parse(text)
    assert said in str(caught.value)


def test_a_program_remembers_what_made_it() -> None:
    schedule = ps.schedule("zbv", 2, 4)
    program = ps.lower(schedule, fsdp=True, merge_backward=True, receive=2)
    assert program.passes == "merge-backward,shard,reduce-grad,send-receive{receive=2},buffers"
    assert PassList.parse(program.passes).apply(schedule) == program
    assert str(lowering(fsdp=True, merge_backward=True, receive=2)) == program.passes


def test_every_pass_is_listed_with_a_summary() -> None:
    assert list(passes()) == [
        *("split-backward", "merge-backward", "vocabulary", "offload", "shard", "reduce-grad"),
        *("send-receive", "receive", "wait-send", "buffers"),
    ]
    assert all(passes().values())


def test_passes_leave_their_input_as_it_was() -> None:
    schedule = ps.schedule("dualpipe-v", 2, 6)
    before = schedule.rows.codes.copy()
    ps.lower(schedule, fsdp=True, merge_backward=True)
    assert (schedule.rows.codes == before).all()
