"""Plans that cut sequences into slices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CostsError, FileFormatError, ScheduleError
from penstock.planner.partition.slices import split_equally
from penstock.planner.plan import Plan
from penstock.planner.problem import Problem
from planner.sliced_models import random_model

SIZES: dict[str, Any] = {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 4, "vocabulary": 32000, "flops": 4e14, "overhead": 2e-5}
LONG = ps.Profile.transformer(**SIZES, sequence=65536, latency=1e-5, bandwidth=50e9)
SHORT = ps.Profile.transformer(**SIZES, sequence=4096)
SOME = ["1f1b", "zb-h1", "zbv", "seq1f1b", "seq-zb-h1", "slimpipe", "searched"]
PLAIN = ps.Profile([ps.Layer(f=1.0, i=1.0, w=1.0, activation=1.0, parameters=1.0)] * 8)


@pytest.fixture(scope="module")
def sliced() -> Plan:
    return ps.plan(LONG, ranks=4, microbatches=2, schedules=SOME, seconds=0)


def test_long_sequences_are_cut_by_themselves(sliced):
    assert sliced.slices == sliced.schedule.slices > 1
    assert len(sliced.slice_lengths) == sliced.slices
    assert sum(sliced.slice_lengths) == 65536
    assert sliced.slice_lengths[0] > 2 * sliced.slice_lengths[-1]  # later slices take longer per token
    whole = ps.plan(LONG, ranks=4, microbatches=2, schedules=SOME, slices=1, seconds=0)
    assert whole.slices == 1
    assert sliced.objective < 0.9 * whole.objective
    assert sliced.overall_bound <= sliced.bound <= sliced.objective
    assert sliced.proof.slices == sliced.slices


def test_the_plan_is_what_the_simulator_and_the_verifier_say(sliced):
    costs = sliced.costs
    assert np.shape(costs.f) == (sliced.schedule.stages, 2 * sliced.slices)
    assert ps.simulate(ps.lower(sliced.schedule), costs).makespan == sliced.objective
    peaks = sliced.predicted.peak_memory
    ps.verify(sliced.program, memory_limit=peaks, costs=costs)
    with pytest.raises(ps.VerifyError, match="memory"):
        ps.verify(sliced.program, memory_limit=[peak * 0.999 for peak in peaks], costs=costs)


def test_the_lengths_beat_equal_ones(sliced):
    """On the same order and partition."""
    even = sliced.problem.recut(sliced.partition, split_equally(65536, sliced.slices))
    assert sliced.objective < 0.97 * even.objective(even.evaluate(sliced.schedule))


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_never_slower_than_equal_lengths(seed):
    profile = random_model(np.random.default_rng(seed), layers=6)
    given: dict[str, Any] = {"ranks": 3, "microbatches": 2, "slices": 4, "slice_granularity": 8, "schedules": "seq1f1b", "seconds": 0}
    plan = ps.plan(profile, **given)
    even = Problem.cut(profile, plan.placement, 2, plan.partition, plan.recompute, lengths=split_equally(96, 4, 8))
    assert plan.objective <= even.objective(even.evaluate(plan.schedule)) * (1 + 1e-9)


def test_files_keep_slices(sliced, tmp_path):
    sliced.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["slices"], data["slice_lengths"]) == (sliced.slices, list(sliced.slice_lengths))
    again = Plan.load(tmp_path / "plan.json")
    assert (again.slice_lengths, again.objective, again.alternatives) == (sliced.slice_lengths, sliced.objective, sliced.alternatives)
    assert again.to_json() == sliced.to_json()
    for lengths, message in [
        ([65536], "are not the tokens of each of"),
        ([1] * sliced.slices, "do not make up a sequence of 65536"),
        ("all", "'slice_lengths' must be a list"),
    ]:
        (tmp_path / "wrong.json").write_text(json.dumps({**data, "slice_lengths": lengths}))
        with pytest.raises(FileFormatError, match=message):
            Plan.load(tmp_path / "wrong.json")


def test_the_report_says_the_lengths(sliced):
    report = sliced.report()
    assert f"2 microbatches of 1 in {sliced.slices} slices" in report
    assert f"{sliced.slice_lengths[0]:,}, {sliced.slice_lengths[1]:,}" in report
    assert "placement, slices and order" in report
    fitted = replace(LONG, layers=[replace(layer, slices=replace(layer.slices, error=0.034)) for layer in LONG.layers if layer.slices])
    measured = ps.plan(fitted, ranks=2, microbatches=1, schedules="seq1f1b", slices=2, seconds=0)
    assert "fitted to measured ones, with an error of 3.4%" in measured.report()


def test_a_plan_without_slices_is_written_as_before():
    plan = ps.plan(PLAIN, ranks=4, microbatches=4, seconds=0)
    assert "slice" not in json.dumps({**plan.to_json(), "alternatives": [], "schedule": None})
    assert all("slices" not in candidate for candidate in plan.to_json()["alternatives"])
    left_out = {candidate.name: candidate.reason for candidate in plan.alternatives if candidate.reason}
    assert left_out["seq1f1b"] == "it cuts sequences into slices, and a profile does not say what a slice takes"
    assert "slices" not in plan.report().split("left out")[0]


def test_whole_sequences_are_planned_as_if_nothing_were_known_of_slices():
    known = ps.plan(SHORT, ranks=4, microbatches=4, seconds=0)
    layers = [replace(layer, slices=None) for layer in SHORT.layers]
    unknown = ps.plan(replace(SHORT, tokens=None, layers=layers), ranks=4, microbatches=4, seconds=0)
    written, reference = ({**plan.to_json(), "alternatives": None} for plan in (known, unknown))
    assert written == reference
    reasons = {candidate.name: candidate.reason for candidate in known.alternatives}
    assert reasons["slimpipe"] == (
        "it cuts sequences into slices, and a sequence of 4096 tokens is too short for slices of 4096: ask for shorter ones with slices="
    )


def test_the_number_of_slices_can_be_given():
    plan = ps.plan(SHORT, ranks=4, microbatches=2, slices=4, schedules=SOME, seconds=0)
    assert plan.slices == 4
    assert {candidate.slices for candidate in plan.alternatives if candidate.placement} == {4}
    reasons = {candidate.name: candidate.reason for candidate in plan.alternatives}
    assert reasons["1f1b"] == "its order is not made for slices, and slices=4 asks for them"
    several = ps.plan(SHORT, ranks=4, microbatches=2, slices=[1, 3], schedules=SOME, seconds=0)
    assert {candidate.slices for candidate in several.alternatives if candidate.placement} == {1, 3}


def test_slices_given_and_orders_searched():
    """A search of one round, beside a named schedule."""
    plan = ps.plan(SHORT, ranks=2, microbatches=2, slices=2, schedules=["seq1f1b", "searched"], seconds=0.5, rounds=1)
    assert plan.slices == 2


@pytest.mark.parametrize(
    ("profile", "given", "error", "message"),
    [
        (PLAIN, {"slices": 4}, CostsError, "slices=4: the profile cannot time a slice, because it does not say how many tokens"),
        (replace(PLAIN, tokens=512), {"slices": [1, 2]}, CostsError, "it does not say what a slice takes on layer 0"),
        (SHORT, {"slices": 0}, ScheduleError, "slices must be a whole number of at least 1"),
        (SHORT, {"slices": []}, ScheduleError, "slices= is empty"),
        (SHORT, {"slices": "4"}, ScheduleError, "slices= takes whole numbers: give a list"),
        (SHORT, {"slices": 64}, ScheduleError, "cannot be cut into 64 slices of multiples of 128 tokens: take at most 32"),
        (SHORT, {"slices": 2, "slice_granularity": 0}, ScheduleError, "slice_granularity must be a whole number"),
    ],
)
def test_wrong_slices_are_refused(profile, given, error, message):
    with pytest.raises(error, match=message):
        ps.plan(profile, ranks=2, microbatches=2, seconds=0, **given)


def test_slices_need_less_memory(sliced):
    """A limit that no whole sequence fits within 1f1b's memory: slices do, and the plan stays within it."""
    limit = 0.95 * ps.plan(LONG, ranks=4, microbatches=4, schedules="1f1b", seconds=0).predicted.peak_memory[0]
    plan = ps.plan(LONG, ranks=4, microbatches=4, schedules=["1f1b", "seq1f1b"], memory_limit=limit, headroom=0, seconds=0)
    assert plan.name == "seq1f1b"
    assert max(plan.predicted.peak_memory) <= limit


def test_recomputed_slices_keep_their_keys_and_values():
    profile = random_model(np.random.default_rng(1), layers=4)
    lengths = (40, 32, 24)
    problem = Problem.cut(profile, ps.schedule("seq1f1b", 2, 1).placement, 1, (2, 2), (True, True), lengths=lengths)
    keys = sum(layer.slices.keys for layer in profile.layers[2:] if layer.slices is not None)
    inputs = profile.layers[1].output / 96
    for part, length in enumerate(lengths):
        assert problem.costs.of_stage("activation", 1, part) == pytest.approx(length * inputs)
        assert problem.costs.of_stage("kept", 1, part) == pytest.approx(length * keys)
    reserve = problem.costs.of_stage("parameters", 1) - 2.0
    parts = profile.cut_sequence(lengths)
    again = [sum(layer.activation for layer in part.layers[2:]) for part in parts]
    spare = [max(layer.workspace for layer in part.layers[2:]) for part in parts]
    kept = [problem.costs.of_stage("activation", 1, part) for part in range(3)]
    assert reserve == pytest.approx(max(size + space - held for size, space, held in zip(again, spare, kept, strict=True)))


def test_a_tight_limit_is_met_by_recomputing_or_refused():
    profile = random_model(np.random.default_rng(5), layers=8)
    given: dict[str, Any] = {"ranks": 4, "microbatches": 3, "slices": [2, 4], "slice_granularity": 8, "seconds": 0, "recompute": True}
    given["schedules"] = ["seq1f1b", "seq-zb-h1", "zbv"]
    free = max(ps.plan(profile, **given).predicted.peak_memory)
    recomputed = []
    for share in (0.8, 0.6):
        plan = ps.plan(profile, **given, memory_limit=share * free)
        assert max(plan.predicted.peak_memory) <= share * free * (1 + 1e-9)
        recomputed.append(any(plan.recompute))
    assert any(recomputed)
    with pytest.raises(ps.PlanError, match="no plan fits"):
        ps.plan(profile, **given, memory_limit=0.1 * free)
