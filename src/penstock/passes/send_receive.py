"""Messages for everything that crosses ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir.dependencies import message_code
from penstock.ir.kind import RECEIVES, SENDS, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows
from penstock.passes.base import Pass
from penstock.passes.receive import Placing, check_place, place_receives, prove


@dataclass(frozen=True)
class SendReceive(Pass):
    """A send right after each action whose output another rank needs, and its receive where `receive` says.

    Stages on the same rank exchange nothing. An overlapped action is followed by the sends of all its parts.
    """

    name = "send-receive"
    receive: Placing = "paired"

    def __post_init__(self) -> None:
        check_place(self.name, "receive", self.receive)

    def apply(self, program: Program) -> Program:
        return prove(self.place(program), self.receive)

    def place(self, program: Program) -> Program:
        """The program with its messages, not yet proved; also for some of the ranks, the rows of the others empty."""
        sent = add_sends(program)
        return self._passed(sent, rows=place_receives(sent, self.receive), lowered=True)


def add_sends(program: Program) -> Program:
    """The program with its sends and no receives yet."""
    rows = program.rows
    if rows.is_kind(*SENDS, *RECEIVES).any():
        raise PassError("the program has sends or receives already; use the pass 'receive' to place its receives anew")
    made = [_sends(program, Kind.SEND_F), _sends(program, Kind.SEND_B)]
    entries, makers = (np.concatenate(column) for column in zip(*made, strict=True))
    added: Rows = rows.insert(rows.group_ends[makers], entries, rows.rank[makers], tie=makers)
    return program.changed(rows=added)


def _sends(program: Program, kind: Kind) -> tuple[Ints, Ints]:
    """The code of each send of this kind, and the entry that makes what it sends."""
    rows, graph, placement = program.rows, program.graph, program.placement
    forward = kind is Kind.SEND_F
    makers = np.flatnonzero(rows.is_kind(Kind.F) if forward else rows.is_kind(Kind.B, Kind.I))
    table = graph.output_table if forward else graph.input_table
    entries: list[Ints] = [np.zeros(0, dtype=np.int64)]
    at: list[Ints] = [np.zeros(0, dtype=np.int64)]
    for column in range(table.shape[1]):
        other = table[rows.stage[makers], column]
        there = other >= 0
        maker, other = makers[there], other[there]
        stage, microbatch = rows.stage[maker], rows.microbatch[maker]
        far = placement.ranks_of(stage, microbatch) != placement.ranks_of(other, microbatch)
        entries.append(message_code(kind, stage[far], other[far], microbatch[far]))
        at.append(maker[far])
    return np.concatenate(entries), np.concatenate(at)
