"""Orders as flat arrays: timed, built and improved, against the simulator and the memory limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.planner.named_schedules import list_named_schedules, one_at_a_time
from penstock.planner.order_search.annealing import Annealing, AnnealOptions
from penstock.planner.order_search.dispatch import DispatchRule
from penstock.planner.order_search.dispatch_rules import DispatchRules
from penstock.planner.order_search.evaluator import Evaluator, Order
from penstock.planner.order_search.flat_problem import build_schedule, flatten, read_order
from penstock.planner.order_search.patterns import Pattern
from penstock.planner.problem import Problem
from planner.order_strategies import order_problems

some = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 10**6)


def is_all_right(problem: Problem, order: Order) -> bool:
    """Whether the simulator and the verifier see a whole schedule within the memory that takes what the order says."""
    schedule = build_schedule(problem, order.nodes, order.full)
    ps.verify(ps.lower(schedule), memory_limit=problem.memory_limit, costs=problem.costs)
    timeline = problem.evaluate(schedule)
    return problem.fits(timeline) and problem.objective(timeline) == pytest.approx(order.objective, rel=1e-9)


def full_of(problem: Problem, evaluator: Evaluator, seed: int) -> np.ndarray:
    """The backwards that are full: all if none may be split, else any if that can pay."""
    if not problem.split:
        return np.ones(evaluator.cells, dtype=np.int8)
    mixed = np.random.default_rng(seed).integers(0, 2, evaluator.cells).astype(np.int8)
    return mixed if evaluator.flat.may_merge else np.zeros(evaluator.cells, dtype=np.int8)


def made_by(evaluator: Evaluator, rule: DispatchRule, full: np.ndarray) -> Order:
    """The order of a rule and what it takes: no more than the rule took, which may have waited for what it then did not run."""
    taken, nodes = evaluator.dispatch(rule, full), evaluator.last_order
    objective = evaluator.time(nodes, full)
    assert objective == pytest.approx(taken) or (rule.patience and objective < taken)
    return Order(nodes, full, objective)


# Orders and schedules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe", "zbv", "1f1b-v", "interleaved-1f1b", "chimera"])
def test_an_order_gives_its_schedule_back(name: str) -> None:
    schedule = ps.schedule(name, 4, 8)
    problem = Problem(schedule.placement, 8, ps.Costs())
    assert build_schedule(problem, *read_order(flatten(problem), schedule)) == schedule


@pytest.mark.parametrize("name", ["seq1f1b", "slimpipe", "zbv", "interleaved-1f1b"])
def test_an_order_of_slices_gives_its_schedule_back(name: str) -> None:
    schedule = ps.schedule(name, 2, 2, slices=3)
    problem = Problem(schedule.placement, 2, ps.Costs(), slices=3)
    assert build_schedule(problem, *read_order(flatten(problem), schedule)) == schedule


def test_overlapped_actions_come_one_after_the_other() -> None:
    schedule = ps.schedule("dualpipe-v", 2, 8)
    problem = Problem(schedule.placement, 8, ps.Costs())
    again = build_schedule(problem, *read_order(flatten(problem), schedule))
    assert [str(part) for action in schedule[1] for part in action.parts] == [str(action) for action in again[1]]


@pytest.mark.parametrize(("placement", "names"), [(Placement.v(2), {"zbv", "v-half", "v-min", "1f1b-v", "dualpipe-v", "hanayo"})])
def test_named_schedules_have_the_placement(placement: Placement, names: set[str]) -> None:
    assert {schedule.name for schedule in list_named_schedules(Problem(placement, 4, ps.Costs()))} == names


def test_named_schedules_are_built_for_the_problem_and_split_only_if_allowed() -> None:
    costs = ps.Costs(f=1.0, i=2.0, w=3.0, activation=1.0, parameters=1.0)
    problem = Problem(Placement.linear(3), 6, costs, memory_limit=(3.0, 3.0, 3.0))
    fitted = next(schedule for schedule in list_named_schedules(problem) if schedule.name == "zb-auto")
    assert fitted == ps.schedule("zb-auto", 3, 6, costs=costs, memory_limit=2.0)
    whole = Problem(Placement.linear(3), 6, costs, split=False)
    assert not any(schedule.rows.is_kind(Kind.I, Kind.W).any() for schedule in list_named_schedules(whole))


@pytest.mark.parametrize("placement", [Placement.wave(3, 2), Placement.bidirectional(4)])
def test_one_at_a_time_holds_one_microbatch(placement: Placement) -> None:
    problem = Problem(placement, 4, ps.Costs())
    timeline = problem.evaluate(one_at_a_time(placement, 4))
    assert (
        timeline.peak_memory == [float(len(set(placement.stages_of(rank)))) for rank in range(placement.ranks)] or placement.kind != "wave"
    )
    assert max(timeline.peak_memory) <= placement.chunks


@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.v(2)])
def test_one_at_a_time_runs_the_slices_of_a_microbatch_forward_and_back(placement: Placement) -> None:
    schedule = one_at_a_time(placement, 2, slices=3)
    ps.verify(ps.lower(schedule))
    assert max(ps.verify(schedule, costs=ps.Costs()).peak_memory or ()) == 3.0 * placement.chunks
    assert [str(action) for action in one_at_a_time(Placement.linear(1), 1, slices=2)[0]] == ["0F0.0", "0F0.1", "0B0.1", "0B0.0"]


# Timing ---------------------------------------------------------------------------------------------------------------


@some
@given(order_problems(sliced=True), seeds)
def test_orders_have_the_simulated_time_and_memory(problem: Problem, seed: int) -> None:
    evaluator = Evaluator(flatten(problem))
    rule = DispatchRules(evaluator.flat).draw_rule(np.random.default_rng(seed))
    order = made_by(evaluator, rule, full_of(problem, evaluator, seed))
    timeline = problem.evaluate(build_schedule(problem, order.nodes, order.full))
    assert problem.objective(timeline) == pytest.approx(order.objective)
    held = evaluator.find_peaks(order.nodes, order.full) + np.array(problem.static_memory)
    assert held == pytest.approx(np.array(timeline.peak_memory))


@some
@given(order_problems(sliced=True), seeds)
def test_the_longest_path_through_a_node_is_its_start_plus_its_tail(problem: Problem, seed: int) -> None:
    """A node that takes longer than everything else makes the objective the way through it."""
    evaluator = Evaluator(flatten(problem))
    chance = np.random.default_rng(seed)
    order = made_by(evaluator, DispatchRules(evaluator.flat).draw_rule(chance), full_of(problem, evaluator, seed))
    evaluator.time(order.nodes, order.full)
    node, more = int(chance.integers(evaluator.nodes)), 10 * order.objective
    way = evaluator.clock.start[node] + evaluator.clock.tail[node]
    flat = evaluator.copy_flat(order.full)
    flat.duration[node] += more
    longer = evaluator.loops.time_order(flat, order.nodes, evaluator.clock)
    begins = [problem.evaluate(build_schedule(problem, order.nodes, order.full)).begun, evaluator.clock.start]
    if problem.barrier or (begins[0] == [begins[1][order.nodes[low]] for low in evaluator.flat.bounds[:-1]]).all():
        assert longer == pytest.approx(way + more)


def test_a_deadlocked_order_is_detected() -> None:
    problem = Problem(Placement.linear(2), 2, ps.Costs())
    evaluator = Evaluator(flatten(problem))
    nodes, full = read_order(evaluator.flat, ps.schedule("gpipe", 2, 2))
    nodes[:4] = nodes[:4][::-1]  # rank 0 runs a backward before its forward
    assert evaluator.time(nodes, full) == -1.0


# List scheduling ------------------------------------------------------------------------------------------------------


@some
@given(order_problems(sliced=True), seeds)
def test_every_rule_gives_a_whole_schedule_within_the_memory(problem: Problem, seed: int) -> None:
    evaluator, chance = Evaluator(flatten(problem)), np.random.default_rng(seed)
    rules, full = DispatchRules(evaluator.flat), full_of(problem, evaluator, seed)
    if problem.split and evaluator.flat.may_merge:
        full[:] = 0
    rule = rules.draw_rule(chance)
    for _ in range(3):
        assert is_all_right(problem, made_by(evaluator, rule, full))
        rule = rules.change(rule, chance)


def test_no_rule_fits_if_one_microbatch_does_not() -> None:
    problem = Problem(Placement.v(2), 3, ps.Costs(activation=1.0), memory_limit=(1.9, 5.0))
    evaluator = Evaluator(flatten(problem))
    full = np.zeros(evaluator.cells, dtype=np.int8)
    assert all(evaluator.dispatch(rule, full) == -1.0 for rule in DispatchRules(evaluator.flat).list_usual())


def test_a_rule_is_given_up_when_it_is_above_the_bound() -> None:
    evaluator = Evaluator(flatten(Problem(Placement.linear(3), 6, ps.Costs())))
    full = np.zeros(evaluator.cells, dtype=np.int8)
    for rule in list(DispatchRules(evaluator.flat).list_usual())[:50]:
        objective = evaluator.dispatch(rule, full)
        assert evaluator.dispatch(rule, full, objective) == objective
        assert evaluator.dispatch(rule, full, objective * 0.999) in (objective, np.inf)
        assert evaluator.dispatch(rule, full, 18.0 * 0.999) == np.inf  # the work of one rank alone


# Local search ---------------------------------------------------------------------------------------------------------


@some
@given(order_problems(sliced=True), seeds, st.sampled_from((0.0, 0.3)))
def test_local_search_keeps_an_order_whole_and_within_the_memory(problem: Problem, seed: int, heat: float) -> None:
    evaluator = Evaluator(flatten(problem))
    full = np.full(evaluator.cells, not problem.split, dtype=np.int8)
    order = made_by(evaluator, DispatchRules(evaluator.flat).draw_rule(np.random.default_rng(seed)), full)
    annealing = Annealing(evaluator, order, seed)
    usual = float(np.mean(evaluator.flat.duration))
    annealing.run(AnnealOptions(heat * usual, 0.8, 20, 3, 0.3, tries=400))
    assert annealing.best <= order.objective
    assert is_all_right(problem, annealing.best_order)
    last = Order(np.array(annealing.state.order), np.array(annealing.state.full), annealing.objective)
    assert is_all_right(problem, last)


def test_different_microbatches_may_be_exchanged() -> None:
    """The longest forward last leaves only its own backward to wait for: 10 less than in the given order, found from it."""
    costs = ps.Costs(f=[[10.0, 1.0, 1.0], [1.0, 1.0, 1.0]], i=1.0, w=1.0)
    problem = Problem(Placement.linear(2), 3, costs)
    evaluator = Evaluator(flatten(problem))
    nodes, full = read_order(evaluator.flat, ps.schedule("zb-h1", 2, 3))
    order = Order(nodes, full, evaluator.time(nodes, full))
    annealing = Annealing(evaluator, order, 1)
    annealing.run(AnnealOptions(1.0, 0.8, 20, 3, 0.3, tries=5000))
    assert annealing.best < order.objective
    rows = build_schedule(problem, annealing.best_order.nodes, annealing.best_order.full)
    assert str(rows[0][0]) != "0F0"


# Patterns -------------------------------------------------------------------------------------------------------------


@some
@given(order_problems(split=True), seeds)
def test_a_pattern_laid_out_is_a_whole_order(problem: Problem, seed: int) -> None:
    evaluator = Evaluator(flatten(problem))
    full = np.zeros(evaluator.cells, dtype=np.int8)
    order = made_by(evaluator, DispatchRules(evaluator.flat).draw_rule(np.random.default_rng(seed)), full)
    pattern = Pattern.read(evaluator, order, 0.5, seed)
    pattern.run(100, 1.0)
    if pattern.best == np.inf:
        return
    nodes = pattern.build_order(evaluator)
    over = np.maximum(0.0, evaluator.find_peaks(nodes, full) - evaluator.flat.limit)
    assert pattern.best == pytest.approx(evaluator.time(nodes, full) + pattern.price * over.sum())
    if not over.any():
        assert is_all_right(problem, Order(nodes, full, evaluator.time(nodes, full)))


def test_the_pattern_of_1f1b_is_read_from_its_middle() -> None:
    """Each rank of 1f1b repeats one forward and one backward, which is p - 1 - r microbatches behind."""
    problem = Problem(Placement.linear(3), 9, ps.Costs(f=1.0, b=2.0), split=False)
    evaluator = Evaluator(flatten(problem))
    nodes, full = read_order(evaluator.flat, ps.schedule("1f1b", 3, 9))
    pattern = Pattern.read(evaluator, Order(nodes, full, 0.0), 0.5, 0)
    assert [set(pattern.state.cycle[3 * rank : 3 * rank + 3]) for rank in range(3)] == [{rank, rank + 3, rank + 6} for rank in range(3)]
    laid = pattern.build_order(evaluator)
    assert build_schedule(problem, laid, full) == ps.schedule("1f1b", 3, 9)


# Engines --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(order_problems(sliced=True), seeds)
def test_plain_and_compiled_loops_agree(problem: Problem, seed: int) -> None:
    found = []
    for plain in (False, True):
        evaluator, chance = Evaluator(flatten(problem), plain=plain), np.random.default_rng(seed)
        full = np.full(evaluator.cells, not problem.split, dtype=np.int8)
        order = made_by(evaluator, DispatchRules(evaluator.flat).draw_rule(chance), full)
        annealing = Annealing(evaluator, order, seed)
        annealing.run(AnnealOptions(float(np.mean(evaluator.flat.duration)), 0.8, 20, 3, 0.3, tries=100))
        best = annealing.best_order
        found.append([order.nodes.tolist(), order.objective, best.nodes.tolist(), best.full.tolist(), best.objective])
        if problem.slices == 1:
            pattern = Pattern.read(evaluator, order, 0.5, seed)
            pattern.run(50, 1.0)
            found[-1].append(pattern.best)
    assert found[0] == found[1]
