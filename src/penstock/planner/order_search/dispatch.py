"""List scheduling: whenever a rank is free, it runs the ready node that a rule ranks first. The loop runs plain and compiled.

Microbatches keep their order on every stage. No rank ever exceeds its memory limit or gets stuck below it: a forward runs only
if the microbatches in flight could still be finished afterwards, the oldest first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.planner.order_search.flat_problem import Column, FlatProblem
from penstock.planner.order_search.timing import ends_weights, find_backward


class DispatchRule(NamedTuple):
    """Priorities: the ready node with the lowest `base[kind, stage] + pace * microbatch` runs first."""

    base: Column
    """Per kind and stage."""
    pace: float
    most: Column
    """Per stage, the most microbatches between its F and its I."""
    ahead: Column
    """Per stage, the most forwards ahead of the I of the rank's last stage, whose backwards come first."""
    overrun: float
    """Share of a W by which it may delay a node that is known to come; otherwise a W fills gaps or runs by its own priority."""
    patience: float
    """Share of a node's time that a rank waits for a node of higher priority instead of running that node."""


class DispatchState(NamedTuple):
    """Scratch columns of list scheduling."""

    arrive: Column
    forwards: Column
    inputs: Column
    weights: Column
    """Nodes of each kind that have run, per stage."""
    ended: Column
    """Weight gradients that have ended, per stage."""
    now: Column
    wake: Column
    """When each rank decides next."""
    held: Column
    under_way: Column
    """Memory of each rank, and the part of it that is activations."""
    free: Column
    at: Column
    begun: Column
    lane: Column
    left: Column
    """Least objective of each rank: its work and its idle time so far."""


def dispatch(flat: FlatProblem, rule: DispatchRule, order: Column, state: DispatchState, bound: float) -> float:  # noqa: PLR0912, PLR0915 - one flat loop
    """Fill in the order that the rule gives; returns its objective, -1 if one microbatch does not fit, infinite if above the bound."""
    ranks, stages, microbatches, slices = flat.ranks, flat.stages, flat.microbatches, flat.slices
    cells = stages * microbatches
    arrive, forwards, inputs, weights = state.arrive, state.forwards, state.inputs, state.weights
    now, wake, held, under_way, free, at = state.now, state.wake, state.held, state.under_way, state.free, state.at
    duration, takes, keeps, limit = flat.duration, flat.takes, flat.keeps, flat.limit
    stage_at, stage_of, base, pace, most, ahead = flat.stage_at, flat.stage_of, rule.base, rule.pace, rule.most, rule.ahead
    for node in range(3 * cells):
        arrive[node] = -1.0
    for node in range(microbatches):
        arrive[node] = 0.0
    for stage in range(stages):
        forwards[stage], inputs[stage], weights[stage], state.ended[stage] = 0, 0, 0, 0
    for rank in range(ranks):
        now[rank], wake[rank], held[rank], under_way[rank], at[rank] = 0.0, math.inf, 0.0, 0.0, flat.bounds[rank]
        state.begun[rank], state.lane[rank], state.left[rank] = -1.0, 0.0, flat.work[rank]
    for way in range(flat.num_links):
        free[way] = 0.0
    wake[flat.rank[0]] = 0.0
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
            unit = find_backward(inputs[stage], slices)
            if unit < forwards[stage]:
                node = cells + stage * microbatches + unit
                begin = arrive[node]
                if begin >= 0:
                    if held[rank] + takes[node] + max(keeps[node], 0.0) > limit[rank]:
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
                    if (key < first_key or not cramped) and _is_safe(flat, state, rank, stage):
                        if held[rank] + takes[node] > limit[rank]:
                            cramped = True
                        elif key < first_key:
                            first, first_key = node, key
                elif (
                    0 <= begin <= coming
                    and (begin < coming or key < coming_key)
                    and held[rank] + takes[node] <= limit[rank]
                    and _is_safe(flat, state, rank, stage)
                ):
                    coming, coming_key = begin, key
            if weights[stage] < inputs[stage]:
                key = base[2 * stages + stage] + pace * weights[stage]
                if key < weight_key:
                    weight, weight_key = 2 * cells + stage * microbatches + find_backward(weights[stage], slices), key
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
        if state.begun[rank] < 0:
            state.begun[rank] = time
            if flat.is_span:
                state.left[rank] -= time
        state.left[rank] += time - now[rank]
        if state.left[rank] > bound:
            return math.inf
        held[rank] += takes[node] + keeps[node]
        time += duration[node]
        now[rank] = time
        wake[rank] = time
        stage = node % cells // microbatches
        if node < cells:
            forwards[stage] += 1
            under_way[rank] += flat.activation[node]
        elif node < 2 * cells:
            inputs[stage] += 1
            under_way[rank] += flat.opened[node - cells] - flat.freed[node - cells]
            arrive[node + cells] = time
        else:
            weights[stage] += 1
        if flat.any_reduce and node >= cells and ends_weights(flat, node):
            state.ended[stage] += 1
            if state.ended[stage] == microbatches:
                state.lane[rank] = max(state.lane[rank], time) + flat.reduce[stage]
        following = flat.after[node]
        if following >= 0:
            way = flat.link[node]
            if way < 0:
                arrive[following] = time
            else:
                if free[way] > time:
                    time = free[way]
                time += flat.travel[node]
                free[way] = time
                arrive[following] = time
                other = flat.rank[following]
                if now[other] > time:
                    time = now[other]
                if time < wake[other]:
                    wake[other] = time
    objective = 0.0
    for rank in range(ranks):
        if at[rank] < flat.bounds[rank + 1]:
            return -1.0
        begun = state.begun[rank] if flat.is_span else 0.0
        objective = max(objective, max(now[rank], state.lane[rank]) + flat.closing[rank] - begun)
    return objective


def _is_safe(flat: FlatProblem, state: DispatchState, rank: int, stage: int) -> bool:  # noqa: PLR0912
    """Whether the rank can finish all microbatches in flight, the oldest first, after one more forward of the stage.

    Every waiting W could run first, so only activations count; finishing a microbatch frees what it holds.
    """
    microbatches, cells, stage_at, stage_of = flat.microbatches, flat.stages * flat.microbatches, flat.stage_at, flat.stage_of
    forwards, inputs, activation = state.forwards, state.inputs, flat.activation
    spare = flat.limit[rank] - state.under_way[rank] - activation[stage * microbatches + forwards[stage]]
    if spare >= flat.alone[rank]:
        return True
    if spare < 0:
        return False
    slices = flat.slices
    oldest, newest = microbatches, 0
    for place in range(stage_at[rank], stage_at[rank + 1]):
        other = stage_of[place]
        count = forwards[other] + (1 if other == stage else 0)
        oldest, newest = min(oldest, inputs[other]), max(newest, count)
    for begin in range(oldest - oldest % slices, newest, slices):
        more, back = 0.0, 0.0
        for place in range(stage_at[rank], stage_at[rank + 1]):
            other = stage_of[place]
            done = forwards[other] + (1 if other == stage else 0)
            for unit in range(begin, begin + slices):
                if unit >= done:
                    more += activation[other * microbatches + unit]
                else:
                    back += activation[other * microbatches + unit]
            for number in range(begin, min(begin + slices, inputs[other])):
                cell = other * microbatches + find_backward(number, slices)
                back += flat.opened[cell] - flat.freed[cell]
        highest, holds = more, more
        for place in range(stage_at[rank + 1] - 1, stage_at[rank] - 1, -1):
            other = stage_of[place]
            for number in range(max(begin, inputs[other]), begin + slices):
                cell = other * microbatches + find_backward(number, slices)
                holds += flat.opened[cell]
                highest = max(highest, holds)
                holds += flat.keeps[cells + cell]
                highest = max(highest, holds)
                holds += flat.keeps[2 * cells + cell]
        if highest > spare:
            return False
        spare += back
        if spare >= flat.alone[rank]:
            return True
    return True
