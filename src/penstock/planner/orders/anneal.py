"""Local search on an order: nodes move along their rank's row, and backwards are split or made full.

A move is first judged by the times around it, which takes no longer than the move is long; only one that may be accepted is timed
in full. Most moves are of nodes on a longest way, for no other can shorten it. The same code runs plain and compiled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.planner.orders.shop import Column, Shop
from penstock.planner.orders.timing import Clock, time_order
from penstock.planner.orders.weave import roll

_MODULUS = 2147483647
_EVEN = 1e-9
_RUN = 6
"""The most nodes of a run that changes places with another."""


class Bench(NamedTuple):
    """The order that is worked on, the best so far, and room."""

    order: Column
    full: Column
    """Which cells have a full backward."""
    best: Column
    best_full: Column
    place: Column
    """Where each node stands in the order."""
    held: Column
    """What the rank holds before each place of the order."""
    critical: Column
    """Nodes on a longest way."""
    backup: Column
    """The order before a sweep."""
    moved: Column
    """The nodes of a move, in their new order."""
    begin: Column
    end: Column
    rest: Column
    """Each moved node's new start, end and tail, as far as the move itself tells."""
    dice: Column
    """The state of the random numbers."""


class Pace(NamedTuple):
    """How to go about it."""

    tries: int
    heat: float
    """The usual loss of time that is accepted."""
    on_critical: float
    """The share of tries that begin with a node on a longest way."""
    reach: int
    """The most places that a node moves."""
    choices: int
    """Moves that are compared for each try."""
    sweeps: float
    """The share of tries that move several nodes at once."""


def anneal(shop: Shop, bench: Bench, clocks: tuple[Clock, Clock], pace: Pace, best: float) -> tuple[float, float, int]:  # noqa: PLR0912
    """Try moves; the best objective, the last one, and how often an order was timed in full. `best` is that of `bench.best`."""
    clock, spare = clocks
    objective = time_order(shop, bench.order, clock)
    timed = 1
    _find_places(shop, bench)
    num_critical = _find_critical(shop, bench, clock, objective)
    if objective < best * (1 - _EVEN):
        best = objective
        _keep(bench)
    for _ in range(pace.tries):
        bound = objective - pace.heat * math.log((roll(bench.dice) + 1) / (_MODULUS + 1))
        what = roll(bench.dice) / _MODULUS
        here, there, cell = -1, -1, -1
        if what < pace.sweeps:
            done = _sweep(shop, bench, bench.critical[roll(bench.dice) % num_critical])
        elif shop.may_merge and what < pace.sweeps + 0.05:
            cell = roll(bench.dice) % (shop.stages * shop.microbatches)
            done = _merge(shop, bench, cell)
        else:
            here, there = _choose(shop, bench, clock, pace, num_critical, bound)
            done = here >= 0
            if done:
                _apply(bench, here, there)
        if not done:
            continue
        found = time_order(shop, bench.order, spare)
        timed += 1
        if found < 0 or found > bound:
            if here >= 0:
                _revert(bench, here, there)
            elif cell >= 0:
                _flip(shop, bench, cell)
            else:
                _restore(shop, bench)
            continue
        clock, spare = spare, clock
        objective = found
        if here >= 0:
            _hold_again(shop, bench, min(here, there), max(here, there))
        else:
            _find_places(shop, bench)
        num_critical = _find_critical(shop, bench, clock, objective)
        if objective < best * (1 - _EVEN):
            best = objective
            _keep(bench)
    return best, objective, timed


def _choose(  # noqa: PLR0917
    shop: Shop, bench: Bench, clock: Clock, pace: Pace, num_critical: int, bound: float
) -> tuple[int, int]:
    """Of some moves the one that seems best, if it is within the bound, with its nodes laid out; else (-1, -1)."""
    nodes = 3 * shop.stages * shop.microbatches
    least, best_here, best_there = bound, -1, -1
    for _ in range(pace.choices):
        if roll(bench.dice) < pace.on_critical * _MODULUS:
            node = bench.critical[roll(bench.dice) % num_critical]
        else:
            node = roll(bench.dice) % nodes
        length = 1 + int((roll(bench.dice) / _MODULUS) ** 2 * pace.reach)
        here = bench.place[node]
        there = _target(shop, bench, clock, node, length if roll(bench.dice) % 1024 < 512 else -length)
        if here != there and _is_within(shop, bench, here, there):
            longest = _estimate(shop, bench, clock, here, there)
            if longest <= least:
                least, best_here, best_there = longest, here, there
    if best_here >= 0:
        _is_within(shop, bench, best_here, best_there)
    return best_here, best_there


def _keep(bench: Bench) -> None:
    bench.best[:] = bench.order
    bench.best_full[:] = bench.full


def _find_places(shop: Shop, bench: Bench) -> None:
    for rank in range(shop.ranks):
        holds = 0.0
        for place in range(shop.bounds[rank], shop.bounds[rank + 1]):
            node = bench.order[place]
            bench.place[node] = place
            bench.held[place] = holds
            holds += shop.takes[node] + shop.keeps[node]


def _find_critical(shop: Shop, bench: Bench, clock: Clock, objective: float) -> int:
    """List the nodes on a longest way; how many there are."""
    least, count = objective * (1 - _EVEN), 0
    start, tail, critical = clock.start, clock.tail, bench.critical
    for node in range(3 * shop.stages * shop.microbatches):
        if start[node] + tail[node] >= least:
            critical[count] = node
            count += 1
    if count == 0:  # sums of another order differ in their last digits
        critical[0] = 0
        count = 1
    return count


def _target(shop: Shop, bench: Bench, clock: Clock, node: int, length: int) -> int:
    """The place that is up to `length` places further on, or back if that is negative, and that what comes before and after allows.

    No node moves past one whose end it would have to wait for in any case. Where microbatches are alike they keep their order on
    every stage.
    """
    order, start, arrive, duration = bench.order, clock.start, clock.arrive, shop.duration
    microbatches, cells, alike = shop.microbatches, shop.stages * shop.microbatches, shop.is_alike
    row, rank = node // microbatches, shop.rank[node]
    place = bench.place[node]
    if length < 0:
        last, before = max(place + length, shop.bounds[rank]), shop.before[node]
        while place > last:
            other = order[place - 1]
            if other in (before, node - cells) or (alike and other // microbatches == row):
                break
            if start[other] + duration[other] <= arrive[node]:
                break
            place -= 1
    else:
        last, end = min(place + length, shop.bounds[rank + 1] - 1), start[node] + duration[node]
        while place < last:
            other = order[place + 1]
            if shop.before[other] == node or other == node + cells or (alike and other // microbatches == row) or end <= arrive[other]:
                break
            place += 1
    return int(place)


def _is_within(shop: Shop, bench: Bench, here: int, there: int) -> bool:
    """Whether the rank keeps within its memory when the node at `here` moves; the nodes between are laid out in `moved`."""
    order, moved, takes, keeps = bench.order, bench.moved, shop.takes, shop.keeps
    low, high = min(here, there), max(here, there)
    for place in range(low, high + 1):
        moved[place - low] = order[place]
    if there < here:
        for place in range(high - low, 0, -1):
            moved[place] = moved[place - 1]
        moved[0] = order[here]
    else:
        for place in range(high - low):
            moved[place] = moved[place + 1]
        moved[high - low] = order[here]
    holds, limit = bench.held[low], shop.limit[shop.rank[order[here]]]
    for place in range(high - low + 1):
        node = moved[place]
        holds += takes[node]
        if holds > limit:
            return False
        holds += keeps[node]
        if holds > limit:
            return False
    return True


def _estimate(shop: Shop, bench: Bench, clock: Clock, here: int, there: int) -> float:
    """The longest way through the moved nodes, if the times of all others stay."""
    order, moved, begin, end, rest, where = bench.order, bench.moved, bench.begin, bench.end, bench.rest, bench.place
    start, arrive, tail, duration, rank_of = clock.start, clock.arrive, clock.tail, shop.duration, shop.rank
    low, high = min(here, there), max(here, there)
    rank, cells = rank_of[order[here]], shop.stages * shop.microbatches
    time = 0.0
    if low > shop.bounds[rank]:
        before = order[low - 1]
        time = start[before] + duration[before]
    for place in range(high - low + 1):
        node = moved[place]
        ready = arrive[node]
        before = shop.before[node]
        if before >= 0 and low <= where[before] <= high:
            ready = end[before]
        if ready > time:
            time = ready
        begin[node] = time
        time += duration[node]
        end[node] = time
    time = tail[order[high + 1]] if high + 1 < shop.bounds[rank + 1] else shop.closing[rank]
    longest = 0.0
    for place in range(high - low, -1, -1):
        node = moved[place]
        after = shop.after[node]
        if after >= 0:
            left = rest[after] if low <= where[after] <= high else tail[after] + shop.travel[node]
            if left > time:
                time = left
        if cells <= node < 2 * cells:
            weight = node + cells
            left = rest[weight] if low <= where[weight] <= high else tail[weight]
            if left > time:
                time = left
        time += duration[node]
        rest[node] = time
        if begin[node] + time > longest:
            longest = begin[node] + time
    return longest


def _apply(bench: Bench, here: int, there: int) -> None:
    low = min(here, there)
    for place in range(low, max(here, there) + 1):
        node = bench.moved[place - low]
        bench.order[place] = node
        bench.place[node] = place


def _revert(bench: Bench, here: int, there: int) -> None:
    """Move the node at `there` back to `here`."""
    order, step = bench.order, 1 if there < here else -1
    node = order[there]
    for place in range(there, here, step):
        order[place] = order[place + step]
    order[here] = node
    for place in range(min(here, there), max(here, there) + 1):
        bench.place[order[place]] = place


def _hold_again(shop: Shop, bench: Bench, low: int, high: int) -> None:
    holds = bench.held[low]
    for place in range(low, high + 1):
        node = bench.order[place]
        bench.held[place] = holds
        holds += shop.takes[node] + shop.keeps[node]


def _merge(shop: Shop, bench: Bench, cell: int) -> bool:
    """Make a split backward full or a full one split; whether the rank keeps within its memory, else all is as before."""
    _flip(shop, bench, cell)
    if _keeps_within(shop, bench, shop.rank[cell]):
        return True
    _flip(shop, bench, cell)
    return False


def _flip(shop: Shop, bench: Bench, cell: int) -> None:
    cells = shop.stages * shop.microbatches
    whole = 1 - bench.full[cell]
    bench.full[cell] = whole
    stash = 0.0 if whole else shop.stash[cell]
    shop.duration[cells + cell] = shop.full_time[cell] if whole else shop.input_time[cell]
    shop.duration[2 * cells + cell] = 0.0 if whole else shop.weight_time[cell]
    shop.keeps[cells + cell] = stash - shop.activation[cell]
    shop.keeps[2 * cells + cell] = -stash


def _keeps_within(shop: Shop, bench: Bench, rank: int) -> bool:
    holds, limit = 0.0, shop.limit[rank]
    for place in range(shop.bounds[rank], shop.bounds[rank + 1]):
        node = bench.order[place]
        holds += shop.takes[node]
        if holds > limit:
            return False
        holds += shop.keeps[node]
        if holds > limit:
            return False
    return True


def _sweep(shop: Shop, bench: Bench, node: int) -> bool:
    """Move a node and its like on the ranks around it, or of the microbatches around it, by as many places each.

    Whether all ranks keep within their memory, else all is as before.
    """
    microbatches, cells, dice = shop.microbatches, shop.stages * shop.microbatches, bench.dice
    bench.backup[:] = bench.order
    if not shop.is_alike and roll(dice) % 2 == 0:
        return _exchange(shop, bench, node % microbatches, roll(dice) % microbatches)
    if roll(dice) % 3 == 0:
        return _rotate(shop, bench, bench.place[node] - roll(dice) % _RUN)
    kind, stage, microbatch = node // cells, node % cells // microbatches, node % microbatches
    rank, chunk = shop.rank[node], 0
    while shop.stage_of[shop.stage_at[rank] + chunk] != stage:
        chunk += 1
    low, high, first, last = rank, rank + 1, microbatch, microbatch + 1
    what = roll(dice) % 4
    if what != 0:
        low, high = max(0, low - roll(dice) % shop.ranks), min(shop.ranks, high + roll(dice) % shop.ranks)
    if what in (0, 1):
        first, last = max(0, first - roll(dice) % 4), min(microbatches, last + roll(dice) % microbatches)
    length = 1 + roll(dice) % (3 if roll(dice) % 2 == 0 else 10)
    backward = roll(dice) % 1024 < 512
    for other in range(low, high):
        if chunk < shop.stage_at[other + 1] - shop.stage_at[other]:
            row = (kind * shop.stages + shop.stage_of[shop.stage_at[other] + chunk]) * microbatches
            for count in range(last - first):
                each = row + (first + count if backward else last - 1 - count)
                if shop.rank[each] == other:
                    _shift(shop, bench, each, -length if backward else length)
    for other in range(low, high):
        if not _keeps_within(shop, bench, other):
            _restore(shop, bench)
            return False
    return True


def _rotate(shop: Shop, bench: Bench, low: int) -> bool:
    """Let two short runs of nodes change places, the first of which begins at a place of the order or at its rank's first.

    Whether that can be and the rank keeps within its memory, else all is as before.
    """
    order, before, cells, dice = bench.order, shop.before, shop.stages * shop.microbatches, bench.dice
    rank = shop.rank[order[max(low, 0)]]
    low = max(low, shop.bounds[rank])
    middle = low + 1 + roll(dice) % _RUN
    high = middle + 1 + roll(dice) % _RUN
    if high > shop.bounds[rank + 1]:
        return False
    for first in range(low, middle):
        early = order[first]
        for second in range(middle, high):
            late = order[second]
            alike = shop.is_alike and early // shop.microbatches == late // shop.microbatches
            if before[late] == early or late == early + cells or alike:
                return False
    for place in range(high - low):
        at = low + place + middle - low
        order[low + place] = bench.backup[at if at < high else at - (high - low)]
    if _keeps_within(shop, bench, rank):
        return True
    order[:] = bench.backup
    return False


def _exchange(shop: Shop, bench: Bench, one: int, other: int) -> bool:
    """Let two microbatches change places throughout; whether all ranks keep within their memory, else all is as before."""
    order, microbatches = bench.order, shop.microbatches
    if one == other or shop.rank[one] != shop.rank[other]:
        return False
    for place in range(3 * shop.stages * microbatches):
        microbatch = order[place] % microbatches
        if microbatch == one:
            order[place] += other - one
        elif microbatch == other:
            order[place] += one - other
    for rank in range(shop.ranks):
        if not _keeps_within(shop, bench, rank):
            bench.order[:] = bench.backup
            return False
    return True


def _shift(shop: Shop, bench: Bench, node: int, length: int) -> None:
    """Move a node along its row as far as the nodes that it needs and that need it allow."""
    order, where, before, microbatches = bench.order, bench.place, shop.before, shop.microbatches
    cells, rank, place = shop.stages * shop.microbatches, shop.rank[node], bench.place[node]
    step = 1 if length > 0 else -1
    for _ in range(abs(length)):
        if not shop.bounds[rank] <= place + step < shop.bounds[rank + 1]:
            break
        other = order[place + step]
        early, late = (node, other) if step > 0 else (other, node)
        if before[late] == early or late == early + cells or (shop.is_alike and early // microbatches == late // microbatches):
            break
        order[place], where[other] = other, place
        place += step
        order[place], where[node] = node, place


def _restore(shop: Shop, bench: Bench) -> None:
    bench.order[:] = bench.backup
    _find_places(shop, bench)
