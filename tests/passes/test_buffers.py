"""Buffer counts, against closed forms and against playing the program."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from ir.naive import numbered
from penstock.errors import PassError, VerifyError
from penstock.ir.program import Program
from penstock.passes.buffers import Buffers
from simulator.draws import orders, zoo

K = ps.Kind


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9])
def test_1f1b_needs_its_distance_to_the_end(ranks: int, microbatches: int) -> None:
    """The count that DeepSpeed's stages have, less its floor of two."""
    buffers = ps.lower(ps.schedule("1f1b", ranks, microbatches), receive="just-in-time").buffers
    assert buffers is not None
    assert [dict(each) for each in buffers.activations] == [{r: min(ranks - r, microbatches)} for r in range(ranks)]
    assert [dict(each) for each in buffers.gradients] == [{r: 1} if r < ranks - 1 else {} for r in range(ranks)]


@pytest.mark.parametrize("ranks", range(1, 5))
def test_gpipe_holds_the_whole_batch(ranks: int) -> None:
    buffers = ps.lower(ps.schedule("gpipe", ranks, 6), receive="just-in-time").buffers
    assert buffers is not None
    assert all(set(each.values()) == {6} for each in buffers.activations)


def test_inference_holds_one_input() -> None:
    buffers = ps.lower(ps.schedule("inference", 4, 6), receive="just-in-time").buffers
    assert buffers is not None
    assert all(set(each.values()) == {1} for each in buffers.activations)
    assert all(not each for each in buffers.gradients)


SHAPES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("1f1b", 4, 7, {}),
    ("interleaved-1f1b", 2, 6, {"chunks": 3}),
    ("zb-h2", 3, 8, {}),
    ("zbv", 3, 7, {}),
    ("dualpipe-v", 3, 8, {}),
    ("dualpipe", 4, 9, {}),
    ("looped-bfs", 2, 4, {"chunks": 2}),
]


def _played(program: Program) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Walk each row and keep the set of live inputs and gradients of each stage."""
    inputs, gradients = [], []
    for rank, row in enumerate(numbered(program)):
        live_in: dict[int, set[int]] = {}
        live_out: dict[int, set[int]] = {}
        most_in: dict[int, int] = {}
        most_out: dict[int, int] = {}
        for action in row:
            for part in action.parts:
                stage, m = part.stage, part.microbatch or 0
                if part.kind in (K.RECV_F, K.F):
                    live_in.setdefault(stage, set()).add(m)
                    most_in[stage] = max(most_in.get(stage, 0), len(live_in[stage]))
                if part.kind is K.RECV_B:
                    live_out.setdefault(stage, set()).add(m)
                if part.kind in (K.B, K.I) and stage and program.placement.rank_of(stage - 1, m) == rank:
                    live_out.setdefault(stage - 1, set()).add(m)
                for s, live in live_out.items():
                    most_out[s] = max(most_out.get(s, 0), len(live))
            for part in action.parts:
                if part.kind in (K.B, K.I):
                    live_in[part.stage].discard(part.microbatch or 0)
                    live_out.get(part.stage, set()).discard(part.microbatch or 0)
        inputs.append(most_in)
        gradients.append(most_out)
    return inputs, gradients


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SHAPES)
@pytest.mark.parametrize("receive", ["paired", "just-in-time", 3])
def test_counts_equal_what_playing_the_program_holds(
    name: str, ranks: int, microbatches: int, options: dict[str, Any], receive: str | int
) -> None:
    program = ps.lower(ps.schedule(name, ranks, microbatches, **options), receive=receive)
    assert program.buffers is not None
    inputs, gradients = _played(program)
    assert list(program.buffers.activations) == inputs
    assert list(program.buffers.gradients) == gradients


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SHAPES)
@pytest.mark.parametrize("receive", ["paired", "just-in-time", 3])
def test_channel_counts_are_proved(name: str, ranks: int, microbatches: int, options: dict[str, Any], receive: str | int) -> None:
    program = ps.lower(ps.schedule(name, ranks, microbatches, **options), receive=receive)
    assert program.buffers is not None
    crossing = {
        (program.placement.rank_of(a, m), program.placement.rank_of(b, m), kind)
        for low, high in program.graph.edges
        for kind, a, b in ((K.SEND_F, low, high), (K.SEND_B, high, low))
        for m in range(microbatches)
        if program.placement.rank_of(a, m) != program.placement.rank_of(b, m)
    }
    assert set(program.buffers.channels) == crossing
    ps.verify(program)


Channel = tuple[int, int, K]


def _random_run(program: Program, seed: int) -> dict[Channel, int]:
    """Run the ranks in a random order, one of them only when nothing else can, and count the messages sent and not yet used."""
    chance = random.Random(seed)
    slow = chance.randrange(program.ranks)
    left = [list(row) for row in numbered(program)]
    under_way: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    most: dict[Channel, int] = defaultdict(int)
    while any(left):
        able = [r for r, row in enumerate(left) if row and all(m in under_way[c] for c, m in _used(program, row[0], r))]
        rank = chance.choice([r for r in able if r != slow] or able)
        action = left[rank].pop(0)
        for channel, message in _used(program, action, rank):
            under_way[channel].remove(message)
        if action.kind in (K.SEND_F, K.SEND_B):
            peer = action.stage + (1 if action.kind is K.SEND_F else -1)
            channel = (rank, program.placement.rank_of(peer, action.microbatch or 0), action.kind)
            under_way[channel].append((peer, action.microbatch or 0))
            most[channel] = max(most[channel], len(under_way[channel]))
    return most


def _used(program: Program, action: ps.Action, rank: int) -> list[tuple[Channel, tuple[int, int]]]:
    """The messages that an action uses: the channel, and the stage and microbatch that they are for."""
    used = []
    for part in action.parts:
        if part.kind not in (K.F, K.B, K.I):
            continue
        other, kind = (part.stage - 1, K.SEND_F) if part.kind is K.F else (part.stage + 1, K.SEND_B)
        microbatch = part.microbatch or 0
        if 0 <= other < program.stages and program.placement.rank_of(other, microbatch) != rank:
            used.append(((program.placement.rank_of(other, microbatch), rank, kind), (part.stage, microbatch)))
    return used


@settings(max_examples=80, deadline=None)
@given(st.one_of(orders(), zoo()), st.sampled_from(["paired", "just-in-time", 2]), st.integers(0, 99))
def test_counts_hold_for_messages_with_several_readers(schedule: ps.Schedule, receive: str | int, seed: int) -> None:
    """However the ranks take turns, no more messages are sent and not taken by their first reader than the channel has slots."""
    program = ps.lower(schedule, receive=receive)
    assert program.buffers is not None
    rank_of, chance, most = program.placement.rank_of, random.Random(seed), Counter[Channel]()
    left = [list(row) for row in numbered(program)]
    under_way: dict[Channel, set[tuple[int, int]]] = defaultdict(set)
    taken: set[tuple[Channel, tuple[int, int]]] = set()

    def used(action: ps.Action, rank: int) -> list[tuple[Channel, tuple[int, int]]]:
        found = []
        for part in action.parts:
            m = part.microbatch or 0
            if part.kind is K.F:
                found += [((rank_of(a, m), rank, K.SEND_F), (a, m)) for a, b in program.graph.edges if b == part.stage]
            elif part.kind in (K.B, K.I):
                found += [((rank_of(b, m), rank, K.SEND_B), (part.stage, m)) for a, b in program.graph.edges if a == part.stage]
        return [(channel, message) for channel, message in found if channel[0] != rank]

    while any(left):
        able = [r for r, row in enumerate(left) if row and all(m in under_way[c] or (c, m) in taken for c, m in used(row[0], r))]
        rank = chance.choice(able)
        action = left[rank].pop(0)
        for channel, message in used(action, rank):
            under_way[channel].discard(message)
            taken.add((channel, message))
        if action.kind in (K.SEND_F, K.SEND_B):
            m, step = action.microbatch or 0, 1 if action.kind is K.SEND_F else -1
            other = action.stage + step if action.peer is None else action.peer
            channel = (rank, rank_of(other, m), action.kind)
            assert (min(action.stage, other), m) not in under_way[channel]
            under_way[channel].add((min(action.stage, other), m))
            most[channel] = max(most[channel], len(under_way[channel]))
    assert not any(under_way.values())
    assert all(count <= program.buffers.channels[channel] for channel, count in most.items())


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), SHAPES)
@pytest.mark.parametrize("receive", ["paired", "just-in-time"])
def test_no_send_ever_waits(name: str, ranks: int, microbatches: int, options: dict[str, Any], receive: str) -> None:
    """Whatever the speed of the ranks, no more messages are under way than there are slots; and for 1F1B some run needs them all."""
    program = ps.lower(ps.schedule(name, ranks, microbatches, **options), receive=receive)
    assert program.buffers is not None
    seen: dict[Channel, int] = {}
    for seed in range(12):
        for channel, count in _random_run(program, seed).items():
            seen[channel] = max(seen.get(channel, 0), count)
    for channel, count in seen.items():
        assert count <= program.buffers.channels[channel]
    if name == "1f1b":
        assert seen == program.buffers.channels


def test_too_few_slots_are_found_out() -> None:
    """Rank 0 runs ahead by three forwards while rank 1 finishes one microbatch before it asks for the next: three can be under way."""
    rows = [
        ["0F0", "0F1", "0F2", "3F0", "3B0", "0B0", "3F1", "3B1", "0B1", "3F2", "3B2", "0B2"],
        ["1F0", "2F0", "2B0", "1B0", "1F1", "2F1", "2B1", "1B1", "1F2", "2F2", "2B2", "1B2"],
    ]
    program = ps.lower(ps.Schedule.from_actions(rows, ps.Placement.v(2)), receive="just-in-time")
    assert program.buffers is not None
    assert program.buffers.channels[0, 1, K.SEND_F] == 3
    ps.verify(program)
    ps.verify(Buffers(slots=2).apply(program))
    with pytest.raises(VerifyError, match="0SEND_F2"):
        ps.verify(Buffers(slots=1).apply(program))


def test_refusals() -> None:
    with pytest.raises(PassError, match=r"slots of pass buffers must be .*, got 0"):
        Buffers(slots=0)
    with pytest.raises(PassError, match="no messages yet"):
        Buffers().apply(Program.start(ps.schedule("1f1b", 2, 2)))
