"""How named schedules, order search, bounds and the exact solver work together."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock.errors import MissingExtraError
from penstock.planner import exact, explore
from penstock.planner.budget import count_rounds
from penstock.planner.candidate import Candidate
from penstock.planner.named_schedules import one_at_a_time
from penstock.planner.order_search import search
from penstock.planner.order_search.search import SearchResult
from penstock.planner.problem import Problem

LAYERS = [ps.Layer(f=5, i=7, w=3, activation=1, weight_stash=0.5)] * 8
MODEL = ps.Profile(LAYERS, latency=0.5)


class Searching:
    """A search that knows one order for a placement, and notes what it was asked."""

    def __init__(self, **orders: str) -> None:
        self.orders = orders
        self.asked: list[tuple[Problem, dict]] = []

    def __call__(self, problem: Problem, **given) -> SearchResult:
        self.asked.append((problem, given))
        name = self.orders.get(problem.placement.kind)
        if name is None:
            return SearchResult(None, float("inf"))
        schedule = ps.schedule(name, problem.ranks, problem.microbatches)
        objective = problem.objective(problem.evaluate(schedule))
        given["progress"](schedule, objective)
        return SearchResult(schedule, objective)


@pytest.fixture
def no_solver(monkeypatch):
    """The solver finds nothing."""
    monkeypatch.setattr(exact, "solve", lambda problem, **given: SimpleNamespace(schedule=None, bound=0.0, objective=0.0))


@pytest.fixture(autouse=True)
def only_parts(request):
    """Without the solver wherever the search is a stand-in too."""
    if "monkeypatch" in request.fixturenames:
        request.getfixturevalue("no_solver")


def planned(monkeypatch, searching: Searching, **given) -> ps.Plan:
    monkeypatch.setattr(search, "search", searching)
    return ps.plan(MODEL, **{"ranks": 4, "microbatches": 8, "schedules": ["gpipe", "searched"], "seconds": 1.0, **given})


def test_a_searched_order_is_chosen_if_it_is_faster(monkeypatch):
    told = []
    plan = planned(monkeypatch, Searching(v="zbv"), progress=told.append)
    assert plan.name == "searched"
    assert plan.schedule == ps.schedule("zbv", 4, 8)
    assert {each.name for each in plan.alternatives} == {"gpipe", "searched"}
    assert "no other candidate that fits is faster; next is gpipe: " in str(plan)
    assert [each for each in told if each.phase == "searching" and each.best_name == "searched"]
    phases = [each.phase for each in told]
    assert phases.index("timing") < phases.index("preparing") < phases.index("searching")


def test_a_slower_searched_order_is_not_chosen(monkeypatch):
    plan = planned(monkeypatch, Searching(linear="1f1b"), schedules=["zbv", "searched"])
    assert plan.name == "zbv"


def test_a_searched_order_that_does_not_fit_is_not_chosen(monkeypatch):
    plan = planned(monkeypatch, Searching(v="zbv", linear="gpipe"), memory_limit=3.5)
    assert plan.schedule == one_at_a_time(plan.placement, 8)


def test_a_search_starts_from_the_orders_of_its_placement(monkeypatch):
    searching = Searching()
    planned(monkeypatch, searching, schedules=["gpipe", "1f1b", "1f1b-v", "searched"])
    starts = {problem.placement.kind: [schedule.name for schedule in given["start"]] for problem, given in searching.asked}
    assert set(starts["linear"]) == {"gpipe", "1f1b"}
    assert starts["v"] == ["1f1b-v"]
    assert set(starts) >= {"linear", "v", "looped"}


def test_orders_with_two_copies_are_searched_if_a_named_one_fits(monkeypatch):
    for schedules, searched in ((["dualpipe", "searched"], True), (["1f1b", "searched"], False)):
        searching = Searching()
        planned(monkeypatch, searching, schedules=schedules)
        assert ("bidirectional" in {problem.placement.kind for problem, _ in searching.asked}) is searched


def test_searches_stay_within_their_share_of_the_seconds(monkeypatch):
    searching = Searching(v="zbv", linear="1f1b")
    planned(monkeypatch, searching, seconds=8.0)
    work = [given["rounds"] / count_rounds(1.0, problem.stages * problem.microbatches) for problem, given in searching.asked]
    assert 3.0 < sum(work) <= 8.0 * 0.75 + 1e-9
    assert all(given["seconds"] <= 8.0 * 0.75 for _, given in searching.asked)
    assert len([problem for problem, _ in searching.asked if problem.placement.kind == "v"]) == 2  # a short one, then a longer


def test_problems_that_cannot_win_are_not_searched(monkeypatch):
    """On one rank the work is all there is, and every schedule has it."""
    searching = Searching()
    plan = planned(monkeypatch, searching, ranks=1)
    assert searching.asked == []
    assert plan.gap == 0
    assert "nothing to gain with this placement and partition" in str(plan)


def test_no_search_without_seconds_or_permission(monkeypatch):
    for given in ({"seconds": 0}, {"schedules": ["gpipe"]}):
        searching = Searching(v="zbv")
        assert planned(monkeypatch, searching, **given).name == "gpipe"
        assert searching.asked == []


def test_recompute_is_searched_too_if_it_is_allowed(monkeypatch):
    searching = Searching()
    planned(monkeypatch, searching, schedules=["gpipe", "searched"], memory_limit=6.0, recompute=True)
    again = {problem.costs.of_stage("i", 0) > 7 * len(LAYERS) / problem.stages for problem, _ in searching.asked}
    assert False in again  # what is recomputed may be too slow to be worth a search


def test_the_bound_of_the_solver_is_used(monkeypatch):
    monkeypatch.setattr(
        exact,
        "solve",
        lambda problem, *, budget, start, workers: SimpleNamespace(schedule=start, bound=119.5, objective=1.0, proven=False),
    )
    small = ps.Profile(LAYERS[:2], latency=0.5)
    monkeypatch.setattr(search, "search", Searching())
    plan = ps.plan(small, ranks=2, microbatches=7, schedules=["1f1b"], seconds=1.0)
    assert plan.bounds["solver"] == 119.5
    assert plan.bound == max(plan.bounds.values())


def test_without_the_solver_a_note_says_what_to_install(monkeypatch):
    def missing(problem, **given):
        raise MissingExtraError("the exact solver", "OR-tools", "solve")

    monkeypatch.setattr(exact, "solve", missing)
    monkeypatch.setattr(search, "search", Searching())
    plan = ps.plan(ps.Profile(LAYERS[:2], latency=0.5), ranks=2, microbatches=7, schedules=["1f1b"], seconds=1.0)
    note = (
        "the exact solver needs OR-tools, which is not installed: install the extra 'solve', pip install '.[solve]' in a clone of Penstock"
    )
    assert plan.notes[0] == note
    assert note in " ".join(str(plan).split())


def test_one_microbatch_at_a_time_holds_the_least():
    for placement in (ps.Placement.linear(3), ps.Placement.v(2), ps.Placement.looped(2, 3)):
        schedule = one_at_a_time(placement, 4)
        ps.verify(ps.lower(schedule))
        costs = ps.Costs(activation=1.0)
        assert ps.simulate(ps.lower(schedule), costs).peak_memory == [len(placement.stages_of(rank)) for rank in range(placement.ranks)]


# With the real parts --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2.5, 4.0, None])
def test_a_search_only_makes_plans_better(limit):
    given = {"ranks": 4, "microbatches": 8, "memory_limit": limit}
    before, after = (ps.plan(MODEL, **given, seconds=seconds) for seconds in (0, 2.0))
    assert after.objective <= before.objective
    assert after.bound >= before.bound or after.placement != before.placement
    assert after.bound <= after.objective * (1 + 1e-9)
    ps.verify(ps.lower(after.schedule), memory_limit=limit, costs=after.costs)
    assert len({(each.sizes, each.placement, each.chunks) for each in after.alternatives if each.name == "searched"}) == len(
        [each for each in after.alternatives if each.name == "searched"]
    )


@pytest.mark.slow
def test_a_small_plan_is_proved_optimal():
    """ZB-H1's formula is optimal at p activations without latency: (m + p - 1)(F + I) + W for m <= p."""
    profile = ps.Profile([ps.Layer(f=2, i=2, w=1, activation=1, weight_stash=1)] * 2)
    plan = ps.plan(profile, ranks=2, microbatches=2, memory_limit=2.0, schedules=["1f1b", "searched"], seconds=4.0)
    assert plan.objective == (2 + 2 - 1) * (2 + 2) + 1
    assert plan.gap == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("vocabulary", [False, True])
def test_named_schedules_for_a_cluster_keep_to_the_seconds(monkeypatch, vocabulary):
    """By a clock on which timing an order takes a fifth of a second, and everything else no time."""
    timed, start = [], time.monotonic()
    of_timeline = Candidate.of_timeline
    monkeypatch.setattr(explore, "time", SimpleNamespace(monotonic=lambda: start + 0.2 * len(timed)))
    monkeypatch.setattr(Candidate, "of_timeline", lambda *given: timed.append(given) or of_timeline(*given))
    cluster = ps.Cluster([ps.Device(speed=1 - 0.1 * place) for place in range(6)], latency=0.5)
    ends = ps.Layer(f=3, i=3, w=3, activation=1)
    given = {"cluster": cluster, "microbatches": 12, "schedules": ["1f1b", "zbv", "zb-h1"], "vocabulary": vocabulary}
    profile = ps.Profile([ends, *LAYERS, *LAYERS, ends])
    plan = ps.plan(profile, **given, seconds=10.0)
    assert 0.2 * len(timed) <= 10.0 + 1.0
    assert any("stopped after 10 s" in note for note in plan.notes)
