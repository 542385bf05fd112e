"""Generation and full lowering (shard, reduce, send-receive) of every rank, against the same by torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import peer
from benchmarks.measure import once, seconds_of
from benchmarks.rows import Case, Row

import penstock as ps

PASSES = ps.PassList.parse("shard,reduce-grad,send-receive")
SIZES = ((8, 64, 1 / 5, 7), (64, 512, 1 / 20, 3), (16, 4096, 1 / 20, 1))
"""Ranks, microbatches, the ratio allowed at most, rounds."""
ITERATED = (64, 512, 1 / 15, 5)
"""The same for lowering followed by a look at every action."""
WAIT = "WAIT_REDUCE_GRAD"
"""An action that torch's lowering adds from 2.15 on; not compared."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    sizes = ((4, 16, 1.0, 2),) if short else SIZES
    cases = [Case(f"{size[0]} x {size[1]}", lambda size=size: [_row(*size)]) for size in sizes]
    iterated = sizes[0] if short else ITERATED
    yield [*cases, Case(f"{iterated[0]} x {iterated[1]}, every action", lambda: [_iterated(*iterated)])]


def _row(ranks: int, microbatches: int, limit: float, rounds: int) -> Row:
    def ours() -> ps.Program:
        return PASSES.apply(ps.schedule("1f1b", ranks, microbatches))

    _, program = once(ours)
    mine, torchs = seconds_of(rounds, ours, lambda: peer.lower(peer.one_f_one_b(ranks, microbatches), ranks, microbatches))
    case = f"generate and lower 1f1b, {ranks} ranks x {microbatches} microbatches ({len(program.rows.codes):,} actions)"
    return Row(case, mine, torchs, limit=limit)


def _iterated(ranks: int, microbatches: int, limit: float, rounds: int) -> Row:
    """Lower, then read one field of every action of every rank; torch's actions are read likewise."""

    def ours() -> int:
        program = PASSES.apply(ps.schedule("1f1b", ranks, microbatches))
        return sum(action.stage for row in program for action in row)

    def torchs() -> int:
        rows = peer.lower(peer.one_f_one_b(ranks, microbatches), ranks, microbatches)
        return sum(action.stage_index for row in rows.values() for action in row)

    lowered = PASSES.apply(ps.schedule("1f1b", ranks, microbatches)), peer.lower(peer.one_f_one_b(ranks, microbatches), ranks, microbatches)
    mine, theirs = ([[str(action) for action in row if not str(action).endswith(WAIT)] for row in rows] for rows in _rows(*lowered))
    if mine != theirs:
        raise AssertionError("the two lowerings differ")
    times, other = seconds_of(rounds, ours, torchs)
    return Row(f"lower and iterate 1f1b, {ranks} ranks x {microbatches} microbatches", times, other, limit=limit)


def _rows(program: ps.Program, orders: peer.Orders) -> tuple[list[Any], list[Any]]:
    return list(program), list(orders.values())
