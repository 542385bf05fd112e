"""Plans that move activations to the host: only if memory holds a schedule back, with true figures and true bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CostsError, FileFormatError, PlanError
from penstock.ir.kind import COMPUTE, Kind
from penstock.passes.offload import Offload, move_activations
from penstock.planner.candidate import count_moves
from penstock.planner.plan import Plan
from penstock.verifier.rules.offload import peak_host_memory
from planner.sliced_models import random_model

PROFILE = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=1.0, weight_stash=0.2, output=0.1, parameters=0.5)] * 16, latency=0.01)
OFTEN = {"ranks": 4, "microbatches": 12, "seconds": 0, "schedules": ["1f1b", "zb-h1", "interleaved-1f1b"]}


def test_a_plan_that_fits_only_with_activations_on_the_host() -> None:
    with pytest.raises(PlanError):
        ps.plan(PROFILE, **OFTEN, memory_limit=7.0)  # type: ignore[arg-type]
    best = ps.plan(PROFILE, **OFTEN, memory_limit=7.0, offload=True, host_bandwidth=4.0)  # type: ignore[arg-type]
    assert count_moves(best.schedule) > 0
    assert max(best.predicted.peak_memory) <= 7.0
    assert best.proof.rules.keys() >= {"offload", "memory"}
    assert best.costs.host_bandwidth == 4.0
    assert best.bound <= best.objective
    assert best.overall_bound <= best.objective


def test_hidden_copies_cost_nothing_and_the_report_says_so() -> None:
    free = ps.plan(PROFILE, **OFTEN)  # type: ignore[arg-type]
    best = ps.plan(PROFILE, **OFTEN, memory_limit=0.6 * max(free.predicted.peak_memory), offload=True, host_bandwidth=8.0)  # type: ignore[arg-type]
    assert best.objective == pytest.approx(free.objective)
    report = best.report()
    moved, total = count_moves(best.schedule), 12 * best.schedule.stages
    held = best.units.size(max(peak_host_memory(best.program, best.costs)))
    assert f"{moved} of {total} activations move to host memory, at most {held} there per rank" in report
    assert "the copies are hidden behind the computation" in report
    assert "offloaded" in report


def test_copies_that_cannot_hide_are_said_to_cost() -> None:
    best = ps.plan(PROFILE, **OFTEN, memory_limit=7.0, offload=True, host_bandwidth=0.5)  # type: ignore[arg-type]
    bare = best.schedule.rows.keep(best.schedule.rows.is_kind(*COMPUTE))
    plain = ps.simulate(ps.lower(ps.Schedule.from_rows(bare, best.placement, 12)), best.costs).makespan
    assert best.objective > plain
    assert f"the copies cost {best.objective / plain - 1:.2%} of the time" in best.report()


def test_nothing_moves_where_memory_does_not_hold_back() -> None:
    best = ps.plan(PROFILE, **OFTEN, memory_limit=100.0, offload=True, host_bandwidth=4.0)  # type: ignore[arg-type]
    assert count_moves(best.schedule) == 0
    assert "host memory" not in best.report()


def test_recomputing_is_chosen_where_the_link_is_too_slow() -> None:
    """With a link that takes a hundred times as long as a stage, recomputing wins; with a fast one, moving does."""
    options = {**OFTEN, "memory_limit": 9.0, "recompute": True, "offload": True}
    slow = ps.plan(PROFILE, **options, host_bandwidth=0.01)  # type: ignore[arg-type]
    fast = ps.plan(PROFILE, **options, host_bandwidth=8.0)  # type: ignore[arg-type]
    assert any(slow.recompute)
    assert count_moves(fast.schedule)
    assert fast.objective < slow.objective
    without = ps.plan(PROFILE, **{**options, "offload": False})  # type: ignore[arg-type]
    assert slow.objective <= without.objective * (1 + 1e-9)


def test_the_host_s_limit_holds() -> None:
    options = {**OFTEN, "memory_limit": 7.0, "offload": True, "host_bandwidth": 4.0}
    most = max(peak_host_memory((best := ps.plan(PROFILE, **options)).program, best.costs))  # type: ignore[arg-type]
    same = ps.plan(PROFILE, **options, host_memory=most)  # type: ignore[arg-type]
    assert same.host_memory_limit == (most,) * 4
    assert same.proof.host_memory_limit == (most,) * 4
    with pytest.raises(PlanError):
        ps.plan(PROFILE, **options, host_memory=0.5)  # type: ignore[arg-type]


def test_settings_of_the_host_need_offload() -> None:
    with pytest.raises(CostsError, match="add offload=True"):
        ps.plan(PROFILE, **OFTEN, host_bandwidth=4.0)  # type: ignore[arg-type]
    with pytest.raises(CostsError, match="host_memory has 2 values for 4 ranks"):
        ps.plan(PROFILE, **OFTEN, offload=True, host_memory=[1, 2])  # type: ignore[arg-type]


def test_an_unknown_bandwidth_is_noted() -> None:
    best = ps.plan(PROFILE, **OFTEN, memory_limit=7.0, offload=True)  # type: ignore[arg-type]
    assert any("bandwidth to host memory is not known" in note for note in best.notes)


def test_files_of_plans(tmp_path: Path) -> None:
    best = ps.plan(PROFILE, **OFTEN, memory_limit=7.0, offload=True, host_bandwidth=4.0, host_memory=20.0)  # type: ignore[arg-type]
    best.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.schedule == best.schedule
    assert again.objective == best.objective
    assert again.host_memory_limit == best.host_memory_limit
    assert [line.offloaded for line in again.alternatives] == [line.offloaded for line in best.alternatives]
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"host_memory_limit": [\n  20.0', '"host_memory_limit": [\n  0.1'))
    with pytest.raises(FileFormatError, match=r"over its limit of 0\.1"):
        Plan.load(tmp_path / "plan.json")


def test_the_search_goes_on_beside_moved_activations() -> None:
    """Searched orders are bounded and solved within the memory limit, with and without moves."""
    options = {**OFTEN, "schedules": ["1f1b", "searched"], "seconds": 1.0, "rounds": 200}
    best = ps.plan(PROFILE, **options, memory_limit=9.0, offload=True, host_bandwidth=8.0)  # type: ignore[arg-type]
    assert max(best.predicted.peak_memory) <= 9.0
    assert best.bound <= best.objective * (1 + 1e-9)
    assert best.overall_bound <= best.objective * (1 + 1e-9)


# Slices of sequences ---------------------------------------------------------------------------------------------------

LONG = ps.Profile.transformer(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    sequence=131072,
    vocabulary=128256,
    flops=4e14,
    overhead=2e-5,
    latency=1e-5,
    bandwidth=50e9,
)


def test_a_long_sequence_that_fits_only_in_slices_and_on_the_host() -> None:
    """8G parameters and 128k tokens on 8 ranks of 80 GB: not even one microbatch fits without moving activations."""
    options = {"ranks": 8, "microbatches": 2, "schedules": "seq1f1b", "slices": [8, 16], "seconds": 0, "memory_limit": "80GB"}
    with pytest.raises(PlanError):
        ps.plan(LONG, **options)  # type: ignore[arg-type]
    best = ps.plan(LONG, **options, offload=True, host_bandwidth=50e9)  # type: ignore[arg-type]
    assert best.slices in (8, 16)
    assert len(set(best.slice_lengths)) > 1
    assert sum(best.slice_lengths) == 131072
    assert max(best.predicted.peak_memory) <= 80e9
    assert best.overall_bound <= best.bound <= best.objective
    free = ps.plan(LONG, **{**options, "memory_limit": None})  # type: ignore[arg-type]
    assert free.objective <= best.objective <= 1.2 * free.objective


@pytest.mark.parametrize("seed", range(6))
def test_slices_and_moves_within_the_limits(seed: int) -> None:
    """Random models: true figures, true bounds, and no rank moves much more than it must."""
    profile = replace(random_model(np.random.default_rng(seed), layers=9), host_bandwidth=2.0, host_latency=0.1)
    options: dict[str, Any] = {"ranks": 3, "microbatches": 2, "slices": [1, 4], "slice_granularity": 8, "seconds": 0}
    options["schedules"] = ["1f1b", "seq1f1b", "seq-zb-h1", "slimpipe", "zbv"]
    free = ps.plan(profile, **options)
    limit = 0.8 * max(free.predicted.peak_memory)
    best = ps.plan(profile, **options, memory_limit=limit, offload=True, recompute=bool(seed % 2))
    again = ps.simulate(best.program, best.costs)
    assert again.makespan == pytest.approx(best.objective)
    assert max(again.peak_memory) <= limit * (1 + 1e-9)
    assert best.overall_bound <= best.objective * (1 + 1e-9)
    assert best.bound <= best.objective * (1 + 1e-9)
    for candidate in best.alternatives:
        assert not candidate.fits or candidate.bound is None or candidate.bound <= candidate.time_or_inf * (1 + 1e-9)
    assert any(candidate.offloaded and candidate.slices > 1 for candidate in best.alternatives)


@pytest.mark.parametrize("seed", [1, 5])
def test_orders_of_slices_are_searched_with_moves(seed: int) -> None:
    """An order that holds more than the limit, with moves, beats all that are within it without."""
    profile = replace(random_model(np.random.default_rng(seed), layers=9), host_bandwidth=20.0, host_latency=0.01)
    options: dict[str, Any] = {"ranks": 3, "microbatches": 3, "slices": 3, "slice_granularity": 8, "schedules": ["seq1f1b", "searched"]}
    limit = 0.75 * max(ps.plan(profile, **{**options, "schedules": "seq1f1b"}, seconds=0).predicted.peak_memory)
    plans = [ps.plan(profile, **options, seconds=30, rounds=800, memory_limit=limit, offload=offload) for offload in (False, True)]
    assert plans[1].name == "searched"
    assert count_moves(plans[1].schedule)
    assert plans[1].objective < 0.97 * plans[0].objective
    for plan in plans:
        assert max(ps.simulate(plan.program, plan.costs).peak_memory) <= limit * (1 + 1e-9)
        assert plan.overall_bound <= plan.objective
        assert plan.bound <= plan.objective * (1 + 1e-9)


def test_a_rank_moves_no_more_than_it_must() -> None:
    options = {**OFTEN, "schedules": ["1f1b"], "memory_limit": 14.0}
    best = ps.plan(PROFILE, **options, offload=True, host_bandwidth=4.0)  # type: ignore[arg-type]
    moved = [sum(action.kind is Kind.OFFLOAD for action in best.schedule[rank]) for rank in range(4)]
    assert moved[3] == 0
    for rank in range(4):
        fewer = [100 * count // 12 for count in moved]
        if not moved[rank]:
            continue
        fewer[rank] = max(fewer[rank] - 9, 0)
        less = move_activations(ps.schedule("1f1b", ranks=4, microbatches=12), Offload(tuple(fewer)))
        assert ps.simulate(ps.lower(less), best.costs).peak_memory[rank] > 14.0


def test_a_moved_schedule_is_made_again_for_other_counts() -> None:
    moved = move_activations(ps.schedule("1f1b", ranks=4, microbatches=8), Offload(100))
    assert moved.remake is not None
    assert moved.remake(12) == move_activations(ps.schedule("1f1b", ranks=4, microbatches=12), Offload(100))
