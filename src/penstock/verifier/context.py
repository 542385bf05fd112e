"""The input of every rule: the table under proof, arrays that several rules read, and small array helpers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.ir import codes
from penstock.ir.costs import Costs
from penstock.ir.dependencies import Linker, peer_stages
from penstock.ir.graph import StageGraph
from penstock.ir.kind import RECEIVES, SEND_WAITS, SENDS, Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Flags, Ints, Rows, find_first
from penstock.ir.table import Table
from penstock.verifier.finding import Finding, Severity


@dataclass(frozen=True)
class Context:
    """The table under proof. Arrays have one value per entry of `rows` unless they say otherwise."""

    table: Table
    semantics: str = "channels"
    costs: Costs = field(default_factory=Costs)
    limits: tuple[float, ...] | None = None
    """The memory limit of each rank."""
    host_limits: tuple[float, ...] | None = None
    """The limit of each rank's activations in host memory."""
    in_bytes: bool = False
    """Whether a limit was given with a unit, so that sizes are bytes."""
    max_outstanding_sends: int | None = None
    """How many sends each rank may have outstanding: sent, and not yet waited for."""

    @property
    def rows(self) -> Rows:
        return self.table.rows

    @property
    def placement(self) -> Placement:
        return self.table.placement

    @property
    def graph(self) -> StageGraph:
        return self.table.graph

    @cached_property
    def linker(self) -> Linker:
        return self.table.linker

    # Where entries belong ---------------------------------------------------------------------------------------------

    @cached_property
    def inside(self) -> Flags:
        """Stage, microbatch and slice are within the counts."""
        return (self.rows.stage < self.table.stages) & (self.rows.microbatch < self.table.units)

    @cached_property
    def communicates(self) -> Flags:
        return self.rows.is_kind(*SENDS, *RECEIVES)

    @cached_property
    def home(self) -> Ints:
        """The rank that the placement gives the entry's stage and microbatch; -1 outside the counts."""
        home = np.full(len(self.rows.codes), -1, dtype=np.int64)
        home[self.inside] = self.placement.ranks_of(self.rows.stage[self.inside], self.rows.microbatch[self.inside])
        return home

    @cached_property
    def at_home(self) -> Flags:
        """On the rank of its stage and microbatch; meaningless for sharding and reduction, which have no microbatch."""
        return np.equal(self.home, self.rows.rank)

    @cached_property
    def cell(self) -> Ints:
        """Stage, microbatch and slice in one number; meaningless outside the counts."""
        return self.rows.stage * self.table.units + self.rows.microbatch

    def find_first(self, *kinds: Kind) -> Ints:
        """For each cell, the first entry of these kinds, -1 if there is none."""
        entries = np.flatnonzero(self.rows.is_kind(*kinds) & self.inside)
        return find_first(self.cell[entries], entries, self.table.stages * self.table.units)

    # Messages ---------------------------------------------------------------------------------------------------------

    @cached_property
    def edge(self) -> Ints:
        """The edge that a communication entry goes along; -1 for other entries and if there is no such edge."""
        edge = np.full(len(self.rows.codes), -1, dtype=np.int64)
        entries = np.flatnonzero(self.communicates & self.inside)
        edge[entries] = self._list_edges(entries)
        return edge

    def _list_edges(self, entries: Ints) -> Ints:
        """The edges that sends, receives and waits for sends go along; -1 if there is no such edge."""
        rows = self.rows
        stage, peer = rows.stage[entries], peer_stages(rows)[entries]
        up = rows.is_kind(Kind.SEND_F, Kind.RECV_B, Kind.WAIT_SEND_F)[entries]
        return np.where(up == (stage < peer), self.linker.edge_between(stage, peer), -1)

    @cached_property
    def along_edge(self) -> Flags:
        """Whether a communication entry, or a wait for a send, goes along an edge of the graph."""
        waits = np.flatnonzero(self.rows.is_kind(*SEND_WAITS) & self.inside)
        along = self.edge >= 0
        along[waits] = self._list_edges(waits) >= 0
        return along

    @cached_property
    def message(self) -> Ints:
        """The edge that a message is named after and its microbatch in one number, the same for both directions; -1 without an edge."""
        return np.where(self.edge >= 0, self.edge * self.table.units + self.rows.microbatch, -1)

    @cached_property
    def away(self) -> Ints:
        """The rank at the other end of a communication entry, -1 if there is none."""
        away, entries = np.full(len(self.rows.codes), -1, dtype=np.int64), np.flatnonzero(self.edge >= 0)
        ends = self.graph.edge_table[self.edge[entries]]
        other = np.where(ends[:, 0] == self.rows.stage[entries], ends[:, 1], ends[:, 0])
        away[entries] = self.placement.ranks_of(other, self.rows.microbatch[entries])
        return away

    @cached_property
    def channel(self) -> Ints:
        """Source rank, target rank and kind of traffic in one number; -1 if the entry is not one end of a message between two ranks."""
        rows, ranks = self.rows, self.table.ranks
        sends, backward = rows.is_kind(*SENDS), rows.is_kind(Kind.SEND_B, Kind.RECV_B)
        source, target = np.where(sends, rows.rank, self.away), np.where(sends, self.away, rows.rank)
        real = (self.edge >= 0) & self.at_home & (self.away != rows.rank)
        return np.where(real, (source * ranks + target) * 2 + backward, -1)

    # Words ------------------------------------------------------------------------------------------------------------

    def channel_name(self, channel: int) -> str:
        source, target = divmod(channel // 2, self.table.ranks)
        return f"rank {source} -> rank {target} ({'gradients' if channel % 2 else 'activations'})"

    def name(self, entry: int) -> str:
        """The entry as text."""
        return str(self.rows.part_at(entry))

    def name_of(self, kind: Kind, stage: int, unit: int) -> str:
        """A compute action as text, which need not be in the table."""
        return str(self.rows.action_for(codes.pack(stage, int(kind), unit)))

    def unit_name(self, unit: int) -> str:
        """`microbatch 3`, or `microbatch 3, slice 1`."""
        microbatch, part = divmod(unit, self.table.slices)
        return f"microbatch {microbatch}" + (f", slice {part}" if self.table.slices > 1 else "")

    @property
    def units_name(self) -> str:
        """`0..7`, or `0..7, slices 0..3`: the range that `unit_name` is in."""
        return f"0..{self.table.microbatches - 1}" + (f", slices 0..{self.table.slices - 1}" if self.table.slices > 1 else "")

    def place(self, entry: int) -> str:
        return f"step {int(self.rows.step[entry])} of rank {int(self.rows.rank[entry])}"

    def report(self, rule: str, entry: int, message: str, remedy: str, severity: Severity = Severity.WRONG) -> Finding:
        """A finding at an entry."""
        rank, step = int(self.rows.rank[entry]), int(self.rows.step[entry])
        return Finding(rule, severity, rank, step, str(self.rows.action_at(entry)), message, remedy, self.table)

    def report_missing(self, rule: str, rank: int, action: str, message: str, remedy: str, *, beside: int = -1) -> Finding:
        """A finding about a missing action, placed beside an entry of its rank or at the end of the row."""
        if beside >= 0 and self.rows.rank[beside] == rank:
            step = int(self.rows.step[beside])
        else:
            step = max(0, int(np.diff(self.rows.group_offsets)[rank]) - 1)
        return Finding(rule, Severity.WRONG, rank, step, action, message, remedy, self.table)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th."""
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def position_in(keys: Ints) -> Ints:
    """For each value of a sorted array, how many equal ones come before it."""
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else np.zeros(0, dtype=np.int64)
    return np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))


def find_repeated(keys: Ints, entries: Ints) -> tuple[Ints, Ints]:
    """The entries with the key of an earlier entry, and for each the first entry with that key."""
    order = np.argsort(keys, kind="stable")
    place = position_in(keys[order])
    later = np.flatnonzero(place)
    return entries[order[later]], entries[order[later - place[later]]]
