"""What is held in memory from when to when: the one home of these rules.

- An activation is held from the start of F to the end of I or B, of each slice if microbatches are cut.
- What a slice keeps for later slices (keys and values) is held from the start of its F to the end of the I or B of the microbatch's first
  slice, which is the last to run: the kept tensors of all slices lie in one memory. They stay on the device if the activation moves.
- The sums of gradients of what is kept are held from the start of the I or B of the microbatch's last slice, which is the first to run and
  adds to the sums of all earlier slices, to the end of the I or B of the slice itself.
- An activation that is moved to the host is not held between the end of its OFFLOAD and the start of its RELOAD. The OFFLOAD ends where its
  rank waits for the copy (`dependencies.find_releases`): at the start of the first F behind the compute action that the copy runs beside,
  or of the RELOAD itself. The host holds it from the start of the OFFLOAD to the start of the I or B, which waits for the copy back.
- The weight stash is held from the end of I to the end of W.
- A received message is held from its receive (in a schedule, from its arrival) to the end of the action that uses it last.
- A sum of gradients for another rank is held from the end of the first backward that adds to it to the end of the last one.
- A sent message that is waited for is held from the start of its SEND to the end of its WAIT_SEND; without a wait, the transport owns it.
- The logits of a rank's share of the vocabulary are held from the start of S to the end of T. What a BROADCAST brings is held on every rank
  from its start to the end of T (without a backward, of S), and a share's embeddings from the start of S to the end of the COMBINE.
- Gathered parameters are held from the start of UNSHARD to the end of RESHARD.
- All the time, a rank holds its shards; its parameters if nothing is sharded.

The verifier and the simulator read `list_changes` of a table. The planner, which has no table yet, reads `Lifetime`s: what one
microbatch, or one slice of it, holds on one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.dependencies import find_releases, peer_stages
from penstock.ir.kind import RECEIVES, SEND_WAITS, SPREAD, Kind
from penstock.ir.rows import Flags, Floats, Ints
from penstock.ir.table import Table

CATEGORIES = ("activations", "weight stash", "receive buffers", "parameters")
_ACTIVATIONS, _WEIGHT_STASH, _RECEIVE_BUFFERS, _PARAMETERS = range(4)


class When(IntEnum):
    """When, in an action, memory changes."""

    START = 0
    END = 1
    ARRIVAL = 2
    """When a message arrives that the action is the first to use; only in a schedule, which has no receives."""


# One microbatch on one stage -------------------------------------------------------------------------------------------


class Lifetime(NamedTuple):
    """How long something is held: from the start or end of an action to the end of an action. `I` stands for any backward."""

    size: str
    """Its name, as sizes are named."""
    begin: Kind
    when: When
    end: Kind


ACTIVATION = Lifetime("activation", Kind.F, When.START, Kind.I)
WEIGHT_STASH = Lifetime("weight_stash", Kind.I, When.END, Kind.W)
"""Nothing after a full backward."""
RECEIVED = Lifetime("received", Kind.F, When.START, Kind.F)
RETURNED = Lifetime("returned", Kind.I, When.START, Kind.I)
"""The messages that F and I use are held at least while these run."""

LIFETIMES = (ACTIVATION, WEIGHT_STASH, RECEIVED, RETURNED)


def net_changes(lifetimes: Iterable[Lifetime], sizes: Mapping[str, Any]) -> dict[tuple[Kind, When], Any]:
    """How much more is held from the start and from the end of each kind of action on.

    >>> changes = net_changes([ACTIVATION, WEIGHT_STASH], {"activation": 3.0, "weight_stash": 1.0})
    >>> changes[Kind.F, When.START], changes[Kind.I, When.END], changes[Kind.W, When.END]
    (3.0, -2.0, -1.0)
    """
    changes: dict[tuple[Kind, When], Any] = {}
    for lifetime in lifetimes:
        size, begin, end = sizes[lifetime.size], (lifetime.begin, lifetime.when), (lifetime.end, When.END)
        changes[begin] = changes.get(begin, 0.0) + size
        changes[end] = changes.get(end, 0.0) - size
    return changes


class KeptSizes(NamedTuple):
    """What changes beside activations and stashes, for every stage (row) and microbatch or slice (column)."""

    taken: Floats
    """When an F starts: what its slice keeps."""
    opened: Floats
    """When an I or B starts: the sums of gradients of all other slices, if its slice is the microbatch's last."""
    freed: Floats
    """When an I or B ends: the sum of its own slice, and what all slices have kept if it is the microbatch's first."""


def tabulate_kept(costs: Costs, stages: int, units: int, slices: int) -> KeptSizes:
    """What slices keep for later ones and the sums of its gradients."""
    kept, sums = (costs.table(name, stages, units) for name in ("kept", "kept_gradients"))
    number = np.arange(units) % slices
    sums[:, number == slices - 1] = 0.0
    opened = np.where(number == slices - 1, _sum_slices(sums, slices), 0.0)
    return KeptSizes(kept, opened, sums + np.where(number == 0, _sum_slices(kept, slices), 0.0))


def _sum_slices(sizes: Floats, slices: int) -> Floats:
    """For each slice, the sum over all slices of its microbatch."""
    stages, units = sizes.shape
    return np.repeat(sizes.reshape(stages, units // slices, slices).sum(axis=2), slices, axis=1)


# A schedule or program -------------------------------------------------------------------------------------------------


class Changes(NamedTuple):
    """Changes of the memory held, one value per change in each column."""

    category: Ints
    """Index into `CATEGORIES`."""
    entry: Ints
    """The entry of `table.rows` whose action makes the change."""
    when: Ints
    """In that action. Changes at an arrival come one per message, in the order of `table.deliveries`."""
    size: Floats
    """Negative when memory is freed."""


def list_changes(table: Table, costs: Costs) -> Changes:
    """Every change of memory in a schedule or program. Without a backward no activation is held."""
    parts = [*_list_stage_changes(table, costs), *_list_message_changes(table, costs)]
    return Changes(*(np.concatenate([getattr(part, name) for part in parts]) for name in Changes._fields))


def _list_stage_changes(table: Table, costs: Costs) -> list[Changes]:
    """Activations, stashes and parameters: changes that a kind of action makes by itself."""
    activation, stash = (_read_sizes(costs, table, name) for name in ("activation", "weight_stash"))
    parameters = np.array(costs.per_stage("parameters", table.stages))[:, None] * np.ones(table.units)
    activations = [
        (_ACTIVATIONS, (Kind.F,), When.START, activation),
        (_ACTIVATIONS, (Kind.B, Kind.I), When.END, -activation),
        (_WEIGHT_STASH, (Kind.I,), When.END, stash),
        (_WEIGHT_STASH, (Kind.W,), When.END, -stash),
    ]
    gathered = [
        (_PARAMETERS, (Kind.UNSHARD,), When.START, parameters),
        (_PARAMETERS, (Kind.RESHARD,), When.END, -parameters),
    ]
    rows, inside = table.rows, _find_inside(table)
    changes = []
    shares = _list_shares(table, costs)
    for category, kinds, when, sizes in (activations + _list_kept(table, costs) if table.training else []) + shares + gathered:
        entries = np.flatnonzero(rows.is_kind(*kinds) & inside)
        changes.append(_list_changes(category, entries, when, sizes[rows.stage[entries], rows.microbatch[entries]]))
    return _list_logits(table, costs) + changes + _list_moves(table, activation)


def _list_kept(table: Table, costs: Costs) -> list[tuple[int, tuple[Kind, ...], When, Floats]]:
    """What slices keep for later ones, and the sums of its gradients."""
    if costs.kept == 0.0 and costs.kept_gradients == 0.0:
        return []
    taken, opened, freed = tabulate_kept(costs, table.stages, table.units, table.slices)
    backwards = Kind.B, Kind.I
    return [
        (_ACTIVATIONS, (Kind.F,), When.START, taken),
        (_ACTIVATIONS, backwards, When.START, opened),
        (_ACTIVATIONS, backwards, When.END, -freed),
    ]


def _list_logits(table: Table, costs: Costs) -> list[Changes]:
    """The logits of each rank's share of the vocabulary, of which ranks may have more or less."""
    rows, inside, changes = table.rows, _find_inside(table), []
    for kind, when, sign in ((Kind.S, When.START, 1.0), (Kind.T if table.training else Kind.S, When.END, -1.0)):
        entries = np.flatnonzero(rows.is_kind(kind) & inside)
        places = rows.rank[entries], rows.stage[entries], rows.microbatch[entries]
        changes.append(_list_changes(_ACTIVATIONS, entries, when, sign * costs.of_shares("logits", (table.stages, table.units), *places)))
    return changes


def _list_shares(table: Table, costs: Costs) -> list[tuple[int, tuple[Kind, ...], When, Floats]]:
    """What a spread vocabulary holds on every rank besides: as much on each."""
    if not table.rows.is_kind(*SPREAD).any():
        return []
    brought, made = _read_sizes(costs, table, "output"), _read_sizes(costs, table, "output")
    made[1:] = 0.0
    if not table.training:
        brought[0] = 0.0
    last = Kind.T if table.training else Kind.S
    return [
        (_RECEIVE_BUFFERS, (Kind.BROADCAST,), When.START, brought),
        (_RECEIVE_BUFFERS, (last,), When.END, -brought),
        (_RECEIVE_BUFFERS, (Kind.S,), When.START, made),
        (_RECEIVE_BUFFERS, (Kind.COMBINE,), When.END, -made),
    ]


def _list_moves(table: Table, activation: Floats) -> list[Changes]:
    """Activations that leave the device and come back."""
    rows, inside, (moved, released) = table.rows, _find_inside(table), find_releases(table.rows)
    moved, released = moved[inside[moved]], released[inside[moved]]
    back = np.flatnonzero(rows.is_kind(Kind.RELOAD) & inside)
    return [
        _list_changes(_ACTIVATIONS, released, When.START, -activation[rows.stage[moved], rows.microbatch[moved]]),
        _list_changes(_ACTIVATIONS, back, When.START, activation[rows.stage[back], rows.microbatch[back]]),
    ]


def list_host_changes(table: Table, costs: Costs) -> Changes:
    """Every change of the host memory that holds activations of a rank."""
    rows, local, activation = table.rows, table.links.local, _read_sizes(costs, table, "activation")
    taken = np.flatnonzero(rows.is_kind(Kind.OFFLOAD) & _find_inside(table))
    free = local.after[rows.is_kind(Kind.RELOAD)[local.before] & rows.is_kind(Kind.B, Kind.I)[local.after]]
    parts = [
        _list_changes(_ACTIVATIONS, entries, When.START, sign * activation[rows.stage[entries], rows.microbatch[entries]])
        for entries, sign in ((taken, 1.0), (free, -1.0))
    ]
    return Changes(*(np.concatenate([getattr(part, name) for part in parts]) for name in Changes._fields))


def _find_inside(table: Table) -> Flags:
    return (table.rows.stage < table.stages) & (table.rows.microbatch < table.units)


def _list_message_changes(table: Table, costs: Costs) -> list[Changes]:
    """Received messages until their last use, sums of gradients until their last part, sent messages until their wait."""
    rows, deliveries, output = table.rows, table.deliveries, _read_sizes(costs, table, "output")
    if table.lowered:
        local = table.links.local
        used = np.flatnonzero(rows.is_kind(*RECEIVES)[local.before])
        last = np.full(len(rows.codes), -1, dtype=np.int64)
        np.maximum.at(last, local.before[used], local.after[used])
        sent = np.full(len(rows.codes), len(rows.codes), dtype=np.int64)
        sent[table.links.messages.after] = table.links.messages.before
        begin, when = np.flatnonzero(last >= 0), When.START
        begin = begin[np.argsort(sent[begin], kind="stable")]  # the order of `table.deliveries`, in which the page adds them up too
        last = last[begin]
        lower = np.minimum(rows.stage[begin], peer_stages(rows)[begin])
    else:
        begin, when, last = deliveries.first, When.ARRIVAL, deliveries.last
        lower = np.minimum(rows.stage[deliveries.sent], rows.stage[begin])
    size = output[lower, rows.microbatch[begin]]
    sums = np.flatnonzero(deliveries.begun != deliveries.made)
    begun, makers = deliveries.begun[sums], deliveries.made[sums]
    partial = output[deliveries.peer[sums], rows.microbatch[begun]]
    waits = np.flatnonzero(rows.is_kind(*SEND_WAITS)[table.links.local.after])
    send, wait = table.links.local.before[waits], table.links.local.after[waits]
    sizes = output[np.minimum(rows.stage[send], peer_stages(rows)[send]), rows.microbatch[send]]
    return [
        _list_changes(_RECEIVE_BUFFERS, begin, when, size),
        _list_changes(_RECEIVE_BUFFERS, last, When.END, -size),
        _list_changes(_RECEIVE_BUFFERS, begun, When.END, partial),
        _list_changes(_RECEIVE_BUFFERS, makers, When.END, -partial),
        _list_changes(_RECEIVE_BUFFERS, send, When.START, sizes),
        _list_changes(_RECEIVE_BUFFERS, wait, When.END, -sizes),
    ]


def _read_sizes(costs: Costs, table: Table, name: str) -> Floats:
    return costs.table(name, table.stages, table.units)


def _list_changes(category: int, entries: Ints, when: When, size: Floats) -> Changes:
    return Changes(np.full(len(entries), category), entries, np.full(len(entries), int(when)), size)


def sum_static(table: Table, costs: Costs) -> Floats:
    """The memory that each rank holds all the time."""
    sharded = table.rows.is_kind(Kind.UNSHARD, Kind.RESHARD).any()
    return costs.per_rank("shard" if sharded else "parameters", table.placement)
