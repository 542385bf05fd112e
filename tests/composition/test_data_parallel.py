"""Copies of a pipeline that get a part of the batch each: gradients are summed once, and are those of the whole batch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import penstock as ps
from composition.parallel import WIDTH, Outcome, assert_near, batch, check, full, mesh_of, perceptrons, schedule, split_over
from penstock.errors import PipelineError, PlacementError, ScheduleError
from penstock.passes.pass_list import PassList
from penstock.runtime import Layers, Pipeline, add_loss
from penstock.runtime.workers import Workers
from runtime.models import GPT, Numbers, by_batch, gradients, token_loss

SIZES = (6, 7)
KINDS = pytest.mark.parametrize("shard", [False, True], ids=["replicate", "FSDP2"])
BOTH = pytest.mark.parametrize(("name", "shard"), [("zbv", False), ("1f1b", True), ("zbv", True)], ids=["zbv", "1f1b-FSDP2", "zbv-FSDP2"])
EACH = pytest.mark.parametrize(("name", "shard"), [("1f1b", False), ("zbv", True)], ids=["1f1b", "zbv-FSDP2"])


def pipeline(model: Any, name: str, mesh: Any, **options: Any) -> Pipeline:
    return Pipeline(model, schedule(name, 2), mesh=mesh, **({"loss_fn": functional.mse_loss} | options))


# Steps ------------------------------------------------------------------------------------------------------------------


@BOTH
def test_gradients_accumulate_over_steps(workers: Workers, name: str, shard: bool) -> None:
    """Three steps before an update, of other sizes and counts: what was there before is not summed again."""
    stages = schedule(name, 2).stages
    model, plan = perceptrons(stages), ((13, (6, 7), 4), (9, (4, 5), 3), (13, (7, 6), 4))
    batches = [(*batch(rows), sizes, count) for rows, sizes, count in plan]

    def train() -> list[Outcome]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(model, name, mesh, shard=shard)
        found = []
        for x, y, sizes, count in batches:
            mine, target = split_over(mesh, x, y, sizes)
            found.append(Outcome.of(pipe, pipe.step(mine, target=target, microbatches=count)))
        return found

    found, again = workers.run(train), copy.deepcopy(model)
    for number, (x, y, _, _) in enumerate(batches):
        loss = functional.mse_loss(again(x), y)
        loss.backward()
        check([theirs[number] for theirs in found], Numbers(loss.detach(), [], gradients(again)))


@EACH
def test_training_follows_the_single_process(workers: Workers, name: str, shard: bool) -> None:
    """Six updates with an optimizer that remembers and with clipping, from models that begin with other values on each data rank."""
    stages = schedule(name, 2).stages
    model, batches = perceptrons(stages), [batch(13) for _ in range(6)]

    def train() -> tuple[list[float], dict[str, Any]]:
        mesh, mine = mesh_of(pp=2, dp=2), copy.deepcopy(model)
        if not shard and mesh["dp"].get_local_rank():
            for parameter in mine.parameters():
                parameter.detach().normal_()  # copies begin with the first's values
        pipe = pipeline(mine, name, mesh, shard=shard)
        optimizer, losses = torch.optim.AdamW(pipe.parameters(), 0.05), []
        for x, y in batches:
            part, target = split_over(mesh, x, y, SIZES)
            losses.append(float(pipe.step(part, target=target).loss))
            losses.append(float(pipe.clip_grad_norm_(0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, {key: full(parameter.detach()) for key, parameter in pipe.local_parameters()}

    found, again = workers.run(train), copy.deepcopy(model)
    optimizer, losses = torch.optim.AdamW(again.parameters(), 0.05), []
    for x, y in batches:
        loss = functional.mse_loss(again(x), y)
        loss.backward()
        losses += [float(loss.detach()), float(nn.utils.clip_grad_norm_(again.parameters(), 0.1))]
        optimizer.step()
        optimizer.zero_grad()
    wanted = {key: parameter.detach() for key, parameter in again.named_parameters()}
    for theirs, parameters in found:
        assert theirs == found[0][0]
        assert theirs == pytest.approx(losses, rel=1e-10)
        for key, parameter in parameters.items():
            torch.testing.assert_close(parameter, wanted[key], rtol=1e-9, atol=1e-11, msg=key)


@KINDS
def test_loss_by_valid_tokens_over_all_data_ranks(workers: Workers, shard: bool) -> None:
    """Weights are summed over all data ranks before the first backward; one of them has no valid token at all, and no backward."""
    torch.manual_seed(0)
    model = GPT(depth=2).double()
    tokens = torch.randint(0, 11, (8, 8))
    targets = tokens.roll(-1, 1).clone()
    targets[1, 3:] = -100
    targets[4:] = -100  # the second data rank

    def valid(target: Tensor) -> Tensor:
        return (target != -100).sum()

    def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        layers = Layers("blocks", head=["embed"], tail=["norm", "head"])
        pipe = pipeline(copy.deepcopy(model), "zb-h1", mesh, split=layers, loss_fn=loss_fn, weight=valid, shard=shard)
        mine, target = split_over(mesh, tokens, targets, (4, 4))
        return Outcome.of(pipe, pipe.step(mine, target=target, microbatches=2))

    check(workers.run(train), by_batch(model, tokens, targets, loss_fn))


def test_all_weights_zero_is_refused_on_all(workers: Workers) -> None:
    def train() -> str:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(perceptrons(2), "1f1b", mesh, weight=lambda target: 0.0)
        with pytest.raises((ScheduleError, PipelineError)) as caught:
            pipe.step(*batch(4)[:1], target=batch(4)[1])
        return str(caught.value)

    for text in workers.run(train):
        assert "the weights of the microbatches are [0.0, 0.0, 0.0, 0.0]" in text


class Sided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.map(x)
        add_loss(made.square().mean())
        return torch.tanh(made)


@pytest.mark.parametrize(("reduction", "shard"), [("mean", True), ("sum", False)])
def test_side_losses_and_sums(workers: Workers, reduction: str, shard: bool) -> None:
    model, (x, y) = nn.Sequential(Sided(), Sided()).double(), batch(16)
    sum_of_means = 8 if reduction == "sum" else 1  # as many microbatches, each of the same size

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        options = {"loss_fn": partial(functional.mse_loss, reduction=reduction), "loss_reduction": reduction, "shard": shard}
        pipe = pipeline(copy.deepcopy(model), "1f1b", mesh, **options)
        mine, target = split_over(mesh, x, y, (8, 8))
        return Outcome.of(pipe, pipe.step(mine, target=target))

    again, side = copy.deepcopy(model), []
    handles = [layer.map.register_forward_hook(lambda module, args, made: side.append(made.square().mean())) for layer in again]
    from penstock.runtime import collect

    with collect():
        loss = functional.mse_loss(again(x), y, reduction=reduction) + sum_of_means * sum(side)
    loss.backward()
    assert handles
    check(workers.run(train), Numbers(loss.detach(), [], gradients(again)))


# Parameters -------------------------------------------------------------------------------------------------------------


class Picky(nn.Module):
    """Uses one parameter on odd rows only, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.odd, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x) + (self.odd(x) if float(x.detach()[0, 0]) > 0 else 0.0))


@BOTH
def test_parameters_that_only_some_data_ranks_use(workers: Workers, name: str, shard: bool) -> None:
    """One that a single data rank has a gradient for, and one that none has, whose gradient stays None."""
    count = schedule(name, 2).stages
    model, (x, y) = nn.Sequential(*(Picky() for _ in range(count))).double(), batch(12)
    x[:, 0] = x[:, 0].abs()
    x[6:, 0] *= -1

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), name, mesh, shard=shard)
        mine, target = split_over(mesh, x, y, (6, 6))
        return Outcome.of(pipe, pipe.step(mine, target=target))

    again, total = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    for one, other in zip(x.split([2, 2, 1, 1] * 2), y.split([2, 2, 1, 1] * 2), strict=True):
        loss = functional.mse_loss(again(one), other) * (len(one) / 12)
        loss.backward()
        total += loss.detach()
    wanted = gradients(again)
    assert wanted["0.odd.weight"] is not None
    assert wanted["0.never.weight"] is None
    check(workers.run(train), Numbers(total, [], wanted))


@pytest.mark.parametrize(("name", "shard"), [("1f1b", False), ("zbv", False), ("1f1b", "list"), ("zbv", True)])
def test_tied_parameters(workers: Workers, name: str, shard: Any) -> None:
    """One matrix at both ends of the model: on other ranks, or on one; copies, shards of the pipeline's making, and shards of ours."""
    torch.manual_seed(0)
    model, tokens = GPT(depth=4, tied=True).double(), torch.randint(0, 11, (13, 8))
    layers = Layers("blocks", head=["embed"], tail=["norm", "head"])

    def train() -> Outcome:
        mesh, mine, options = mesh_of(pp=2, dp=2), copy.deepcopy(model), {}
        if shard == "list":
            for layer in (mine.embed, *mine.blocks, mine.norm, mine.head):
                fully_shard(layer, mesh=mesh["dp"])
            options = {"ties": [["embed.tokens.weight", "head.weight"]]}
        pipe = pipeline(mine, name, mesh, split=layers, loss_fn=token_loss, shard=shard is True, **options)
        part, target = split_over(mesh, tokens, tokens, SIZES)
        return Outcome.of(pipe, pipe.step(part, target=target))

    wanted = by_batch(model, tokens, tokens, token_loss)
    norm = wanted.norm  # the matrix once
    wanted.grads["head.weight"] = wanted.grads["embed.tokens.weight"]
    found = workers.run(train)
    for outcome in found:
        assert outcome.norm == pytest.approx(float(norm), rel=1e-12)
        for key, grad in outcome.grads.items():
            assert_near(key, grad, wanted.grads[key], 1e-12)
    assert {key for outcome in found for key in outcome.grads} | {"head.weight"} == set(wanted.grads)


@EACH
def test_frozen_stage(workers: Workers, name: str, shard: bool) -> None:
    model, (x, y) = perceptrons(schedule(name, 2).stages), batch(13)
    model[0].requires_grad_(False)
    model[-1].norm.requires_grad_(False)

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), name, mesh, shard=shard)
        mine, target = split_over(mesh, x, y, SIZES)
        return Outcome.of(pipe, pipe.step(mine, target=target))

    check(workers.run(train), by_batch(model, x, y))


def test_buffers_are_those_of_the_first_data_rank(workers: Workers) -> None:
    """As DistributedDataParallel does: the next step and the next evaluation begin with the first data rank's statistics."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))).double()
    x, y = batch(16)

    def train() -> Any:
        mesh, mine = mesh_of(pp=2, dp=2), copy.deepcopy(model)
        pipe = pipeline(mine, "gpipe", mesh)
        part, target = split_over(mesh, x, y, (8, 8))
        pipe.step(part, target=target)
        after = mine[1][0].running_mean.clone()
        pipe.eval_step(part, target=target)
        synced = mine[1][0].running_mean.clone()
        return mesh["pp"].get_local_rank(), after, synced, mine[1][0].num_batches_tracked.clone()

    found = [theirs[1:] for theirs in workers.run(train) if theirs[0] == 1]
    (one, first, counted), (other, second, _) = found
    assert not torch.equal(one, other)
    assert torch.equal(first, one)
    assert torch.equal(second, one)
    assert int(counted) == 4


class Recomputing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@EACH
def test_activation_checkpointing(workers: Workers, name: str, shard: bool) -> None:
    model, (x, y) = nn.Sequential(*map(Recomputing, perceptrons(schedule(name, 2).stages))), batch(13)

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), name, mesh, shard=shard, residency=1)
        mine, target = split_over(mesh, x, y, SIZES)
        return Outcome.of(pipe, pipe.step(mine, target=target))

    check(workers.run(train), by_batch(model, x, y))


def test_sparse_gradients_are_refused(workers: Workers) -> None:
    model = [nn.Embedding(11, WIDTH, sparse=True), nn.Linear(WIDTH, 11)]
    tokens = torch.randint(0, 11, (4, 3))

    def train() -> str:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(model, "1f1b", mesh, loss_fn=token_loss)
        with pytest.raises(PipelineError) as caught:
            pipe.step(tokens, target=tokens)
        return str(caught.value)

    for text in workers.run(train):
        assert "sparse gradient" in text


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
    """Before anything has begun, so that the next step works, in shards too."""
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
    """Too few rows on one of them: all know at once, and go on."""
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
    assert all("a batch of 3 cannot be cut into 4 microbatches" in text for text, _ in found)
    check([outcome for _, outcome in found], by_batch(model, x, y))


def test_data_ranks_that_disagree_on_the_schedule(workers: Workers) -> None:
    def build() -> str:
        mesh = mesh_of(pp=2, dp=2)
        with pytest.raises(PipelineError) as caught:
            pipeline(perceptrons(2), "gpipe" if mesh["dp"].get_local_rank() else "1f1b", mesh)
        return str(caught.value)

    assert all("the ranks disagree on schedule" in text for text in workers.run(build))


# Other steps ------------------------------------------------------------------------------------------------------------


@EACH
def test_evaluation_and_inference(workers: Workers, name: str, shard: bool) -> None:
    """The loss is that of all data ranks' batches, the outputs are this one's; gradients are left alone."""
    model, (x, y) = perceptrons(schedule(name, 2).stages), batch(13)

    def train() -> Any:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), name, mesh, shard=shard)
        mine, target = split_over(mesh, x, y, SIZES)
        outcome = Outcome.of(pipe, pipe.step(mine, target=target))
        result = pipe.eval_step(mine, target=target, microbatches=3, outputs=True)
        same = all(torch.equal(full(parameter.grad), outcome.grads[key]) for key, parameter in pipe.local_parameters())
        return result.loss, result.outputs, pipe.infer(mine), same, mesh["dp"].get_local_rank()

    with torch.no_grad():
        wanted, whole = functional.mse_loss(model(x), y), model(x)
    for loss, outputs, inferred, same, data in workers.run(train):
        assert same
        assert float((loss - wanted).abs()) < 1e-13
        for found in (outputs, inferred):
            torch.testing.assert_close(found, whole.split(list(SIZES))[data], rtol=1e-12, atol=1e-12)


def test_parity_over_data_ranks(workers: Workers) -> None:
    """The pipeline compares itself with the unpipelined model on the batches of all data ranks."""
    model, (x, y) = perceptrons(4), batch(13)

    def train() -> Any:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), "zbv", mesh)
        mine, target = split_over(mesh, x, y, SIZES)
        parity = pipe.parity(mine, target=target)
        sharded = pipeline(copy.deepcopy(model), "zbv", mesh, shard=True)
        with pytest.raises(ScheduleError, match="parity runs a copy of the whole model"):
            sharded.parity(mine, target=target)
        return parity.loop.worst, parity.batch.worst if parity.batch is not None else 1.0

    for loop, whole in workers.run(train):
        assert loop < 1e-13
        assert whole < 1e-12


def test_a_list_of_microbatches(workers: Workers) -> None:
    model = perceptrons(2)
    sizes = ((2, 1, 4), (3, 3, 1))
    batches = [[batch(rows) for rows in each] for each in sizes]

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), "1f1b", mesh)
        mine = batches[mesh["dp"].get_local_rank()]
        return Outcome.of(pipe, pipe.step_list([x for x, _ in mine], [y for _, y in mine]))

    x, y = (torch.cat([pair[which] for each in batches for pair in each]) for which in (0, 1))
    check(workers.run(train), by_batch(model, x, y))


def test_a_group_alone_is_no_data_parallelism(workers: Workers) -> None:
    """`group=` runs two pipelines that know nothing of each other."""
    model, (x, y) = perceptrons(2), batch(12)

    def train() -> Any:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), schedule("1f1b", 2), loss_fn=functional.mse_loss, group=mesh["pp"])
        mine, target = split_over(mesh, x, y, (6, 6))
        return mesh["dp"].get_local_rank(), Outcome.of(pipe, pipe.step(mine, target=target))

    found = workers.run(train)
    for data in (0, 1):
        check([outcome for at, outcome in found if at == data], by_batch(model, x.split(6)[data], y.split(6)[data]))


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
        mesh, (x, y), found = mesh_of(pp=2, dp=2), batch(4), []
        for program, shard in ((plain, True), (bare, False)):
            with pytest.raises(ScheduleError) as caught:
                Pipeline(perceptrons(2), program, loss_fn=functional.mse_loss, mesh=mesh, shard=shard).step(x, target=y)
            found.append(str(caught.value))
        return found

    for texts in workers.run(build):
        assert "the program has no UNSHARD: lower it with fsdp=True" in texts[0]
        assert "there are 2 data ranks, but the program has no REDUCE_GRAD" in texts[1]
