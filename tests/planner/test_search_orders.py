"""Orders as flat arrays: timed, made and improved as the simulator and the memory limit have it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.planner.orders.anneal import Pace
from penstock.planner.orders.dispatch import Rule
from penstock.planner.orders.named import named_schedules, one_at_a_time
from penstock.planner.orders.patterns import Pattern, pattern_of
from penstock.planner.orders.rules import Rules
from penstock.planner.orders.shop import order_of, schedule_of, shop_of
from penstock.planner.orders.workshop import Order, Workshop
from penstock.planner.problem import Problem
from planner.drawn_orders import order_problems

some = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 10**6)


def is_all_right(problem: Problem, order: Order) -> bool:
    """Whether the simulator and the verifier see a whole schedule within the memory that takes what the order says."""
    schedule = schedule_of(problem, order.nodes, order.full)
    ps.verify(ps.lower(schedule), memory_limit=problem.memory_limit, costs=problem.costs)
    timeline = problem.evaluate(schedule)
    return problem.fits(timeline) and problem.objective(timeline) == pytest.approx(order.objective, rel=1e-9)


def full_of(problem: Problem, workshop: Workshop, seed: int) -> np.ndarray:
    """Which backwards are full: all where none may be split, else any if that can pay."""
    if not problem.split:
        return np.ones(workshop.cells, dtype=np.int8)
    mixed = np.random.default_rng(seed).integers(0, 2, workshop.cells).astype(np.int8)
    return mixed if workshop.shop.may_merge else np.zeros(workshop.cells, dtype=np.int8)


def made_by(workshop: Workshop, rule: Rule, full: np.ndarray) -> Order:
    """The order of a rule and what it takes: no more than the rule took, which may have waited for what it then did not run."""
    taken, nodes = workshop.dispatch(rule, full), workshop.made
    objective = workshop.time(nodes, full)
    assert objective == pytest.approx(taken) or (rule.patience and objective < taken)
    return Order(nodes, full, objective)


# Orders and schedules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe", "zbv", "1f1b-v", "interleaved-1f1b", "chimera"])
def test_an_order_gives_its_schedule_back(name: str) -> None:
    schedule = ps.schedule(name, 4, 8)
    problem = Problem(schedule.placement, 8, ps.Costs())
    assert schedule_of(problem, *order_of(shop_of(problem), schedule)) == schedule


def test_overlapped_actions_come_one_after_the_other() -> None:
    schedule = ps.schedule("dualpipe-v", 2, 8)
    problem = Problem(schedule.placement, 8, ps.Costs())
    again = schedule_of(problem, *order_of(shop_of(problem), schedule))
    assert [str(part) for action in schedule[1] for part in action.parts] == [str(action) for action in again[1]]


@pytest.mark.parametrize(("placement", "names"), [(Placement.v(2), {"zbv", "v-half", "v-min", "1f1b-v", "dualpipe-v", "hanayo"})])
def test_named_schedules_have_the_placement(placement: Placement, names: set[str]) -> None:
    assert {schedule.name for schedule in named_schedules(Problem(placement, 4, ps.Costs()))} == names


def test_named_schedules_are_fitted_and_split_only_where_that_is_allowed() -> None:
    costs = ps.Costs(f=1.0, i=2.0, w=3.0, activation=1.0, parameters=1.0)
    problem = Problem(Placement.linear(3), 6, costs, memory_limit=(3.0, 3.0, 3.0))
    fitted = next(schedule for schedule in named_schedules(problem) if schedule.name == "zb-auto")
    assert fitted == ps.schedule("zb-auto", 3, 6, costs=costs, memory_limit=2.0)
    whole = Problem(Placement.linear(3), 6, costs, split=False)
    assert not any(schedule.rows.is_kind(Kind.I, Kind.W).any() for schedule in named_schedules(whole))


@pytest.mark.parametrize("placement", [Placement.wave(3, 2), Placement.bidirectional(4)])
def test_one_at_a_time_holds_one_microbatch(placement: Placement) -> None:
    problem = Problem(placement, 4, ps.Costs())
    timeline = problem.evaluate(one_at_a_time(placement, 4))
    assert (
        timeline.peak_memory == [float(len(set(placement.stages_of(rank)))) for rank in range(placement.ranks)] or placement.kind != "wave"
    )
    assert max(timeline.peak_memory) <= placement.chunks


# Timing ---------------------------------------------------------------------------------------------------------------


@some
@given(order_problems(), seeds)
def test_orders_take_and_hold_what_the_simulator_says(problem: Problem, seed: int) -> None:
    workshop = Workshop(shop_of(problem))
    rule = Rules(workshop.shop).drawn(np.random.default_rng(seed))
    order = made_by(workshop, rule, full_of(problem, workshop, seed))
    timeline = problem.evaluate(schedule_of(problem, order.nodes, order.full))
    assert problem.objective(timeline) == pytest.approx(order.objective)
    held = workshop.holds(order.nodes, order.full) + np.array(problem.static_memory)
    assert held == pytest.approx(np.array(timeline.peak_memory))


@some
@given(order_problems(), seeds)
def test_the_longest_way_through_a_node_is_its_start_and_its_tail(problem: Problem, seed: int) -> None:
    """A node that takes longer than everything else makes the objective the way through it."""
    workshop = Workshop(shop_of(problem))
    chance = np.random.default_rng(seed)
    order = made_by(workshop, Rules(workshop.shop).drawn(chance), full_of(problem, workshop, seed))
    workshop.time(order.nodes, order.full)
    node, more = int(chance.integers(workshop.nodes)), 10 * order.objective
    way = workshop.clock.start[node] + workshop.clock.tail[node]
    shop = workshop.shop_with(order.full)
    shop.duration[node] += more
    longer = workshop.loops.time_order(shop, order.nodes, workshop.clock)
    begins = [problem.evaluate(schedule_of(problem, order.nodes, order.full)).begun, workshop.clock.start]
    if problem.barrier or (begins[0] == [begins[1][order.nodes[low]] for low in workshop.shop.bounds[:-1]]).all():
        assert longer == pytest.approx(way + more)


def test_an_order_that_hangs_is_seen() -> None:
    problem = Problem(Placement.linear(2), 2, ps.Costs())
    workshop = Workshop(shop_of(problem))
    nodes, full = order_of(workshop.shop, ps.schedule("gpipe", 2, 2))
    nodes[:4] = nodes[:4][::-1]  # rank 0 runs a backward before its forward
    assert workshop.time(nodes, full) == -1.0


# List scheduling ------------------------------------------------------------------------------------------------------


@some
@given(order_problems(), seeds)
def test_every_rule_gives_a_whole_schedule_within_the_memory(problem: Problem, seed: int) -> None:
    workshop, chance = Workshop(shop_of(problem)), np.random.default_rng(seed)
    rules, full = Rules(workshop.shop), full_of(problem, workshop, seed)
    if problem.split and workshop.shop.may_merge:
        full[:] = 0
    rule = rules.drawn(chance)
    for _ in range(3):
        assert is_all_right(problem, made_by(workshop, rule, full))
        rule = rules.changed(rule, chance)


def test_no_rule_fits_where_one_microbatch_does_not() -> None:
    problem = Problem(Placement.v(2), 3, ps.Costs(activation=1.0), memory_limit=(1.9, 5.0))
    workshop = Workshop(shop_of(problem))
    full = np.zeros(workshop.cells, dtype=np.int8)
    assert all(workshop.dispatch(rule, full) == -1.0 for rule in Rules(workshop.shop).first())


def test_a_rule_is_given_up_when_it_is_above_the_bound() -> None:
    workshop = Workshop(shop_of(Problem(Placement.linear(3), 6, ps.Costs())))
    full = np.zeros(workshop.cells, dtype=np.int8)
    for rule in list(Rules(workshop.shop).first())[:50]:
        objective = workshop.dispatch(rule, full)
        assert workshop.dispatch(rule, full, objective) == objective
        assert workshop.dispatch(rule, full, objective * 0.999) in (objective, np.inf)
        assert workshop.dispatch(rule, full, 18.0 * 0.999) == np.inf  # the work of one rank alone


# Local search ---------------------------------------------------------------------------------------------------------


@some
@given(order_problems(), seeds, st.sampled_from((0.0, 0.3)))
def test_local_search_keeps_an_order_whole_and_within_the_memory(problem: Problem, seed: int, heat: float) -> None:
    workshop = Workshop(shop_of(problem))
    full = np.full(workshop.cells, not problem.split, dtype=np.int8)
    order = made_by(workshop, Rules(workshop.shop).drawn(np.random.default_rng(seed)), full)
    annealing = workshop.annealing(order, seed)
    usual = float(np.mean(workshop.shop.duration))
    annealing.run(Pace(400, heat * usual, 0.8, 20, 3, 0.3))
    assert annealing.best <= order.objective
    assert is_all_right(problem, annealing.found)
    last = Order(np.array(annealing.bench.order), np.array(annealing.bench.full), annealing.objective)
    assert is_all_right(problem, last)


def test_microbatches_that_differ_may_change_places() -> None:
    """The longest forward last leaves only its own backward to wait for: 10 less than in the given order, found from it."""
    costs = ps.Costs(f=[[10.0, 1.0, 1.0], [1.0, 1.0, 1.0]], i=1.0, w=1.0)
    problem = Problem(Placement.linear(2), 3, costs)
    workshop = Workshop(shop_of(problem))
    nodes, full = order_of(workshop.shop, ps.schedule("zb-h1", 2, 3))
    order = Order(nodes, full, workshop.time(nodes, full))
    annealing = workshop.annealing(order, 1)
    annealing.run(Pace(5000, 1.0, 0.8, 20, 3, 0.3))
    assert annealing.best < order.objective
    rows = schedule_of(problem, annealing.found.nodes, annealing.found.full)
    assert str(rows[0][0]) != "0F0"


# Patterns -------------------------------------------------------------------------------------------------------------


@some
@given(order_problems(split=True), seeds)
def test_a_pattern_laid_out_is_a_whole_order(problem: Problem, seed: int) -> None:
    workshop = Workshop(shop_of(problem))
    full = np.zeros(workshop.cells, dtype=np.int8)
    order = made_by(workshop, Rules(workshop.shop).drawn(np.random.default_rng(seed)), full)
    pattern = Pattern(workshop, *pattern_of(workshop, order), full, seed)
    pattern.run(100, 1.0)
    if pattern.best == np.inf:
        return
    nodes = pattern.laid(workshop)
    over = np.maximum(0.0, workshop.holds(nodes, full) - workshop.shop.limit)
    assert pattern.best == pytest.approx(workshop.time(nodes, full) + pattern.price * over.sum())
    if not over.any():
        assert is_all_right(problem, Order(nodes, full, workshop.time(nodes, full)))


def test_the_pattern_of_one_f_one_b_is_found_in_the_middle_of_it() -> None:
    """Each rank of 1f1b repeats one forward and one backward, which is p - 1 - r microbatches behind."""
    problem = Problem(Placement.linear(3), 9, ps.Costs(f=1.0, b=2.0), split=False)
    workshop = Workshop(shop_of(problem))
    nodes, full = order_of(workshop.shop, ps.schedule("1f1b", 3, 9))
    thread, behind = pattern_of(workshop, Order(nodes, full, 0.0))
    assert [set(thread[3 * rank : 3 * rank + 3]) for rank in range(3)] == [{rank, rank + 3, rank + 6} for rank in range(3)]
    laid = Pattern(workshop, thread, behind, full, 0).laid(workshop)
    assert schedule_of(problem, laid, full) == ps.schedule("1f1b", 3, 9)


# Engines --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(order_problems(), seeds)
def test_the_plain_and_the_compiled_loops_do_the_same(problem: Problem, seed: int) -> None:
    found = []
    for plain in (False, True):
        workshop, chance = Workshop(shop_of(problem), plain=plain), np.random.default_rng(seed)
        full = np.full(workshop.cells, not problem.split, dtype=np.int8)
        order = made_by(workshop, Rules(workshop.shop).drawn(chance), full)
        annealing = workshop.annealing(order, seed)
        annealing.run(Pace(100, float(np.mean(workshop.shop.duration)), 0.8, 20, 3, 0.3))
        pattern = Pattern(workshop, *pattern_of(workshop, order), full, seed)
        pattern.run(50, 1.0)
        best = annealing.found
        found.append((order.nodes.tolist(), order.objective, best.nodes.tolist(), best.full.tolist(), best.objective, pattern.best))
    assert found[0] == found[1]
