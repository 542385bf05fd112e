"""When the nodes of an order run, and the time from each to the end; and random numbers. The loops run plain and compiled."""

from __future__ import annotations

from typing import NamedTuple

from penstock.planner.order_search.flat_problem import Column, FlatProblem


class Clock(NamedTuple):
    """The times of an order, and scratch columns."""

    start: Column
    """Start of each node."""
    arrive: Column
    """When the input of each node is there, -1 if it never is."""
    tail: Column
    """Time from the start of each node to the end of everything, along the longest path."""
    walk: Column
    """The nodes in a topological order."""
    at: Column
    now: Column
    stack: Column
    queued: Column
    lane: Column
    free: Column
    left: Column


def find_backward(number: int, slices: int) -> int:
    """The microbatch, or slice, whose backward is the `number`-th on a stage: those of a microbatch's slices descend.

    >>> [find_backward(number, 3) for number in range(6)]
    [2, 1, 0, 5, 4, 3]
    """
    return number + slices - 1 - 2 * (number % slices)


def ends_weights(flat: FlatProblem, node: int) -> bool:
    """Whether this backward ends the weight gradient of its cell: a W, or a full backward."""
    cells = flat.stages * flat.microbatches
    return bool((flat.full[node % cells] > 0) == (node < 2 * cells))


def time_order(flat: FlatProblem, order: Column, clock: Clock) -> float:
    """The objective of an order, -1 if it deadlocks; fills the clock's columns."""
    objective = time_starts(flat, order, clock)
    if objective >= 0:
        _time_tails(flat, clock)
    return objective


def time_starts(flat: FlatProblem, order: Column, clock: Clock) -> float:  # noqa: PLR0912, PLR0915 - one flat loop, as in the simulator
    """The same as `time_order` without the tails."""
    start, arrive, walk = clock.start, clock.arrive, clock.walk
    at, now, stack, queued, free, left, lane = clock.at, clock.now, clock.stack, clock.queued, clock.free, clock.left, clock.lane
    rank_of, duration, after, travel, link, bounds = flat.rank, flat.duration, flat.after, flat.travel, flat.link, flat.bounds
    ranks, microbatches = flat.ranks, flat.microbatches
    cells = flat.stages * microbatches
    nodes = 3 * cells
    for node in range(nodes):
        arrive[node] = -1.0
    for node in range(microbatches):
        arrive[node] = 0.0
    for way in range(flat.num_links):
        free[way] = 0.0
    for stage in range(flat.stages):
        left[stage] = microbatches
    for rank in range(ranks):
        at[rank], now[rank], lane[rank] = bounds[rank], 0.0, 0.0
        stack[rank], queued[rank] = ranks - 1 - rank, 1
    top, done = ranks, 0
    while top > 0:
        top -= 1
        rank = stack[top]
        queued[rank] = 0
        place, last, time = at[rank], bounds[rank + 1], now[rank]
        while place < last:
            node = order[place]
            begin = arrive[node]
            if begin < 0:
                break
            if begin > time:
                time = begin
            start[node] = time
            time += duration[node]
            walk[done] = node
            done += 1
            place += 1
            following = after[node]
            if following >= 0:
                way = link[node]
                if way < 0:
                    arrive[following] = time
                else:
                    leave = free[way]
                    if time > leave:
                        leave = time
                    leave += travel[node]
                    free[way] = leave
                    arrive[following] = leave
                    other = rank_of[following]
                    if not queued[other]:
                        queued[other] = 1
                        stack[top] = other
                        top += 1
            if node >= cells:
                if node < 2 * cells:
                    arrive[node + cells] = time
                if flat.any_reduce and ends_weights(flat, node):
                    stage = node % cells // microbatches
                    left[stage] -= 1
                    if left[stage] == 0:
                        lane[rank] = max(lane[rank], time) + flat.reduce[stage]
        at[rank] = place
        now[rank] = time
    if done < nodes:
        return -1.0
    objective = 0.0
    for rank in range(ranks):
        begun = start[order[bounds[rank]]] if flat.is_span and bounds[rank] < bounds[rank + 1] else 0.0
        end = max(now[rank], lane[rank]) + flat.closing[rank] - begun
        if end > objective:
            objective = end
        now[rank] = flat.closing[rank] - begun
        lane[rank] = now[rank]
    return objective


def _time_tails(flat: FlatProblem, clock: Clock) -> None:
    """Fill in the tails; `now` and `lane` hold the time after the last node of each rank."""
    walk, tail, now, lane, free, left = clock.walk, clock.tail, clock.now, clock.lane, clock.free, clock.left
    rank_of, duration, after, travel, link = flat.rank, flat.duration, flat.after, flat.travel, flat.link
    cells = flat.stages * flat.microbatches
    for way in range(flat.num_links):
        free[way] = 0.0
    for stage in range(flat.stages):
        left[stage] = 1
    for place in range(3 * cells - 1, -1, -1):
        node = walk[place]
        rank = rank_of[node]
        time = now[rank]
        following = after[node]
        if following >= 0:
            rest = tail[following]
            way = link[node]
            if way >= 0:
                if free[way] > rest:
                    rest = free[way]
                rest += travel[node]
                free[way] = rest
            if rest > time:
                time = rest
        if node >= cells:
            if node < 2 * cells and tail[node + cells] > time:
                time = tail[node + cells]
            if flat.any_reduce and ends_weights(flat, node):
                stage = node % cells // flat.microbatches
                if left[stage] == 1:
                    left[stage] = 0
                    lane[rank] += flat.reduce[stage]
                    if lane[rank] > time:
                        time = lane[rank]
        time += duration[node]
        tail[node] = time
        now[rank] = time


# Random numbers -------------------------------------------------------------------------------------------------------

MODULUS = 2147483647


def draw(state: Column) -> int:
    """The next random number of Lehmer's generator, from 0 up to the modulus."""
    state[0] = state[0] * 48271 % MODULUS
    return int(state[0])
