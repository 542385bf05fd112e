"""Replicas of a pipeline on virtual ranks: gradients, losses and batch sizes over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.deepspeed.training import WIDTH, Block, by_loop, data, loss_fn, sgd
from penstock.compat.deepspeed import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineEngine,
    PipelineModule,
    ProcessTopology,
    TiedLayerSpec,
    as_deepspeed,
)
from penstock.compat.deepspeed import schedule as s
from penstock.errors import PenstockError, PipelineError, ScheduleError
from penstock.runtime import launch, rank

TOPOLOGIES = [
    PipeDataParallelTopology(num_pp=2, num_dp=2),
    PipeDataParallelTopology(num_pp=1, num_dp=3),
    PipeDataParallelTopology(num_pp=3, num_dp=2),
    ProcessTopology(["data", "pipe"], [2, 2]),
]


def specs() -> list[Any]:
    return [TiedLayerSpec("end", Block, 0), LayerSpec(Block, 1), torch.sin, TiedLayerSpec("end", Block, 0)]


class Whole(nn.Module):
    """The same without a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.end, self.middle = Block(0), Block(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.sin(self.middle(self.end(x))))  # type: ignore[no-any-return]


def share(batches: list[Any], micro_batches: int, replica: int, replicas: int) -> list[Any]:
    """One replica's microbatches: of each batch, a run of its own."""
    size = micro_batches * replicas
    runs = [batches[start + replica * micro_batches :][:micro_batches] for start in range(0, len(batches), size)]
    return [each for run in runs for each in run]


def engine_of(topology: ProcessTopology, layers: Callable[[], list[Any]] = specs, **options: Any) -> PipelineEngine:
    module = PipelineModule(layers(), topology=topology, loss_fn=loss_fn, partition_method="uniform")
    return PipelineEngine(module, **{"micro_batches": 4, "optimizer": sgd, "deadline": 20, **options})


def train(topology: ProcessTopology, batches: list[Any], micro_batches: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(topology, micro_batches=micro_batches, **options)
    assert engine.grid is not None
    replicas = engine.grid.get_data_parallel_world_size()
    mine = iter(share(batches, micro_batches, engine.grid.get_data_parallel_rank(), replicas))
    losses = [engine.train_batch(mine).item() for _ in range(len(batches) // (micro_batches * replicas))]
    return losses, {name: parameter.detach() for name, parameter in engine.module.named_parameters()}


def assert_alike(found: list[Any], batches: list[Any], count: int) -> None:
    whole = Whole()
    wanted = [loss.item() for loss in by_loop(whole, batches, count)]
    parts = {"tied_modules.end": whole.end, "1": whole.middle}
    for losses, parameters in found:
        assert losses == pytest.approx(wanted, rel=1e-12)
        for name, value in parameters.items():
            layer, _, last = name.rpartition(".")
            torch.testing.assert_close(value, parts[layer].get_parameter(last), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_replicas_train_like_the_unpipelined_model_on_all_data(topology: ProcessTopology, order: str) -> None:
    replicas = topology.get_dim("data")
    batches = data(2 * 3 * replicas, torch.float64)
    found = launch(lambda: train(topology, batches, 3, train_schedule=as_deepspeed(order)), ranks=topology.world_size())
    assert_alike(found, batches, 3 * replicas)


def test_one_stage_with_replicas_runs_deepspeed_s_data_parallel_stream() -> None:
    batches = data(8, torch.float64)
    topology = PipeDataParallelTopology(1, 2)

    def train_all() -> Any:
        layers = lambda: [LayerSpec(Block, 0), LayerSpec(Block, 1)]  # noqa: E731
        engine = engine_of(topology, layers, train_schedule=s.DataParallelSchedule)
        return engine.train_batch(iter(share(batches, 4, rank(), 2))).item()

    wanted = by_loop(nn.Sequential(Block(0), Block(1)), batches, 8)[0].item()
    assert launch(train_all, ranks=2) == pytest.approx([wanted] * 2, rel=1e-12)


def test_replicas_start_from_the_values_of_the_first() -> None:
    """Buffers too, whatever each has built."""

    def build() -> list[Tensor]:
        layers = lambda: [LayerSpec(Block, 10 * rank()), LayerSpec(nn.BatchNorm1d, WIDTH)]  # noqa: E731
        module = PipelineModule(layers(), topology=PipeDataParallelTopology(1, 3))
        module.get_submodule("1").running_mean.fill_(rank())
        PipelineEngine(module, micro_batches=1, deadline=20)
        return [each.detach() for each in (*module.parameters(), *module.buffers())]

    first, *others = launch(build, ranks=3)
    assert torch.equal(first[0], Block(0).weight)
    for each in others:
        assert all(map(torch.equal, each, first))


class Branch(nn.Module):
    """Uses one of two layers, depending on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.idle = Block(1), Block(2), Block(3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.low if x.sum() < 0 else self.high)(x)  # type: ignore[no-any-return]


def test_a_layer_that_only_one_replica_uses() -> None:
    batches = [
        (sign * torch.rand(3, WIDTH, dtype=torch.float64), y) for sign, (_, y) in zip((-1, -1, 1, 1), data(4, torch.float64), strict=True)
    ]

    def train_all() -> dict[str, Tensor | None]:
        module = PipelineModule([LayerSpec(Branch)], topology=PipeDataParallelTopology(1, 2), loss_fn=loss_fn)
        engine = PipelineEngine(module, micro_batches=2, deadline=20)
        engine.train_batch(iter(batches[2 * rank() :][:2]))
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    whole = Branch()
    for x, y in batches:
        (loss_fn(whole(x), y) / 4).backward()
    for found in launch(train_all, ranks=2):
        for name, grad in found.items():
            wanted = whole.get_parameter(name.removeprefix("0.")).grad
            assert (grad is None) == (wanted is None)
            if grad is not None:
                torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)


def test_evaluation_is_over_all_replicas() -> None:
    batches = data(8, torch.float64)

    def evaluate() -> tuple[Any, ...]:
        engine = engine_of(PipeDataParallelTopology(2, 2))
        assert engine.grid is not None
        mine = share(batches, 4, engine.grid.data_parallel_id, 2)
        loss = engine.eval_batch(iter(mine)).item()
        own = engine.eval_batch(iter(mine), bcast_loss=False)
        each = engine.eval_batch(iter(mine), reduce_output=None)
        return loss, None if own is None else own.item(), [loss.item() for loss in each]

    whole = Whole()
    with torch.no_grad():
        losses = [loss_fn(whole(x), y).item() for x, y in batches]
    for place, (loss, own, each) in enumerate(launch(evaluate, ranks=4)):
        assert loss == pytest.approx(sum(losses) / 8, rel=1e-12)
        assert own == (None if place < 2 else pytest.approx(sum(losses) / 8, rel=1e-12))
        assert each == pytest.approx(losses[4 * (place % 2) :][:4], rel=1e-12)


# Refusals -------------------------------------------------------------------------------------------------------------


class Forgetful(s.TrainSchedule):
    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        for step in super().steps():
            yield [each for each in step if each.name != "ReduceGrads"]


def refused(train_one: Callable[[], Any], said: str, error: type[PenstockError] = ScheduleError) -> None:
    with pytest.raises(error) as caught:
        launch(train_one, ranks=4)
    assert said in str(caught.value)


SQUARE = PipeDataParallelTopology(2, 2)


def test_a_schedule_that_does_not_reduce() -> None:
    refused(lambda: engine_of(SQUARE, train_schedule=Forgetful).train_batch(iter(data(4, torch.float64))), "no ReduceGrads")


def test_replicas_that_are_one_object() -> None:
    layers = [Block(0), Block(1)]
    refused(lambda: engine_of(SQUARE, lambda: layers), "two replicas have a parameter that is one object")


def test_replicas_of_other_shapes() -> None:
    refused(lambda: engine_of(SQUARE, lambda: [LayerSpec(Block, 0, WIDTH + rank() % 2)] * 2), "other parameters in replica")


def test_one_iterator_for_two_replicas() -> None:
    shared = [iter(data(16, torch.float64)) for _ in range(2)]
    refused(lambda: engine_of(SQUARE).train_batch(shared[rank() // 2]), "two ranks were given one and the same iterator")


def test_replicas_that_run_other_schedules() -> None:
    def train_one() -> None:
        engine_of(SQUARE, micro_batches=3 + rank() % 2).train_batch(iter(data(4, torch.float64)))

    refused(train_one, "the replicas run different instructions on stage 0")


def test_a_failure_in_one_replica_is_raised_in_all() -> None:
    def train_one() -> str:
        engine = engine_of(SQUARE)
        batches = data(4, torch.float64)
        with pytest.raises(PipelineError) as caught:
            engine.train_batch(iter(batches[: 4 - (rank() == 1)]))
        return str(caught.value)

    assert all("failed on rank 1: ScheduleError: the data ended within the batch" in said for said in launch(train_one, ranks=4))


def test_messages_to_no_stage_in_streams_without_a_proof() -> None:
    class Lost(s.PipeInstruction):
        pass

    class Mine(PipelineEngine):
        _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, "Lost": lambda self: None}  # noqa: RUF012

    class Strange(s.TrainSchedule):
        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            yield [Lost(), s.SendGrad(0), s.ReduceTiedGrads(), s.ReduceGrads()]

    def train_one() -> None:
        module = PipelineModule(specs(), topology=SQUARE, loss_fn=loss_fn)
        Mine(module, micro_batches=4, train_schedule=Strange, deadline=20).train_batch(iter(data(4, torch.float64)))

    refused(train_one, "SendGrad(buffer_id=0) on stage 0 cannot run: the first stage has no previous stage")


# Sizes, shapes and rates ----------------------------------------------------------------------------------------------


def test_the_size_of_a_batch_may_change() -> None:
    """By the number of microbatches, over all replicas."""
    sizes = (24, 12, 36)
    batches = data(sum(sizes) // 3, torch.float64)

    def train_one() -> tuple[list[float], int]:
        engine = engine_of(SQUARE, micro_batch_size=3)
        assert engine.grid is not None
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()) == (24, 4, 3)
        losses, start = [], 0
        for size in sizes:
            engine.set_train_batch_size(size)
            assert (engine.train_batch_size(), engine.micro_batches) == (size, size // 6)
            losses.append(engine.train_batch(iter(share(batches[start:][: size // 3], size // 6, engine.grid.data_parallel_id, 2))).item())
            start += size // 3
        with pytest.raises(ScheduleError, match="a batch of 20 samples is no multiple of 6: 2 replicas with microbatches of 3"):
            engine.set_train_batch_size(20)
        return losses, engine.global_samples

    whole, wanted, start = Whole(), [], 0
    optimizer = sgd(whole.parameters())
    for size in sizes:
        total = torch.zeros((), dtype=torch.float64)
        for x, y in batches[start:][: size // 3]:
            loss = loss_fn(whole(x), y) / (size // 3)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(total.item())
        start += size // 3
    for losses, samples in launch(train_one, ranks=4):
        assert losses == pytest.approx(wanted, rel=1e-12)
        assert samples == sum(sizes)


def test_sizes_that_are_not_known() -> None:
    engine = PipelineEngine(nn.Sequential(Block(0)), micro_batches=2)
    with pytest.raises(ScheduleError, match=r"give PipelineEngine\(micro_batch_size=...\)"):
        engine.set_train_batch_size(4)


def test_activations_may_change_their_shape() -> None:
    batches = [(torch.randn(size, WIDTH, dtype=torch.float64), torch.randn(size, WIDTH, dtype=torch.float64)) for size in (2, 2, 5, 5)]

    def train_one() -> list[float]:
        engine = engine_of(PipeDataParallelTopology(2, 1), micro_batches=2)
        source = iter(batches)
        first = engine.train_batch(source).item()
        engine.reset_activation_shape()
        return [first, engine.train_batch(source).item()]

    wanted = [loss.item() for loss in by_loop(Whole(), batches, 2)]
    assert all(found == pytest.approx(wanted, rel=1e-12) for found in launch(train_one, ranks=2))


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_learning_rates_follow_their_schedule() -> None:
    batches = data(12, torch.float64)

    def train_one() -> tuple[list[float], list[float]]:
        engine = engine_of(PipeDataParallelTopology(2, 1), lr_scheduler=decay)
        source = iter(batches)
        losses, rates = [], []
        for _ in range(3):
            rates += engine.get_lr()
            losses.append(engine.train_batch(source).item())
        return losses, rates

    whole = Whole()
    optimizer = sgd(whole.parameters())
    schedule, wanted = decay(optimizer), []
    for start in range(0, 12, 4):
        losses = [loss_fn(whole(x), y) / 4 for x, y in batches[start : start + 4]]
        torch.autograd.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        wanted.append(sum(loss.item() for loss in losses))
    for losses, rates in launch(train_one, ranks=2):
        assert losses == pytest.approx(wanted, rel=1e-12)
        assert rates == [0.1, 0.05, 0.025]


def test_a_learning_rate_schedule_may_be_a_class_or_made_already() -> None:
    def rates() -> list[float]:
        found = []
        for ready in (False, True):
            block = Block(0)
            optimizer = sgd(block.parameters())
            kind = torch.optim.lr_scheduler.ConstantLR  # a third of the rate for five steps
            engine = PipelineEngine(
                nn.Sequential(block), micro_batches=1, optimizer=optimizer, lr_scheduler=kind(optimizer) if ready else kind
            )
            found += engine.get_lr()
        return found

    assert launch(rates, ranks=1)[0] == pytest.approx([0.1 / 3] * 2)


def test_a_stage_without_parameters_has_no_learning_rate() -> None:
    def train_one() -> list[float]:
        layers = lambda: [LayerSpec(Block, 0), torch.tanh]  # noqa: E731
        engine = engine_of(PipeDataParallelTopology(2, 1), layers, lr_scheduler=decay)
        engine.train_batch(iter(data(4, torch.float64)))
        return engine.get_lr()

    assert launch(train_one, ranks=2) == [[0.05], []]
