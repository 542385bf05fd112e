"""Verification of lowered programs, against what torch has of it, and the whole way from a name to a proven program.

torch validates that each stage runs each microbatch once and in order, on compute actions alone; whether messages match and
nothing hangs shows in its simulation. Our verifier proves both, and seven more rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import peer
from benchmarks.measure import once, seconds_of
from benchmarks.rows import Case, Row, within

import penstock as ps

PASSES = ps.PassList.parse("send-receive,buffers")
"""torch's simulation knows no gradients being reduced."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    sizes = ((4, 8),) if short else ((8, 64), (32, 256))
    rounds, large = (2, (8, 20)) if short else (3, (64, 2700))
    yield [
        *(Case(f"verify {size[0]} x {size[1]}", lambda size=size: _verified(*size, rounds)) for size in sizes),
        *(Case(f"{name} proven", lambda name=name: [_whole_way(name, *sizes[-1], rounds)]) for name in peer.MULTI),
        Case("a million actions", lambda: [_large(*large)]),
    ]


def _fresh(program: ps.Program) -> ps.Program:
    """The program with nothing worked out yet."""
    return ps.Program(program.rows, program.placement, program.microbatches, buffers=program.buffers)


def _verified(ranks: int, microbatches: int, rounds: int) -> list[Row]:
    program = PASSES.apply(ps.schedule("1f1b", ranks, microbatches))
    compute, lowered = peer.one_f_one_b(ranks, microbatches), peer.actions_of(program)
    ps.verify(_fresh(program))
    mine, counted, simulated = seconds_of(
        rounds,
        lambda: ps.verify(_fresh(program)),
        lambda: peer.validate(compute, ranks, microbatches),
        lambda: peer.simulate(lowered, ranks),
    )
    shape = f"1f1b, {ranks} ranks x {microbatches} microbatches ({len(program.rows.codes):,} actions)"
    both = [a + b for a, b in zip(counted, simulated, strict=True)]
    return [
        Row(f"verify {shape}, against validation and simulation", mine, both),
        Row(f"verify {shape}, against validation", mine, counted, note="torch's looks at compute actions, without messages"),
    ]


def _whole_way(name: str, ranks: int, microbatches: int, rounds: int) -> Row:
    def ours() -> ps.Proof:
        return ps.verify(ps.lower(ps.schedule(name, ranks, microbatches)))

    theirs = peer.whole(name, ranks, microbatches)
    ours(), theirs()
    mine, torchs = seconds_of(rounds, ours, theirs)
    case = f"generate, lower and verify {name}, {ranks} ranks x {microbatches} microbatches"
    return Row(case, mine, torchs, note="torch's: generate, validate, lower")


def _large(ranks: int, microbatches: int) -> Row:
    program = ps.lower(ps.schedule("1f1b", ranks, microbatches))
    seconds, _ = once(lambda: ps.verify(_fresh(program)))
    return within(f"verify {len(program.rows.codes):,} actions", seconds, 10.0)
