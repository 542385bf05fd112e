"""The ranks that are left as one pipeline: what they run on whose costs, what they say about it, and when they cannot go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError
from penstock.ir.kind import Kind
from penstock.runtime.batch.joint_input import JointBatch
from penstock.runtime.execution.programs import forward_program
from penstock.runtime.parallel.joint_pipeline import JointPipeline
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.runtime.pipeline import GroupOptions
from penstock.runtime.transport import current_group
from penstock.runtime.transport.processes import Processes


class LostMesh:
    """A mesh of pp x dp that has lost ranks, as seen by one that is left; nothing is sent."""

    def __init__(self, pipeline: int, data: int, lost: list[tuple[int, int]], rank: int = 0) -> None:
        self.shape, self.lost = (pipeline, data), lost
        ranks = range(pipeline * data)
        members = tuple(number for number in ranks if self.locate(number) not in lost)
        self.whole = SimpleNamespace(ranks=len(ranks), members=members, describe_rank=self.describe_rank)
        self.sent: list[Any] = []
        self.group = SimpleNamespace(rank=rank, members=members, gather=lambda rank, name, value, deadline: self.sent.append(value))

    def locate(self, rank: int) -> tuple[int, int]:
        return divmod(rank, self.shape[1])

    def describe_rank(self, rank: int) -> str:
        return "rank {} (pp {}, dp {})".format(rank, *self.locate(rank))

    def find_survivors(self) -> ps.Survivors:
        return ps.Survivors.after(*self.shape, self.lost)

    def join_survivors(self) -> Any:
        return self.group


def join(mesh: Any, plan: Any = None, **options: Any) -> JointPipeline:
    return JointPipeline(mesh, plan, split=True, deadline=1.0, **options)


def test_a_loss_is_described_with_those_who_take_over() -> None:
    """All of one peer, or shared by several."""
    table = ps.schedule("1f1b", 2, 4)
    alone, shared = (join(LostMesh(2, data, [lost])).describe(table) for data, lost in ((2, (1, 1)), (3, (0, 1))))
    assert alone.startswith("rank 3 (pp 1, dp 1) was lost; its 4 microbatches run on rank 2 (pp 1, dp 0); predicted step 1.")
    takers = "2 on rank 0 (pp 0, dp 0) and 2 on rank 2 (pp 0, dp 2)"
    assert shared.startswith(f"rank 1 (pp 0, dp 1) was lost; of its 4 microbatches run {takers}; predicted step 1.")


def test_a_loss_is_described_as_it_was_in_its_step() -> None:
    """The step may be completed after further ranks were lost."""
    mesh = LostMesh(2, 2, [(1, 1)])
    joint, table = join(mesh), ps.schedule("1f1b", 2, 4)
    before = joint.describe(table)
    mesh.whole.members = (1, 2)
    assert joint.describe(table) == before


def test_a_step_with_other_microbatches_is_described_with_them() -> None:
    joint, table = join(LostMesh(2, 3, [(0, 1)])), ps.schedule("1f1b", 2, 4)
    joint.batch = JointBatch(joint.survivors, table.placement, table.graph, (), 7)
    assert "of its 7 microbatches run 4 on rank 0 (pp 0, dp 0) and 3 on rank 2 (pp 0, dp 2)" in joint.describe(table)


def test_lost_columns_are_named() -> None:
    with pytest.raises(
        PipelineError, match=r"rank 2 \(pp 1, dp 0\) and rank 3 \(pp 1, dp 1\) were lost, and the others cannot go on: all 2"
    ):
        join(LostMesh(2, 2, [(1, 0), (1, 1)]))


def test_lost_replicas_are_named() -> None:
    """Before anything says which ranks run their microbatches."""
    gone = r"rank 1 \(pp 0, dp 1\) and rank 4 \(pp 1, dp 1\) were lost, and the others cannot go on: all ranks of replica 1"
    with pytest.raises(PipelineError, match=rf"{gone} are lost, .* splits batches over 2 replicas"):
        join(LostMesh(2, 3, [(0, 1), (1, 1)], rank=2))


def test_an_evaluation_runs_where_its_batch_is_sent() -> None:
    """Also if it has more microbatches than the schedule, and three peers take turns."""
    joint, table = join(LostMesh(2, 4, [(1, 1)])), ps.schedule("1f1b", 2, 2)
    program = forward_program(table, 4 * 5, placement=joint.survivors.place(table.placement, 5))
    assert {(action.stage, action.microbatch): rank for rank, row in enumerate(program) for action in row if action.kind is Kind.F} == {
        (stage, 4 * k + replica): joint.survivors.find_taker((stage, replica), k)
        for stage in range(2)
        for k in range(5)
        for replica in range(4)
    }


def test_no_pipeline_is_created_without_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = SimpleNamespace(mesh=torch.arange(4).view(2, 2), mesh_dim_names=("pp", "dp"), get_coordinate=lambda: [0, 0])
    monkeypatch.setattr(current_group, "join_ranks", lambda ranks, transport: LostMesh(2, 2, [(1, 0), (1, 1)]).whole)
    with pytest.raises(PipelineError, match=r"rank 2 \(pp 1, dp 0\) and rank 3 \(pp 1, dp 1\) are lost, and all ranks of a mesh create"):
        PipelineMesh(devices)


def test_launched_pipelines_that_cannot_go_on_warn(caplog: pytest.LogCaptureFixture) -> None:
    group = Processes.__new__(Processes)
    group.expects_losses = True
    options = GroupOptions(None, None, "auto", 1.0, None)
    assert not options.allow_losses(group, 1, None, ps.schedule("1f1b", 2, 4))
    assert not caplog.messages
    assert not options.allow_losses(group, 0, None, ps.schedule("1f1b", 2, 4))
    assert "all ranks raise if one is lost: no other rank can run the microbatches of a lost one, because only ranks" in caplog.text


def test_the_new_schedule_stays_within_the_limits_of_the_plan() -> None:
    """The peer of a lost rank runs twice as many microbatches, and holds no more of them at once than its limit allows."""
    table, costs = ps.schedule("1f1b", 2, 4), ps.Costs(activation=1.0, output=0.0)
    before = ps.simulate(ps.lower(table), costs).peak_memory
    limits = tuple(before)
    taken = join(LostMesh(2, 2, [(1, 1)]), SimpleNamespace(costs=costs, memory_limit=limits)).take_over(table)
    places = taken.survivors.places
    assert all(peak <= limits[place[0]] for peak, place in zip(taken.timeline.peak_memory, places, strict=True))
    free = join(LostMesh(2, 2, [(1, 1)]), SimpleNamespace(costs=costs, memory_limit=None)).take_over(table)
    assert free.timeline.makespan <= taken.timeline.makespan
    with pytest.raises(PipelineError, match=r"rank 3 .* was lost, and the others cannot go on: rank \d .* would hold .* of at most 0\.5"):
        join(LostMesh(2, 2, [(1, 1)]), SimpleNamespace(costs=costs, memory_limit=(0.5, 0.5))).take_over(table)


def test_costs_of_other_microbatches_do_not_count() -> None:
    """A plan knows times for each of its microbatches, and a step may have another number of them."""
    plan = SimpleNamespace(costs=ps.Costs(f=((1.0, 5.0), (1.0, 5.0))), memory_limit=None)
    joint, known, other = join(LostMesh(2, 2, [(1, 1)]), plan), ps.schedule("1f1b", 2, 2), ps.schedule("1f1b", 2, 4)
    assert joint.take_over(known).before.makespan == ps.simulate(ps.lower(known), plan.costs).makespan
    assert joint.take_over(other).before.makespan == ps.simulate(ps.lower(other), ps.Costs()).makespan


def test_schedules_are_made_once() -> None:
    joint = join(LostMesh(2, 2, [(1, 1)]))
    assert joint.take_over(ps.schedule("1f1b", 2, 4)) is joint.take_over(ps.schedule("1f1b", 2, 4))
    assert joint.take_over(ps.schedule("1f1b", 2, 4)) is not joint.take_over(ps.schedule("1f1b", 2, 6))


@pytest.mark.parametrize(("rank", "sends"), [(0, True), (1, False), (2, True), (3, False)])
def test_only_the_first_of_each_column_sends_what_peers_have_in_common(rank: int, sends: bool) -> None:
    """The survivors of 2 x 3 without (0, 0) and (1, 1) are (0, 1), (0, 2), (1, 0), (1, 2)."""
    mesh = LostMesh(2, 3, [(0, 0), (1, 1)], rank)
    join(mesh).gather_columns("sum", {"weight": 1.0})
    assert mesh.sent == [{"weight": 1.0} if sends else {}]
