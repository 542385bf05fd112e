"""Replicas of a pipeline on parts of the batch: gradients are summed once, and equal those of the whole batch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock as ps
from composition.parallel import (
    SIZES,
    WIDTH,
    Outcome,
    Sided,
    assert_near,
    batch,
    check,
    full,
    mesh_of,
    perceptrons,
    pipeline,
    schedule,
    split_over,
)
from penstock.errors import PipelineError, ScheduleError
from penstock.passes.pass_list import PassList
from penstock.runtime import Layers, Pipeline
from penstock.runtime.launch.workers import Workers
from runtime.models import GPT, Numbers, by_batch, gradients, token_loss

KINDS = pytest.mark.parametrize("shard", [False, True], ids=["replicate", "FSDP2"])
BOTH = pytest.mark.parametrize(("name", "shard"), [("zbv", False), ("1f1b", True), ("zbv", True)], ids=["zbv", "1f1b-FSDP2", "zbv-FSDP2"])
EACH = pytest.mark.parametrize(("name", "shard"), [("1f1b", False), ("zbv", True)], ids=["1f1b", "zbv-FSDP2"])


# Steps ------------------------------------------------------------------------------------------------------------------


@BOTH
def test_gradients_accumulate_over_steps(workers: Workers, name: str, shard: bool) -> None:
    """Three steps of different sizes and counts before an update: earlier gradients are not summed again."""
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
    """Six updates with a stateful optimizer and clipping, from models with different initial values on each data rank."""
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


@KINDS
def test_data_ranks_order_their_own_microbatches(workers: Workers, shard: bool) -> None:
    """Data ranks may order their microbatches differently; different schedules are refused before the step."""
    model, (x, y) = perceptrons(2), batch(sum(SIZES))

    def train() -> tuple[Outcome, str]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(model, "1f1b", mesh, shard=shard)
        mine, target = split_over(mesh, x, y, SIZES)
        inputs, targets = mine.tensor_split(4), target.tensor_split(4)
        first = mesh.get_local_rank("dp") == 0
        outcome = Outcome.of(pipe, pipe.step_list(inputs, targets, order=[2, 0, 3, 1] if first else [1, 3, 0, 2]))
        planner = ps.BatchPlanner(schedule("1f1b", 2), ps.Costs(), sequence=1, schedules=["zb-h1"])
        order = planner.order([1, 9, 2, 5])
        assert order.schedule.name == "zb-h1"
        with pytest.raises(PipelineError) as caught:
            pipe.step_list(inputs, targets, order=order if first else None)
        return outcome, str(caught.value)

    results = workers.run(train)
    check([outcome for outcome, _ in results], by_batch(model, x, y))
    for _, text in results:
        assert "the data ranks run different schedules" in text
        assert "zb-h1-" in text


def test_all_weights_zero_is_refused_on_all(workers: Workers) -> None:
    def train() -> str:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(perceptrons(2), "1f1b", mesh, weight=lambda target: 0.0)
        with pytest.raises((ScheduleError, PipelineError)) as caught:
            pipe.step(*batch(4)[:1], target=batch(4)[1])
        return str(caught.value)

    for text in workers.run(train):
        assert "the weights of the microbatches are [0.0, 0.0, 0.0, 0.0]" in text


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
    """A parameter with a gradient on one data rank only, and one without any, whose gradient stays None."""
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
    """One matrix at both ends of the model, on two ranks or on one: replicated, sharded by the pipeline, or sharded by the user."""
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


class Penalty(nn.Module):
    """Adds the squared slope of its own map, which is differentiated again: its backward cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(functional.linear(x, self.map.weight, self.map.bias))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square()


@pytest.mark.parametrize("options", [{}, {"shard": True}, {"accumulate_dtype": torch.float64}], ids=["replicate", "FSDP2", "sums"])
def test_a_stage_that_needs_its_backward_whole(workers: Workers, options: dict[str, Any]) -> None:
    model, (x, y) = perceptrons(schedule("zbv", 2).stages), batch(13)
    model[2] = Penalty().double()

    def train() -> tuple[Outcome, Any]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), "zbv", mesh, **options)
        mine, target = split_over(mesh, x, y, SIZES)
        return Outcome.of(pipe, pipe.step(mine, target=target)), pipe.merged.stages

    found = workers.run(train)
    assert {stages for _, stages in found} == {(2,)}
    check([outcome for outcome, _ in found], by_batch(model, x, y))


def test_buffers_are_those_of_the_first_data_rank(workers: Workers) -> None:
    """As in DistributedDataParallel, the next step and the next evaluation begin with the first data rank's statistics."""
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


@KINDS
@pytest.mark.parametrize("wait", ["now", "deferred"])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_reductions_that_the_program_waits_for(workers: Workers, name: str, wait: str, shard: bool) -> None:
    passes = f"{'shard,' if shard else ''}reduce-grad{{wait={wait}}},send-receive,wait-send,buffers"
    program = PassList.parse(passes).apply(schedule(name, 2))
    model, (x, y) = perceptrons(program.stages), batch(sum(SIZES))

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(model, program, mesh=mesh, shard=shard, loss_fn=functional.mse_loss)
        mine, target = split_over(mesh, x, y, SIZES)
        return Outcome.of(pipe, pipe.step(mine, target=target))

    check(workers.run(train), by_batch(model, x, y))
