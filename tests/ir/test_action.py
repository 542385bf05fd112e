"""Actions: what they may be, and their packed form."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import timeit
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from ir.strategies import actions, compute_actions
from penstock.errors import ActionError
from penstock.ir import codes
from penstock.ir.action import Action, pack_action, unpack_actions, unpack_row
from penstock.ir.kind import COMPUTE, COPIES, JOINS, RECEIVES, SEND_WAITS, SENDS, SPREAD, WORK, Kind


@given(actions)
def test_packing_is_reversed_by_unpacking(action: Action) -> None:
    packed = pack_action(action)
    assert tuple(unpack_actions(packed)) == (action,)
    assert len(packed) == len(action.parts)
    assert all(0 <= code < 2**63 for code in packed)


@given(st.lists(actions, max_size=8))
def test_a_row_of_codes_keeps_its_groups_apart(row: list[Action]) -> None:
    assert list(unpack_actions(code for action in row for code in pack_action(action))) == row


@given(st.lists(actions, max_size=8))
def test_a_row_unpacked_at_once_is_the_same_actions(row: list[Action]) -> None:
    unpacked = unpack_row(np.array([code for action in row for code in pack_action(action)], dtype=np.int64))
    assert unpacked == tuple(row)
    assert [repr(action) for action in unpacked] == [repr(action) for action in row]
    assert [hash(action) for action in unpacked] == [hash(action) for action in row]
    for action, wanted in zip(unpacked, row, strict=True):
        assert type(action) is Action
        assert all(type(getattr(action, f.name)) is type(getattr(wanted, f.name)) for f in dataclasses.fields(Action))
        assert pickle.loads(pickle.dumps(action)) == copy.copy(action) == dataclasses.replace(action) == action
        with pytest.raises(dataclasses.FrozenInstanceError):
            action.stage = 1  # type: ignore[misc]


@given(st.lists(actions.map(pack_action), max_size=4), st.integers(0, 2**61 - 1))
def test_a_row_with_any_code_is_unpacked_or_refused_as_one_by_one(packed: list[tuple[int, ...]], code: int) -> None:
    row = [*(entry for group in packed for entry in group), code]

    def unpacked_or_refusal(unpack: Callable[[], Iterable[Action]]) -> tuple[Action, ...] | str:
        try:
            return tuple(unpack())
        except ValueError as error:
            return repr(error)

    one_by_one = unpacked_or_refusal(lambda: unpack_actions(row))
    assert unpacked_or_refusal(lambda: unpack_row(np.array(row, dtype=np.int64))) == one_by_one


def test_unpacking_leaves_the_garbage_collector_as_it_was() -> None:
    row = ps.schedule("1f1b", ranks=2, microbatches=4).row(0)
    assert gc.isenabled()
    unpack_row(row)
    assert gc.isenabled()
    gc.disable()
    try:
        unpack_row(row)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v"])
def test_a_row_is_unpacked_much_faster_than_one_by_one(name: str) -> None:
    for table in (order := ps.schedule(name, ranks=4, microbatches=256), ps.lower(order)):
        codes_of_row = table.row(1).tolist()
        at_once = min(timeit.repeat(lambda table=table: table[1], number=1, repeat=9))  # type: ignore[misc]
        one_by_one = min(timeit.repeat(lambda row=codes_of_row: tuple(unpack_actions(row)), number=1, repeat=9))  # type: ignore[misc]
        assert at_once < one_by_one / 2


@given(st.lists(actions.filter(lambda a: not a.sub_actions), min_size=1, max_size=8))
def test_the_fields_of_codes_are_read_alike_from_integers_and_arrays(row: list[Action]) -> None:
    packed = np.array([pack_action(action)[0] for action in row], dtype=np.int64)
    for read, field in (
        (codes.stage_of, lambda a: a.stage),
        (codes.kind_of, lambda a: int(a.kind)),
        (codes.microbatch_of, lambda a: a.microbatch or 0),
        (codes.peer_of, lambda a: -1 if a.peer is None else a.peer),
    ):
        wanted = [field(action) for action in row]
        assert read(packed).tolist() == wanted
        assert [read(code) for code in packed.tolist()] == wanted


@given(st.integers(0, 1000), st.integers(0, 10**6))
def test_the_generators_helpers_are_the_packed_actions(chunk: int, microbatch: int) -> None:
    for kind in COMPUTE:
        assert getattr(codes, kind.name)(chunk, microbatch) == pack_action(Action(chunk, kind, microbatch))[0]
    parts = [codes.F(chunk, microbatch), codes.B(chunk, microbatch)]
    assert codes.overlap(*parts) == pack_action(Action.overlap(Action(chunk, Kind.F, microbatch), Action(chunk, Kind.B, microbatch)))


@given(actions, actions)
def test_equal_actions_are_those_with_equal_text(one: Action, other: Action) -> None:
    assert (one == other) == (str(one) == str(other))
    assert one == dataclasses.replace(one)
    assert hash(one) == hash(dataclasses.replace(one))


def test_an_action_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Action(0, Kind.F, 0).stage = 1  # type: ignore[misc]


def test_the_kinds_fall_into_classes() -> None:
    assert {kind for kind in Kind if kind.is_compute} == {*WORK, Kind.OVERLAP_F_B}
    assert {kind for kind in Kind if kind.is_communication} == {*SENDS, *RECEIVES}
    assert {kind for kind in Kind if kind.has_microbatch} == {*COMPUTE, *SENDS, *RECEIVES, *SEND_WAITS, *COPIES, *SPREAD}
    assert {kind for kind in Kind if kind.is_copy} == set(COPIES)
    assert {kind for kind in Kind if kind.is_spread} == set(SPREAD)
    assert {kind for kind in Kind if kind.is_join} == set(JOINS)
    assert {kind for kind in Kind if kind.is_send_wait} == set(SEND_WAITS)


@given(st.lists(compute_actions, min_size=2, max_size=4))
def test_the_parts_of_an_overlap_are_its_sub_actions(parts: list[Action]) -> None:
    assert Action.overlap(*parts).parts == tuple(parts)
    assert parts[0].parts == (parts[0],)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((-1, Kind.F, 0), "stage -1 of a F action"),
        ((codes.MAX_STAGES, Kind.F, 0), "stages run from 0 to 65534"),
        ((0, Kind.F, -1), "microbatch -1 of stage 0"),
        ((0, Kind.F, codes.MAX_MICROBATCHES), "microbatches run from 0 to 16777215"),
        ((3, Kind.F, None), "F of stage 3 needs a microbatch"),
        ((3, Kind.UNSHARD, 0), "UNSHARD of stage 3 belongs to the whole stage"),
        ((3, Kind.F, 0, (Action(0, Kind.F, 0),)), "a F action has no sub-actions"),
        ((3, Kind.F, 0, (), 1), "a F action has no peer"),
        ((3, Kind.SEND_F, 0, (), 3), "peer 3 of stage 3"),
        ((3, Kind.SEND_F, 0, (), -1), "peer -1 of stage 3"),
        ((0, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 0),) * 2), "no stage, microbatch, slice or peer of its own"),
        ((-1, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 0),)), "two or more sub-actions, got 1"),
        ((-1, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 0), Action(0, Kind.SEND_F, 0))), "0SEND_F0 cannot be overlapped"),
    ],
)
def test_impossible_actions_are_refused(fields: tuple[object, ...], said: str) -> None:
    with pytest.raises(ActionError) as caught:
        Action(*fields)  # type: ignore[arg-type]
    assert said in str(caught.value)


@given(st.lists(compute_actions, min_size=2, max_size=3))
def test_overlaps_do_not_nest(parts: list[Action]) -> None:
    with pytest.raises(ActionError, match="cannot be overlapped"):
        Action.overlap(Action.overlap(*parts), parts[0])
