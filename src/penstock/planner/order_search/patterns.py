"""Search for a pattern that repeats with every microbatch.

A pattern has, per rank, one *cycle*: every kind and stage of the rank once, in order, and for each kind and stage how many
periods its microbatch lags lag. Laid out for all microbatches it is an order. A pattern is small however many microbatches
there are, and a change to it changes all of them. The loop runs plain and compiled; `PatternSearch` drives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.ir.rows import Ints
from penstock.planner.budget import SearchBudget
from penstock.planner.order_search.evaluator import Evaluator, Order
from penstock.planner.order_search.flat_problem import Column, Flags, FlatProblem
from penstock.planner.order_search.timing import MODULUS, Clock, draw, time_starts

_EVEN = 1e-9
_SHARES = (0.5, 0.4, 0.6)
"""Where in an order its pattern is taken from."""
_LONG = 40_000
"""The most changes tried on one pattern."""
_HOT, _COOL = 1.0, 0.02
"""The loss accepted at first, as a share of a node's time, and the share of it accepted at last."""
_PRICE = 20.0
"""Cost of one activation over the limit, in node times."""
_WORK = 1_000_000
"""Nodes times tries between two checks of the budget."""


class PatternState(NamedTuple):
    """The current pattern, the best so far, and scratch columns."""

    cycle: Column
    """Kinds and stages of each rank, numbered `kind * stages + stage`, from `3 * stage_at[rank]` on."""
    lag: Column
    """Lag of each kind and stage, in periods."""
    best: Column
    best_lag: Column
    kept: Column
    kept_lag: Column
    order: Column
    over: Column
    """Memory of each rank over its limit."""
    random: Column


def search_pattern(  # noqa: PLR0912, PLR0917 - one flat loop
    flat: FlatProblem, state: PatternState, clock: Clock, tries: int, heat: float, price: float, best: float
) -> tuple[float, float]:
    """Try changes; returns the best cost and the last one. Cost is time, plus `price` per unit of memory over the limits."""
    stages = flat.stages
    for rank in range(flat.ranks):
        _lay_out_and_weigh(flat, state, rank)
    cost = time_starts(flat, state.order, clock)
    if cost < 0:
        return best, cost
    for rank in range(flat.ranks):
        cost += price * state.over[rank]
    state.kept[:] = state.cycle
    state.kept_lag[:] = state.lag
    if cost < best * (1 - _EVEN):
        best = cost
        state.best[:] = state.cycle
        state.best_lag[:] = state.lag
    for _ in range(tries):
        bound = cost - heat * math.log((draw(state.random) + 1) / (MODULUS + 1))
        low = draw(state.random) % flat.ranks
        high = low + 1
        if draw(state.random) % 3 == 0:
            high = min(flat.ranks, high + draw(state.random) % flat.ranks)
        chunk = draw(state.random) % (flat.stage_at[low + 1] - flat.stage_at[low])
        kind, size = draw(state.random) % 3, draw(state.random) % 8
        length = 1 if size < 4 else 2 if size < 6 else 3 if size < 7 else 1 + draw(state.random) % 12
        if draw(state.random) % 1024 < 512:
            length = -length
        for rank in range(low, high):
            if chunk < flat.stage_at[rank + 1] - flat.stage_at[rank]:
                _shift_item(flat, state, rank, kind * stages + flat.stage_of[flat.stage_at[rank] + chunk], length)
                _lay_out_and_weigh(flat, state, rank)
        changed = 0.0
        for rank in range(flat.ranks):
            changed += price * state.over[rank]
        taken = -1.0
        if changed <= bound:
            taken = time_starts(flat, state.order, clock)
            changed += taken
        good = taken >= 0 and changed <= bound
        for rank in range(low, high):
            for place in range(3 * flat.stage_at[rank], 3 * flat.stage_at[rank + 1]):
                if good:
                    state.kept[place] = state.cycle[place]
                    state.kept_lag[state.cycle[place]] = state.lag[state.cycle[place]]
                else:
                    state.cycle[place] = state.kept[place]
                    state.lag[state.cycle[place]] = state.kept_lag[state.cycle[place]]
            if not good:
                _lay_out_and_weigh(flat, state, rank)
        if good:
            cost = changed
            if cost < best * (1 - _EVEN):
                best = cost
                state.best[:] = state.cycle
                state.best_lag[:] = state.lag
    return best, cost


def lay_out(flat: FlatProblem, state: PatternState, rank: int) -> None:
    """Write out the rank's part of the pattern for all microbatches."""
    microbatches, cycle, lag = flat.microbatches, state.cycle, state.lag
    begin, end = 3 * flat.stage_at[rank], 3 * flat.stage_at[rank + 1]
    least, most = lag[cycle[begin]], lag[cycle[begin]]
    for place in range(begin, end):
        least, most = min(least, lag[cycle[place]]), max(most, lag[cycle[place]])
    at = flat.bounds[rank]
    for turn in range(least, most + microbatches):
        for place in range(begin, end):
            microbatch = turn - lag[cycle[place]]
            if 0 <= microbatch < microbatches:
                state.order[at] = cycle[place] * microbatches + microbatch
                at += 1


def _lay_out_and_weigh(flat: FlatProblem, state: PatternState, rank: int) -> None:
    """Write out the rank's part, and find the most memory of the rank over its limit."""
    lay_out(flat, state, rank)
    holds, most = 0.0, 0.0
    for place in range(flat.bounds[rank], flat.bounds[rank + 1]):
        node = state.order[place]
        holds += flat.takes[node]
        most = max(most, holds)
        holds += flat.keeps[node]
        most = max(most, holds)
    state.over[rank] = max(0.0, most - flat.limit[rank])


def _shift_item(flat: FlatProblem, state: PatternState, rank: int, item: int, length: int) -> None:
    """Move an item along its rank's cycle; past an end it re-enters at the other end, one period later or earlier."""
    cycle, begin, end = state.cycle, 3 * flat.stage_at[rank], 3 * flat.stage_at[rank + 1]
    place = begin
    while cycle[place] != item:
        place += 1
    step = 1 if length > 0 else -1
    for _ in range(abs(length)):
        other = place + step
        if other == end:
            for index in range(end - 1, begin, -1):
                cycle[index] = cycle[index - 1]
            place = begin
            state.lag[item] += 1
        elif other < begin:
            for index in range(begin, end - 1):
                cycle[index] = cycle[index + 1]
            place = end - 1
            state.lag[item] -= 1
        else:
            cycle[place] = cycle[other]
            place = other
        cycle[place] = item


# Driving the loop -----------------------------------------------------------------------------------------------------


@dataclass
class PatternSearch:
    """Searches patterns of one problem, for orders of another that may have more microbatches."""

    evaluator: Evaluator
    whole: Evaluator
    budget: SearchBudget
    chance: np.random.Generator

    def run(self, orders: list[Order]) -> list[Order]:
        """The best pattern that grows from each order while the budget lasts; only those within the memory."""
        better: list[Order] = []
        for place, order in enumerate(orders):
            if self.budget.over:
                break
            with self.budget.part(1 / (len(orders) - place)):
                better += self._search(order, _SHARES[place % len(_SHARES)])
        return better

    def _search(self, order: Order, share: float) -> list[Order]:
        pattern = Pattern.read(self.evaluator, order, share, int(self.chance.integers(2**31)))
        tries, tried = min(1000, max(50, _WORK // self.evaluator.nodes)), 0
        begin, end = self.budget.share, self.budget.end
        while not self.budget.over and tried < _LONG:
            done = max(tried / _LONG, (self.budget.share - begin) / max(end - begin, 1e-9))
            pattern.run(tries, _HOT * _COOL ** min(done, 1.0))
            self.budget.spend(tries)
            tried += tries
        if math.isinf(pattern.best):
            return []
        whole, microbatches = self.whole, self.evaluator.flat.microbatches
        full = order.full if whole is self.evaluator else np.repeat(order.full[::microbatches], whole.flat.microbatches)
        nodes = pattern.build_order(whole)
        objective = whole.time(nodes, full)
        fits = objective >= 0 and not (whole.find_peaks(nodes, full) > whole.flat.limit).any()
        return [Order(nodes, full, objective, order.source)] if fits else []


class Pattern:
    """Local search on one pattern."""

    def __init__(self, evaluator: Evaluator, cycle: Ints, lag: Ints, full: Flags, seed: int) -> None:
        self.evaluator = evaluator
        self.flat = evaluator.copy_flat(full)
        self.state = PatternState(
            **{name: evaluator.as_column(cycle.copy()) for name in ("cycle", "best", "kept")},
            **{name: evaluator.as_column(lag.copy()) for name in ("lag", "best_lag", "kept_lag")},
            order=evaluator.ints(evaluator.nodes),
            over=evaluator.floats(evaluator.flat.ranks),
            random=evaluator.seed(seed),
        )
        self.best = self.cost = math.inf
        self.price = _PRICE * evaluator.usual / (float(np.mean(evaluator.flat.activation)) or 1.0)

    @classmethod
    def read(cls, evaluator: Evaluator, order: Order, share: float, seed: int) -> Pattern:
        """The pattern of an order: what each rank does from a share of the time on."""
        flat = evaluator.flat
        stages, microbatches = flat.stages, flat.microbatches
        evaluator.time(order.nodes, order.full)
        starts = np.asarray(evaluator.clock.start).reshape(3 * stages, microbatches)
        moment = share * float(starts.max())
        nearest = np.minimum((starts < moment).sum(axis=1), microbatches - 1)
        place = np.empty(evaluator.nodes, dtype=np.int64)
        place[order.nodes] = np.arange(evaluator.nodes)
        turn = place.reshape(3 * stages, microbatches)[np.arange(3 * stages), nearest]
        cycle = []
        for rank in range(flat.ranks):
            held = flat.stage_of[flat.stage_at[rank] : flat.stage_at[rank + 1]]
            items = np.concatenate([kind * stages + held for kind in range(3)])
            cycle.append(items[np.argsort(turn[items], kind="stable")])
        return cls(evaluator, np.concatenate(cycle), -nearest, order.full, seed)

    def run(self, tries: int, heat: float) -> None:
        self.best, self.cost = self.evaluator.loops.search_pattern(
            self.flat, self.state, self.evaluator.clock, tries, heat * self.evaluator.usual, self.price, self.best
        )

    def build_order(self, whole: Evaluator) -> Ints:
        """The best pattern as an order for an evaluator with at least as many microbatches."""
        order = np.zeros(whole.nodes, dtype=np.int64)
        best = self.state._replace(cycle=self.state.best, lag=self.state.best_lag, order=order)
        for rank in range(whole.flat.ranks):
            lay_out(whole.flat, best, rank)
        return order
