"""Local search on orders: nodes move along their rank's row, and backwards are split or merged.

A move is first estimated from the times around it, in time proportional to its length; only a move that may be accepted is
timed in full. Most moves are of nodes on a critical path, because no other move can shorten it. The loop runs plain and
compiled; `LocalSearch` drives it over several orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.budget import SearchBudget
from penstock.planner.order_search.evaluator import Evaluator, Order
from penstock.planner.order_search.flat_problem import Column, FlatProblem
from penstock.planner.order_search.timing import MODULUS, Clock, draw, time_order

_EVEN = 1e-9
_RUN = 6
"""The most nodes of a run that is exchanged with another."""


class AnnealState(NamedTuple):
    """The current order, the best so far, and scratch columns."""

    order: Column
    full: Column
    """The cells with a full backward."""
    best: Column
    best_full: Column
    place: Column
    """Place of each node in the order."""
    held: Column
    """Memory of the rank before each place of the order."""
    critical: Column
    """Nodes on a critical path."""
    backup: Column
    """The order before a sweep."""
    moved: Column
    """The nodes of a move, in their new order."""
    begin: Column
    end: Column
    rest: Column
    """Estimated start, end and tail of each moved node."""
    random: Column
    """State of the random numbers."""


class AnnealOptions(NamedTuple):
    """Options of one run."""

    heat: float
    """The usual loss of time that is accepted."""
    on_critical: float
    """Share of tries that move a node on a critical path."""
    reach: int
    """Most places that a node moves."""
    choices: int
    """Moves compared per try."""
    sweeps: float
    """Share of tries that move several nodes at once."""
    tries: int = 0


def anneal(  # noqa: PLR0912
    flat: FlatProblem, state: AnnealState, clocks: tuple[Clock, Clock], options: AnnealOptions, best: float
) -> tuple[float, float, int]:
    """Try moves; returns the best objective, the last one, and how many orders were timed in full.

    `best` is the objective of `state.best`.
    """
    clock, spare = clocks
    objective = time_order(flat, state.order, clock)
    timed = 1
    _fill_places(flat, state)
    num_critical = _find_critical(flat, state, clock, objective)
    if objective < best * (1 - _EVEN):
        best = objective
        _keep(state)
    for _ in range(options.tries):
        bound = objective - options.heat * math.log((draw(state.random) + 1) / (MODULUS + 1))
        what = draw(state.random) / MODULUS
        here, there, cell = -1, -1, -1
        if what < options.sweeps:
            done = _sweep(flat, state, state.critical[draw(state.random) % num_critical])
        elif flat.may_merge and what < options.sweeps + 0.05:
            cell = draw(state.random) % (flat.stages * flat.microbatches)
            done = _merge(flat, state, cell)
        else:
            here, there = _choose(flat, state, clock, options, num_critical, bound)
            done = here >= 0
            if done:
                _apply(state, here, there)
        if not done:
            continue
        moved = time_order(flat, state.order, spare)
        timed += 1
        if moved < 0 or moved > bound:
            if here >= 0:
                _write_moved(state, there, here)
                _apply(state, there, here)
            elif cell >= 0:
                _flip(flat, state, cell)
            else:
                _restore(flat, state)
            continue
        clock, spare = spare, clock
        objective = moved
        if here >= 0:
            low = min(here, there)
            _fill_held(flat, state, low, max(here, there) + 1, state.held[low])
        else:
            _fill_places(flat, state)
        num_critical = _find_critical(flat, state, clock, objective)
        if objective < best * (1 - _EVEN):
            best = objective
            _keep(state)
    return best, objective, timed


def _choose(  # noqa: PLR0917
    flat: FlatProblem, state: AnnealState, clock: Clock, options: AnnealOptions, num_critical: int, bound: float
) -> tuple[int, int]:
    """The most promising of some moves if its estimate is within the bound, with its nodes in `moved`; else (-1, -1)."""
    nodes = 3 * flat.stages * flat.microbatches
    least, best_here, best_there = bound, -1, -1
    for _ in range(options.choices):
        if draw(state.random) < options.on_critical * MODULUS:
            node = state.critical[draw(state.random) % num_critical]
        else:
            node = draw(state.random) % nodes
        length = 1 + int((draw(state.random) / MODULUS) ** 2 * options.reach)
        here = state.place[node]
        there = _find_target(flat, state, clock, node, length if draw(state.random) % 1024 < 512 else -length)
        if here != there and _is_within(flat, state, here, there):
            longest = _estimate(flat, state, clock, here, there)
            if longest <= least:
                least, best_here, best_there = longest, here, there
    if best_here >= 0:
        _write_moved(state, best_here, best_there)
    return best_here, best_there


def _keep(state: AnnealState) -> None:
    state.best[:] = state.order
    state.best_full[:] = state.full


def _fill_places(flat: FlatProblem, state: AnnealState) -> None:
    for rank in range(flat.ranks):
        _fill_held(flat, state, flat.bounds[rank], flat.bounds[rank + 1], 0.0)


def _fill_held(flat: FlatProblem, state: AnnealState, first: int, last: int, holds: float) -> None:
    """Fill in the places of nodes and the memory before them, from a place on that `holds` so much."""
    for place in range(first, last):
        node = state.order[place]
        state.place[node] = place
        state.held[place] = holds
        holds += flat.takes[node] + flat.keeps[node]


def _find_critical(flat: FlatProblem, state: AnnealState, clock: Clock, objective: float) -> int:
    """List the nodes on a critical path; returns their number."""
    least, count = objective * (1 - _EVEN), 0
    start, tail, critical = clock.start, clock.tail, state.critical
    for node in range(3 * flat.stages * flat.microbatches):
        if start[node] + tail[node] >= least:
            critical[count] = node
            count += 1
    if count == 0:  # sums in another order differ in their last digits
        critical[0] = 0
        count = 1
    return count


def _find_target(flat: FlatProblem, state: AnnealState, clock: Clock, node: int, length: int) -> int:
    """The place up to `length` places later, or earlier if negative, as far as dependencies allow.

    No node moves past one whose end it would wait for anyway. Identical microbatches keep their order on every stage.
    """
    order, start, arrive, duration = state.order, clock.start, clock.arrive, flat.duration
    microbatches, cells, alike = flat.microbatches, flat.stages * flat.microbatches, flat.is_alike
    row, rank = node // microbatches, flat.rank[node]
    place = state.place[node]
    if length < 0:
        last, before = max(place + length, flat.bounds[rank]), flat.before[node]
        while place > last:
            other = order[place - 1]
            if other in (before, node - cells) or (alike and other // microbatches == row):
                break
            if start[other] + duration[other] <= arrive[node]:
                break
            place -= 1
    else:
        last, end = min(place + length, flat.bounds[rank + 1] - 1), start[node] + duration[node]
        while place < last:
            other = order[place + 1]
            if flat.before[other] == node or other == node + cells or (alike and other // microbatches == row) or end <= arrive[other]:
                break
            place += 1
    return int(place)


def _is_within(flat: FlatProblem, state: AnnealState, here: int, there: int) -> bool:
    """Whether the rank stays within its memory if the node at `here` moves; the nodes between are written to `moved`."""
    _write_moved(state, here, there)
    low, limit = min(here, there), flat.limit[flat.rank[state.order[here]]]
    return _stays_within(flat, state.moved, 0, abs(here - there) + 1, state.held[low], limit)


def _write_moved(state: AnnealState, here: int, there: int) -> None:
    low, step = min(here, there), -1 if there < here else 1
    for place in range(low, max(here, there) + 1):
        state.moved[place - low] = state.order[here] if place == there else state.order[place + step]


def _stays_within(flat: FlatProblem, nodes: Column, first: int, last: int, holds: float, limit: float) -> bool:  # noqa: PLR0917
    """Whether some nodes stay within the limit, one after the other, if so much is held before the first."""
    for place in range(first, last):
        node = nodes[place]
        holds += flat.takes[node]
        if holds > limit:
            return False
        holds += flat.keeps[node]
        if holds > limit:
            return False
    return True


def _estimate(flat: FlatProblem, state: AnnealState, clock: Clock, here: int, there: int) -> float:
    """The longest path through the moved nodes if the times of all others stay."""
    order, moved, begin, end, rest, where = state.order, state.moved, state.begin, state.end, state.rest, state.place
    start, arrive, tail, duration, rank_of = clock.start, clock.arrive, clock.tail, flat.duration, flat.rank
    low, high = min(here, there), max(here, there)
    rank, cells = rank_of[order[here]], flat.stages * flat.microbatches
    time = 0.0
    if low > flat.bounds[rank]:
        before = order[low - 1]
        time = start[before] + duration[before]
    for place in range(high - low + 1):
        node = moved[place]
        ready = arrive[node]
        before = flat.before[node]
        if before >= 0 and low <= where[before] <= high:
            ready = end[before]
        if ready > time:
            time = ready
        begin[node] = time
        time += duration[node]
        end[node] = time
    time = tail[order[high + 1]] if high + 1 < flat.bounds[rank + 1] else flat.closing[rank]
    longest = 0.0
    for place in range(high - low, -1, -1):
        node = moved[place]
        after = flat.after[node]
        if after >= 0:
            left = rest[after] if low <= where[after] <= high else tail[after] + flat.travel[node]
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


def _apply(state: AnnealState, here: int, there: int) -> None:
    low = min(here, there)
    for place in range(low, max(here, there) + 1):
        node = state.moved[place - low]
        state.order[place] = node
        state.place[node] = place


def _merge(flat: FlatProblem, state: AnnealState, cell: int) -> bool:
    """Merge a split backward or split a full one; undone and False if the rank then exceeds its memory."""
    _flip(flat, state, cell)
    if _keeps_within(flat, state, flat.rank[cell]):
        return True
    _flip(flat, state, cell)
    return False


def _flip(flat: FlatProblem, state: AnnealState, cell: int) -> None:
    cells = flat.stages * flat.microbatches
    whole = 1 - state.full[cell]
    state.full[cell] = whole
    stash = 0.0 if whole else flat.stash[cell]
    flat.duration[cells + cell] = flat.full_time[cell] if whole else flat.input_time[cell]
    flat.duration[2 * cells + cell] = 0.0 if whole else flat.weight_time[cell]
    # As in `replace_full_backwards`, for one cell.
    flat.keeps[cells + cell] = stash - flat.freed[cell]
    flat.keeps[2 * cells + cell] = -stash


def _keeps_within(flat: FlatProblem, state: AnnealState, rank: int) -> bool:
    return _stays_within(flat, state.order, flat.bounds[rank], flat.bounds[rank + 1], 0.0, flat.limit[rank])


def _sweep(flat: FlatProblem, state: AnnealState, node: int) -> bool:
    """Move a node and its counterparts on neighbouring ranks or of neighbouring microbatches by the same number of places.

    Undone and False if a rank then exceeds its memory.
    """
    microbatches, cells, random = flat.microbatches, flat.stages * flat.microbatches, state.random
    state.backup[:] = state.order
    if not flat.is_alike and draw(random) % 2 == 0:
        return _exchange(flat, state, node % microbatches, draw(random) % microbatches)
    if draw(random) % 3 == 0:
        return _rotate(flat, state, state.place[node] - draw(random) % _RUN)
    kind, stage, microbatch = node // cells, node % cells // microbatches, node % microbatches
    rank, chunk = flat.rank[node], 0
    while flat.stage_of[flat.stage_at[rank] + chunk] != stage:
        chunk += 1
    low, high, first, last = rank, rank + 1, microbatch, microbatch + 1
    what = draw(random) % 4
    if what != 0:
        low, high = max(0, low - draw(random) % flat.ranks), min(flat.ranks, high + draw(random) % flat.ranks)
    if what in (0, 1):
        first, last = max(0, first - draw(random) % 4), min(microbatches, last + draw(random) % microbatches)
    length = 1 + draw(random) % (3 if draw(random) % 2 == 0 else 10)
    backward = draw(random) % 1024 < 512
    for other in range(low, high):
        if chunk < flat.stage_at[other + 1] - flat.stage_at[other]:
            row = (kind * flat.stages + flat.stage_of[flat.stage_at[other] + chunk]) * microbatches
            for count in range(last - first):
                moved = row + (first + count if backward else last - 1 - count)
                if flat.rank[moved] == other:
                    _shift(flat, state, moved, -length if backward else length)
    for other in range(low, high):
        if not _keeps_within(flat, state, other):
            _restore(flat, state)
            return False
    return True


def _rotate(flat: FlatProblem, state: AnnealState, low: int) -> bool:
    """Exchange two adjacent short runs of nodes, the first of which begins at `low` or at its rank's first place.

    Undone and False if dependencies or the rank's memory forbid it.
    """
    order, before, cells, random = state.order, flat.before, flat.stages * flat.microbatches, state.random
    rank = flat.rank[order[max(low, 0)]]
    low = max(low, flat.bounds[rank])
    middle = low + 1 + draw(random) % _RUN
    high = middle + 1 + draw(random) % _RUN
    if high > flat.bounds[rank + 1]:
        return False
    for first in range(low, middle):
        early = order[first]
        for second in range(middle, high):
            late = order[second]
            alike = flat.is_alike and early // flat.microbatches == late // flat.microbatches
            if before[late] == early or late == early + cells or alike:
                return False
    for place in range(high - low):
        order[low + place] = state.backup[low + (place + middle - low) % (high - low)]
    if _keeps_within(flat, state, rank):
        return True
    order[:] = state.backup
    return False


def _exchange(flat: FlatProblem, state: AnnealState, one: int, other: int) -> bool:
    """Exchange two microbatches everywhere; undone and False if a rank then exceeds its memory."""
    order, microbatches = state.order, flat.microbatches
    if one == other or flat.rank[one] != flat.rank[other]:
        return False
    for place in range(3 * flat.stages * microbatches):
        microbatch = order[place] % microbatches
        if microbatch == one:
            order[place] += other - one
        elif microbatch == other:
            order[place] += one - other
    for rank in range(flat.ranks):
        if not _keeps_within(flat, state, rank):
            state.order[:] = state.backup
            return False
    return True


def _shift(flat: FlatProblem, state: AnnealState, node: int, length: int) -> None:
    """Move a node along its row as far as dependencies allow."""
    order, where, before, microbatches = state.order, state.place, flat.before, flat.microbatches
    cells, rank, place = flat.stages * flat.microbatches, flat.rank[node], state.place[node]
    step = 1 if length > 0 else -1
    for _ in range(abs(length)):
        if not flat.bounds[rank] <= place + step < flat.bounds[rank + 1]:
            break
        other = order[place + step]
        early, late = (node, other) if step > 0 else (other, node)
        if before[late] == early or late == early + cells or (flat.is_alike and early // microbatches == late // microbatches):
            break
        order[place], where[other] = other, place
        place += step
        order[place], where[node] = node, place


def _restore(flat: FlatProblem, state: AnnealState) -> None:
    state.order[:] = state.backup
    _fill_places(flat, state)


# Driving the loop -----------------------------------------------------------------------------------------------------


class Annealing:
    """Local search on one order."""

    def __init__(self, evaluator: Evaluator, order: Order, seed: int) -> None:
        self.evaluator, self.source = evaluator, order.source
        self.flat = evaluator.copy_flat(order.full)
        self.objective = self.best = order.objective
        as_column = evaluator.as_column
        self.state = AnnealState(
            order=as_column(order.nodes.copy()),
            full=self.flat.full,
            best=as_column(order.nodes.copy()),
            best_full=as_column(order.full.copy()),
            **{name: evaluator.ints(evaluator.nodes) for name in ("place", "critical", "backup", "moved")},
            **{name: evaluator.floats(evaluator.nodes) for name in ("held", "begin", "end", "rest")},
            random=evaluator.seed(seed),
        )

    def run(self, options: AnnealOptions) -> int:
        """Continue from the last order; returns how many orders were timed in full."""
        clocks = self.evaluator.clock, self.evaluator.spare
        self.best, self.objective, timed = self.evaluator.loops.anneal(self.flat, self.state, clocks, options, self.best)
        return int(timed)

    @property
    def best_order(self) -> Order:
        state = self.state
        return Order(np.array(state.best, dtype=np.int64), np.array(state.best_full, dtype=np.int8), float(self.best), self.source)


_MOST_TRIES = 1000
"""The most tries of one turn per node."""
_COOL = 0.03
"""The loss accepted at last, as a share of the first."""
_MANNERS = (
    AnnealOptions(0.15, 0.9, 40, 8, 0.05),
    AnnealOptions(0.3, 0.9, 15, 3, 0.3),
    AnnealOptions(1.0, 0.6, 100, 20, 0.02),
    AnnealOptions(0.05, 0.9, 40, 1, 0.05),
    AnnealOptions(0.5, 0.9, 15, 8, 0.3),
)
"""Turns alternate between these, whose heat is a share of a node's time: none is the best for all problems."""
_WORK_PER_CALL = 6_000_000
"""Nodes times tries between two checks of the budget: some hundredths of a second."""
_TRY = 0.05
"""Cost of a try, in orders timed in full."""
_FIRST = 0.4
"""Share of the budget for the first turns."""


@dataclass
class LocalSearch:
    """Improves several orders: one turn each, then more turns for the best; `accept` checks a whole order."""

    evaluator: Evaluator
    budget: SearchBudget
    chance: np.random.Generator
    accept: Callable[[Order], bool]
    over: Callable[[], Floats]
    """Memory of the last refused order over each limit."""

    def run(self, orders: list[Order]) -> None:
        pool = list(orders)
        with self.budget.part(_FIRST):
            for place in range(len(pool)):
                self._improve(pool, place, 1 / (len(pool) - place), place)
        turn = 0
        while pool and not self.budget.over:
            pool.sort(key=lambda order: order.objective)
            place = 0 if self.chance.random() < 0.6 else int(self.chance.integers(len(pool)))
            self._improve(pool, place, 0.5, turn)
            turn += 1

    def _improve(self, pool: list[Order], place: int, share: float, turn: int) -> None:
        """Anneal one order for a share of what is left of the budget; a better order that is accepted replaces it."""
        better = self._anneal(pool[place], share, turn)
        if better.objective < pool[place].objective:
            if self.accept(better):
                pool[place] = better
            else:
                self.evaluator.leave_free(self.over())

    def _anneal(self, order: Order, share: float, turn: int) -> Order:
        manner = _MANNERS[turn % len(_MANNERS)]
        nodes = self.evaluator.nodes
        tries, tried = min(1000, max(50, _WORK_PER_CALL // nodes), _MOST_TRIES * nodes // 10), 0
        annealing = Annealing(self.evaluator, order, int(self.chance.integers(2**31)))
        with self.budget.part(share) as (begin, end):
            while not self.budget.over and tried < _MOST_TRIES * nodes:
                done = max(tried / (_MOST_TRIES * nodes), (self.budget.share - begin) / max(end - begin, 1e-9))
                options = manner._replace(heat=manner.heat * self.evaluator.usual * _COOL ** min(done, 1.0), tries=tries)
                self.budget.spend(annealing.run(options) + _TRY * tries)
                tried += tries
        return annealing.best_order
