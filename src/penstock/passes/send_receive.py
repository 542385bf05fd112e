"""Add the messages between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir.dependencies import Linker, message_code
from penstock.ir.kind import RECEIVES, SENDS, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows
from penstock.passes.base import Pass
from penstock.passes.receive import Placing, check_place, place_receives, prove, refuse_broken


@dataclass(frozen=True)
class SendReceive(Pass):
    """A send right after each action whose output another rank needs, and its receive at the place that `receive` chooses.

    Stages on the same rank exchange nothing. An output goes once to each rank that reads it; the gradients of all its readers
    there go back as one sum, after the last of their backwards. An overlapped action is followed by the sends of all its parts.
    """

    name = "send-receive"
    receive: Placing = "paired"

    def __post_init__(self) -> None:
        check_place(self.name, "receive", self.receive)

    def apply(self, program: Program) -> Program:
        refuse_broken(program, ("known", "placed", "complete", "vocabulary", "joined"))
        return prove(self.place(program), self.receive)

    def place(self, program: Program) -> Program:
        """The program with its messages, not yet proved; also for some of the ranks, the rows of the others empty."""
        sent = add_sends(program)
        return self._record(sent, rows=place_receives(sent, self.receive), lowered=True)


def add_sends(program: Program) -> Program:
    """The program with its sends and no receives yet."""
    rows = program.rows
    if rows.is_kind(*SENDS, *RECEIVES).any():
        raise PassError("the program has sends or receives already; use the pass 'receive' to place its receives again")
    linker = program.linker
    sends = [_list_sends(linker, Kind.SEND_F), _list_sends(linker, Kind.SEND_B)]
    entries, makers = (np.concatenate(column) for column in zip(*sends, strict=True))
    added: Rows = rows.insert(rows.group_ends[makers], entries, rows.rank[makers], tie=makers)
    return program.changed(rows=added)


def _list_sends(linker: Linker, kind: Kind) -> tuple[Ints, Ints]:
    """The code of each send of this kind, and the entry that makes its data: of a sum, the last that adds to it."""
    rows, graph, placement = linker.rows, linker.graph, linker.placement
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
        maker, stage, other, microbatch = maker[far], stage[far], other[far], microbatch[far]
        low, high = linker.carrier_ends(forward, stage, other, microbatch)
        if forward:
            own = high == other
            maker, low, high, microbatch = maker[own], low[own], high[own], microbatch[own]
        entries.append(message_code(kind, *((low, high) if forward else (high, low)), microbatch))
        at.append(maker)
    code, maker = np.concatenate(entries), np.concatenate(at)
    if forward or not len(linker.find_shared(forward)[0]):
        return code, maker
    order = np.lexsort((maker, code))
    last = np.append(code[order][1:] != code[order][:-1], True)[: len(code)]
    edges = np.sort(order[last])
    return code[edges], maker[edges]
