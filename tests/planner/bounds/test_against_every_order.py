"""Every bound against an exact solver of its own, on random tiny problems whose messages take memory and whose limits bind."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from typing import Any

import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bounds.lower_bound import Bound, lower_bound
from penstock.planner.bounds.overall import OverallBound
from penstock.planner.partition.assignment import Assignment
from penstock.planner.problem import Problem
from planner.every_order import EveryOrder, TooManyOrdersError
from planner.small_problems import SMALL, TINY, best_of_all, problems

PLACEMENTS = (
    (Placement.looped(2, 2), 4),
    (Placement.looped(3, 2), 3),
    (Placement.looped(2, 3), 3),
    (Placement.v(2), 4),
    (Placement.v(3), 3),
    (Placement.wave(2, 2), 2),
    (Placement.linear(3), 3),
    (Placement.custom([0, 1, 0]), 4),
)
"""With the most microbatches that are drawn."""


def draw_links(chance: random.Random, ranks: int) -> dict[str, Any]:
    """The same for all pairs of ranks, or any of two latencies and bandwidths for each pair and direction."""
    links: dict[str, Any] = {"latency": chance.choice((0.0, 0.0, 1.0)), "bandwidth": chance.choice((None, None, 2.0))}
    if chance.random() < 0.4:
        links = {name: [[chance.choice(of) for _ in range(ranks)] for _ in range(ranks)] for name, of in UNEQUAL.items()}
    return links


UNEQUAL: dict[str, tuple[float | None, ...]] = {"latency": (0.0, 1.0, 3.0), "bandwidth": (None, 2.0, 0.5)}


def draw_problem(chance: random.Random) -> Problem:
    """Whole times of at least 1, sizes in tenths, and a limit from what one microbatch needs to twice that."""
    placement, most = chance.choice(PLACEMENTS)
    stages, microbatches = placement.stages, chance.randint(2, most)
    uneven = chance.random() < 0.3

    def draw(*amounts: float) -> list[float]:
        """One value per stage, the same for all if stages are even."""
        return [chance.choice(amounts) for _ in range(stages)] if uneven else [chance.choice(amounts)] * stages

    times = {name: draw(1.0, 2.0, 3.0, 4.0) for name in ("f", "i", "w")}
    activation = draw(0.5, 1.0, 2.0)
    output = [chance.choice((0.0, 0.1, 1.0, 3.0)) for _ in range(stages)]
    stash = [chance.choice((0.0, 0.5)) * size for size in activation]
    costs = Costs(**times, activation=activation, output=output, weight_stash=stash, **draw_links(chance, placement.ranks))
    limit = []
    for rank in range(placement.ranks):
        mine = placement.stages_of(rank)
        held = [sum(activation[own] for own in mine if own <= stage) for stage in mine]
        crossing = [max(output[stage - 1] if stage else 0.0, output[stage] if stage < stages - 1 else 0.0) for stage in mine]
        least = max(size + message for size, message in zip(held, crossing, strict=True))
        limit.append(least + chance.choice((0.0, 0.0, 1.0, 4.0)))
    return Problem(placement, microbatches, costs, tuple(limit), barrier=chance.random() < 0.8, split=chance.random() < 0.6)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_no_bound_is_above_the_best_order(seed: int) -> None:
    """Twenty problems per seed, 320 in all; those with too many orders are drawn again."""
    chance, decided = random.Random(seed), 0
    while decided < 20:
        problem = draw_problem(chance)
        bound = lower_bound(problem)
        try:
            best, _ = EveryOrder(problem).beat(bound.value)
        except TooManyOrdersError:
            continue
        decided += 1
        assert best == math.inf, f"{bound.name} says {bound.value}, but an order of {problem} takes {best}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 102))
def test_no_bound_of_a_linear_program_or_solver_is_above_the_best_order(seed: int) -> None:
    chance, decided = random.Random(seed), 0
    while decided < 20:
        problem = draw_problem(chance)
        bound = lower_bound(problem, seconds=0.2)
        try:
            best, _ = EveryOrder(problem).beat(bound.value)
        except TooManyOrdersError:
            continue
        decided += 1
        assert best == math.inf, f"{bound.name} says {bound.value}, but an order of {problem} takes {best}"


def test_a_freed_message_leaves_its_memory_to_the_next_forward() -> None:
    """Rank 1 frees the 3.0 that stage 5 receives before it starts the second microbatch: the order takes 54, within the limit."""
    stash = [0.25, 0.25, 0.25, 0.25, 0.0, 0.25]
    costs = Costs(f=4.0, i=1.0, w=1.0, activation=0.5, weight_stash=stash, output=[0.1, 0.1, 0.0, 3.0, 0.0, 0.0])
    problem = Problem(Placement.looped(2, 3), 2, costs, (4.5, 5.0))
    rows = [
        ["0F0", "2F0", "4F0", "0F1", "4I0", "4W0", "2F1", "2I0", "2W0", "0I0", "0W0", "4F1", "4I1", "4W1", "2I1", "2W1", "0I1", "0W1"],
        ["1F0", "3F0", "5F0", "5I0", "1F1", "3I0", "3W0", "5W0", "1I0", "3F1", "1W0", "5F1", "5I1", "5W1", "3I1", "3W1", "1I1", "1W1"],
    ]
    schedule = Schedule.from_actions(rows, problem.placement, microbatches=2)
    ps.verify(ps.lower(schedule), memory_limit=problem.memory_limit, costs=costs)
    taken = problem.objective(problem.evaluate(schedule))
    assert taken == 54.0
    for name, bound in lower_bound(problem, seconds=0.5).all.items():
        assert bound <= taken, name


def test_a_received_gradient_counts_with_the_activations() -> None:
    """Two microbatches would hold 2 + 3 while the gradient of 3 is used, so each waits for the one before: 3 x (2 + 2 + 2)."""
    costs = Costs(f=1.0, i=1.0, w=1.0, output=[3.0, 0.0])
    problem = Problem(Placement.linear(2), 3, costs, (4.5, 9.0), split=False)
    assert lower_bound(problem).value == 18.0
    assert EveryOrder(problem).beat()[0] == 18.0


def test_a_stage_that_holds_nothing_is_planned() -> None:
    held, sent = (1.0, 0.0, 1.0, 1.0), (3.0, 0.1, 0.1, 0.1)
    layers = [ps.Layer(f=1, i=1, w=1, activation=a, output=o) for a, o in zip(held, sent, strict=True)]
    asked = {"ranks": 2, "microbatches": 4, "memory_limit": 2.5}
    try:
        plan = ps.plan(ps.Profile(layers), seconds=0.2, **asked)
    except ps.PlanError:
        return  # refused, in words
    assert max(plan.predicted.peak_memory) <= 2.5


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(problem=problems(SMALL[:2] + TINY[3:5]))
def test_the_solver_is_right(problem: Problem) -> None:
    """Without messages in memory it finds what trying every order with the simulator finds."""
    problem = replace(problem, costs=replace(problem.costs, optimizer=0.0, reduce=0.0))
    assert EveryOrder(problem, most_nodes=10**6).beat()[0] == pytest.approx(best_of_all(problem))


# Plans ----------------------------------------------------------------------------------------------------------------

FOUR = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=1)] * 4)


def test_a_plan_with_a_false_bound_cannot_be_made() -> None:
    plan = ps.plan(FOUR, ranks=2, microbatches=2, schedules=["1f1b"], seconds=0)
    for claims in ({"bounds": {"work": plan.objective + 1}}, {"overall_bound": plan.objective + 1}):
        with pytest.raises(AssertionError, match=rf"{plan.objective + 1!r}.* takes {plan.objective!r}"):
            replace(plan, **claims)


def test_a_false_bound_stops_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap is never cut off at 0, which hid it."""
    false = Bound(1e9, "false", {"false": 1e9})
    monkeypatch.setattr("penstock.planner.explore.lower_bound", lambda problem, seconds=0.0: false)
    with pytest.raises(AssertionError, match="false"):
        ps.plan(FOUR, ranks=2, microbatches=2, schedules=["1f1b"], seconds=0)


# Every partition ------------------------------------------------------------------------------------------------------


def every_setting(profile: ps.Profile, placements: list[Placement], asked: dict[str, Any]) -> Iterator[Problem]:
    """Every contiguous partition on every one of the placements, with the devices of a cluster in every order."""
    cluster = asked.get("cluster")
    orders = [None] if cluster is None else [Assignment(cluster, order) for order in permutations(range(len(cluster)))]
    for placement, assignment in product(placements, orders):
        for cuts in combinations(range(1, len(profile)), placement.stages - 1):
            sizes = tuple(last - first for first, last in pairwise((0, *cuts, len(profile))))
            shape = profile, placement, 2, sizes, (False,) * placement.stages
            yield Problem.cut(*shape, asked["limits"], asked["barrier"], asked["split"], assignment=assignment)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_partition_is_quicker_than_the_overall_bound(seed: int, uneven: bool) -> None:
    chance = random.Random(seed)
    layers = [
        ps.Layer(
            f=chance.randint(1, 5),
            i=chance.randint(1, 5),
            w=chance.randint(1, 5),
            activation=chance.randint(0, 3),
            parameters=chance.random(),
        )
        for _ in range(5)
    ]
    profile = ps.Profile(layers, latency=chance.choice((0.0, 1.0)))
    limit = chance.choice((None, 6.0, 8.0))
    asked = {"limits": None if limit is None else (limit, limit), "barrier": chance.random() < 0.7, "split": chance.random() < 0.3}
    if uneven:
        speeds = (0.5, 2.0, {"f": 2.0, "i": 1.0, "w": 0.25}, [1.0, 2.0, 4.0, 0.5, 1.0])
        asked["cluster"] = ps.Cluster(
            [ps.Device(speed=chance.choice(speeds)) for _ in range(2)], latency=[[0, chance.choice((0, 1))], [chance.choice((0, 2)), 0]]
        )
    bound = OverallBound(profile, 2, 2, **asked).value()
    placements = [Placement.linear(2), Placement.v(2), Placement.looped(2, 2)]
    tried = 0
    for problem in every_setting(profile, placements, asked):
        with suppress(TooManyOrdersError):
            best, _ = EveryOrder(problem, most_nodes=3000).beat(bound)
            assert best == math.inf
            tried += 1
    assert tried >= 8


def test_the_overall_bound_is_reached_with_even_layers() -> None:
    """One rank has nothing to wait for: its work is the bound. Of two ranks with two layers each, one waits for one layer at least."""
    profile = ps.Profile([ps.Layer(f=1, i=1, w=1)] * 4)
    assert OverallBound(profile, 3, 1).value() == 36.0
    assert OverallBound(profile, 3, 2).value() == 18.0 + 1.0
    assert EveryOrder(Problem.cut(profile, Placement.v(2), 3, (1,) * 4, (False,) * 4), 10**5).beat(19.5)[0] == 19.0
