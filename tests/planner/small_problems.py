"""Problems small enough to try every order, and the code that tries them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from hypothesis import strategies as st

from penstock.errors import PassError
from penstock.ir.action import Action
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.problem import Problem

some_eighths = st.integers(1, 16).map(lambda number: number / 8)
eighths = st.integers(0, 16).map(lambda number: number / 8)
"""Sums of these are exact, so that equal times are equal."""


class Shape(NamedTuple):
    """What of a problem makes the number of its orders."""

    placement: Placement
    microbatches: int
    split: bool
    full: bool = False
    """Whether a full backward may be better than its halves, so that both are tried."""


TINY = (
    Shape(Placement.linear(1), 2, split=True, full=True),
    Shape(Placement.linear(1), 3, split=False),
    Shape(Placement.linear(2), 1, split=True, full=True),
    Shape(Placement.linear(2), 2, split=False),
    Shape(Placement.v(1), 2, split=False),
    Shape(Placement.v(2), 1, split=True),
    Shape(Placement.looped(1, 2), 2, split=False),
    Shape(Placement.looped(2, 2), 1, split=True),
    Shape(Placement.bidirectional(2), 2, split=False),
    Shape(Placement.custom([0, 1, 0]), 1, split=True),
)
"""Up to a hundred orders."""
SMALL = (
    Shape(Placement.linear(2), 2, split=True),
    Shape(Placement.linear(3), 2, split=False),
    Shape(Placement.bidirectional(2), 2, split=True),
    Shape(Placement.custom([0, 0, 1]), 2, split=False),
)
"""Up to five hundred."""


@st.composite
def costs(draw: st.DrawFn, shape: Shape, *, output: bool = False) -> Costs:
    """Times of at least an eighth, one for all, one a stage or one an action; a slow link, an optimizer and a reduction now and then."""
    stages, microbatches = shape.placement.stages, shape.microbatches

    def of(amounts: st.SearchStrategy[float]) -> Any:
        row = st.lists(amounts, min_size=microbatches, max_size=microbatches)
        a_stage = st.lists(amounts, min_size=stages, max_size=stages)
        return draw(st.one_of(amounts, a_stage, a_stage, st.lists(row, min_size=stages, max_size=stages)))

    fields: dict[str, Any] = {name: of(some_eighths) for name in ("f", "i", "w")}
    ranks = shape.placement.ranks
    fields["latency"] = draw(
        st.one_of(eighths, st.lists(st.lists(eighths, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks))
    )
    if shape.full:
        fields |= {"b": of(some_eighths), "activation": of(some_eighths), "weight_stash": of(eighths)}
    else:
        fields |= {"activation": of(st.sampled_from((1.0, 1.5, 1.625, 2.0))), "weight_stash": of(st.sampled_from((0.0, 0.5, 0.875, 1.0)))}
    for name in ("optimizer", "reduce"):
        if draw(st.booleans()):
            fields[name] = draw(st.lists(eighths, min_size=stages, max_size=stages))
    if output:
        fields |= {"output": of(eighths), "bandwidth": draw(st.sampled_from((None, 0.5, 2.0)))}
    return Costs(**fields)


@st.composite
def problems(draw: st.DrawFn, shapes: tuple[Shape, ...] = TINY, *, output: bool = False) -> Problem:
    """A tiny problem, its memory somewhere between too little and enough for everything."""
    shape = draw(st.sampled_from(shapes))
    made = draw(costs(shape, output=output))
    ranks = shape.placement.ranks
    limit = draw(st.one_of(st.none(), st.lists(st.integers(8, 40).map(lambda n: n / 8), min_size=ranks, max_size=ranks)))
    return Problem(shape.placement, shape.microbatches, made, limit and tuple(limit), barrier=draw(st.booleans()), split=shape.split)


# Every order ----------------------------------------------------------------------------------------------------------


def best_of_all(problem: Problem) -> float:
    """The least objective of any order that fits, infinite if none does: every order is lowered and simulated."""
    best = math.inf
    for rows in product(*(list(_rows(problem, rank)) for rank in range(problem.ranks))):
        schedule = Schedule.from_actions(rows, problem.placement, microbatches=problem.microbatches)
        try:
            timeline = problem.evaluate(schedule)
        except PassError:  # the ranks wait for each other
            continue
        if problem.fits(timeline):
            best = min(best, problem.objective(timeline))
    return best


def _rows(problem: Problem, rank: int) -> Iterator[tuple[Action, ...]]:
    """Every order of one rank's actions that its own dependencies allow, with each backward split or not."""
    cells = [(s, m) for m in range(problem.microbatches) for s in range(problem.stages) if problem.placement.rank_of(s, m) == rank]
    modes = (True, False) if problem.split and problem.costs.b is not None else (problem.split,)
    for choice in product(modes, repeat=len(cells)):
        todo: list[Action] = []
        for (stage, m), halves in zip(cells, choice, strict=True):
            backward = (Kind.I, Kind.W) if halves else (Kind.B,)
            todo += [Action(stage, kind, m) for kind in (Kind.F, *backward)]
        yield from _orders((), todo)


def _orders(done: tuple[Action, ...], todo: list[Action]) -> Iterator[tuple[Action, ...]]:
    if not todo:
        yield done
    for action in todo:
        if not any(_needs(action, other) for other in todo):
            yield from _orders((*done, action), [other for other in todo if other != action])


def _needs(action: Action, other: Action) -> bool:
    """Whether the other must come first on the same rank."""
    if action.microbatch != other.microbatch or action == other:
        return False
    if action.kind is Kind.F:
        return other.kind is Kind.F and other.stage < action.stage
    if action.kind is Kind.W:
        return other.kind in (Kind.F, Kind.I) and other.stage == action.stage
    return other.kind is Kind.F or (other.kind in (Kind.B, Kind.I) and other.stage > action.stage)
