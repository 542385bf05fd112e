"""Local search on the order of microbatches within one schedule. The loops run plain and compiled.

A *position* is a microbatch of the schedule; which of the batch's microbatches takes it is what the search changes. What waits for what is
the same for all of them, so the actions are laid out once, as *steps* in an order in which each comes after everything that it needs, and
one pass over the steps times any order of the microbatches. The same holds for the memory of a rank: what it takes and frees, one after
the other, depends on the schedule alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.planner.order_search.flat_problem import Column
from penstock.planner.order_search.timing import draw

_ROUNDING = 1e-9
"""Sums of the same times differ by less than this share."""


class Steps(NamedTuple):
    """The actions of a schedule, and how each rank's memory changes.

    An action that waits for several messages, sends several, or consists of several that overlap is several steps, some of which take no
    time. Times, travels and sizes are in rows of one value per microbatch of the batch; a step has the place of the first of its row.
    """

    ranks: int
    links: int
    rank: Column
    """Rank of each step."""
    position: Column
    time: Column
    """The row of each step in `BatchColumns.times`."""
    need: Column
    """The earlier step whose message each step waits for, -1 for none."""
    link: Column
    """The link that each step's message occupies, -1 for none."""
    travel: Column
    """The row of each step's message in `BatchColumns.travels`."""
    first: Column
    """Each rank's first step that takes time."""
    last: Column
    reduced: Column
    """The steps that end a stage's gradients, and these stages, in the order of each rank."""
    bounds: Column
    """The first change of memory of each rank, and the number of changes."""
    held: Column
    """The row of each change in `BatchColumns.sizes`."""
    held_position: Column
    sign: Column
    """1.0 for memory that is taken, -1.0 for memory that is freed."""
    has_copies: bool
    """Whether the rank of a stage depends on the position."""


class BatchColumns(NamedTuple):
    """What the microbatches of a batch take and hold."""

    times: Column
    travels: Column
    sizes: Column
    limit: Column
    """Memory limit of each rank, beyond what it always holds."""
    closing: Column
    """Optimizer time of each rank."""
    reduce: Column
    """Gradient reduction time of each stage."""
    is_span: bool
    """Whether the longest rank span counts instead of the makespan."""


class Scratch(NamedTuple):
    """Columns that the loops write to: the first two have one value per step."""

    end: Column
    arrive: Column
    now: Column
    slack: Column
    lane: Column
    free: Column
    busy: Column
    """The time of each rank's steps."""
    spent: Column
    """One value: the work done, which is the steps that were timed and half the changes of memory that were looked at."""
    full: Column
    """One value: the rank whose limit was exceeded last."""


def time_permutations(steps: Steps, batch: BatchColumns, orders: Column, scratch: Scratch, objectives: Column) -> None:
    """Fill in the objective of each of these orders; `orders[k]` has the microbatch at each position."""
    for number in range(len(objectives)):
        objectives[number] = time_permutation(steps, batch, orders[number], scratch, math.inf)


def time_permutation(steps: Steps, batch: BatchColumns, at: Column, scratch: Scratch, most: float) -> float:
    """The objective of an order; infinite as soon as it must be above `most`, for which `scratch.busy` must be filled in."""
    rank_of, position, row, need, link, way_row = steps.rank, steps.position, steps.time, steps.need, steps.link, steps.travel
    times, travels = batch.times, batch.travels
    end, arrive, now, slack, lane, free = scratch.end, scratch.arrive, scratch.now, scratch.slack, scratch.lane, scratch.free
    stops = most < math.inf and not steps.has_copies and not batch.is_span
    for rank in range(steps.ranks):
        now[rank], lane[rank] = 0.0, 0.0
        slack[rank] = most * (1.0 + _ROUNDING) - scratch.busy[rank] - batch.closing[rank] if stops else math.inf
    for way in range(steps.links):
        free[way] = 0.0
    for step in range(len(rank_of)):
        rank, microbatch = rank_of[step], at[position[step]]
        time, source = now[rank], need[step]
        if source >= 0:
            begin = arrive[source]
            if begin > time:
                slack[rank] -= begin - time
                if slack[rank] < 0.0:
                    scratch.spent[0] += step
                    return math.inf
                time = begin
        time += times[row[step] + microbatch]
        now[rank] = time
        end[step] = time
        way = link[step]
        if way >= 0:
            leave = free[way]
            if time > leave:
                leave = time
            leave += travels[way_row[step] + microbatch]
            free[way] = leave
            arrive[step] = leave
    scratch.spent[0] += len(rank_of)
    for number in range(len(steps.last)):
        step = steps.last[number]
        rank = rank_of[step]
        lane[rank] = max(lane[rank], end[step]) + batch.reduce[steps.reduced[number]]
    objective = 0.0
    for rank in range(steps.ranks):
        step = steps.first[rank]
        begun = end[step] - times[row[step] + at[position[step]]] if batch.is_span else 0.0
        ended = max(now[rank], lane[rank]) + batch.closing[rank] - begun
        if ended > objective:
            objective = ended
    return objective


def find_excess(steps: Steps, batch: BatchColumns, at: Column, scratch: Scratch, most: float) -> float:
    """How much the memory of all ranks together exceeds the limits; infinite as soon as it is above `most`."""
    held, position, sign, sizes = steps.held, steps.held_position, steps.sign, batch.sizes
    excess, begin = 0.0, scratch.full[0] if most == 0.0 else 0
    for number in range(steps.ranks):
        rank = (begin + number) % steps.ranks
        limit = batch.limit[rank]
        if limit == math.inf:
            continue
        total, peak = 0.0, 0.0
        for change in range(steps.bounds[rank], steps.bounds[rank + 1]):
            total += sign[change] * sizes[held[change] + at[position[change]]]
            if total > peak:
                peak = total
        scratch.spent[0] += (steps.bounds[rank + 1] - steps.bounds[rank]) // 2
        if peak > limit:
            scratch.full[0] = rank
            excess += peak - limit
            if excess > most:
                return math.inf
    return excess


def search_permutations(  # noqa: PLR0917 - columns of the compiled loop
    steps: Steps, batch: BatchColumns, at: Column, scratch: Scratch, random: Column, tries: int, work: int, limited: bool
) -> tuple[float, float]:
    """Exchange and move microbatches, and keep each change that is not worse: with less memory over the limits, then with less time.

    Returns the objective and the memory over the limits. `at` has the microbatch at each position
    and is changed; `limited` says whether any rank has a memory limit. Ends after so many tries, or when as much
    `work` is done as `Scratch.spent` counts.
    """
    positions = len(at)
    for rank in range(steps.ranks):
        scratch.busy[rank] = 0.0
    for step in range(len(steps.rank)):
        scratch.busy[steps.rank[step]] += batch.times[steps.time[step] + at[steps.position[step]]]
    work += scratch.spent[0]
    objective = time_permutation(steps, batch, at, scratch, math.inf)
    excess = find_excess(steps, batch, at, scratch, math.inf) if limited else 0.0
    if positions < 2:
        return objective, excess
    for _ in range(tries):
        if scratch.spent[0] > work:
            break
        here, there = draw(random) % positions, draw(random) % (positions - 1)
        if there >= here:
            there += 1
        moves = draw(random) % 1024 < 512
        _change(at, here, there, moves)
        over, timed = 0.0, objective
        if excess > 0.0:  # the time does not count yet
            over = find_excess(steps, batch, at, scratch, excess)
        if over == 0.0:
            timed = time_permutation(steps, batch, at, scratch, math.inf if excess > 0.0 else objective)
        if limited and excess == 0.0 and timed <= objective:
            over = find_excess(steps, batch, at, scratch, 0.0)
        if over <= excess and (excess > 0.0 or timed <= objective):
            objective, excess = timed, over
        else:
            _change(at, there, here, moves)
    if excess > 0.0:
        objective = time_permutation(steps, batch, at, scratch, math.inf)
    return objective, excess


def _change(at: Column, here: int, there: int, moves: bool) -> None:
    """Move the microbatch at one position to another, those between making room; or exchange the two. The reverse undoes it."""
    moved, step = at[here], 1 if there > here else -1
    if moves:
        for position in range(here, there, step):
            at[position] = at[position + step]
    else:
        at[here] = at[there]
    at[there] = moved
