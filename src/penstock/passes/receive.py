"""Where receives stand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from penstock.errors import LoweringError, PassError, VerifyError
from penstock.ir.dependencies import Linker, Needs, message_code, peer_stages
from penstock.ir.kind import RECEIVES, SENDS, WORK, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows
from penstock.ir.steps import walk
from penstock.passes.base import Pass
from penstock.verifier.finding import report
from penstock.verifier.verify import check, verify

Placing = str | int
"""`paired`, `just-in-time`, or how many compute actions before its use a receive is posted."""


@dataclass(frozen=True)
class Receive(Pass):
    """Take every receive out and place it anew.

    - `paired`: at the moment of its send, when ranks take turns at one action each. Both ends of a pair of ranks then see the
      same order of messages, which one communicator (NCCL) needs.
    - `just-in-time`: right before its first use.
    - a number: that many compute actions before its use.

    A receive never overtakes an earlier message of its channel. The result is proved again.
    """

    name = "receive"
    place: Placing

    def __post_init__(self) -> None:
        check_place(self.name, "place", self.place)

    def apply(self, program: Program) -> Program:
        if not program.lowered:
            raise PassError("the program has no messages yet: run the pass 'send-receive' first")
        rows = program.rows
        sent = program.changed(rows=rows.keep(~rows.is_kind(*RECEIVES)))
        return prove(self._record(sent, rows=place_receives(sent, self.place)), self.place)


def check_place(pass_name: str, option: str, place: Placing) -> None:
    known = ("paired", "just-in-time")
    if place in known or (isinstance(place, int) and not isinstance(place, bool) and place >= 0):
        return
    raise PassError(f"{option}={place} of pass {pass_name}: it must be {' or '.join(known)}, or a depth of at least 0")


def prove(program: Program, place: Placing) -> Program:
    """Return the program after a proof that no rank waits forever.

    Paired receives are placed along one order in which every rank gets to its end and both ends of every message stand at
    one moment, so that order is the proof, under either semantics.
    """
    if place != "paired":
        try:
            verify(program)
        except VerifyError as error:
            raise LoweringError(error.findings, f"no valid program came of placing receives {place!r}:\n{error}") from error
    return program


def refuse_broken(program: Program, rules: Collection[str] | None = None) -> None:
    """Refuse a program whose compute actions break these rules, by default all, with every finding about them."""
    schedule = program.schedule()
    findings = check(schedule, rules=rules)
    if findings:
        raise LoweringError(findings, f"the schedule cannot be lowered: {report(schedule, 'channels', findings)}")


def place_receives(sent: Program, place: Placing) -> Rows:
    """Rows with a receive for each send. An empty row, as when one rank is lowered alone, gets none."""
    linker = Linker(sent.rows, sent.placement, sent.graph, sent.units, lowered=False)
    messages = _Receives.of(linker)
    if place == "paired":
        return _pair(sent, linker, messages)
    return _place_ahead(sent.rows, messages, 0 if place == "just-in-time" else int(place))


@dataclass(frozen=True)
class _Receives:
    """One value per message, in the order of the rows: the send, the receive's code and rank, and the first entry that uses the message."""

    send: Ints
    code: Ints
    rank: Ints
    use: Ints
    channel: Ints

    @classmethod
    def of(cls, linker: Linker) -> _Receives:
        rows = linker.rows
        send = np.flatnonzero(rows.is_kind(*SENDS))
        stage, microbatch, target = rows.stage[send], rows.microbatch[send], peer_stages(rows)[send]
        forward = rows.kind[send] == Kind.SEND_F
        code = message_code(np.where(forward, *RECEIVES), target, stage, microbatch)
        rank = linker.placement.ranks_of(target, microbatch)
        low, high = np.minimum(stage, target), np.maximum(stage, target)
        use = np.where(forward, *(linker.first_use(way, low, high, microbatch) for way in (True, False)))
        channel = (rows.rank[send] * len(rows) + rank) * 2 + forward
        there = use >= 0
        return cls(send[there], code[there], rank[there], use[there], channel[there])


def _place_ahead(rows: Rows, messages: _Receives, depth: int) -> Rows:
    """Each receive `depth` compute actions before its use, and never behind a later message of its channel."""
    starts = np.unique(rows.group_starts[np.flatnonzero(rows.is_kind(*WORK))])
    turn = np.searchsorted(starts, rows.group_starts[messages.use])
    first = np.searchsorted(starts, rows.offsets[messages.rank])
    places = starts[np.maximum(turn - depth, first)]
    order = np.argsort(messages.channel, kind="stable")
    before = np.empty(len(places), dtype=np.int64)
    before[order] = _find_least_to_come(places[order], messages.channel[order])
    tie = np.empty(len(places), dtype=np.int64)
    tie[order] = np.arange(len(order))
    return rows.insert(before, messages.code, messages.rank, tie)


def _find_least_to_come(values: Ints, segment: Ints) -> Ints:
    """For each value the least of it and all later ones of its segment; segments are contiguous and ascending."""
    span = int(values.max(initial=0)) + 1
    lowered = values + segment * span
    return np.asarray(np.minimum.accumulate(lowered[::-1])[::-1] - segment * span, dtype=np.int64)


def _pair(sent: Program, linker: Linker, messages: _Receives) -> Rows:
    """Ranks take turns, in order, at one action each that is ready; a send and its receive stand at the moment of the sender's turn."""
    rows, links = linker.rows, linker.links()
    local, missing = links.local, links.missing
    is_send = rows.is_kind(*SENDS)
    acting = rows.keep(~is_send)
    # The place of each entry once the sends are removed; for a send, that of the entry before it.
    place = np.arange(len(rows.codes)) - np.cumsum(is_send)
    sender, joint = rows.rank[messages.send], links.meetings.list_waits(rows.rank)
    waits = Needs(
        place[np.concatenate((messages.send, joint.before, local.before))],
        place[np.concatenate((messages.use, joint.after, local.after))],
    )
    later = (sender > messages.rank, rows.rank[joint.before] > rows.rank[joint.after], np.ones(len(local.before), dtype=np.bool_))
    lag = np.concatenate(later).astype(np.int64)
    rounds = walk(acting, waits, lag)
    if len(missing.after) or not rounds.complete:
        refuse_broken(sent)
        raise PassError("the order cannot run: its compute actions could, but some send comes before the action that it needs")
    turn = rounds.step[acting.group[np.maximum(place, 0)]]
    return _merge(rows, messages, turn, turn[messages.send], sender)


def _merge(rows: Rows, messages: _Receives, turn: Ints, moment: Ints, sender: Ints) -> Rows:
    """Rows and receives in one order: by rank, then turn, then who acts in it, then as the sender has it."""
    num_ranks = len(rows)
    rank = np.concatenate((rows.rank, messages.rank))
    turns = np.concatenate((turn, moment))
    actor = np.concatenate((rows.rank, sender))
    within = np.concatenate((np.arange(len(rows.codes)), messages.send))
    order = np.lexsort((within, (rank * (int(turns.max(initial=0)) + 1) + turns) * num_ranks + actor))
    entries = np.concatenate((rows.codes, messages.code))
    return Rows.sorted_by(entries[order], rank[order], num_ranks)
