"""Ranks as processes: replicas, slices and tied layers over gloo, against the unpipelined model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from compat.deepspeed.training import WIDTH, Block, by_loop, data, loss_fn, sgd
from penstock.compat.deepspeed import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineEngine,
    PipelineModule,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
    as_deepspeed,
)
from penstock.errors import PipelineError
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.end, self.middle = Block(0), Block(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.sin(self.middle(self.end(x))))  # type: ignore[no-any-return]


def specs(seed: int = 0) -> list[Any]:
    return [TiedLayerSpec("end", Block, seed), LayerSpec(Block, seed + 1), torch.sin, TiedLayerSpec("end", Block, seed)]


def train(shape: tuple[int, int], batches: list[Any], options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Two batches of two microbatches on this rank's replica, from values that only the first replica has right."""
    topology = PipeDataParallelTopology(*shape)
    replica = topology.get_coord(dist.get_rank()).data
    module = PipelineModule(specs(100 * replica), topology=topology, loss_fn=loss_fn, partition_method="uniform")
    engine = PipelineEngine(module, micro_batches=2, optimizer=sgd, deadline=30, **options)
    size = 2 * shape[1]
    mine = iter([each for start in (0, size) for each in batches[start + 2 * replica :][:2]])
    losses = [engine.train_batch(mine).item() for _ in range(2)]
    losses.append(engine.eval_batch(iter(batches)).item())
    return losses, {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("shape", "strict"), [((2, 2), True), ((2, 2), False), ((1, 4), True), ((4, 1), True)])
def test_replicas_train_like_the_unpipelined_model(workers: Workers, shape: tuple[int, int], strict: bool) -> None:
    torch.manual_seed(0)
    batches, whole = data(4 * shape[1], torch.float64), Whole()
    options = {"strict": strict, "train_schedule": as_deepspeed("eager-1f1b")}
    found = workers.run(train, (shape, batches, options), ranks=shape[0] * shape[1])
    wanted = [loss.item() for loss in by_loop(whole, batches, 2 * shape[1])]
    with torch.no_grad():
        wanted.append(sum(loss_fn(whole(x), y).item() for x, y in batches[:2]) / 2)
    parts = {"tied_modules.end": whole.end, "1": whole.middle}
    for losses, parameters in found:
        assert losses == pytest.approx(wanted, rel=1e-12)
        for name, value in parameters.items():
            layer, _, last = name.rpartition(".")
            torch.testing.assert_close(value, parts[layer].get_parameter(last), rtol=1e-12, atol=1e-12)


DEADLINE = 60.0


def fail(batches: list[Any], failing: int) -> tuple[str, float, float]:
    """One rank runs out of data in the first batch; the next batch works.

    The error is kept meanwhile, as an error handler would: its references must not keep other ranks waiting.
    """
    module = PipelineModule(specs(), topology=PipeDataParallelTopology(2, 2), loss_fn=loss_fn)
    engine = PipelineEngine(module, micro_batches=2, optimizer=sgd, deadline=DEADLINE)
    began = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter(batches[: 2 - (dist.get_rank() == failing)]))
    waited = time.monotonic() - began
    return str(caught.value), waited, engine.train_batch(iter(batches)).item()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_in_one_replica_is_raised_in_all_at_once_and_got_over(workers: Workers, failing: int) -> None:
    torch.manual_seed(0)
    batches = data(2, torch.float64)
    wanted = by_loop(Whole(), batches, 2)[0].item()
    for message, waited, loss in workers.run(fail, (batches, failing), ranks=4):
        assert f"failed on rank {failing}: ScheduleError: the data ended within the batch" in message
        assert waited < DEADLINE / 6
        assert loss == pytest.approx(wanted, rel=1e-12)


# Slices ---------------------------------------------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """Hand the input to all slices; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Sum the results of the slices; the gradient is the same for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Dense(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.float64, generator=values))
        self.down = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.float64, generator=values))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Sliced(Dense):
    """A slice of it: some rows of the first map and the same columns of the second. It ends in a collective."""

    def __init__(self, seed: int, grid: PipelineParallelGrid) -> None:
        super().__init__(seed)
        self.grid = grid
        mine = slice(grid.get_slice_parallel_rank() * 2, grid.get_slice_parallel_rank() * 2 + 2)
        self.up, self.down = nn.Parameter(self.up[mine].detach().clone()), nn.Parameter(self.down[:, mine].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        group = self.grid.get_slice_parallel_group()
        return Leave.apply(super().forward(Enter.apply(x, group)), group)  # type: ignore[no-any-return]


def train_slices(shape: tuple[int, int, int], batches: list[Any]) -> tuple[list[float], dict[str, Tensor], int]:
    topology = PipeModelDataParallelTopology(*shape)
    grid = PipelineParallelGrid(topology)
    module = PipelineModule([LayerSpec(Sliced, 0, grid), torch.sin, LayerSpec(Sliced, 1, grid)], topology=topology, loss_fn=loss_fn)
    engine = PipelineEngine(module, micro_batches=2, optimizer=sgd, deadline=30)
    mine = iter([each for start in range(0, len(batches), 2 * shape[2]) for each in batches[start + 2 * grid.data_parallel_id :][:2]])
    losses = [engine.train_batch(mine).item() for _ in range(2)]
    return losses, {name: parameter.detach() for name, parameter in module.named_parameters()}, grid.get_slice_parallel_rank()


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)])
def test_slices_of_layers_and_the_grid_s_process_groups(workers: Workers, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    batches = data(4 * shape[2], torch.float64)

    whole = nn.Sequential(Dense(0), Sine(), Dense(1))
    wanted = [loss.item() for loss in by_loop(whole, batches, 2 * shape[2])]
    for losses, parameters, place in workers.run(train_slices, (shape, batches), ranks=4):
        assert losses == pytest.approx(wanted, rel=1e-10)
        mine = slice(2 * place, 2 * place + 2)
        for name, value in parameters.items():
            full = whole.get_parameter(name)
            part = full[mine] if name.endswith("up") else full[:, mine]
            torch.testing.assert_close(value, part, rtol=1e-10, atol=1e-10)


def sum_ranks() -> dict[str, Any]:
    """The ranks of each process group, by what they sum."""
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data"], [2, 2]))
    found = {}
    for name in ("data", "pipe", "slice", "model"):
        group = getattr(grid, f"get_{name}_parallel_group")()
        total = torch.tensor([float(2 ** dist.get_rank())])
        dist.all_reduce(total, group=group)
        found[name] = (int(total.item()), dist.get_world_size(group))
    return found


def test_a_grid_s_process_groups(workers: Workers) -> None:
    for place, found in enumerate(workers.run(sum_ranks, (), ranks=4)):
        pipe, data_id = divmod(place, 2)
        assert found == {
            "data": (0b11 << 2 * pipe, 2),
            "pipe": (0b101 << data_id, 2),
            "slice": (1 << place, 1),
            "model": (0b101 << data_id, 2),
        }


# Checkpoints ----------------------------------------------------------------------------------------------------------


def save_and_go_on(shape: tuple[int, int, int], folder: str, batches: list[Any], resume: bool) -> list[float]:
    """Two batches with a checkpoint between them, or the second one alone, from other values and the checkpoint."""
    topology = PipeModelDataParallelTopology(*shape)
    grid = PipelineParallelGrid(topology)
    layers = [LayerSpec(Sliced, 50 * resume, grid), torch.sin, LayerSpec(Sliced, 50 * resume + 1, grid)]
    module = PipelineModule(layers, topology=topology, loss_fn=loss_fn)
    engine = PipelineEngine(module, micro_batches=2, optimizer=sgd, deadline=30)
    mine = iter(batches[2 * grid.data_parallel_id :][:2])
    if resume:
        assert engine.load_checkpoint(folder)[1] == {"epoch": 1}
        return [engine.train_batch(mine).item()]
    first = engine.train_batch(iter(batches[2 * grid.data_parallel_id :][:2])).item()
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    return [first, engine.train_batch(mine).item()]


@pytest.mark.parametrize(("before", "after"), [((2, 2, 1), (1, 2, 2)), ((1, 2, 2), (2, 2, 1))])
def test_checkpoints_of_slices_and_replicas(workers: Workers, tmp_path: Path, before: Any, after: Any) -> None:
    """Saved with some stages and replicas, loaded with others: all replicas of both get the same two microbatches."""
    torch.manual_seed(0)
    batches = data(2, torch.float64) * 2
    first = workers.run(save_and_go_on, (before, str(tmp_path), batches, False), ranks=4)
    then = workers.run(save_and_go_on, (after, str(tmp_path), batches, True), ranks=4)
    wanted = [loss.item() for loss in by_loop(nn.Sequential(Dense(0), Sine(), Dense(1)), batches, 2)]
    assert all(found == pytest.approx(wanted, rel=1e-10) for found in first)
    assert all(found == pytest.approx(wanted[1:], rel=1e-10) for found in then)
