"""What each rank holds over time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.ir.kind import Kind
from penstock.ir.rows import Flags, Ints

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline

Floats = NDArray[np.float64]

CATEGORIES = ("activations", "weight stash", "receive buffers", "parameters")


@dataclass(frozen=True, eq=False)
class Curve:
    """A rank's memory: from `times[k]` on it holds `held[category][k]`, on top of the `static` that it always keeps."""

    times: Floats
    held: dict[str, Floats]
    static: float

    @cached_property
    def total(self) -> Floats:
        """Everything but the static part."""
        return np.asarray(np.sum(list(self.held.values()), axis=0), dtype=np.float64)

    @property
    def peak(self) -> float:
        return self.static + float(self.total.max(initial=0.0))

    @property
    def peak_time(self) -> float:
        """When the peak is first reached."""
        return float(self.times[int(np.argmax(self.total))]) if len(self.times) else 0.0


@dataclass(frozen=True)
class _Changes:
    """Changes of one category: when, in which place among equals, on which rank, and by how much."""

    time: Floats
    place: Ints
    rank: Ints
    size: Floats


def curves(timeline: Timeline) -> list[Curve]:
    """Every rank's curve.

    An activation is held from the start of F to the end of I or B, which leaves the weight stash that the end of W frees;
    a received message from its receive (in a schedule, its arrival) to the end of what uses it last; a sum of gradients for
    another rank, among the receive buffers, from the end of the first backward that adds to it to the end of the last; there too what
    is sent and waited for, from its send to the end of its WAIT_SEND, while what nobody waits for is the transport's; parameters
    from the start of UNSHARD to RESHARD. Ranks that never shard keep their parameters all the time.
    """
    made = [_activations(timeline), _stashes(timeline), _received(timeline), _unsharded(timeline)]
    category = np.repeat(np.arange(len(made)), [len(part.time) for part in made])
    time, place, rank, size = (np.concatenate([getattr(part, name) for part in made]) for name in ("time", "place", "rank", "size"))
    order = np.lexsort((place, time, rank))
    time, rank, size, category = time[order], rank[order], size[order], category[order]
    bounds = np.searchsorted(rank, np.arange(timeline.ranks + 1))
    static = _static(timeline)
    found = []
    for low, high, base in zip(bounds[:-1], bounds[1:], static, strict=True):
        held = {name: np.cumsum(np.where(category[low:high] == k, size[low:high], 0.0)) for k, name in enumerate(CATEGORIES)}
        found.append(Curve(time[low:high], held, base))
    return found


def _entries(timeline: Timeline, *kinds: Kind) -> Ints:
    return np.flatnonzero(timeline.table.rows.is_kind(*kinds))


def _sizes(timeline: Timeline, name: str, entries: Ints) -> Floats:
    table, rows = timeline.table, timeline.table.rows
    return timeline.costs.table(name, table.stages, table.microbatches)[rows.stage[entries], rows.microbatch[entries]]


def _at(timeline: Timeline, entries: Ints, size: Floats, times: Floats, after: bool) -> _Changes:
    """Changes at the start or the end of actions; at one time in the order of the row, and an action's end gives before it takes."""
    rows = timeline.table.rows
    node = rows.group[entries]
    return _Changes(times[node], node * 4 + 2 * after + (size > 0), rows.rank[entries], size)


def _together(*parts: _Changes) -> _Changes:
    return _Changes(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("time", "place", "rank", "size")))


def _activations(timeline: Timeline) -> _Changes:
    if not timeline.table.training:
        return _at(timeline, np.zeros(0, dtype=np.int64), np.zeros(0), timeline.start, after=False)
    takes, gives = _entries(timeline, Kind.F), _entries(timeline, Kind.B, Kind.I)
    return _together(
        _at(timeline, takes, _sizes(timeline, "activation", takes), timeline.start, after=False),
        _at(timeline, gives, -_sizes(timeline, "activation", gives), timeline.end, after=True),
    )


def _stashes(timeline: Timeline) -> _Changes:
    takes, gives = _entries(timeline, Kind.I), _entries(timeline, Kind.W)
    return _together(
        _at(timeline, takes, _sizes(timeline, "weight_stash", takes), timeline.end, after=True),
        _at(timeline, gives, -_sizes(timeline, "weight_stash", gives), timeline.end, after=True),
    )


def _received(timeline: Timeline) -> _Changes:
    messages, sizes = timeline.messages, timeline.flat.sizes(timeline.costs)
    graph = timeline.flat.graph()
    if timeline.table.lowered:
        time, place = timeline.start[graph.receive], graph.receive.astype(np.int64) * 4
    else:
        time, place = timeline.arrive, graph.user.astype(np.int64) * 4 - 1
    sums = np.flatnonzero(messages.begun != messages.maker)
    return _together(
        _Changes(time, place, messages.target, sizes),
        _at(timeline, messages.last, -sizes, timeline.end, after=True),
        _at(timeline, messages.begun[sums], sizes[sums], timeline.end, after=True),
        _at(timeline, messages.maker[sums], -sizes[sums], timeline.end, after=True),
        *_sent(timeline, sizes),
    )


def _sent(timeline: Timeline, sizes: Floats) -> tuple[_Changes, _Changes]:
    """Messages that the sender keeps until its WAIT_SEND."""
    rows, messages, retire = timeline.table.rows, timeline.messages, timeline.flat.graph().retire
    waits = np.flatnonzero(retire[rows.group] >= 0)
    message = retire[rows.group[waits]]
    return (
        _at(timeline, messages.before[message], sizes[message], timeline.start, after=False),
        _at(timeline, waits, -sizes[message], timeline.end, after=True),
    )


def _unsharded(timeline: Timeline) -> _Changes:
    rows = timeline.table.rows
    takes, gives = _entries(timeline, Kind.UNSHARD), _entries(timeline, Kind.RESHARD)
    size = np.array(timeline.costs.per_stage("parameters", timeline.table.stages))
    return _together(
        _at(timeline, takes, size[rows.stage[takes]], timeline.collective_start, after=False),
        _at(timeline, gives, -size[rows.stage[gives]], timeline.end, after=True),
    )


def is_sharded(timeline: Timeline) -> bool:
    flags: Flags = timeline.table.rows.is_kind(Kind.UNSHARD, Kind.RESHARD)
    return bool(flags.any())


def _static(timeline: Timeline) -> list[float]:
    """What each rank keeps throughout: shards where the program shards, else its stages' parameters."""
    kept: list[float] = timeline.of_ranks("shard" if is_sharded(timeline) else "parameters").tolist()
    return kept
