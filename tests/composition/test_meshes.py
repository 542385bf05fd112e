"""Meshes, wrappers and counts that a pipeline takes as they are, and those that it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from composition.parallel import SIZES, Outcome, batch, check, mesh_of, perceptrons, pipeline, schedule, split_over
from penstock.errors import PipelineError, PlacementError, ScheduleError
from penstock.passes.pass_list import PassList
from penstock.runtime import Pipeline
from penstock.runtime.launch.workers import Workers
from runtime.models import by_batch

KINDS = pytest.mark.parametrize("shard", [False, True], ids=["replicate", "FSDP2"])


# What users wrap models in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        ("DistributedDataParallel", "zbv"),
        ("DistributedDataParallel", "interleaved-zb"),
        ("replicate", "zbv"),
        ("fully_shard", "interleaved-zb"),
        ("partial", "zbv"),
    ],
)
def test_row_2_wrapped_stages(workers: Workers, name: str, wrapper: str) -> None:
    """Stages wrapped by the user: replicas' gradients are equal with a split backward too."""
    stages = schedule(name, 2).stages
    model, (x, y) = perceptrons(stages), batch(13)

    def wrapped(module: nn.Module, mesh: Any) -> nn.Module:
        if wrapper == "DistributedDataParallel":
            return DistributedDataParallel(module, process_group=mesh["dp"].get_group())
        if wrapper == "replicate":
            return replicate(module, mesh=mesh["dp"])
        if wrapper == "partial":  # only some of a stage's parameters
            fully_shard(module.up, mesh=mesh["dp"])
            return module
        fully_shard(module.down, mesh=mesh["dp"])
        return fully_shard(module, mesh=mesh["dp"])

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        held = schedule(name, 2).placement.stages_of(mesh["pp"].get_local_rank())
        parts = {stage: wrapped(copy.deepcopy(model[stage]), mesh) for stage in held}
        pipe = pipeline(parts, name, mesh)
        mine, target = split_over(mesh, x, y, SIZES)
        for _ in range(2):
            pipe.step(mine, target=target)
        for parameter in pipe.parameters():
            parameter.grad = None
        return Outcome.of(pipe, pipe.step(mine, target=target))

    check(workers.run(train), by_batch(model, x, y))


def test_wrappers_that_do_not_fit_the_mesh(workers: Workers) -> None:
    def build() -> list[str]:
        mesh, found = mesh_of(pp=2, dp=2), []

        def refused(error: type[Exception], model: Any, **options: Any) -> None:
            with pytest.raises(error) as caught:
                Pipeline(model, schedule("1f1b", 2), **options)
            found.append(str(caught.value))

        whole = DistributedDataParallel(perceptrons(2))
        refused(PlacementError, whole, mesh=mesh)
        refused(ScheduleError, whole, group=mesh["pp"])
        refused(PlacementError, [fully_shard(part, mesh=mesh["pp"]) for part in perceptrons(2)], mesh=mesh)
        refused(ScheduleError, [fully_shard(part, mesh=mesh["dp"]) for part in perceptrons(2)], group=mesh["pp"])
        root = fully_shard(perceptrons(2), mesh=mesh["dp"])
        refused(PlacementError, root, mesh=mesh)
        refused(ScheduleError, perceptrons(2), mesh=mesh["pp"], shard=True)
        return found

    for texts in workers.run(build):
        wanted = [
            "copies the model over processes [0, 1, 2, 3], but the mesh's data dimensions over",
            "wrapped in DistributedDataParallel: give mesh=",
            "is sharded over processes",
            "is sharded by fully_shard: give mesh=",
            "is sharded with a module that is not inside the stage: apply fully_shard to each layer",
            "shard= needs mesh= with a dimension to shard over",
        ]
        assert len(texts) == len(wanted)
        for text, part in zip(texts, wanted, strict=True):
            assert part in text


# Counts and agreement ---------------------------------------------------------------------------------------------------


@KINDS
def test_different_counts_are_refused(workers: Workers, shard: bool) -> None:
    """The refusal comes before the step begins, so that the next step works, with shards too."""
    model, (x, y) = perceptrons(2), batch(13)

    def train() -> tuple[str, Outcome]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), "1f1b", mesh, shard=shard)
        mine, target = split_over(mesh, x, y, SIZES)
        with pytest.raises(PipelineError) as caught:
            pipe.step(mine, target=target, microbatches=3 + mesh["dp"].get_local_rank())
        return str(caught.value), Outcome.of(pipe, pipe.step(mine, target=target))

    found = workers.run(train)
    for text, _ in found:
        assert "the data ranks run different numbers of microbatches: 3 on rank" in text
        assert "4 on rank" in text
    check([outcome for _, outcome in found], by_batch(model, x, y))


def test_input_that_one_data_rank_refuses(workers: Workers) -> None:
    """Too few rows on one data rank: all ranks raise at once, and go on."""
    model, (x, y) = perceptrons(2), batch(13)

    def train() -> tuple[str, Outcome]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), "1f1b", mesh)
        mine, target = split_over(mesh, x, y, SIZES)
        rows = 3 if mesh["dp"].get_local_rank() else 6
        with pytest.raises((PipelineError, ScheduleError)) as caught:
            pipe.step(mine[:rows], target=target[:rows])
        return str(caught.value), Outcome.of(pipe, pipe.step(mine, target=target))

    found = workers.run(train)
    assert all("a batch of 3 cannot be split into 4 microbatches" in text for text, _ in found)
    check([outcome for _, outcome in found], by_batch(model, x, y))


def test_data_ranks_that_disagree_on_the_schedule(workers: Workers) -> None:
    def build() -> str:
        mesh = mesh_of(pp=2, dp=2)
        with pytest.raises(PipelineError) as caught:
            pipeline(perceptrons(2), "gpipe" if mesh["dp"].get_local_rank() else "1f1b", mesh)
        return str(caught.value)

    assert all("the ranks disagree on schedule" in text for text in workers.run(build))


# Meshes ---------------------------------------------------------------------------------------------------------------


def test_meshes_of_other_orders(workers: Workers) -> None:
    """The pipeline as the second dimension, with processes that are not neighbours; and a mesh of two of the four processes."""
    model, (x, y) = perceptrons(2), batch(13)

    def train() -> tuple[Outcome, Outcome | None]:
        mesh_of(pp=4)
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "pp"))
        pipe = pipeline(copy.deepcopy(model), "1f1b", mesh)
        mine, target = split_over(mesh, x, y, SIZES)
        first = Outcome.of(pipe, pipe.step(mine, target=target))
        with pytest.raises(ScheduleError, match=r"along pp the device mesh has processes \[\d, \d\]: give them in ascending order"):
            pipeline(copy.deepcopy(model), "1f1b", DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("dp", "pp")))
        pair = DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("dp", "pp"))
        if dist.get_rank() in (0, 3):
            with pytest.raises(PipelineError, match=r"process \d is not in the device mesh"):
                pipeline(copy.deepcopy(model), "1f1b", pair)
            return first, None
        pipe = pipeline(copy.deepcopy(model), "1f1b", pair)
        return first, Outcome.of(pipe, pipe.step(x, target=y))

    found = workers.run(train)
    check([first for first, _ in found], by_batch(model, x, y))
    check([second for _, second in found if second is not None], by_batch(model, x, y))


def test_meshes_that_are_refused(workers: Workers) -> None:
    def build() -> list[str]:
        found = []

        def refused(mesh: Any, **options: Any) -> None:
            with pytest.raises(ScheduleError) as caught:
                Pipeline(perceptrons(2), schedule("1f1b", 2), mesh=mesh, **options)
            found.append(str(caught.value))

        mesh = mesh_of(pp=2, dp=2)
        refused(dist.group.WORLD)
        refused(mesh, group=mesh["pp"])
        refused(mesh_of(pp=2, ddp=2))
        refused(mesh_of(dp_shard=2, dp_replicate=2))
        refused(mesh_of(pp=4))
        return found

    for texts in workers.run(build, ranks=4):
        assert [text.split(":")[0] for text in texts] == [
            "mesh= takes a device mesh, got ProcessGroup; a process group goes into group=",
            "give either group= or mesh=",
            "the device mesh has a dimension 'ddp'; did you mean 'dp'? known",
            "the device mesh has the data dimensions ['dp_shard', 'dp_replicate']",
            "the schedule is for 2 ranks, but there are 4",
        ]


def test_a_mesh_needs_processes() -> None:
    from penstock.runtime import launch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))

        def build() -> None:
            Pipeline(perceptrons(2), schedule("1f1b", 2), mesh=mesh)

        with pytest.raises(ScheduleError, match="a device mesh is of processes"):
            launch(build, ranks=2)
    finally:
        dist.destroy_process_group()


def test_programs_without_the_actions_are_refused(workers: Workers) -> None:
    plain = ps.lower(schedule("1f1b", 2))
    bare = PassList.parse("send-receive,buffers").apply(schedule("1f1b", 2))

    def build() -> list[str]:
        mesh, (x, y), texts = mesh_of(pp=2, dp=2), batch(4), []
        for program, shard in ((plain, True), (bare, False)):
            # A rank that is still building its pipeline is told of the refusal by another.
            with pytest.raises((ScheduleError, PipelineError)) as caught:
                Pipeline(perceptrons(2), program, loss_fn=functional.mse_loss, mesh=mesh, shard=shard).step(x, target=y)
            texts.append(str(caught.value))
        return texts

    for texts in workers.run(build):
        assert "the program has no UNSHARD: lower it with fsdp=True" in texts[0]
        assert "there are 2 data ranks, but the program has no REDUCE_GRAD" in texts[1]


@KINDS
def test_devices_of_a_plan_are_those_along_the_pipeline(workers: Workers, shard: bool) -> None:
    """The second device of each data rank's pipeline holds the first stage; for losses the mesh says so too."""
    cluster = ps.Cluster([ps.Device(speed=1.0), ps.Device(speed=2.0)])
    profile = ps.Profile([ps.Layer(f=1, i=1, w=1)] * 3)
    plan = ps.plan(profile, cluster=cluster, microbatches=4, schedules=["zb-h1"], seconds=0)
    plan = replace(plan, devices=(1, 0), partition=(2, 1), bounds={"none": 0.0}, overall_bound=0.0)
    model, (x, y) = perceptrons(3), batch(13)

    def train() -> tuple[Outcome, int, list[int]]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), plan, loss_fn=functional.mse_loss, mesh=mesh, shard=shard)
        assert [pipe.grid.locate(number) for number in range(4)] == [(1, 0), (1, 1), (0, 0), (0, 1)]
        assert pipe.grid.find_survivors().places[pipe.grid.whole.rank] == (pipe.rank, pipe.data.rank)
        mine, target = split_over(mesh, x, y, SIZES)
        return Outcome.of(pipe, pipe.step(mine, target=target)), mesh["pp"].get_local_rank(), sorted(pipe.stages)

    found = workers.run(train)
    assert [(place, stages) for _, place, stages in found] == [(0, [1]), (0, [1]), (1, [0]), (1, [0])]
    check([outcome for outcome, *_ in found], by_batch(model, x, y))
