"""Plans that move activations to the host: only if memory holds a schedule back, with true figures and true bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import CostsError, FileFormatError, PlanError
from penstock.ir.kind import COMPUTE
from penstock.passes.offload import Offload
from penstock.planner.offload import count_moves, move_activations
from penstock.planner.plan import Plan
from penstock.verifier.rules.offload import peak_host_memory

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
    """Searched orders are bounded and solved within the memory limit; a moved candidate never passes it on."""
    options = {**OFTEN, "schedules": ["1f1b", "searched"], "seconds": 1.0, "rounds": 200}
    best = ps.plan(PROFILE, **options, memory_limit=9.0, offload=True, host_bandwidth=8.0)  # type: ignore[arg-type]
    assert max(best.predicted.peak_memory) <= 9.0
    for line in best.alternatives:
        assert line.offloaded is None or line.name != "searched"


def test_a_moved_schedule_is_made_again_for_other_counts() -> None:
    moved = move_activations(ps.schedule("1f1b", ranks=4, microbatches=8), Offload(100))
    assert moved.remake is not None
    assert moved.remake(12) == move_activations(ps.schedule("1f1b", ranks=4, microbatches=12), Offload(100))
