"""No rank waits forever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir import codes
from penstock.ir.dependencies import Needs
from penstock.ir.kind import Kind
from penstock.ir.rows import Ints
from penstock.ir.steps import Walk, walk
from penstock.verifier.context import Context, ordinal, position_in
from penstock.verifier.finding import Finding, Severity
from penstock.verifier.rules.waits import Waits, waits

_LINKS_SHOWN = 8


def deadlock(context: Context) -> Iterator[Finding]:
    """Every rank gets to the end of its row; if not, a finding names the ranks that wait for each other as a chain."""
    stuck = _Stuck(context, waits(context))
    if not stuck.walk.complete:
        for chain in stuck.cycles():
            yield _report_cycle(context, stuck, chain)
        for wait in stuck.find_dead_ends().tolist():
            yield _report_dead_end(context, stuck, wait)
    if context.semantics == "rendezvous" and context.table.lowered:
        yield from disagreements(context)


@dataclass(frozen=True)
class _Stuck:
    """The ranks that stop, and the waits that stop them."""

    context: Context
    waits: Waits

    @cached_property
    def walk(self) -> Walk:
        """Run every rank as far as its waits allow; an action that waits for a missing action waits for itself."""
        before, after = self.waits.before, self.waits.after
        return walk(self.context.rows, Needs(np.where(before < 0, after, before), after))

    @cached_property
    def at_heads(self) -> Ints:
        """The unmet waits of the actions that the ranks stop at, in the order of the ranks."""
        rows, (before, after, _, _) = self.context.rows, self.waits
        heads = rows.group_offsets[:-1] + self.walk.done
        unmet = (before < 0) | (self.walk.step[rows.group[before]] < 0)
        at = np.flatnonzero(unmet & (rows.group[after] == heads[rows.rank[after]]))
        return at[np.argsort(rows.rank[after[at]], kind="stable")]

    def find_dead_ends(self) -> Ints:
        """The waits for actions that no rank runs."""
        return self.at_heads[self.waits.before[self.at_heads] < 0]

    def cycles(self) -> Iterator[list[int]]:
        """Each cycle of ranks once, from its lowest rank, as the waits that lead from one rank to the next."""
        onward = self._find_first_waits()
        seen: dict[int, int] = {}
        for start in sorted(onward):
            rank, path = start, list[int]()
            while rank in onward and rank not in seen:
                seen[rank] = start
                path.append(rank)
                rank = self._find_awaited(onward[rank])
            if seen.get(rank) == start and rank in path:
                cycle = path[path.index(rank) :]
                lowest = cycle.index(min(cycle))
                yield [onward[rank] for rank in cycle[lowest:] + cycle[:lowest]]

    def _find_first_waits(self) -> dict[int, int]:
        """For each rank that stops, its first wait for an action that another rank has yet to run."""
        onward: dict[int, int] = {}
        for wait in self.at_heads[self.waits.before[self.at_heads] >= 0].tolist():
            onward.setdefault(int(self.context.rows.rank[self.waits.after[wait]]), wait)
        return onward

    def _find_awaited(self, wait: int) -> int:
        return int(self.context.rows.rank[self.waits.before[wait]])

    def ends(self, wait: int) -> tuple[int, int, int, int]:
        """Rank and step of the action that waits and of the one that it waits for."""
        rows, after, before = self.context.rows, self.waits.after[wait], self.waits.before[wait]
        return int(rows.rank[after]), int(rows.step[after]), int(rows.rank[before]), int(rows.step[before])

    def describe(self, wait: int) -> str:
        """`rank 0 waits in step 5 (0B0) for 1SEND_B0, which is step 7 of rank 1`."""
        context, entry, before = self.context, int(self.waits.after[wait]), int(self.waits.before[wait])
        what = context.name(before) if before >= 0 else _name_missing(context, int(self.waits.never[wait]))
        what = f"the slot that {what} frees" if self.waits.slot[wait] else what
        where = f"which is {context.place(before)}" if before >= 0 else "which nobody runs"
        rows = context.rows
        return f"rank {int(rows.rank[entry])} waits in step {int(rows.step[entry])} ({rows.action_at(entry)}) for {what}, {where}"


def _report_cycle(context: Context, stuck: _Stuck, chain: list[int]) -> Finding:
    links = [stuck.describe(wait) for wait in (chain if len(chain) <= _LINKS_SHOWN else [*chain[: _LINKS_SHOWN - 1], chain[-1]])]
    if len(chain) > _LINKS_SHOWN:
        links.insert(-1, f"and so on over {len(chain) - _LINKS_SHOWN} more ranks")
    message = f"{len(chain)} ranks wait for each other in a cycle: {'; '.join(links)}" if len(chain) > 1 else links[0]
    finding = context.report("deadlock", int(stuck.waits.after[chain[0]]), message, _suggest_way_out(context, stuck, chain), Severity.HANG)
    return replace(finding, cycle=tuple(stuck.ends(wait) for wait in chain))


def _suggest_way_out(context: Context, stuck: _Stuck, chain: list[int]) -> str:
    """Let a rank of the chain run the action that the rank before it waits for, preferably one that can run at once."""
    links = [(int(stuck.waits.before[wait]), int(stuck.waits.after[chain[(at + 1) % len(chain)]])) for at, wait in enumerate(chain)]
    before, stop = next((link for link in links if _could_run(context, *link)), links[0])
    also = "" if _could_run(context, before, stop) else ", and what that needs,"
    rank, step = int(context.rows.rank[before]), int(context.rows.step[stop])
    first = f"Let rank {rank} run {context.name(before)}{also} before its step {step}"
    for wait in chain:
        if stuck.waits.slot[wait]:
            channel = int(context.channel[stuck.waits.after[wait]])
            return f"Give the channel {context.channel_name(channel)} more slots; or: {first}"
    return first


def _could_run(context: Context, entry: int, stop: int) -> bool:
    """Whether everything that an entry needs of its own rank is done when the rank stops."""
    local = context.table.links.local
    return bool((local.before[local.after == entry] < stop).all())


def _report_dead_end(context: Context, stuck: _Stuck, wait: int) -> Finding:
    """As severe as the missing work, which `complete` reports first."""
    code = int(stuck.waits.never[wait])
    rank = context.placement.rank_of(codes.stage_of(code), codes.microbatch_of(code))
    return context.report(
        "deadlock", int(stuck.waits.after[wait]), stuck.describe(wait), f"Run {_name_missing(context, code)} on rank {rank}"
    )


def _name_missing(context: Context, code: int) -> str:
    """The name of a missing action; in a schedule `I` stands for either backward that makes the gradient."""
    if codes.kind_of(code) == Kind.I:
        return f"{context.rows.action_for(code)} (or {context.name_of(Kind.B, codes.stage_of(code), codes.microbatch_of(code))})"
    return str(context.rows.action_for(code))


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
    for own, other, swapped in ((lower, upper, False), (upper, lower, True)):
        partner = own.partner(other)
        unlike = np.flatnonzero(_number_messages(context, own.entries) != _number_messages(context, partner))
        one, two = (partner, own.entries) if swapped else (own.entries, partner)
        parts.append(np.stack([own.pair[unlike], own.place[unlike], one[unlike], two[unlike]]))
    wrong = np.concatenate(parts, axis=1)
    wrong = wrong[:, np.lexsort((wrong[1], wrong[0]))]
    first = np.append(True, wrong[0, 1:] != wrong[0, :-1])[: wrong.shape[1]]
    waiting = _find_first_waiting(context, wrong) if wrong.shape[1] else {}
    for pair, place, one, two in wrong[:, first].T.tolist():
        yield _report_disagreement(context, pair, place, (one, two), waiting.get(pair, -1))


def _number_messages(context: Context, entries: Ints) -> Ints:
    """The message that an entry is an end of, the same number for both ends; -1 for no entry."""
    backward = context.rows.is_kind(Kind.SEND_B, Kind.RECV_B)[entries]
    return np.where(entries < 0, -1, context.message[entries] * 2 + backward)


def _find_first_waiting(context: Context, wrong: Ints) -> dict[int, int]:
    """For each pair, the first action that waits for a message which never completes."""
    pair = np.full(len(context.rows.codes), -1, dtype=np.int64)
    for ends in wrong[2:]:
        pair[ends[ends >= 0]] = wrong[0][ends >= 0]
    sent, after = context.table.links.data
    lost = np.flatnonzero(pair[sent] >= 0)
    lost = lost[np.argsort(context.rows.step[after[lost]], kind="stable")][::-1]
    return dict(zip(pair[sent[lost]].tolist(), after[lost].tolist(), strict=True))


def _report_disagreement(context: Context, pair: int, place: int, ends: tuple[int, int], waiting: int) -> Finding:
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
    return context.report("deadlock", next(entry for entry in ends if entry >= 0), message, remedy, Severity.HANG)


def _step(context: Context, entry: int) -> str:
    return f"step {int(context.rows.step[entry])} ({context.rows.action_at(entry)})"
