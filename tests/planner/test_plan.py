"""Plans: never worse than the zoo, within their limits, bounded, and the same after a round trip."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, FileFormatError, PlacementError, PlanError, ScheduleError, UnknownNameError
from penstock.planner import plan as planning
from penstock.planner.candidate import Verdict
from penstock.planner.partition.cut import cut_layers
from penstock.planner.partition.stage_costs import stage_costs
from penstock.schedules.registry import algorithms
from planner.model_strategies import models

EVEN = ps.Profile([ps.Layer(f=500, i=700, w=300, activation=0.5, weight_stash=0.25)] * 8, latency=50)
"""8 layers, two per rank on 4 ranks: F, I, W of 1000, 1400, 600 per rank, 1 held per microbatch, and 0.5 for W."""


def zoo(profile: ps.Profile, ranks: int, microbatches: int, limits: list[float] | None) -> dict[str, tuple[float, list[float]]]:
    """Every named schedule that trains: what it takes and holds, the model cut for it by `partition`."""
    found = {}
    for name, algorithm in algorithms().items():
        for chunks in [None] if algorithm.layout.fixed else [2, 4]:
            try:
                schedule = ps.schedule(name, ranks, microbatches, chunks=chunks)
            except ScheduleError:
                continue
            if not schedule.training or schedule.stages > len(profile) or schedule.slices > 1:
                continue
            cut = cut_layers(profile, schedule.placement, limits=limits)
            costs = stage_costs(profile, cut.sizes, schedule.placement, [False] * schedule.stages)
            timeline = ps.simulate(ps.lower(schedule), costs)
            found[f"{name} {chunks}"] = (timeline.makespan, timeline.peak_memory)
    return found


@pytest.mark.slow
@given(st.data())
@settings(max_examples=25)
def test_never_worse_than_any_named_schedule_that_fits(data: st.DataObject) -> None:
    profile = data.draw(models(9))
    ranks, microbatches = data.draw(st.integers(1, min(4, len(profile)))), data.draw(st.integers(1, 8))
    profile = ps.Profile(profile.layers, latency=data.draw(st.sampled_from([0.0, 0.5, 4.0])))
    limit = data.draw(st.none() | st.integers(0, 200).map(float))
    limits = None if limit is None else [limit] * ranks
    others = zoo(profile, ranks, microbatches, limits)
    fitting = {name: takes for name, (takes, peaks) in others.items() if limit is None or max(peaks) <= limit * (1 + 1e-9)}
    try:
        plan = ps.plan(profile, ranks=ranks, microbatches=microbatches, memory_limit=limit, seconds=0)
    except PlanError:
        assert not fitting
        return
    assert plan.objective <= min(fitting.values(), default=math.inf) * (1 + 1e-9)
    check(plan, profile, ranks, microbatches, limits)


def check(plan: ps.Plan, profile: ps.Profile, ranks: int, microbatches: int, limits: list[float] | None) -> None:
    """Everything that a plan promises."""
    assert (plan.placement.ranks, plan.microbatches) == (ranks, microbatches)
    assert len(plan.partition) == plan.placement.stages
    assert min(plan.partition) >= 1
    assert [layer for stage in range(plan.placement.stages) for layer in plan.layers(stage)] == list(profile.layers)
    timeline = ps.simulate(ps.lower(plan.schedule), plan.costs)
    assert plan.predicted.makespan == timeline.makespan
    assert plan.predicted.peak_memory == timeline.peak_memory
    if limits is not None:
        assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    ps.verify(ps.lower(plan.schedule), memory_limit=limits, costs=plan.costs)
    assert plan.proof.actions == int(plan.program.rows.group_offsets[-1])
    assert plan.bound <= plan.objective * (1 + 1e-9)
    assert plan.overall_bound <= plan.bound * (1 + 1e-9)
    assert plan.gap == pytest.approx(plan.objective / plan.bound - 1, abs=1e-9) if plan.bound else plan.gap == 0
    chosen = plan.alternatives[plan.chosen]
    assert (chosen.name, chosen.objective, chosen.sizes) == (plan.name, plan.objective, plan.partition)
    for each in plan.alternatives:
        assert each.fits or each.verdict in set(Verdict)
        assert not each.fits or each.bound <= each.objective * (1 + 1e-9)


@pytest.fixture(scope="module")
def plan() -> ps.Plan:
    return ps.plan(EVEN, ranks=4, microbatches=8, memory_limit=4.0, seconds=0)


def test_a_plan_keeps_its_promises(plan):
    check(plan, EVEN, 4, 8, [4.0] * 4)
    assert {each.name for each in plan.alternatives} >= {
        name for name, each in algorithms().items() if each.layout.fixed and not each.is_sliced
    }


def test_one_limit_per_rank_is_respected():
    limits = [2.0, 3.0, 4.0, 8.0]
    plan = ps.plan(EVEN, ranks=4, microbatches=8, memory_limit=limits, seconds=0)
    check(plan, EVEN, 4, 8, limits)
    assert ps.plan(EVEN, ranks=4, microbatches=8, memory_limit="8B", seconds=0).in_bytes


def test_without_a_barrier_the_longest_span_counts():
    with_, without = (ps.plan(EVEN, ranks=4, microbatches=8, barrier=barrier, seconds=0) for barrier in (True, False))
    spans = without.predicted.finished - without.predicted.begun
    assert without.objective == max(spans)
    assert max(spans) <= max(with_.predicted.finished - with_.predicted.begun)
    assert with_.objective == with_.predicted.makespan


def test_without_a_split_there_is_no_i():
    plan = ps.plan(EVEN, ranks=4, microbatches=8, split=False, seconds=0)
    assert {action.kind.name for row in plan.schedule for action in row} <= {"F", "B", "OVERLAP_F_B"}
    reasons = {each.name: each.reason for each in plan.alternatives if each.verdict == Verdict.REFUSED}
    assert reasons["zbv"] == "it splits the backward"


def test_only_the_schedules_that_were_named():
    plan = ps.plan(EVEN, ranks=4, microbatches=8, schedules=["gpipe", "1f1b"], seconds=0)
    assert {each.name for each in plan.alternatives} == {"gpipe", "1f1b"}
    assert plan.name in ("gpipe", "1f1b")


# Recompute and microbatch sizes ---------------------------------------------------------------------------------------

BIG = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=8, weight_stash=1, output=1)] * 8, input=1)


def test_recompute_is_used_if_nothing_fits_without_it():
    with pytest.raises(PlanError, match="no plan fits"):
        ps.plan(BIG, ranks=4, microbatches=8, memory_limit=15.0, seconds=0)
    plan = ps.plan(BIG, ranks=4, microbatches=8, memory_limit=24.0, recompute=True, schedules="gpipe", seconds=0)
    check(plan, BIG, 4, 8, [24.0] * 4)
    assert any(plan.recompute)
    for stage, again in enumerate(plan.recompute):
        layers = plan.layers(stage)
        assert plan.costs.of_stage("i", stage) == len(layers) * (2 if again else 1)
    with pytest.raises(PlanError):
        ps.plan(BIG, ranks=4, microbatches=8, memory_limit=24.0, schedules="gpipe", seconds=0)


def test_recompute_is_not_used_if_it_is_not_needed():
    allowed, not_allowed = (ps.plan(EVEN, ranks=4, microbatches=8, memory_limit=4.0, recompute=again, seconds=0) for again in (True, False))
    assert allowed.objective == not_allowed.objective
    assert not any(allowed.recompute)


def test_only_some_ranks_recompute_if_that_is_enough():
    """The first rank of 1f1b holds most: if its room alone is short, the others need not compute anything again."""
    layer = ps.Layer(f=1, i=1, w=1, activation=8, output=1)
    profile = ps.Profile([layer] * 4, input=1)
    plan = ps.plan(profile, ranks=4, microbatches=8, memory_limit=[20, 40, 40, 40], schedules="1f1b", recompute=True, seconds=0)
    assert plan.recompute == (True, False, False, False)


def test_a_batch_is_cut_into_the_sizes_that_were_measured():
    layers = {size: [ps.Layer(f=size, i=size, w=size, activation=size)] * 4 for size in (1, 2, 4)}
    profile = ps.Profile(layers[2], microbatch=2, variants=[ps.Profile(layers[size], microbatch=size) for size in (1, 4)])
    plan = ps.plan(profile, ranks=4, batch=32, seconds=0)
    assert {(each.microbatch, each.microbatches) for each in plan.alternatives if each.microbatch} == {(1, 32), (2, 16), (4, 8)}
    assert plan.microbatch == 1  # without latency the smallest fills the pipeline best
    slow = ps.Profile(layers[2], microbatch=2, latency=20, variants=profile.variants)
    assert ps.plan(slow, ranks=4, batch=32, seconds=0).microbatch > 1
    assert ps.plan(profile, ranks=4, batch=6, seconds=0).microbatch in (1, 2)
    assert ps.plan(profile, ranks=4, batch=32, microbatch_sizes=[8], seconds=0).profile.layers[0].f == 8
    assert ps.plan(profile, ranks=4, microbatches=5, seconds=0).microbatch == 2


# Robustness -----------------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_cut_the_batch_are_named():
    made = ps.plan(EVEN, ranks=2, batch=12, microbatch_sizes=[2, 8, 5], schedules=["1f1b"], seconds=0)
    assert made.microbatch == 2
    assert [note.split(":")[0] for note in made.notes] == ["microbatches of 5 are left out", "microbatches of 8 are left out"]
    assert "a batch of 12 cannot be cut into them" in str(made)


def test_the_most_robust_of_equally_fast_plans_is_chosen(monkeypatch):
    plan = ps.plan(EVEN, ranks=1, microbatches=4, seconds=0)
    close = [each for each in plan.alternatives if each.p95 is not None]
    assert len(close) > 1  # on one rank everything takes the same
    assert plan.p95 * (1 - planning.NOISE) <= min(each.p95 for each in close)  # none is more robust by more than chance
    monkeypatch.setattr(planning, "measure_p95", lambda candidate, request: -candidate.objective if candidate.name == "gpipe" else 0.0)
    robust = ps.plan(EVEN, ranks=1, microbatches=4, seconds=0)
    assert robust.name == "gpipe"
    assert robust.p95 == min(each.p95 for each in robust.alternatives if each.p95 is not None)


def test_p95_equals_the_simulated_one(plan):
    many = ps.simulate_many(plan.program, plan.costs, scenarios=planning.SCENARIOS, jitter=plan.jitter, seed=0)
    assert plan.p95 == many.p95


# Progress and stopping ------------------------------------------------------------------------------------------------


def test_progress_and_stopping():
    told = []
    plan = ps.plan(EVEN, ranks=4, microbatches=8, seconds=0, progress=told.append, stop=lambda: len(told) >= 3)
    assert [each.done for each in told] == [0, 1, 2]
    assert told[0].total > 10
    assert told[2].best >= plan.objective
    left_out = {"data-parallel", "inference", *(name for name, each in algorithms().items() if each.is_sliced)}
    assert {each.name for each in plan.alternatives} - left_out == {told[k].what for k in range(3)}
    reasons = {each.name: each.reason for each in plan.alternatives}
    assert reasons["seq1f1b"] == "it cuts sequences into slices, and a profile does not say what a slice takes"
    with pytest.raises(PlanError, match="stopped before anything"):
        ps.plan(EVEN, ranks=4, microbatches=8, stop=lambda: True)


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_round_trip_keeps_everything(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.schedule == plan.schedule
    assert list(loaded.schedule) == list(plan.schedule)
    assert loaded.predicted.makespan == plan.predicted.makespan
    assert loaded.report() == plan.report()
    assert (loaded.proof, loaded.bound, loaded.gap) == (plan.proof, plan.bound, plan.gap)


def test_the_schedule_of_a_plan_can_be_loaded_alone(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert ps.load(tmp_path / "plan.json") == plan.schedule


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "schedule"}, "not a Penstock plan"),
        ({"version": 9}, "version 9"),
        ({"partition": None}, "'partition' must be a list, got null"),
        ({"partition": [2, 2, 2, 1]}, "does not share 8 layers"),
        ({"partition": [2.0, 2, 2, 2]}, "does not share 8 layers"),
        ({"recompute": [True]}, "'recompute' must be true or false"),
        ({"memory_limit": [1.0]}, "memory_limit has 1 values for 4 ranks"),
        ({"memory_limit": ["x"] * 4}, "memory_limit: 'x' is not a size"),
        ({"memory_limit": [1.0] * 4}, "over its limit"),
        ({"objective": 1.0}, "it says that it takes 1.0, but its schedule takes"),
        ({"bounds": {}}, "'bounds' must be numbers"),
        ({"alternatives": [3]}, "an alternative: the data must be an object"),
        ({"alternatives": [{"name": "a"}]}, "an alternative:"),
        ({"profile": {}}, "a profile: 'layers' is missing"),
    ],
)
def test_a_plan_that_was_changed_is_refused(plan, tmp_path, change, said):
    data = plan.to_json()
    if "partition" in change and change["partition"] and len(data["partition"]) != 4:
        change = {"partition": [*change["partition"][:3], *[1] * (len(data["partition"]) - 3)]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data, **change}))
    with pytest.raises(FileFormatError) as refused:
        ps.Plan.load(path)
    assert said in str(refused.value)


def test_a_schedule_that_drops_work_is_refused(plan, tmp_path):
    data = plan.to_json()
    data["schedule"]["rows"][0].pop()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=r"plan\.json"):
        ps.Plan.load(path)


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({}, ScheduleError, "either microbatches= or batch="),
        ({"microbatches": 4, "batch": 4}, ScheduleError, "either microbatches= or batch="),
        ({"microbatches": 0}, ScheduleError, "microbatches must be a whole number"),
        ({"microbatches": 4, "microbatch_sizes": [1]}, ScheduleError, "goes with batch="),
        ({"batch": 7, "microbatch_sizes": [2, 4]}, ScheduleError, "not a multiple of a microbatch size of 2 or 4"),
        ({"microbatches": 4, "ranks": 9}, PlacementError, "8 layers are too few for 9 ranks"),
        ({"microbatches": 4, "ranks": 0}, ScheduleError, "ranks must be a whole number"),
        ({"microbatches": 4, "memory_limit": [1, 2]}, CostsError, "2 values for 4 ranks"),
        ({"microbatches": 4, "memory_limit": "40Gib"}, CostsError, "memory_limit: '40Gib' is not a size"),
        ({"microbatches": 4, "schedules": ["1f1"]}, UnknownNameError, "did you mean '1f1b'"),
        ({"microbatches": 4, "schedules": []}, ScheduleError, "name at least one"),
        ({"microbatches": 4, "seconds": -1}, ScheduleError, "seconds must be a number of at least 0"),
        ({"microbatches": 4, "progress": 3}, ScheduleError, r"progress must be a function, which is called as progress\(done\), got 3"),
        ({"microbatches": 4, "stop": True}, ScheduleError, r"stop must be a function, which is called as stop\(\), got True"),
        ({"microbatches": 4, "found": []}, ScheduleError, r"found must be a function, which is called as found\(candidate\), got \[\]"),
        *(
            ({"microbatches": 4, name: value}, ScheduleError, f"{name} must be True or False, got {value!r}")
            for name, value in (("vocabulary", "ends"), ("recompute", "no"), ("offload", 0), ("barrier", None), ("split", 1.0))
        ),
        ({"microbatches": 4, "jitter": 1}, ScheduleError, "jitter must be a number of at least 0 and below 1"),
    ],
)
def test_wrong_arguments(given, kind, said):
    with pytest.raises(kind, match=said):
        ps.plan(EVEN, **{"ranks": 4, **given})


def test_a_profile_is_needed():
    with pytest.raises(CostsError, match=r"needs a penstock\.Profile, got list"):
        ps.plan([1], ranks=2, microbatches=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"seed": -1},
        {"seed": "x"},
        {"seed": 1.5},
        {"schedules": 5},
        {"schedules": [1]},
        {"microbatches": None, "batch": 8, "microbatch_sizes": 2},
    ],
    ids=str,
)
def test_values_of_the_wrong_type_are_reported(given):
    with pytest.raises(ScheduleError, match="|".join(("seed", "schedules=", "microbatch_sizes="))):
        ps.plan(EVEN, **{"ranks": 2, "microbatches": 4, "seconds": 0, **given})


@pytest.mark.parametrize(
    "change",
    [
        {"overall_bound": 1e9},
        {"bounds": {"work": 1e9}},
        {"overall_bound": -1.0},
        {"chosen": 999},
        {"chosen": -1},
        {"alternatives": []},
        {"p95": -1.0},
    ],
    ids=str,
)
def test_a_file_with_impossible_claims_is_refused(plan, change, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan.to_json(), **change}))
    with pytest.raises(FileFormatError, match=r"bound|chosen|p95"):
        ps.Plan.load(path)


@pytest.mark.parametrize("barrier", [True, False])
def test_robustness_measures_the_objective(barrier):
    equal = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=1)] * 4)  # ranks begin and end one after the other
    plan = ps.plan(equal, ranks=4, microbatches=8, schedules="zb-h2", barrier=barrier, jitter=0.0, seconds=0)
    assert plan.p95 == pytest.approx(plan.objective)
    assert barrier or plan.objective < plan.predicted.makespan


def test_a_fast_plan_is_kept_unless_robustness_gains_more(monkeypatch):
    """All named schedules take the same on one rank."""
    given = {"ranks": 1, "microbatches": 4, "seconds": 0}
    assert ps.plan(EVEN, **given).placement.stages == 1
    monkeypatch.setattr(planning, "measure_p95", lambda candidate, request: 100.0 - (0.5 if candidate.problem.stages > 1 else 0.0))
    assert ps.plan(EVEN, **given).placement.stages == 1
    monkeypatch.setattr(planning, "measure_p95", lambda candidate, request: 100.0 - (2.0 if candidate.problem.stages > 1 else 0.0))
    assert ps.plan(EVEN, **given).placement.stages > 1


# What callers of `found` may rely on -----------------------------------------------------------------------------------

ROUGH = ps.Profile([ps.Layer(f=1 + 0.3 * (k % 3), i=1, w=0.7, activation=1, output=0.3, parameters=2) for k in range(11)], latency=0.2)


def test_the_latest_candidates_by_place_are_the_plan_s_alternatives():
    """Also after cuts were shifted and orders improved: the later version takes over the place."""
    latest, events = {}, []

    def found(candidate):
        events.append(candidate)
        latest[candidate.place] = candidate

    plan = ps.plan(ROUGH, ranks=4, microbatches=8, rounds=30, seconds=600, found=found)
    assert len(events) > len(latest)  # something was improved
    tried = [candidate for candidate in plan.alternatives if candidate.placement]
    assert [latest[place].objective for place in range(len(latest))] == [candidate.objective for candidate in tried]
    assert [latest[place].fits for place in range(len(latest))] == [candidate.fits for candidate in tried]
    assert latest[plan.chosen].schedule is plan.schedule
    assert latest[plan.chosen].objective == plan.objective


def test_no_candidate_fits_if_no_plan_does():
    found = []
    with pytest.raises(PlanError, match=r"no plan fits: \d+ candidates: "):
        ps.plan(ROUGH, ranks=4, microbatches=8, memory_limit=8.0, seconds=0, found=found.append)
    assert found
    assert not any(candidate.fits for candidate in found)


# Named schedules before searched orders --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "p95", "wins"), [(0.005, 100.0, True), (0.005, 99.0, True), (0.005, 101.0, False), (0.02, 100.0, False)]
)
def test_a_named_schedule_wins_within_one_percent_if_its_p95_is_not_worse(monkeypatch, slower, p95, wins):
    problem = planning.Problem(ps.Placement.linear(2), 2, ps.Costs())
    base = planning.Candidate.time("searched", problem, ps.schedule("1f1b", 2, 2))
    searched = replace(base, objective=100.0, place=0)
    named = replace(base, name="1f1b", objective=100.0 * (1 + slower), place=1)
    request = SimpleNamespace(near=0.001, stop=lambda: False)
    monkeypatch.setattr(planning, "measure_p95", lambda candidate, request: p95 if candidate.name == "1f1b" else 100.0)
    winner, measured = planning.choose([searched, named], request)
    assert (winner is named) is wins
    assert measured == {0: 100.0, 1: p95}
