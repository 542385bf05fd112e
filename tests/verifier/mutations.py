"""Ways to break a program: each takes rows of actions and yields, or draws, changed ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from penstock.ir.action import Action
from penstock.ir.kind import COMPUTE, RECEIVES, SEND_WAITS, SENDS, Kind

Rows = tuple[tuple[Action, ...], ...]
FAMILIES = (COMPUTE, (*SENDS, *RECEIVES, *SEND_WAITS), (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD))


def _with_row(rows: Rows, rank: int, row: tuple[Action, ...]) -> Rows:
    return (*rows[:rank], row, *rows[rank + 1 :])


def _without(row: tuple[Action, ...], at: int) -> tuple[Action, ...]:
    return row[:at] + row[at + 1 :]


def _with(row: tuple[Action, ...], at: int, action: Action) -> tuple[Action, ...]:
    return (*row[:at], action, *row[at:])


def places(rows: Rows) -> list[tuple[int, int]]:
    """Where the actions are: rank and index."""
    return [(rank, at) for rank, row in enumerate(rows) for at in range(len(row))]


def drop(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Leave the action out."""
    yield _with_row(rows, rank, _without(rows[rank], at))


def duplicate(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Run the action a second time, anywhere in its row."""
    for to in range(len(rows[rank]) + 1):
        yield _with_row(rows, rank, _with(rows[rank], to, rows[rank][at]))


def swap(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Exchange it with a later one of its row."""
    row = rows[rank]
    for other in range(at + 1, len(row)):
        yield _with_row(rows, rank, (*row[:at], row[other], *row[at + 1 : other], row[at], *row[other + 1 :]))


def move(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Run it earlier or later."""
    rest = _without(rows[rank], at)
    for to in range(len(rest) + 1):
        yield _with_row(rows, rank, _with(rest, to, rows[rank][at]))


def move_away(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Run it on another rank."""
    left = _with_row(rows, rank, _without(rows[rank], at))
    for other in range(len(rows)):
        if other != rank:
            for to in range(len(rows[other]) + 1):
                yield _with_row(left, other, _with(left[other], to, rows[rank][at]))


def retarget(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Another microbatch, slice, stage, kind or peer."""
    stages = 1 + max(part.stage for row in rows for action in row for part in action.parts)
    microbatches = 1 + max(part.microbatch or 0 for row in rows for action in row for part in action.parts)
    slices = 1 + max(part.slice or 0 for row in rows for action in row for part in action.parts)
    action = rows[rank][at]
    for k, part in enumerate(action.parts):
        for other in _siblings(part, stages, microbatches, slices):
            changed = Action.overlap(*_with(_without(action.parts, k), k, other)) if action.sub_actions else other
            yield _with_row(rows, rank, _with(_without(rows[rank], at), at, changed))


def _siblings(part: Action, stages: int, microbatches: int, slices: int) -> Iterator[Action]:
    if part.microbatch is not None:
        yield from (replace(part, microbatch=m) for m in range(microbatches + 1))
    if part.slice is not None:
        yield from (replace(part, slice=k) for k in range(slices))
    yield from (replace(part, stage=s) for s in range(stages + 1) if s != part.peer)
    yield from (replace(part, kind=kind) for family in FAMILIES if part.kind in family for kind in family)
    if part.kind.is_communication or part.kind.is_send_wait:
        yield from (replace(part, peer=s) for s in (None, *range(stages + 1)) if s != part.stage)


def regroup(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Part an overlapped action, leave a part of it out, turn it round, or overlap two neighbours."""
    row, action = rows[rank], rows[rank][at]
    rest = _without(row, at)
    if action.sub_actions:
        yield _with_row(rows, rank, (*row[:at], *action.parts, *row[at + 1 :]))
        yield _with_row(rows, rank, (*row[:at], *action.parts[::-1], *row[at + 1 :]))
        yield _with_row(rows, rank, _with(rest, at, Action.overlap(*action.parts[::-1])))
        for k in range(len(action.parts)):
            left = _without(action.parts, k)
            yield _with_row(rows, rank, _with(rest, at, left[0] if len(left) == 1 else Action.overlap(*left)))
    if at + 1 < len(row) and action.is_compute and row[at + 1].is_compute:
        both = Action.overlap(*action.parts, *row[at + 1].parts)
        yield _with_row(rows, rank, (*row[:at], both, *row[at + 2 :]))


OPERATORS = (drop, duplicate, swap, move, move_away, retarget, regroup)


def every(rows: Rows) -> list[Rows]:
    """All programs one mutation away, each once."""
    mutants = (mutant for operator in OPERATORS for rank, at in places(rows) for mutant in operator(rows, rank, at))
    return [mutant for mutant in dict.fromkeys(mutants) if mutant != rows]


def some(rows: Rows, random: Random) -> Rows:
    """One to three mutations by chance; moves within a row, which often do no harm, come more often than the others."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        operator = random.choice((*OPERATORS, shift, shift, shift, shift))
        mutants = list(operator(rows, *random.choice(places(rows))))
        rows = random.choice(mutants) if mutants else rows
    return rows


def shift(rows: Rows, rank: int, at: int) -> Iterator[Rows]:
    """Exchange it with the next of its row."""
    yield from list(swap(rows, rank, at))[:1]
