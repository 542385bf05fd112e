"""List scheduling: whenever a rank is free, it runs the node that a rule puts first. The same code runs plain and compiled.

Microbatches keep their order on every stage. No rank ever holds more than its limit, and none gets stuck under it: a forward runs
only if afterwards the microbatches under way could still be finished, the oldest first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.planner.orders.shop import Column, Shop
from penstock.planner.orders.timing import ends_weights


class Rule(NamedTuple):
    """What comes first: the node of the lowest `base[kind, stage] + pace * microbatch` that is ready."""

    base: Column
    """For each kind and stage."""
    pace: float
    most: Column
    """For each stage, how many microbatches may be between its F and its I."""
    ahead: Column
    """For each stage, how many of its F may have run beyond the I of the rank's last stage, whose backwards come first."""
    overrun: float
    """The share of a W by which it may delay what is known to come; it fills gaps otherwise, or runs by its own turn."""
    patience: float
    """The share of a node's time that a rank waits for one that comes first, instead of running that node."""


class Floor(NamedTuple):
    """Room for list scheduling."""

    arrive: Column
    forwards: Column
    inputs: Column
    weights: Column
    """How many of each stage's nodes of each kind have run."""
    ended: Column
    """How many of each stage's gradients of the weights are there."""
    now: Column
    wake: Column
    """When each rank decides next."""
    held: Column
    under_way: Column
    """The memory of each rank, and the part of it that is activations."""
    free: Column
    at: Column
    begun: Column
    lane: Column
    left: Column
    """The least objective of each rank: its work and its idle time so far."""


def dispatch(shop: Shop, rule: Rule, order: Column, floor: Floor, bound: float) -> float:  # noqa: PLR0912, PLR0915 - one flat loop
    """Fill in the order that the rule gives; its objective, -1 where one microbatch alone does not fit.

    The result is infinite as soon as it is known to be above the bound.
    """
    ranks, stages, microbatches = shop.ranks, shop.stages, shop.microbatches
    cells = stages * microbatches
    arrive, forwards, inputs, weights = floor.arrive, floor.forwards, floor.inputs, floor.weights
    now, wake, held, under_way, free, at = floor.now, floor.wake, floor.held, floor.under_way, floor.free, floor.at
    duration, takes, keeps, limit = shop.duration, shop.takes, shop.keeps, shop.limit
    stage_at, stage_of, base, pace, most, ahead = shop.stage_at, shop.stage_of, rule.base, rule.pace, rule.most, rule.ahead
    for node in range(3 * cells):
        arrive[node] = -1.0
    for node in range(microbatches):
        arrive[node] = 0.0
    for stage in range(stages):
        forwards[stage], inputs[stage], weights[stage], floor.ended[stage] = 0, 0, 0, 0
    for rank in range(ranks):
        now[rank], wake[rank], held[rank], under_way[rank], at[rank] = 0.0, math.inf, 0.0, 0.0, shop.bounds[rank]
        floor.begun[rank], floor.lane[rank], floor.left[rank] = -1.0, 0.0, shop.work[rank]
    for way in range(shop.num_links):
        free[way] = 0.0
    wake[shop.rank[0]] = 0.0
    while True:
        rank, time = 0, wake[0]
        for other in range(1, ranks):
            if wake[other] < time:
                rank, time = other, wake[other]
        if time == math.inf:
            break
        first, first_key, coming, coming_key = -1, math.inf, math.inf, math.inf
        weight, weight_key, cramped = -1, math.inf, False
        top = stage_of[stage_at[rank + 1] - 1]
        for place in range(stage_at[rank], stage_at[rank + 1]):
            stage = stage_of[place]
            if inputs[stage] < forwards[stage]:
                node = cells + stage * microbatches + inputs[stage]
                begin = arrive[node]
                if begin >= 0:
                    if held[rank] + keeps[node] > limit[rank]:
                        cramped = cramped or begin <= time
                    else:
                        key = base[stages + stage] + pace * inputs[stage]
                        if begin <= time:
                            if key < first_key:
                                first, first_key = node, key
                        elif begin < coming or (begin == coming and key < coming_key):
                            coming, coming_key = begin, key
            count = forwards[stage]
            if count < microbatches and count - inputs[stage] < most[stage] and count - inputs[top] < ahead[stage]:
                node = stage * microbatches + count
                begin, key = arrive[node], base[stage] + pace * count
                if 0 <= begin <= time:
                    if (key < first_key or not cramped) and _is_safe(shop, floor, rank, stage):
                        if held[rank] + takes[node] > limit[rank]:
                            cramped = True
                        elif key < first_key:
                            first, first_key = node, key
                elif (
                    0 <= begin <= coming
                    and (begin < coming or key < coming_key)
                    and held[rank] + takes[node] <= limit[rank]
                    and _is_safe(shop, floor, rank, stage)
                ):
                    coming, coming_key = begin, key
            if weights[stage] < inputs[stage]:
                key = base[2 * stages + stage] + pace * weights[stage]
                if key < weight_key:
                    weight, weight_key = 2 * cells + stage * microbatches + weights[stage], key
        fills = weight >= 0 and time + duration[weight] * (1 - rule.overrun) <= coming
        node = -1
        if first >= 0:
            if coming_key < first_key and coming < time + rule.patience * duration[first]:
                if fills:
                    node = weight
            else:
                node = weight if weight_key < first_key else first
        elif weight >= 0 and (cramped or fills):
            node = weight
        if node < 0:
            wake[rank] = coming
            continue
        order[at[rank]] = node
        at[rank] += 1
        if floor.begun[rank] < 0:
            floor.begun[rank] = time
            if shop.is_span:
                floor.left[rank] -= time
        floor.left[rank] += time - now[rank]
        if floor.left[rank] > bound:
            return math.inf
        held[rank] += takes[node] + keeps[node]
        time += duration[node]
        now[rank] = time
        wake[rank] = time
        stage = node % cells // microbatches
        if node < cells:
            forwards[stage] += 1
            under_way[rank] += shop.activation[node]
        elif node < 2 * cells:
            inputs[stage] += 1
            under_way[rank] -= shop.activation[node - cells]
            arrive[node + cells] = time
        else:
            weights[stage] += 1
        if shop.any_reduce and node >= cells and ends_weights(shop, node):
            floor.ended[stage] += 1
            if floor.ended[stage] == microbatches:
                floor.lane[rank] = max(floor.lane[rank], time) + shop.reduce[stage]
        following = shop.after[node]
        if following >= 0:
            way = shop.link[node]
            if way < 0:
                arrive[following] = time
            else:
                if free[way] > time:
                    time = free[way]
                time += shop.travel[node]
                free[way] = time
                arrive[following] = time
                other = shop.rank[following]
                if now[other] > time:
                    time = now[other]
                if time < wake[other]:
                    wake[other] = time
    objective = 0.0
    for rank in range(ranks):
        if at[rank] < shop.bounds[rank + 1]:
            return -1.0
        begun = floor.begun[rank] if shop.is_span else 0.0
        objective = max(objective, max(now[rank], floor.lane[rank]) + shop.closing[rank] - begun)
    return objective


def _is_safe(shop: Shop, floor: Floor, rank: int, stage: int) -> bool:  # noqa: PLR0912
    """Whether the rank can finish all microbatches under way, the oldest first, after one more forward of the stage.

    Every W that waits could run before, so that only activations count; finishing one gives back what it holds.
    """
    microbatches, stage_at, stage_of = shop.microbatches, shop.stage_at, shop.stage_of
    forwards, inputs, activation = floor.forwards, floor.inputs, shop.activation
    spare = shop.limit[rank] - floor.under_way[rank] - activation[stage * microbatches + forwards[stage]]
    if spare >= shop.alone[rank]:
        return True
    if spare < 0:
        return False
    oldest, newest = microbatches, 0
    for place in range(stage_at[rank], stage_at[rank + 1]):
        other = stage_of[place]
        count = forwards[other] + (1 if other == stage else 0)
        if inputs[other] < oldest:
            oldest = inputs[other]
        if count > newest:
            newest = count
    for microbatch in range(oldest, newest):
        more, back = 0.0, 0.0
        for place in range(stage_at[rank], stage_at[rank + 1]):
            other = stage_of[place]
            size = activation[other * microbatches + microbatch]
            if microbatch >= forwards[other] + (1 if other == stage else 0):
                more += size
            elif microbatch >= inputs[other]:
                back += size
        highest, holds = more, more
        for place in range(stage_at[rank + 1] - 1, stage_at[rank] - 1, -1):
            other = stage_of[place]
            if microbatch >= inputs[other]:
                cell = other * microbatches + microbatch
                holds += shop.keeps[shop.stages * microbatches + cell]
                if holds > highest:
                    highest = holds
                holds += shop.keeps[2 * shop.stages * microbatches + cell]
        if highest > spare:
            return False
        spare += back
        if spare >= shop.alone[rank]:
            return True
    return True
