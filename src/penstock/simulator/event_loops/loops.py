"""The event loops, written so that plain Python and numba run the same code on lists and on arrays.

A node is one action of one rank. A rank runs its nodes in order: each begins when the one before has ended, what it waits for
has arrived, its parameters are gathered and, for a send, a slot is free. A wait for a send begins when the message is there and its
receive is posted. What it sends leaves when it ends and the link is free. A copy to the host or back starts when its node has ended and
the lane is free; the nodes that need it wait for its end. A collective of all ranks starts when all have joined it and the one before it
has ended, one at a time for the whole pipeline; a rank that joins goes on at once, and the nodes that need its result wait for its end.

`run` compiles the loops by numba, cached on disk, if numba is installed; otherwise they run in plain Python.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtraError, ScheduleError

# Lists in the plain loop, arrays in the compiled one.
Column = Any


class Graph(NamedTuple):
    """The waits between nodes, independent of times. Messages are sorted by the node that sends them."""

    bounds: Column
    """Each rank's first node, and the number of nodes."""
    rank: Column
    need_at: Column
    """Node n waits for the messages `need[need_at[n] : need_at[n + 1]]`."""
    need: Column
    send_at: Column
    """Node n sends the messages from `send_at[n]` up to `send_at[n + 1]`."""
    gather_at: Column
    gather: Column
    """Node n waits for the collectives of the nodes `gather[gather_at[n] : gather_at[n + 1]]`: its parameters, or a reduction."""
    retire: Column
    """The message that the node waits to be taken, -1 for none."""
    collective: Column
    """The lane on which the node starts a collective or a copy to or from the host, -1 for other nodes."""
    received: Column
    """The message that the node receives, -1 for other nodes."""
    sender: Column
    user: Column
    """Each message's sending and using node."""
    receive: Column
    """Each message's receive, -1 in a schedule, which has none."""
    slot: Column
    """The message that must be taken before this one can be sent, -1 for none."""
    link: Column
    other_link: Column
    """The links that each message occupies while it travels; the same twice if it is one."""
    num_links: int
    any_slots: bool
    """Whether any message waits for a slot."""
    any_retires: bool
    """Whether any node waits for a message of its own to be taken."""
    num_lanes: int
    """One per rank for collectives, then one per link to the host and direction."""
    shares_lanes: bool
    """Whether several ranks start copies on one lane."""
    meet: Column
    """The collective of all ranks that the node joins, -1 for other nodes."""
    meet_at: Column
    join: Column
    """Collective k is joined by the nodes `join[meet_at[k] : meet_at[k + 1]]`."""
    any_meets: bool
    """Whether any node joins a collective of all ranks."""


class Durations(NamedTuple):
    """How long everything takes."""

    node: Column
    message: Column
    collective: Column


class Times(NamedTuple):
    """When everything happens; -1 if it never does."""

    start: Column
    end: Column
    depart: Column
    arrive: Column
    collective_start: Column
    collective_end: Column


def run_independent(  # noqa: PLR0912, PLR0915, PLR0917 - one flat loop: calls would cost more than its lines do
    graph: Graph,
    takes: Durations,
    times: Times,
    at: Column,
    now: Column,
    stack: Column,
    queued: Column,
    free: Column,
    lane: Column,
    arrived: Column,
    latest: Column,
) -> None:
    """No link or lane is shared: a rank runs on as far as it can, in any order of ranks, with the same result.

    `arrived` counts the ranks that have joined each collective of all ranks, and `latest` is when the last of them did.
    """
    bounds, rank_of, need_at, need, send_at = graph.bounds, graph.rank, graph.need_at, graph.need, graph.send_at
    gather_at, gather, collective, received = graph.gather_at, graph.gather, graph.collective, graph.received
    sender, user, receive, slot, link = graph.sender, graph.user, graph.receive, graph.slot, graph.link
    duration, travel, collect = takes.node, takes.message, takes.collective
    start, end, depart, arrive = times.start, times.end, times.depart, times.arrive
    collective_start, collective_end = times.collective_start, times.collective_end
    any_slots, any_gathers, any_retires, retire = graph.any_slots, len(gather) > 0, graph.any_retires, graph.retire
    any_meets, meet, meet_at, join = graph.any_meets, graph.meet, graph.meet_at, graph.join
    ranks = len(bounds) - 1
    top = ranks
    while top > 0:
        top -= 1
        rank = stack[top]
        queued[rank] = 0
        node, last, clock = at[rank], bounds[rank + 1], now[rank]
        while node < last:
            begin = clock
            blocked = False
            k, stop = need_at[node], need_at[node + 1]
            while k < stop:
                arrival = arrive[need[k]]
                if arrival < 0:
                    blocked = True
                    break
                if arrival > begin:
                    begin = arrival
                k += 1
            if blocked:
                break
            message, stop = send_at[node], send_at[node + 1]
            if any_slots and message < stop:
                for part in range(message, stop):
                    earlier = slot[part]
                    if earlier >= 0:
                        taken = start[receive[earlier]]
                        if taken < 0:
                            blocked = True
                            break
                        if taken > begin:
                            begin = taken
                        if arrive[earlier] > begin:
                            begin = arrive[earlier]
                if blocked:
                    break
            if any_retires and retire[node] >= 0:
                sent = retire[node]
                taken = start[receive[sent]]
                if taken < 0:
                    break
                if taken > begin:
                    begin = taken
                if arrive[sent] > begin:
                    begin = arrive[sent]
            if any_gathers:
                for k in range(gather_at[node], gather_at[node + 1]):
                    if collective_end[gather[k]] > begin:
                        begin = collective_end[gather[k]]
                    elif any_meets and meet[gather[k]] >= 0 and collective_end[gather[k]] < 0:
                        blocked = True
                if blocked:
                    break
            clock = begin + duration[node]
            start[node] = begin
            end[node] = clock
            while message < stop:
                way, using = link[message], user[message]
                leave = free[way]
                if clock > leave:
                    leave = clock
                depart[message] = leave
                leave += travel[message]
                arrive[message] = leave
                free[way] = leave
                other = rank_of[using]
                if at[other] == using and not queued[other]:
                    queued[other] = 1
                    stack[top] = other
                    top += 1
                message += 1
            if (any_slots or any_retires) and received[node] >= 0:
                other = rank_of[sender[received[node]]]
                if not queued[other] and at[other] < bounds[other + 1]:
                    queued[other] = 1
                    stack[top] = other
                    top += 1
            if any_meets and meet[node] >= 0:
                number = meet[node]
                arrived[number] += 1
                if clock > latest[number]:
                    latest[number] = clock
                if arrived[number] == ranks:
                    way = collective[node]
                    begin = latest[number] if latest[number] > lane[way] else lane[way]
                    lane[way] = begin + collect[node]
                    for k in range(meet_at[number], meet_at[number + 1]):
                        collective_start[join[k]] = begin
                        collective_end[join[k]] = lane[way]
                        other = rank_of[join[k]]
                        if other != rank and not queued[other] and at[other] < bounds[other + 1]:
                            queued[other] = 1
                            stack[top] = other
                            top += 1
            elif collective[node] >= 0:
                way = collective[node]
                begin = clock if clock > lane[way] else lane[way]
                collective_start[node] = begin
                lane[way] = begin + collect[node]
                collective_end[node] = lane[way]
            node += 1
        at[rank] = node
        now[rank] = clock


def run_shared(  # noqa: PLR0912, PLR0915, PLR0917
    graph: Graph,
    takes: Durations,
    times: Times,
    at: Column,
    now: Column,
    heap: Column,
    state: Column,
    free: Column,
    lane: Column,
    last_on: Column,
    held_by: Column,
    arrived: Column,
) -> None:
    """Links that several channels share, lanes that several ranks share: first come, first served, and lower ranks first at the same time.

    `heap` holds the ranks that have something to do, the earliest first; `state` is 1 while a rank's node is running,
    0 when it is to try the node it is at, and 2 when it waits for another rank. `last_on` is the last message of each link;
    `held_by` gets, for each message that had to wait for a link, the message that held it. `arrived` counts the ranks that have joined each
    collective of all ranks.
    """
    bounds, rank_of, need_at, need, send_at = graph.bounds, graph.rank, graph.need_at, graph.need, graph.send_at
    gather_at, gather, collective, received = graph.gather_at, graph.gather, graph.collective, graph.received
    sender, user, receive, slot = graph.sender, graph.user, graph.receive, graph.slot
    start, end, depart, arrive = times.start, times.end, times.depart, times.arrive
    size = len(bounds) - 1
    while size > 0:
        rank = heap[0]
        size = _pop(heap, now, size)
        clock = now[rank]
        node = at[rank]
        if state[rank] == 1:
            if graph.any_meets and graph.meet[node] >= 0:
                number = graph.meet[node]
                arrived[number] += 1
                if arrived[number] == len(bounds) - 1:
                    way = collective[node]
                    begin = clock if clock > lane[way] else lane[way]
                    lane[way] = begin + takes.collective[node]
                    for k in range(graph.meet_at[number], graph.meet_at[number + 1]):
                        times.collective_start[graph.join[k]] = begin
                        times.collective_end[graph.join[k]] = lane[way]
                        other = rank_of[graph.join[k]]
                        if state[other] == 2:
                            state[other] = 0
                            if now[other] < clock:
                                now[other] = clock
                            size = _push(heap, now, size, other)
            elif collective[node] >= 0:
                way = collective[node]
                begin = clock if clock > lane[way] else lane[way]
                times.collective_start[node] = begin
                lane[way] = begin + takes.collective[node]
                times.collective_end[node] = lane[way]
            at[rank] = node + 1
            for message in range(send_at[node], send_at[node + 1]):
                begin = clock
                for way in (graph.link[message], graph.other_link[message]):
                    if free[way] > begin:
                        begin = free[way]
                        held_by[message] = last_on[way]
                depart[message] = begin
                begin += takes.message[message]
                arrive[message] = begin
                for way in (graph.link[message], graph.other_link[message]):
                    free[way] = begin
                    last_on[way] = message
                other = rank_of[user[message]]
                if state[other] == 2 and at[other] == user[message]:
                    state[other] = 0
                    if now[other] < clock:
                        now[other] = clock
                    size = _push(heap, now, size, other)
            if received[node] >= 0:
                other = rank_of[sender[received[node]]]
                if state[other] == 2:
                    state[other] = 0
                    if now[other] < clock:
                        now[other] = clock
                    size = _push(heap, now, size, other)
            state[rank] = 0
            node += 1
        if node == bounds[rank + 1]:
            continue
        begin = clock
        blocked = False
        for k in range(need_at[node], need_at[node + 1]):
            arrival = arrive[need[k]]
            if arrival < 0:
                blocked = True
            elif arrival > begin:
                begin = arrival
        for k in range(gather_at[node], gather_at[node + 1]):
            if times.collective_end[gather[k]] > begin:
                begin = times.collective_end[gather[k]]
            elif graph.any_meets and graph.meet[gather[k]] >= 0 and times.collective_end[gather[k]] < 0:
                blocked = True
        for message in range(send_at[node], send_at[node + 1]):
            earlier = slot[message]
            if earlier >= 0:
                if start[receive[earlier]] < 0:
                    blocked = True
                else:
                    begin = max(begin, start[receive[earlier]], arrive[earlier])
        if graph.any_retires and graph.retire[node] >= 0:
            sent = graph.retire[node]
            if start[receive[sent]] < 0:
                blocked = True
            else:
                begin = max(begin, start[receive[sent]], arrive[sent])
        if blocked:
            state[rank] = 2
            continue
        start[node] = begin
        end[node] = begin + takes.node[node]
        now[rank] = end[node]
        state[rank] = 1
        size = _push(heap, now, size, rank)


def _is_before(now: Column, one: int, other: int) -> bool:
    return now[one] < now[other] or (now[one] == now[other] and one < other)


def _push(heap: Column, now: Column, size: int, rank: int) -> int:
    """Add a rank; the new size."""
    place = size
    heap[place] = rank
    while place > 0:
        above = (place - 1) // 2
        if not _is_before(now, heap[place], heap[above]):
            break
        heap[place], heap[above] = heap[above], heap[place]
        place = above
    return size + 1


def _pop(heap: Column, now: Column, size: int) -> int:
    """Remove the first rank; the new size."""
    size -= 1
    heap[0] = heap[size]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            return size
        if below + 1 < size and _is_before(now, heap[below + 1], heap[below]):
            below += 1
        if not _is_before(now, heap[below], heap[place]):
            return size
        heap[place], heap[below] = heap[below], heap[place]
        place = below


# Running the loops -----------------------------------------------------------------------------------------------------


class LoopResult(NamedTuple):
    """When everything happened; `reached` is the node that each rank came to, its end if nothing hangs."""

    times: Times
    reached: NDArray[np.int32]
    held_by: NDArray[np.int32]


def run(graph: Graph, takes: Durations, contention: str, engine: str = "auto") -> LoopResult:
    """Time the graph. `engine` is `plain`, `compiled`, or `auto`: compiled if numba is installed."""
    compiled = compile_loops() if _wants_compiled(engine) else None
    shared = contention != "independent" or graph.shares_lanes
    if compiled is not None:
        return _call(compiled[shared], graph, takes, shared)
    columns: list[Any] = [column.tolist() if isinstance(column, np.ndarray) else column for column in graph]
    as_lists = Graph(*columns)
    return _call((run_independent, run_shared)[shared], as_lists, Durations(*(c.tolist() for c in takes)), shared, plain=True)


def _wants_compiled(engine: str) -> bool:
    if engine not in ("auto", "plain", "compiled"):
        raise ScheduleError(f"engine must be auto, plain or compiled, got {engine!r}")
    installed = importlib.util.find_spec("numba") is not None
    if engine == "compiled" and not installed:
        raise MissingExtraError("the compiled engine", "numba", "fast")
    return installed and engine != "plain"


def _call(loop: Callable[..., None], graph: Graph, takes: Durations, shared: bool, plain: bool = False) -> LoopResult:
    ranks, nodes, messages = len(graph.bounds) - 1, len(graph.rank), len(graph.sender)
    give: Callable[[Any], Any] = (lambda array: array.tolist()) if plain else (lambda array: array)
    times = Times(*(give(np.full(count, -1.0)) for count in (nodes, nodes, messages, messages, nodes, nodes)))
    at = give(np.array(graph.bounds[:-1], dtype=np.int32))
    now, free, lane = (give(np.zeros(count)) for count in (ranks, graph.num_links, graph.num_lanes))
    held_by = give(np.full(messages if shared else 0, -1, dtype=np.int32))
    meetings = len(graph.meet_at) - 1
    arrived = give(np.zeros(meetings, dtype=np.int32))
    if shared:
        heap, state = give(np.arange(ranks, dtype=np.int32)), give(np.zeros(ranks, dtype=np.int8))
        last_on = give(np.full(graph.num_links, -1, dtype=np.int32))
        loop(graph, takes, times, at, now, heap, state, free, lane, last_on, held_by, arrived)
    else:
        stack, queued = give(np.arange(ranks, dtype=np.int32)[::-1].copy()), give(np.ones(ranks, dtype=np.int8))
        loop(graph, takes, times, at, now, stack, queued, free, lane, arrived, give(np.zeros(meetings)))
    return LoopResult(
        Times(*(np.asarray(column, dtype=np.float64) for column in times)),
        np.asarray(at, dtype=np.int32),
        np.asarray(held_by, dtype=np.int32),
    )


Loop = Callable[..., Any]


@cache
def compile_loops() -> tuple[Loop, Loop]:
    """`run_independent` and `run_shared`, compiled; needs numba."""
    before = _compile(_is_before)
    push, pop = (_compile(helper, _is_before=before) for helper in (_push, _pop))
    return _compile(run_independent), _compile(run_shared, _push=push, _pop=pop)


def _compile(function: Loop, **helpers: Loop) -> Loop:
    """The function compiled, with compiled helpers in place of the plain ones that it calls."""
    import numba

    assert isinstance(function, FunctionType)
    twin = FunctionType(function.__code__, {**globals(), **helpers}, function.__name__)
    twin.__module__ = __name__
    compiled: Loop = numba.njit(cache=True, nogil=True)(twin)
    return compiled
