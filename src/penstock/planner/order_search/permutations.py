"""Local search on the order of microbatches within one schedule. The loop runs plain and compiled.

A *position* is a microbatch of the schedule; which of the batch's microbatches takes it is what the search changes. The order of the nodes
stays as it is: a change only exchanges their times and sizes.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.planner.order_search.flat_problem import Column, FlatProblem
from penstock.planner.order_search.timing import Clock, draw, time_starts


class PermutationState(NamedTuple):
    """The microbatch at each position, and the times of each microbatch."""

    order: Column
    """The nodes of the schedule, by position."""
    at: Column
    """The microbatch at each position."""
    duration: Column
    travel: Column
    takes: Column
    keeps: Column
    """The columns of the flat problem, with microbatches in the order of the batch."""
    random: Column
    """State of the random numbers."""


def search_permutations(flat: FlatProblem, state: PermutationState, clock: Clock, tries: int, limited: bool) -> tuple[float, float]:
    """Exchange and move microbatches, and keep each change that is not worse.

    Returns the objective, -1 for a deadlock, and the memory over the limits, see `find_excess`: less of that is better, then less time.
    `flat` has columns of its own that are written to; `limited` says whether any rank has a memory limit.
    """
    microbatches = flat.microbatches
    for position in range(microbatches):
        _place(flat, state, position)
    objective = time_starts(flat, state.order, clock)
    excess = find_excess(flat, state.order) if limited else 0.0
    if objective < 0 or microbatches < 2:
        return objective, excess
    for _ in range(tries):
        here, there = draw(state.random) % microbatches, draw(state.random) % (microbatches - 1)
        if there >= here:
            there += 1
        moves = draw(state.random) % 1024 < 512
        _change(flat, state, here, there, moves)
        timed = time_starts(flat, state.order, clock)
        over = find_excess(flat, state.order) if limited and (excess > 0 or timed <= objective) else 0.0
        if timed >= 0 and (over < excess or (over == excess and timed <= objective)):
            objective, excess = timed, over
        else:
            _change(flat, state, there, here, moves)
    return objective, excess


def find_excess(flat: FlatProblem, order: Column) -> float:
    """How much activations and stashes exceed the limits of all ranks together."""
    excess = 0.0
    for rank in range(flat.ranks):
        held, peak = 0.0, 0.0
        for place in range(flat.bounds[rank], flat.bounds[rank + 1]):
            node = order[place]
            held += flat.takes[node]
            if held > peak:
                peak = held
            held += flat.keeps[node]
            if held > peak:
                peak = held
        if peak > flat.limit[rank]:
            excess += peak - flat.limit[rank]
    return excess


def _change(flat: FlatProblem, state: PermutationState, here: int, there: int, moves: bool) -> None:
    """Move the microbatch at one position to another, those between making room; or exchange the two. The reverse undoes it."""
    at, step = state.at, 1 if there > here else -1
    if moves:
        moved = at[here]
        for position in range(here, there, step):
            at[position] = at[position + step]
            _place(flat, state, position)
        at[there] = moved
    else:
        at[here], at[there] = at[there], at[here]
        _place(flat, state, here)
    _place(flat, state, there)


def _place(flat: FlatProblem, state: PermutationState, position: int) -> None:
    """Give the nodes at a position the times and sizes of its microbatch."""
    there, microbatch = position, state.at[position]
    for _ in range(3 * flat.stages):
        flat.duration[there], flat.travel[there] = state.duration[microbatch], state.travel[microbatch]
        flat.takes[there], flat.keeps[there] = state.takes[microbatch], state.keeps[microbatch]
        there += flat.microbatches
        microbatch += flat.microbatches
