"""Sharding: residency, look-ahead, and as few unshards as can be."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _add_unshard_reshard

import penstock as ps
from penstock.errors import PassError
from penstock.ir.program import Program
from penstock.passes.shard import Shard, list_stays

SHARDING = (ps.Kind.UNSHARD, ps.Kind.RESHARD)


def _start(name: str, ranks: int, microbatches: int, **options: Any) -> Program:
    return Program.start(ps.schedule(name, ranks, microbatches, **options))


def _play(row: tuple[ps.Action, ...]) -> tuple[int, int]:
    """How many unshards a row has and how many stages it holds in full at most; fails if the state is wrong."""
    whole: set[int] = set()
    unshards = most = 0
    for action in row:
        if action.kind is ps.Kind.UNSHARD:
            assert action.stage not in whole
            whole.add(action.stage)
            unshards, most = unshards + 1, max(most, len(whole))
        elif action.kind is ps.Kind.RESHARD:
            whole.remove(action.stage)
        else:
            assert whole >= {part.stage for part in action.parts}
    assert not whole
    return unshards, most


def _fewest(uses: list[tuple[int, ...]], residency: int) -> int:
    """The fewest gathers, by trying every set that could be kept."""
    costs = {frozenset[int](): 0}
    for stages in uses:
        wanted = frozenset(stages)
        after: dict[frozenset[int], int] = {}
        for kept, cost in costs.items():
            others = kept - wanted
            for size in range(min(len(others), residency - len(wanted)) + 1):
                for stay in itertools.combinations(sorted(others), size):
                    state = wanted | frozenset(stay)
                    after[state] = min(after.get(state, 10**9), cost + len(wanted - kept))
        costs = after
    return min(costs.values())


@settings(max_examples=150)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True).map(tuple), min_size=1, max_size=14), st.integers(2, 4))
def test_residencies_are_as_few_as_can_be(uses: list[tuple[int, ...]], residency: int) -> None:
    stays = list(list_stays(uses, residency))
    assert len(stays) == _fewest(uses, residency)
    for group, stages in enumerate(uses):
        held = [stage for stage, _, first, last in stays if first <= group <= last]
        assert set(stages) <= set(held)
        assert len(held) <= residency


CASES = [
    ("1f1b", 4, 6, {}),
    ("interleaved-1f1b", 2, 8, {"chunks": 4}),
    ("looped-bfs", 2, 5, {"chunks": 4}),
    ("interleaved-zb", 3, 6, {"chunks": 3}),
    ("zbv", 3, 7, {}),
    ("dualpipe-v", 3, 8, {}),
    ("dualpipe", 4, 9, {}),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "options"), CASES)
@pytest.mark.parametrize("lookahead", [0, 1, 3, 100])
@pytest.mark.parametrize("residency", [None, 2, 3])
def test_parameters_are_there_when_used(
    name: str, ranks: int, microbatches: int, options: dict[str, Any], lookahead: int, residency: int | None
) -> None:
    plain = _start(name, ranks, microbatches, **options)
    sharded = Shard(lookahead, residency).apply(plain)
    for rank, row in enumerate(sharded):
        uses = [tuple({part.stage: None for part in action.parts}) for action in plain[rank]]
        held = len(set(itertools.chain.from_iterable(uses)))
        unshards, most = _play(row)
        assert most <= (held if residency is None else residency)
        assert unshards == (held if residency is None or residency >= held else _fewest(uses, residency))
        assert tuple(a for a in row if a.kind not in SHARDING) == plain[rank]


def test_lookahead_is_counted_in_compute_actions() -> None:
    program = _start("looped-bfs", 1, 3, chunks=2)
    texts = {n: [str(a) for a in Shard(lookahead=n).apply(program)[0]] for n in (0, 2)}
    assert texts[0].index("1UNSHARD") == texts[0].index("1F0") - 1
    assert texts[2].index("1UNSHARD") == texts[2].index("0F1") - 1


def test_unshards_against_the_peer() -> None:
    """With 4 and 8 stages on a rank the peer gathers 23 and 87 times per step; one gather per stage is enough if memory allows."""
    for chunks in (4, 8):
        program = _start("interleaved-1f1b", 2, 8, chunks=chunks)
        peer = [str(a) for a in _add_unshard_reshard([_Action.from_str(str(a)) for a in program[0]], max_active_stages=3)]
        gathers = sum("UNSHARD" in text for text in peer)
        whole, tight = (_play(Shard(residency=residency).apply(program)[0])[0] for residency in (None, 3))
        assert whole == chunks
        assert chunks < tight < gathers


def _lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python the work runs: a count that does not depend on the machine."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("residency", [None, 2])
def test_work_is_linear_in_microbatches(residency: int | None) -> None:
    counts = []
    for microbatches in (64, 128, 256):
        program = _start("interleaved-1f1b", 4, microbatches, chunks=4)
        _ = program.rows.group_starts
        counts.append(_lines_run(lambda program=program: Shard(residency=residency).apply(program)))  # type: ignore[misc]
    assert counts[2] - counts[1] <= 2.2 * (counts[1] - counts[0]) + 200


def test_only_when_asked() -> None:
    assert not any(a.kind in SHARDING for row in ps.lower(ps.schedule("zbv", 3, 6)) for a in row)
    assert any(a.kind in SHARDING for row in ps.lower(ps.schedule("zbv", 3, 6), fsdp=True) for a in row)


def test_refusals() -> None:
    with pytest.raises(PassError, match="residency=1, but rank 0 runs an action that uses 2 stages at once"):
        Shard(residency=1).apply(_start("dualpipe-v", 2, 6))
    with pytest.raises(PassError, match=r"lookahead of pass shard must be .*, got -1"):
        Shard(lookahead=-1)
    with pytest.raises(PassError, match="shard it once"):
        Shard().apply(Shard().apply(_start("1f1b", 2, 2)))
