"""Generation and full lowering (shard, reduce, send-receive) of every rank, against the same by torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import peer
from benchmarks.measure import once, seconds_of
from benchmarks.rows import Case, Row

import penstock as ps

PASSES = ps.PassList.parse("shard,reduce-grad,send-receive")
SIZES = ((8, 64, 1 / 5, 7), (64, 512, 1 / 20, 3), (16, 4096, 1 / 20, 1))
"""Ranks, microbatches, the ratio allowed at most, rounds."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    sizes = ((4, 16, 1.0, 2),) if short else SIZES
    yield [Case(f"{size[0]} x {size[1]}", lambda size=size: [_row(*size)]) for size in sizes]


def _row(ranks: int, microbatches: int, limit: float, rounds: int) -> Row:
    def ours() -> ps.Program:
        return PASSES.apply(ps.schedule("1f1b", ranks, microbatches))

    _, program = once(ours)
    mine, torchs = seconds_of(rounds, ours, lambda: peer.lower(peer.one_f_one_b(ranks, microbatches), ranks, microbatches))
    case = f"generate and lower 1f1b, {ranks} ranks x {microbatches} microbatches ({len(program.rows.codes):,} actions)"
    return Row(case, mine, torchs, limit=limit)
