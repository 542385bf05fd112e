"""Waits that retire sends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir.dependencies import message_code, peer_stages
from penstock.ir.kind import SEND_WAITS, SENDS, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows
from penstock.passes.base import Pass
from penstock.text.units import check_count
from penstock.verifier.verify import verify

_END = 1 << 62
"""A place behind every entry: the end of the row."""


@dataclass(frozen=True)
class WaitSend(Pass):
    """WAIT_SEND_F or WAIT_SEND_B once for each send: until then the sender keeps what it has sent.

    A send of activations is waited for after the backward of its stage and microbatch, by which time the receiver must have taken
    it; the others at the end of the row. `outstanding` is how many sends of a rank may be unretired at once: before a send that
    would be one too many, the rank waits for the first of its sends that is taken when ranks run one action each in turn. Waits that
    the program has already are placed anew, and the result is proved again.
    """

    name = "wait-send"
    outstanding: int | None = None

    def __post_init__(self) -> None:
        if self.outstanding is not None:
            check_count("outstanding of pass wait-send", self.outstanding, error=PassError)

    def apply(self, program: Program) -> Program:
        placed = self.place(program)
        verify(placed, max_outstanding_sends=self.outstanding)
        return placed

    def place(self, program: Program) -> Program:
        """The program with its waits, not yet proved."""
        if not program.lowered:
            raise PassError("the program has no messages yet: run the pass 'send-receive' first")
        bare = program.changed(rows=program.rows.keep(~program.rows.is_kind(*SEND_WAITS)))
        sends = np.flatnonzero(bare.rows.is_kind(*SENDS))
        places = _place_behind_backwards(bare, sends)
        if self.outstanding is not None:
            places = _Budget(bare, sends, places, self.outstanding).run()
        return self._record(bare, rows=_insert(bare, sends, places))


def _place_behind_backwards(program: Program, sends: Ints) -> Ints:
    """In front of which entry each send is waited for: behind the backward of the same stage and microbatch, else at the end."""
    rows, linker = program.rows, program.linker
    backward = linker.gradient_at(rows.stage[sends], rows.microbatch[sends])
    after = (rows.kind[sends] == Kind.SEND_F) & (backward > sends) & (rows.rank[backward] == rows.rank[sends])
    return np.where(after, rows.group_ends[backward], _END)


def _insert(program: Program, sends: Ints, places: Ints) -> Rows:
    rows = program.rows
    stage, microbatch, peer = rows.stage[sends], rows.microbatch[sends], peer_stages(rows)[sends]
    waits = message_code(np.where(rows.kind[sends] == Kind.SEND_F, *SEND_WAITS), stage, peer, microbatch)
    rank = rows.rank[sends]
    return rows.insert(np.where(places == _END, rows.offsets[rank + 1], places), waits, rank, tie=sends)


@dataclass
class _Budget:
    """Finds earlier places for waits, so that no rank has more than `limit` sends outstanding.

    It runs the program in rounds, one action per rank. A rank that is about to send with all places taken waits until one of its
    messages has been received. A rank can send if fewer than `limit` of its messages are under way, so whether all ranks get to their
    ends does not depend on which of the received messages is retired first: if they do not, no other places would do.
    """

    program: Program
    sends: Ints
    places: Ints
    limit: int

    def run(self) -> Ints:
        rows, places = self.program.rows, self.places.copy()
        if not len(self.sends):
            return places
        number = {int(send): at for at, send in enumerate(self.sends.tolist())}
        message_of = {receive: number[send] for send, receive in zip(*(ends.tolist() for ends in self.program.links.messages), strict=True)}
        needs = self._find_needs()
        done, taken = np.zeros(len(rows.codes), dtype=np.bool_).tolist(), [False] * len(self.sends)
        at, ends, group_ends = rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), rows.group_ends.tolist()
        pending: list[list[int]] = [[] for _ in at]
        moved = True
        while moved:
            moved = False
            for rank, end in enumerate(ends):
                entry = at[rank]
                if entry == end or not all(done[need] for part in range(entry, group_ends[entry]) for need in needs.get(part, ())):
                    continue
                held = pending[rank]
                held[:] = [send for send in held if places[send] > entry]  # retired where they stand
                if entry in number and len(held) >= self.limit:
                    ready = next((send for send in held if taken[send]), None)
                    if ready is None:
                        continue
                    places[ready] = entry
                    held.remove(ready)
                for part in range(entry, group_ends[entry]):
                    done[part] = True
                if entry in number:
                    held.append(number[entry])
                if entry in message_of:
                    taken[message_of[entry]] = True
                at[rank], moved = group_ends[entry], True
        stuck = next((rank for rank, end in enumerate(ends) if at[rank] < end), None)
        if stuck is not None:
            raise self._make_refusal(stuck, at[stuck], pending)
        return places

    def _find_needs(self) -> dict[int, list[int]]:
        """For each entry that uses a message or a collective, the sends or joins of other ranks that it waits for."""
        needs: dict[int, list[int]] = {}
        links = self.program.links
        for waits in (links.data, links.meetings.list_waits(self.program.rows.rank)):
            for before, after in zip(*(ends.tolist() for ends in waits), strict=True):
                needs.setdefault(after, []).append(before)
        return needs

    def _make_refusal(self, rank: int, entry: int, pending: list[list[int]]) -> PassError:
        rows = self.program.rows
        full = [(r, held) for r, held in enumerate(pending) if len(held) >= self.limit]
        rank, held = full[0] if full else (rank, pending[rank])
        shown = ", ".join(str(rows.part_at(int(self.sends[send]))) for send in held)
        return PassError(
            f"outstanding={self.limit} of pass wait-send: ranks would wait for each other forever. Rank {rank} has {shown} outstanding, "
            "and no receive of them can be posted before it sends more: raise the limit, or place the receives earlier"
        )
