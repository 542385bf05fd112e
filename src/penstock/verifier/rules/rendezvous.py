"""One communicator for each pair of ranks: both must run their exchanges in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.ir.kind import Kind
from penstock.ir.rows import Ints
from penstock.verifier.context import Context, ordinal, position_in
from penstock.verifier.finding import Finding, Severity


class _Queues(NamedTuple):
    """One side's communication entries, sorted by pair of ranks, and the place of each in its queue."""

    entries: Ints
    pair: Ints
    place: Ints

    @classmethod
    def of_side(cls, context: Context, lower: bool) -> _Queues:
        """The queues of the lower or of the higher rank of every pair."""
        rank, away, ranks = context.rows.rank, context.away, context.table.ranks
        entries = np.flatnonzero((context.channel >= 0) & ((rank < away) == lower))
        pair = np.minimum(rank, away)[entries] * ranks + np.maximum(rank, away)[entries]
        order = np.argsort(pair, kind="stable")
        return cls(entries[order], pair[order], position_in(pair[order]))

    def partner(self, other: _Queues) -> Ints:
        """For each entry, the one at the same place of the other side's queue, -1 behind its end."""
        if not len(other.entries):
            return np.full(len(self.entries), -1, dtype=np.int64)
        begin, end = (np.searchsorted(other.pair, self.pair, side=side) for side in ("left", "right"))
        at = begin + self.place
        return np.where(at < end, other.entries[np.minimum(at, len(other.entries) - 1)], -1)


def disagreements(context: Context) -> Iterator[Finding]:
    """For each pair of ranks, the first exchange that is not the same message on both; nothing behind it ever completes."""
    lower, upper = (_Queues.of_side(context, side) for side in (True, False))
    parts = []
    for mine, other, swapped in ((lower, upper, False), (upper, lower, True)):
        partner = mine.partner(other)
        unlike = np.flatnonzero(_message(context, mine.entries) != _message(context, partner))
        one, two = (partner, mine.entries) if swapped else (mine.entries, partner)
        parts.append(np.stack([mine.pair[unlike], mine.place[unlike], one[unlike], two[unlike]]))
    wrong = np.concatenate(parts, axis=1)
    wrong = wrong[:, np.lexsort((wrong[1], wrong[0]))]
    first = np.append(True, wrong[0, 1:] != wrong[0, :-1])[: wrong.shape[1]]
    waiting = _first_waiting(context, wrong) if wrong.shape[1] else {}
    for pair, place, one, two in wrong[:, first].T.tolist():
        yield _disagreement(context, pair, place, (one, two), waiting.get(pair, -1))


def _message(context: Context, entries: Ints) -> Ints:
    """Which message an entry is an end of, the same number for both ends; -1 for no entry."""
    backward = context.rows.is_kind(Kind.SEND_B, Kind.RECV_B)[entries]
    return np.where(entries < 0, -1, context.message[entries] * 2 + backward)


def _first_waiting(context: Context, wrong: Ints) -> dict[int, int]:
    """For each pair, the first action that waits for a message which never completes."""
    pair = np.full(len(context.rows.codes), -1, dtype=np.int64)
    for ends in wrong[2:]:
        pair[ends[ends >= 0]] = wrong[0][ends >= 0]
    sent, after = context.table.links.data
    lost = np.flatnonzero(pair[sent] >= 0)
    lost = lost[np.argsort(context.rows.step[after[lost]], kind="stable")][::-1]
    return dict(zip(pair[sent[lost]].tolist(), after[lost].tolist(), strict=True))


def _disagreement(context: Context, pair: int, place: int, ends: tuple[int, int], waiting: int) -> Finding:
    ranks = divmod(pair, context.table.ranks)
    runs = [
        f"rank {rank} runs {context.name(entry)} (step {int(context.rows.step[entry])})" if entry >= 0 else f"rank {rank} has no more"
        for rank, entry in zip(ranks, ends, strict=True)
    ]
    so = f", so rank {int(context.rows.rank[waiting])} waits forever in {_step(context, waiting)}" if waiting >= 0 else ""
    message = (
        f"rank {ranks[0]} and rank {ranks[1]} disagree about their {ordinal(place + 1)} exchange: {', '.join(runs)}; "
        f"neither it nor anything behind it completes{so}"
    )
    remedy = "Place sends and receives at the same moment (receive placement `paired`), or run on independent channels"
    return context.finding("deadlock", next(entry for entry in ends if entry >= 0), message, remedy, Severity.HANG)


def _step(context: Context, entry: int) -> str:
    return f"step {int(context.rows.step[entry])} ({context.rows.action_at(entry)})"
