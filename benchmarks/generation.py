"""Generation of the compute orders of all ranks, against torch's own generation of the same orders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import peer
from benchmarks.measure import once, seconds_of
from benchmarks.rows import Case, Row

import penstock as ps


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    sizes = ((4, 8),) if short else ((8, 64), (32, 256))
    rounds = 2 if short else 5
    yield [
        Case(f"{name} {ranks} x {count}", lambda name=name, ranks=ranks, count=count: [_row(name, ranks, count, rounds)])
        for name in peer.MULTI
        for ranks, count in sizes
    ]


def _row(name: str, ranks: int, microbatches: int, rounds: int) -> Row:
    def ours() -> int:
        return len(ps.schedule(name, ranks, microbatches).rows.codes)

    theirs = peer.generation(name, ranks, microbatches)
    _, actions = once(ours)
    theirs()
    mine, torchs = seconds_of(rounds, ours, theirs)
    return Row(f"generate {name}, {ranks} ranks x {microbatches} microbatches ({actions:,} actions)", mine, torchs)
