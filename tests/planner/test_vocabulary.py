"""Plans that spread the vocabulary over the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, PlacementError, PlanError
from penstock.ir.kind import SPREAD
from penstock.ir.placement import Placement
from penstock.planner.partition.cut import cut_layers
from penstock.planner.partition.stage_costs import stage_costs
from penstock.planner.profile.vocabulary import spread_ends

EMBEDDING = ps.Layer(name="embedding", f=0.1, i=0.0, w=0.1, activation=1, output=2, parameters=40, gradients=40, update=0.2, reduction=0.4)
BLOCK = ps.Layer(name="block", f=1.0, i=1.0, w=1.0, activation=8, weight_stash=4, output=2, parameters=8, gradients=8, update=0.1)
HEAD = ps.Layer(name="head", f=3.0, i=3.0, w=3.0, activation=24, weight_stash=12, output=20, parameters=40, gradients=40, update=0.2)
MODEL = ps.Profile([EMBEDDING, *[BLOCK] * 8, HEAD], latency=0.01, bandwidth=100.0)
OPTIONS = {"ranks": 4, "microbatches": 12, "seconds": 0, "schedules": ["1f1b", "zb-h1", "zbv"]}


@pytest.fixture(scope="module")
def spread() -> ps.Plan:
    return ps.plan(MODEL, **OPTIONS, vocabulary=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [Placement.linear(4), Placement.v(4), Placement.looped(2, 3)])
def test_no_work_is_lost_or_gained(placement: Placement) -> None:
    """All ranks together compute, hold and update what the whole model does."""
    ranks, stages = placement.ranks, placement.stages
    profile = spread_ends(MODEL, ranks)
    sizes = tuple(len(MODEL) // stages + (stage < len(MODEL) % stages) for stage in range(stages))
    costs = stage_costs(profile, sizes, placement, (False,) * stages)
    work = sum(sum(costs.per_stage(name, stages)) for name in "fiw") + ranks * sum(sum(costs.per_stage(name, stages)) for name in "st")
    assert work == pytest.approx(MODEL.time)
    assert sum(costs.per_stage("parameters", stages)) == pytest.approx(sum(layer.static for layer in MODEL.layers))
    assert sum(costs.per_stage("optimizer", stages)) == pytest.approx(sum(layer.update for layer in MODEL.layers))
    assert sum(costs.per_stage("reduce", stages)) == pytest.approx(sum(layer.reduction for layer in MODEL.layers))
    shares = costs.per_rank("parameters", placement)
    assert min(shares) >= (EMBEDDING.static + HEAD.static) / ranks
    assert costs.of_stage("output", stages - 1) == BLOCK.output  # not the logits: what the head reads is broadcast
    assert costs.of_stage("broadcast", stages - 1) == pytest.approx((2 if ranks == 4 else 1) * 0.01 + 2 / 100)


def test_the_plan_is_faster_than_the_best_cut(spread: ps.Plan) -> None:
    whole = ps.plan(MODEL, **OPTIONS)  # type: ignore[arg-type]
    assert spread.vocabulary
    assert not whole.vocabulary
    assert spread.objective < 0.95 * whole.objective
    assert {candidate.vocabulary for candidate in spread.candidates} == {False, True}
    best_cut = min(c.objective for c in spread.candidates if not c.vocabulary and c.objective is not None)
    assert best_cut == pytest.approx(whole.objective)


def test_the_plan_is_what_it_says(spread: ps.Plan) -> None:
    assert spread.schedule.rows.is_kind(*SPREAD).any()
    assert {"joined", "vocabulary"} <= set(spread.proof.rules)
    assert ps.simulate(ps.lower(spread.schedule), spread.costs).makespan == spread.objective
    assert spread.overall_bound <= spread.bound * (1 + 1e-9) <= spread.objective * (1 + 1e-9)
    work = 12 * (sum(layer.time for layer in MODEL.layers[1:-1]) + EMBEDDING.time + HEAD.time) / 4
    assert spread.objective > work
    assert spread.bound >= work * (1 - 1e-9)
    assert "embedding and head on all ranks" in spread.report()
    assert "all ranks" in spread.report()


def test_files(spread: ps.Plan, tmp_path: Path) -> None:
    spread.save(tmp_path / "plan.json")
    again = ps.Plan.load(tmp_path / "plan.json")
    assert (again.objective, again.schedule, again.profile) == (spread.objective, spread.schedule, spread.profile)
    assert again.vocabulary
    spread.profile.save(tmp_path / "profile.toml")
    assert ps.Profile.load(tmp_path / "profile.toml") == spread.profile
    assert spread.profile.at(2).shares[1].f == 2 * HEAD.f / 4


def test_a_head_that_fits_on_no_rank_is_spread() -> None:
    """The embedding and the head keep 80 each, a rank has 78."""
    options = {**OPTIONS, "memory_limit": 78.0, "schedules": ["1f1b"]}
    block = replace(BLOCK, parameters=4, gradients=4, activation=1.0, weight_stash=0.0)
    model = replace(MODEL, layers=[EMBEDDING, *[block] * 8, replace(HEAD, activation=4.0, weight_stash=0.0)])
    with pytest.raises(PlanError, match="alone keeps 80"):
        ps.plan(model, **options)  # type: ignore[arg-type]
    plan = ps.plan(model, **options, vocabulary=True)  # type: ignore[arg-type]
    assert plan.vocabulary
    assert max(plan.predicted.peak_memory) <= 78


def test_a_small_head_stays_where_it_is() -> None:
    """Collectives that take long cost more than a head that takes little."""
    head = replace(HEAD, f=0.0, i=0.0, w=0.0)
    plan = ps.plan(replace(MODEL, layers=[*MODEL.layers[:-1], head], bandwidth=1.0), **OPTIONS, vocabulary=True)  # type: ignore[arg-type]
    assert not plan.vocabulary


def test_searched_orders_are_not_spread() -> None:
    options = {**OPTIONS, "seconds": 1.0, "rounds": 50, "schedules": ["1f1b", "searched"]}
    plan = ps.plan(MODEL, **options, vocabulary=True)  # type: ignore[arg-type]
    assert {(candidate.name, candidate.vocabulary) for candidate in plan.candidates} >= {("1f1b", False), ("1f1b", True)}
    assert not any(candidate.vocabulary for candidate in plan.candidates if candidate.name == "searched")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), placement=st.sampled_from([Placement.linear(3), Placement.v(2), Placement.v(4), Placement.looped(2, 3)]))
def test_no_stage_is_only_a_spread_end(data: st.DataObject, placement: Placement) -> None:
    """The ranks run the spread ends, so a stage of nothing else would be empty; of the other cuts the best is found."""
    blocks = data.draw(st.integers(placement.stages - 1, placement.stages + 3))
    times = data.draw(st.lists(st.sampled_from([0.2, 1.0, 1.1, 5.0]), min_size=blocks, max_size=blocks))
    layers = [replace(BLOCK, f=time, i=time, w=time) for time in times]
    profile = spread_ends(replace(MODEL, layers=[EMBEDDING, *layers, HEAD]), placement.ranks)
    if blocks < placement.stages:
        with pytest.raises(PlacementError, match=f"{blocks} layers? between the spread ends are too few for {placement.stages} stages"):
            cut_layers(profile, placement)
        return
    cut = cut_layers(profile, placement)
    assert min(cut.sizes[0], cut.sizes[-1]) >= 2
    between = cut_layers(ps.Profile(layers), placement)
    assert cut.load == pytest.approx(between.load) or not (cut.exact and between.exact)


def test_plans_leave_a_layer_to_each_stage() -> None:
    """Also where cuts are shifted to suit an order; a schedule with as many stages as layers is only tried without a spread vocabulary."""
    slow, head = replace(BLOCK, f=2.0, i=2.0, w=2.0), replace(HEAD, f=12.0, i=12.0, w=12.0)
    model = replace(MODEL, layers=[EMBEDDING, slow, *[BLOCK] * 7, head])
    options = {**OPTIONS, "schedules": ["zbv", "interleaved-1f1b"]}
    plan = ps.plan(model, **options, vocabulary=True)  # type: ignore[arg-type]
    assert plan.vocabulary
    assert min(plan.partition[0], plan.partition[-1]) >= 2
    short = replace(MODEL, layers=[EMBEDDING, *[BLOCK] * 6, head])
    assert not ps.plan(short, **options, vocabulary=True).vocabulary  # type: ignore[arg-type]


def test_bad_input_is_refused() -> None:
    with pytest.raises(CostsError, match="at least 3 layers; there are 2"):
        ps.plan(ps.Profile([BLOCK, BLOCK]), ranks=2, microbatches=2, vocabulary=True)
    with pytest.raises(CostsError, match="give the whole profile, and vocabulary=True"):
        ps.plan(spread_ends(MODEL, 4), ranks=4, microbatches=2)
    with pytest.raises(CostsError, match="spread over the ranks already"):
        spread_ends(spread_ends(MODEL, 4), 4)
    with pytest.raises(CostsError, match="from an embedding and a head, but there are 1"):
        spread_ends(ps.Profile([BLOCK]), 4)
    with pytest.raises(CostsError, match="shares are two layers"):
        ps.Profile([BLOCK], shares=[BLOCK])
