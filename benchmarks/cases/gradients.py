"""Cases in which gradients, statistics or outputs could be wrong without an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.cases.engines import PenstockEngine, count_stages, held_stages
from benchmarks.cases.outcome import DIFFERS, MISSING, RIGHT, SCALED, Case, Outcome, compare_gradients, compare_values, first_wrong
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, COUNT = 6, 4


def build_blocks(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]


def draw_batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def run_loop(
    modules: Sequence[nn.Module], x: Tensor, y: Any, count: int = COUNT, loss_fn: Callable[..., Tensor] = functional.mse_loss
) -> list[Tensor]:
    """Run the unpipelined model over the microbatches, weighted by their rows, and return their outputs."""
    outputs = []
    for piece, wanted in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        value: Any = piece
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        (loss_fn(value, wanted) * (len(piece) / len(x))).backward()
        outputs.append(value)
    return outputs


def compare_held(name: str, modules: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> Outcome:
    """Compare the gradients of the stages that this rank holds."""
    held = held_stages(name, dist.get_world_size(), dist.get_rank())
    return compare_gradients([modules[index] for index in held], [wanted[index] for index in held])


def train_and_compare(
    engine: Any,
    name: str,
    modules: list[nn.Module],
    batch: tuple[Tensor, Tensor] | None = None,
    loss_fn: Callable[..., Any] = functional.mse_loss,
) -> Outcome:
    """One step against the loop."""
    wanted = copy.deepcopy(modules)
    x, y = batch or draw_batch()
    engine.build(modules, name, COUNT, loss_fn).step(x, y)
    run_loop(wanted, x, y, loss_fn=loss_fn)
    return compare_held(name, modules, wanted)


def freeze_first_stage(name: str, engine: Any) -> Outcome:
    modules = build_blocks(count_stages(name, 2))
    modules[0].requires_grad_(False)
    return train_and_compare(engine, name, modules)


class TwoOutputs(nn.Module):
    """Its second output depends on a parameter alone, and not on the stage's input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor, side: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.linear(x if side is None else x + side), 2 * self.side


def add_outputs(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(output[0] + output[1], target)


def second_output(engine: Any) -> Outcome:
    return train_and_compare(engine, "interleaved-zb", [TwoOutputs() for _ in range(4)], loss_fn=add_outputs)


def replicate_stages(engine: Any) -> Outcome:
    """Two replicas of a pipeline of two ranks; each replica has its own half of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, replicas = mesh.get_group("pp"), mesh.get_group("dp")
    name, rank = "interleaved-zb", dist.get_rank(pipeline)
    modules = build_blocks(4)
    wanted = copy.deepcopy(modules)
    batches = [draw_batch(), draw_batch()]
    for x, y in batches:
        run_loop(wanted, x, y)
    for module in wanted:
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / 2
    held = held_stages(name, 2, rank)
    if isinstance(engine, PenstockEngine):
        runner: Any = engine.build(modules, name, COUNT, mesh=mesh)
    else:
        wrapped = [
            DistributedDataParallel(module, process_group=replicas) if index in held else module for index, module in enumerate(modules)
        ]
        runner = engine.build(wrapped, name, COUNT, group=pipeline)
    runner.step(*batches[dist.get_rank(replicas)])
    mine = torch.cat([p.grad.flatten() for index in held for p in modules[index].parameters() if p.grad is not None])
    other = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(other, mine, group=replicas)
    agreed = compare_values(other[0], other[1], "replicas' gradients")
    return agreed if not agreed.right else compare_gradients([modules[index] for index in held], [wanted[index] for index in held])


def evaluate_after_step(engine: Any) -> Outcome:
    modules = build_blocks(2)
    wanted, (x, y) = copy.deepcopy(modules), draw_batch()
    runner = engine.build(modules, "1f1b", COUNT)
    runner.step(x, y)
    runner.eval(x, y)
    run_loop(wanted, x, y)
    return compare_held("1f1b", modules, wanted)


def step_twice(engine: Any) -> Outcome:
    """Both steps see the same batch, so that the gradient of one step is the unit."""
    modules = build_blocks(2)
    wanted, (x, y) = copy.deepcopy(modules), draw_batch()
    runner = engine.build(modules, "1f1b", COUNT)
    runner.step(x, y)
    runner.step(x, y)
    run_loop(wanted, x, y)
    outcome = compare_held("1f1b", modules, wanted)
    if outcome.symptom == SCALED and outcome.text.startswith("2 times"):
        return Outcome(RIGHT, "twice the gradients of one step")
    return Outcome(SCALED, f"{outcome.text} of one step, not 2") if outcome.symptom == SCALED else outcome


def count_batches(engine: Any) -> Outcome:
    """The first step of a model with batch norm."""
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
    wanted, (x, y) = copy.deepcopy(modules), draw_batch()
    engine.build(modules, "1f1b", COUNT).step(x, y)
    run_loop(wanted, x, y)
    (mine, other) = (stages[dist.get_rank()][1] for stages in (modules, wanted))  # type: ignore[index]
    counted = int(mine.num_batches_tracked)
    if counted != COUNT:
        return Outcome(DIFFERS, f"batch norm counts {counted} batches, not {COUNT}")
    return first_wrong(
        Outcome(RIGHT, f"batch norm counts {COUNT} batches, statistics equal"),
        compare_values(mine.running_mean, other.running_mean, "running mean"),
        compare_values(mine.running_var, other.running_var, "running variance"),
    )


def permute_microbatches(engine: Any) -> Outcome:
    """An order that runs microbatch 2 first."""
    rows = ["0F2 0F0 0F1 0B1 0B2 0B0"]
    modules, (x, y) = build_blocks(1), draw_batch(9)
    wanted = copy.deepcopy(modules)
    result = engine.build(modules, "1f1b", 3, order=rows).step(x, y)
    pieces = run_loop(wanted, x, y, 3)
    gradients = compare_held("1f1b", modules, wanted)
    output = compare_values(result.output.detach(), torch.cat(pieces).detach(), "outputs")
    values = [functional.mse_loss(piece, target) for piece, target in zip(pieces, y.tensor_split(3), strict=True)]
    losses = compare_values(torch.stack([loss.detach() for loss in result.losses]), torch.stack(values).detach(), "losses")
    if compare_values(result.output.detach(), torch.cat([pieces[2], pieces[0], pieces[1]]).detach(), "").right:
        return Outcome(DIFFERS, "outputs in order of execution: microbatches 2, 0, 1")
    return first_wrong(Outcome(RIGHT, "outputs and losses in order of microbatches"), output, losses, gradients)


CASES = (
    Case("1a", "first stage frozen, interleaved zero bubble", MISSING, partial(freeze_first_stage, "interleaved-zb")),
    Case("1b", "first stage frozen, ZB-V", MISSING, partial(freeze_first_stage, "zbv")),
    Case("1c", "parameter of a second output, zero bubble", MISSING, second_output),
    Case("2", "DDP around stages, zero bubble", DIFFERS, replicate_stages, ranks=4),
    Case("3", "eval after a step", SCALED, evaluate_after_step),
    Case("4", "two steps before the optimizer", SCALED, step_twice),
    Case("5", "first step with batch norm", DIFFERS, count_batches),
    Case("6", "outputs and losses of an order out of sequence", DIFFERS, permute_microbatches, ranks=1),
)
