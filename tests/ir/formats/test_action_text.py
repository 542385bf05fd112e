"""The text form: strict, reversible, and PyTorch's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from ir.strategies import actions, torch_actions
from penstock.errors import ActionError
from penstock.ir.action import Action
from penstock.ir.formats.action_text import format_action, parse_action
from penstock.ir.kind import Kind


def as_torch(action: Action) -> _Action:
    """The same action built by hand as PyTorch's."""
    parts = tuple(map(as_torch, action.sub_actions)) or None
    return _Action(action.stage, _ComputationType(action.kind.name), action.microbatch, parts)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("0B11", Action(0, Kind.B, 11)),
        ("7I3", Action(7, Kind.I, 3)),
        ("12W345", Action(12, Kind.W, 345)),
        ("3SEND_F1", Action(3, Kind.SEND_F, 1)),
        ("3RECV_F1", Action(3, Kind.RECV_F, 1)),
        ("3SEND_B1", Action(3, Kind.SEND_B, 1)),
        ("3RECV_B1", Action(3, Kind.RECV_B, 1)),
        ("1UNSHARD", Action(1, Kind.UNSHARD)),
        ("1RESHARD", Action(1, Kind.RESHARD)),
        ("1REDUCE_GRAD", Action(1, Kind.REDUCE_GRAD)),
        ("3WAIT_SEND_F1", Action(3, Kind.WAIT_SEND_F, 1)),
        ("3WAIT_SEND_B1", Action(3, Kind.WAIT_SEND_B, 1)),
        ("1WAIT_REDUCE_GRAD", Action(1, Kind.WAIT_REDUCE_GRAD)),
        ("2OFFLOAD3", Action(2, Kind.OFFLOAD, 3)),
        ("2RELOAD3.1", Action(2, Kind.RELOAD, 3, slice=1)),
        ("7S3", Action(7, Kind.S, 3)),
        ("7T3.1", Action(7, Kind.T, 3, slice=1)),
        ("7BROADCAST3", Action(7, Kind.BROADCAST, 3)),
        ("0COMBINE3", Action(0, Kind.COMBINE, 3)),
        ("0WAIT_SEND_F1>3", Action(0, Kind.WAIT_SEND_F, 1, peer=3)),
        ("3WAIT_SEND_B1>0", Action(3, Kind.WAIT_SEND_B, 1, peer=0)),
        ("(3F1;0B4)OVERLAP_F_B", Action.overlap(Action(3, Kind.F, 1), Action(0, Kind.B, 4))),
        ("0SEND_F1>3", Action(0, Kind.SEND_F, 1, peer=3)),
        ("3RECV_F1<0", Action(3, Kind.RECV_F, 1, peer=0)),
        ("3SEND_B1>0", Action(3, Kind.SEND_B, 1, peer=0)),
        ("0RECV_B1<3", Action(0, Kind.RECV_B, 1, peer=3)),
    ],
)
def test_every_kind_is_written_and_read(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert format_action(action) == text


def test_the_table_above_names_every_kind() -> None:
    written = {case[1].kind for case in test_every_kind_is_written_and_read.pytestmark[0].args[1]}
    assert written == set(Kind)


@given(actions)
def test_reading_reverses_writing(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert Action.parse(f" {action}\t") == action


@given(torch_actions)
def test_the_text_is_pytorchs(action: Action) -> None:
    theirs = as_torch(action)
    assert str(action) == repr(theirs)
    assert _Action.from_str(str(action)) == theirs
    assert Action.parse(repr(theirs)) == action


BAD = [
    "1F0junk",
    "junk1F0",
    "1F0 1F1",
    "1F0;1F1",
    "1F",
    "F0",
    "F",
    "10",
    "",
    "-1F0",
    "1F-1",
    "1.0F0",
    "1f0",
    "1 F 0",
    "\uff11F0",
    "1UNSHARD0",
    "1RESHARD0",
    "1REDUCE_GRAD3",
    "1SEND_F",
    "1RECV_B",
    "1OVERLAP_F_B",
    "1OVERLAP_F_B0",
    "(1F0)OVERLAP_F_B",
    "()OVERLAP_F_B",
    "(;)OVERLAP_F_B",
    "(1F0;)OVERLAP_F_B",
    "(1F0;2B0)",
    "(1F0;2B0)F",
    "(1F0;2B0)OVERLAP_F_B3",
    "2(1F0;2B0)OVERLAP_F_B",
    "(1F0;2B0",
    "1F0;2B0)OVERLAP_F_B",
    "(1F0;2SEND_F0)OVERLAP_F_B",
    "(1F0;2UNSHARD)OVERLAP_F_B",
    "((1F0;2B0)OVERLAP_F_B;3F0)OVERLAP_F_B",
    "1F0>2",
    "1UNSHARD>2",
    "1SEND_F0<2",
    "1RECV_F0>2",
    "1SEND_F0>1",
    "1SEND_F0>",
    "1SEND_F>2",
    "65535F0",
    "0F16777216",
    "1SEND_F0>65535",
    "9" * 5000 + "F0",
]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:40] or "nothing")
def test_anything_else_is_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(ActionError) as caught:
        parse_action(text)
    assert repr(text)[:40] in str(caught.value)


@given(st.text(alphabet="0123456789FBIWSENDRCV_UHA();<> ", max_size=16))
def test_what_is_accepted_is_an_action_and_what_is_not_raises_one_error(text: str) -> None:
    try:
        action = parse_action(text)
    except ActionError:
        return
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("1UNSHRAD", "'UNSHARD'"), ("1SEND0", "'SEND_F'"), ("1REDUCE", "'REDUCE_GRAD'"), ("(1F0;2B0)OVERLAP_FB", "'OVERLAP_F_B'")],
)
def test_an_unknown_kind_suggests_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(ActionError, match="there is no kind") as caught:
        parse_action(text)
    assert f"did you mean {nearest}" in str(caught.value)


def test_the_parser_is_stricter_than_pytorchs() -> None:
    """PyTorch's parser takes `1F0xyz` for `1F0`; a typing error in a file would go unseen."""
    assert repr(_Action.from_str("1F0xyz")) == "1F0"
    with pytest.raises(ActionError, match="'1F0xyz' is not an action"):
        parse_action("1F0xyz")


def test_the_pytorch_drop_in_reads_waits() -> None:
    from penstock.compat.torch.schedules import _Action as OurAction

    for text in ("0WAIT_SEND_F3", "2WAIT_SEND_B0", "1WAIT_REDUCE_GRAD"):
        assert str(OurAction.from_str(text)) == text
