"""A schedule or program as flat arrays for the event loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir.costs import Costs
from penstock.ir.dependencies import find_releases
from penstock.ir.kind import COMPUTE, COPIES, JOINS, SEND_WAITS, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Flags, Floats, Ints, find_first
from penstock.ir.table import Table
from penstock.simulator.event_loops.loops import Durations, Graph

Small = NDArray[np.int32]
_TIMES = {Kind.F: "f", Kind.B: "b", Kind.I: "i", Kind.W: "w"}
_SHARE_TIMES = {Kind.S: "s", Kind.T: "t"}
"""The costs of the kinds that occupy the compute lane: of a stage, and of a rank's share of the vocabulary."""


@dataclass(frozen=True)
class Flat:
    """The timing graph of a table: built once, timed under any costs. Nodes are the groups of `table.rows`."""

    table: Table

    @property
    def num_nodes(self) -> int:
        return int(self.table.rows.group_offsets[-1])

    @cached_property
    def messages(self) -> Messages:
        """The messages between ranks, in the order in which they are sent."""
        rows = self.table.rows
        _, maker, before, after, _, _ = self.table.deliveries
        source, target = rows.rank[before], rows.rank[after]
        backward = rows.kind[after] != Kind.F
        channel = (source * len(rows) + target) * 2 + backward
        keys, index = np.unique(channel, return_inverse=True)
        names = tuple((k // 2 // len(rows), k // 2 % len(rows), Kind.SEND_B if k % 2 else Kind.SEND_F) for k in keys.tolist())
        return Messages(before, after, maker, backward, source, target, index, names)

    def graph(self, costs: Costs | None = None) -> Graph:
        """The structure with the links that messages share under these costs; by default one per channel.

        Each direction of a link to the host is a lane too, which several ranks may share.
        """
        if costs is None:
            return self._independent
        graph = self._link_messages(costs)
        if costs.host_link_shared == 1 or not self._copies.any():
            return graph
        lane, count = self._number_lanes(costs.host_link_shared)
        return graph._replace(collective=lane, num_lanes=count, shares_lanes=True)

    def _link_messages(self, costs: Costs) -> Graph:
        """One link per channel, per direction of a pair, per direction of a rank, per rank, or as the lanes of the costs say."""
        messages, ranks, contention = self.messages, self.table.ranks, costs.contention
        if contention == "independent":
            return self._independent
        if costs.lanes is not None:
            lanes = np.array(costs.lanes, dtype=np.int64)[messages.source, messages.target]
            one, other, count = lanes[:, 0], lanes[:, 1], int(np.max(costs.lanes)) + 1
        elif contention == "pair":
            pairs, one = np.unique(messages.source * ranks + messages.target, return_inverse=True)
            other, count = one, len(pairs)
        elif contention == "duplex":
            one, other, count = messages.source, ranks + messages.target, 2 * ranks
        else:
            one, other, count = messages.source, messages.target, ranks
        return self._base._replace(link=_shrink(one), other_link=_shrink(other), num_links=count)

    @cached_property
    def _independent(self) -> Graph:
        """Cached, because gaps and paths read it at every step."""
        channel = _shrink(self.messages.channel)
        return self._base._replace(link=channel, other_link=channel, num_links=len(self.messages.channels))

    @cached_property
    def _base(self) -> Graph:
        rows, messages, num_nodes = self.table.rows, self.messages, self.num_nodes
        sender, user = rows.group[messages.before], rows.group[messages.after]
        need = np.argsort(user, kind="stable")
        gather_at, gather = self._gathers()
        receive, received = self._find_receives()
        slot, retire = self._link_slots(), self._retires()
        lane, num_lanes = self._number_lanes(1)
        meet, meet_at, join = self._number_meetings()
        empty = np.zeros(0, dtype=np.int32)
        return Graph(
            bounds=_shrink(rows.group_offsets),
            rank=np.repeat(np.arange(len(rows), dtype=np.int32), np.diff(rows.group_offsets)),
            need_at=_starts(user, num_nodes),
            need=_shrink(need),
            send_at=_starts(sender, num_nodes),
            gather_at=gather_at,
            gather=_shrink(gather),
            retire=_shrink(retire),
            collective=lane,
            received=_shrink(received),
            sender=_shrink(sender),
            user=_shrink(user),
            receive=_shrink(receive),
            slot=_shrink(slot),
            link=empty,
            other_link=empty,
            num_links=0,
            any_slots=bool((slot >= 0).any()),
            any_retires=bool((retire >= 0).any()),
            num_lanes=num_lanes,
            shares_lanes=False,
            meet=_shrink(meet),
            meet_at=meet_at,
            join=_shrink(join),
            any_meets=len(join) > 0,
        )

    @cached_property
    def _copies(self) -> Flags:
        """Whether each entry is an OFFLOAD or a RELOAD."""
        return self.table.rows.is_kind(*COPIES)

    def _number_lanes(self, host_link_shared: int) -> tuple[Small, int]:
        """The lane of what each node starts: one per rank for collectives of its replicas, one for those that all ranks join, then one per
        link to the host out and one back."""
        rows, ranks = self.table.rows, self.table.ranks
        links = -(-ranks // host_link_shared)
        lane = np.where(rows.is_kind(Kind.UNSHARD, Kind.REDUCE_GRAD), rows.rank, -1)
        lane = np.where(rows.is_kind(*JOINS), ranks, lane)
        if not self._copies.any():
            return _shrink(lane[rows.heads]), ranks + 1
        back = rows.kind == Kind.RELOAD
        lane = np.where(self._copies, ranks + 1 + back * links + rows.rank // host_link_shared, lane)
        return _shrink(lane[rows.heads]), ranks + 1 + 2 * links

    def _number_meetings(self) -> tuple[Ints, Small, Ints]:
        """For each node that joins a collective of all ranks the number of that collective, else -1; and each collective's joins."""
        rows, meetings = self.table.rows, self.table.links.meetings
        meet = np.full(self.num_nodes, -1, dtype=np.int64)
        order = np.argsort(meetings.joined, kind="stable")
        join = rows.group[meetings.join]
        meet[join] = meetings.joined
        return meet, _starts(meetings.joined[order], len(meetings.code)), join[order]

    def _gathers(self) -> tuple[Small, Ints]:
        """For each compute entry, the last UNSHARD of its stage on its rank before it; for each WAIT_REDUCE_GRAD, its reduction.

        For each backward of a moved activation, its RELOAD; for each OFFLOAD, the action that waits for its copy; and for each action that
        needs a collective of all ranks, its own rank's join.
        """
        rows, local = self.table.rows, self.table.links.local
        use, unshard = self._link_unshards()
        waited = rows.is_kind(Kind.WAIT_REDUCE_GRAD)[local.after] | rows.is_kind(Kind.RELOAD, *JOINS)[local.before]
        released = find_releases(rows)
        user = np.concatenate((use, local.after[waited], released.after))
        maker = np.concatenate((unshard, local.before[waited], released.before))
        order = np.argsort(user, kind="stable")
        return _starts(rows.group[user[order]], self.num_nodes), rows.group[maker[order]]

    def _link_unshards(self) -> tuple[Ints, Ints]:
        rows, stages = self.table.rows, self.table.stages
        unshards = np.flatnonzero(rows.is_kind(Kind.UNSHARD))
        if not len(unshards):
            return unshards, unshards
        uses = np.flatnonzero(rows.is_kind(*COMPUTE))
        span = len(rows.codes)
        key = (rows.rank * stages + rows.stage) * span + np.arange(span)
        order = np.argsort(key[unshards])
        at = np.searchsorted(key[unshards][order], key[uses]) - 1
        latest = unshards[order][np.maximum(at, 0)]
        real = (at >= 0) & (rows.rank[latest] == rows.rank[uses]) & (rows.stage[latest] == rows.stage[uses])
        return uses[real], latest[real]

    def _find_receives(self) -> tuple[Ints, Ints]:
        """Each message's receive node, and each node's received message; -1 if there is none."""
        rows, messages = self.table.rows, self.messages
        if not self.table.lowered:
            return np.full(len(messages.before), -1), np.full(self.num_nodes, -1)
        receive = rows.group[find_first(*self.table.links.messages, len(rows.codes))[messages.before]]
        return receive, find_first(receive, np.arange(len(receive)), self.num_nodes)

    def _retires(self) -> Ints:
        """For each node that is a WAIT_SEND, the message of its send; -1 for other nodes."""
        rows, local, messages = self.table.rows, self.table.links.local, self.messages
        waited = rows.is_kind(*SEND_WAITS)[local.after]
        if not waited.any():
            return np.full(self.num_nodes, -1)
        message_of = find_first(messages.before, np.arange(len(messages.before)), len(rows.codes))
        return find_first(rows.group[local.after[waited]], message_of[local.before[waited]], self.num_nodes)

    def _link_slots(self) -> Ints:
        """For each message, the one of its channel whose slot it takes over; -1 if there is a slot from the start."""
        messages = self.messages
        slot = np.full(len(messages.before), -1, dtype=np.int64)
        buffers = self.table.buffers if isinstance(self.table, Program) else None
        if buffers is None or not buffers.channels:
            return slot
        order = np.argsort(messages.channel, kind="stable")
        first = np.searchsorted(messages.channel[order], np.arange(len(messages.channels)))
        unlimited = len(order) + 1
        counts = np.array([buffers.channels.get(channel, unlimited) for channel in messages.channels], dtype=np.int64)
        place = np.arange(len(order)) - first[messages.channel[order]]
        back = counts[messages.channel[order]]
        late = np.flatnonzero(place >= back)
        slot[order[late]] = order[late - back[late]]
        return slot

    def durations(self, costs: Costs) -> Durations:
        """How long every node, message and collective takes."""
        table, rows = self.table, self.table.rows
        costs.check(table.stages, table.units, table.ranks)
        taken = np.zeros(len(rows.codes))
        for kind, name in _TIMES.items():
            self._fill(taken, rows.is_kind(kind), costs, name)
        for kind, name in _SHARE_TIMES.items():
            entries = np.flatnonzero(rows.is_kind(kind))
            if len(entries):
                places = rows.rank[entries], rows.stage[entries], rows.microbatch[entries]
                taken[entries] = costs.of_shares(name, (table.stages, table.units), *places)
        heads = np.flatnonzero(rows.heads)
        node = taken if len(heads) == len(taken) else np.add.reduceat(taken, heads) if len(heads) else taken
        if len(heads) != len(taken):
            node = np.where(np.diff(np.append(heads, len(taken))) > 1, node * costs.overlap, node)
        collective = np.zeros(len(rows.codes))
        for kind, name in ((Kind.UNSHARD, "unshard"), (Kind.REDUCE_GRAD, "reduce")):
            of_kind = rows.is_kind(kind)
            collective[of_kind] = np.array(costs.per_stage(name, table.stages))[rows.stage[of_kind]]
        for kind, name in ((Kind.BROADCAST, "broadcast"), (Kind.COMBINE, "combine")):
            self._fill(collective, rows.is_kind(kind), costs, name)
        if self._copies.any():
            self._fill(collective, self._copies, costs, "activation")
            rate = np.inf if costs.host_bandwidth is None else costs.host_bandwidth
            collective[self._copies] = costs.host_latency + collective[self._copies] / rate
        return Durations(node, self._find_travel(costs), collective[heads])

    def _fill(self, taken: Floats, of_kind: NDArray[np.bool_], costs: Costs, name: str) -> None:
        rows, table = self.table.rows, self.table
        value = getattr(costs, name)
        if isinstance(value, float):
            taken[of_kind] = value
        else:
            taken[of_kind] = costs.table(name, table.stages, table.units)[rows.stage[of_kind], rows.microbatch[of_kind]]

    def _find_travel(self, costs: Costs) -> Floats:
        return costs.travel(self.sizes(costs), self.messages.source, self.messages.target)

    def sizes(self, costs: Costs) -> Floats:
        """The size of each message: the output of the lower stage of its edge."""
        rows, messages = self.table.rows, self.messages
        lower = np.where(messages.backward, rows.stage[messages.after], rows.stage[messages.before])
        if isinstance(costs.output, float):
            return np.full(len(lower), costs.output)
        return costs.table("output", self.table.stages, self.table.units)[lower, rows.microbatch[messages.before]]


@dataclass(frozen=True)
class Messages:
    """One value per message: the entries that send, use and compute it, its way, its ranks and its channel."""

    before: Ints
    after: Ints
    """The first that uses it: later ones on the rank need not wait."""
    maker: Ints
    """The last that adds to it."""
    backward: NDArray[np.bool_]
    source: Ints
    target: Ints
    channel: Ints
    channels: tuple[tuple[int, int, Kind], ...]
    """Each channel's ranks, from and to, and the kind of its sends."""


def _shrink(values: Ints) -> Small:
    """Four bytes per index: a graph of a thousand ranks has tens of millions."""
    return values.astype(np.int32)


def _starts(owner: Ints, count: int) -> Small:
    """For items sorted by owner, the index of each owner's first item, and the number of items at the end."""
    starts = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(owner, minlength=count), out=starts[1:])
    return starts
