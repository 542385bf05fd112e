"""When an order's nodes run, and how long it takes from each to the end. The same code runs plain and compiled."""

from __future__ import annotations

from typing import NamedTuple

from penstock.planner.orders.shop import Column, Shop


class Clock(NamedTuple):
    """What timing an order finds out, and the room that it needs to do so."""

    start: Column
    """When each node starts."""
    arrive: Column
    """When each node's input is there, -1 where it never is."""
    tail: Column
    """The time from the start of each node to the end of everything, along the longest way."""
    walk: Column
    """The nodes in an order in which each comes after what it waits for."""
    at: Column
    now: Column
    stack: Column
    queued: Column
    lane: Column
    free: Column
    left: Column


def ends_weights(shop: Shop, node: int) -> bool:
    """Whether the weights' gradient of the node's cell is there when this backward ends: at W, or at a full backward."""
    cells = shop.stages * shop.microbatches
    return bool((shop.full[node % cells] > 0) == (node < 2 * cells))


def time_order(shop: Shop, order: Column, clock: Clock) -> float:
    """The objective of an order, -1 where a rank waits for ever; the clock's columns are filled."""
    objective = time_starts(shop, order, clock)
    if objective >= 0:
        _time_tails(shop, clock)
    return objective


def time_starts(shop: Shop, order: Column, clock: Clock) -> float:  # noqa: PLR0912, PLR0915 - one flat loop, as in the simulator
    """The same without the tails."""
    start, arrive, walk = clock.start, clock.arrive, clock.walk
    at, now, stack, queued, free, left, lane = clock.at, clock.now, clock.stack, clock.queued, clock.free, clock.left, clock.lane
    rank_of, duration, after, travel, link, bounds = shop.rank, shop.duration, shop.after, shop.travel, shop.link, shop.bounds
    ranks, microbatches = shop.ranks, shop.microbatches
    cells = shop.stages * microbatches
    nodes = 3 * cells
    for node in range(nodes):
        arrive[node] = -1.0
    for node in range(microbatches):
        arrive[node] = 0.0
    for way in range(shop.num_links):
        free[way] = 0.0
    for stage in range(shop.stages):
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
                if shop.any_reduce and ends_weights(shop, node):
                    stage = node % cells // microbatches
                    left[stage] -= 1
                    if left[stage] == 0:
                        lane[rank] = max(lane[rank], time) + shop.reduce[stage]
        at[rank] = place
        now[rank] = time
    if done < nodes:
        return -1.0
    objective = 0.0
    for rank in range(ranks):
        begun = start[order[bounds[rank]]] if shop.is_span and bounds[rank] < bounds[rank + 1] else 0.0
        end = max(now[rank], lane[rank]) + shop.closing[rank] - begun
        if end > objective:
            objective = end
        now[rank] = shop.closing[rank] - begun
        lane[rank] = now[rank]
    return objective


def _time_tails(shop: Shop, clock: Clock) -> None:
    """The time from each node to the end; `now` and `lane` hold what follows the last node of each rank."""
    walk, tail, now, lane, free, left = clock.walk, clock.tail, clock.now, clock.lane, clock.free, clock.left
    rank_of, duration, after, travel, link = shop.rank, shop.duration, shop.after, shop.travel, shop.link
    cells = shop.stages * shop.microbatches
    for way in range(shop.num_links):
        free[way] = 0.0
    for stage in range(shop.stages):
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
            if shop.any_reduce and ends_weights(shop, node):
                stage = node % cells // shop.microbatches
                if left[stage] == 1:
                    left[stage] = 0
                    lane[rank] += shop.reduce[stage]
                    if lane[rank] > time:
                        time = lane[rank]
        time += duration[node]
        tail[node] = time
        now[rank] = time
