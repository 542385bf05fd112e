"""Search for a pattern that repeats with every microbatch. The same code runs plain and compiled.

A pattern has for each rank a *thread*: every kind and stage of the rank once, in the order of one period, and for each kind and
stage how many periods its microbatch is behind. Laid out for all microbatches it is an order. A pattern is small however many
microbatches there are, and a change to it changes all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.planner.orders.shop import Column, Shop
from penstock.planner.orders.timing import Clock, time_starts

_MODULUS = 2147483647
_EVEN = 1e-9


class Loom(NamedTuple):
    """The pattern that is worked on, the best so far, and room."""

    thread: Column
    """Each rank's kinds and stages, numbered `kind * stages + stage`, from `3 * stage_at[rank]` on."""
    behind: Column
    """Of each kind and stage, in periods."""
    best: Column
    best_behind: Column
    kept: Column
    kept_behind: Column
    order: Column
    over: Column
    """By how much each rank is over its limit."""
    dice: Column


def weave(  # noqa: PLR0912, PLR0917 - one flat loop
    shop: Shop, loom: Loom, clock: Clock, tries: int, heat: float, price: float, best: float
) -> tuple[float, float]:
    """Try changes; the best cost and the last one. Cost is time, and `price` for each unit of memory over the limits."""
    stages = shop.stages
    for rank in range(shop.ranks):
        lay(shop, loom, rank)
        loom.over[rank] = _weigh(shop, loom, rank)
    cost = time_starts(shop, loom.order, clock)
    if cost < 0:
        return best, cost
    for rank in range(shop.ranks):
        cost += price * loom.over[rank]
    loom.kept[:] = loom.thread
    loom.kept_behind[:] = loom.behind
    if cost < best * (1 - _EVEN):
        best = cost
        loom.best[:] = loom.thread
        loom.best_behind[:] = loom.behind
    for _ in range(tries):
        bound = cost - heat * math.log((roll(loom.dice) + 1) / (_MODULUS + 1))
        low = roll(loom.dice) % shop.ranks
        high = low + 1
        if roll(loom.dice) % 3 == 0:
            high = min(shop.ranks, high + roll(loom.dice) % shop.ranks)
        chunk = roll(loom.dice) % (shop.stage_at[low + 1] - shop.stage_at[low])
        kind, size = roll(loom.dice) % 3, roll(loom.dice) % 8
        length = 1 if size < 4 else 2 if size < 6 else 3 if size < 7 else 1 + roll(loom.dice) % 12
        if roll(loom.dice) % 1024 < 512:
            length = -length
        for rank in range(low, high):
            if chunk < shop.stage_at[rank + 1] - shop.stage_at[rank]:
                _shift(shop, loom, rank, kind * stages + shop.stage_of[shop.stage_at[rank] + chunk], length)
                lay(shop, loom, rank)
                loom.over[rank] = _weigh(shop, loom, rank)
        found = 0.0
        for rank in range(shop.ranks):
            found += price * loom.over[rank]
        taken = -1.0
        if found <= bound:
            taken = time_starts(shop, loom.order, clock)
            found += taken
        good = taken >= 0 and found <= bound
        for rank in range(low, high):
            for place in range(3 * shop.stage_at[rank], 3 * shop.stage_at[rank + 1]):
                if good:
                    loom.kept[place] = loom.thread[place]
                    loom.kept_behind[loom.thread[place]] = loom.behind[loom.thread[place]]
                else:
                    loom.thread[place] = loom.kept[place]
                    loom.behind[loom.thread[place]] = loom.kept_behind[loom.thread[place]]
            if not good:
                lay(shop, loom, rank)
                loom.over[rank] = _weigh(shop, loom, rank)
        if good:
            cost = found
            if cost < best * (1 - _EVEN):
                best = cost
                loom.best[:] = loom.thread
                loom.best_behind[:] = loom.behind
    return best, cost


def roll(dice: Column) -> int:
    """The next random number, from 0 up to the modulus."""
    dice[0] = dice[0] * 48271 % _MODULUS
    return int(dice[0])


def lay(shop: Shop, loom: Loom, rank: int) -> None:
    """Lay the rank's thread out for all microbatches."""
    microbatches, thread, behind = shop.microbatches, loom.thread, loom.behind
    begin, end = 3 * shop.stage_at[rank], 3 * shop.stage_at[rank + 1]
    least, most = behind[thread[begin]], behind[thread[begin]]
    for place in range(begin, end):
        least, most = min(least, behind[thread[place]]), max(most, behind[thread[place]])
    at = shop.bounds[rank]
    for period in range(least, most + microbatches):
        for place in range(begin, end):
            microbatch = period - behind[thread[place]]
            if 0 <= microbatch < microbatches:
                loom.order[at] = thread[place] * microbatches + microbatch
                at += 1


def _weigh(shop: Shop, loom: Loom, rank: int) -> float:
    """By how much the rank is over its limit at most."""
    holds, most = 0.0, 0.0
    for place in range(shop.bounds[rank], shop.bounds[rank + 1]):
        node = loom.order[place]
        holds += shop.takes[node]
        most = max(most, holds)
        holds += shop.keeps[node]
        most = max(most, holds)
    return float(max(0.0, most - shop.limit[rank]))


def _shift(shop: Shop, loom: Loom, rank: int, item: int, length: int) -> None:
    """Move an item along its rank's thread; past an end of it, it comes in at the other end, a period later or earlier."""
    thread, begin, end = loom.thread, 3 * shop.stage_at[rank], 3 * shop.stage_at[rank + 1]
    place = begin
    while thread[place] != item:
        place += 1
    step = 1 if length > 0 else -1
    for _ in range(abs(length)):
        other = place + step
        if other == end:
            for each in range(end - 1, begin, -1):
                thread[each] = thread[each - 1]
            place = begin
            loom.behind[item] += 1
        elif other < begin:
            for each in range(begin, end - 1):
                thread[each] = thread[each + 1]
            place = end - 1
            loom.behind[item] -= 1
        else:
            thread[place] = thread[other]
            place = other
        thread[place] = item
