"""Cases in which a step could fail: evaluation, exceptions, batches and targets of all sorts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.cases.engines import count_stages
from benchmarks.cases.gradients import COUNT, WIDTH, build_blocks, compare_held, draw_batch, run_loop, train_and_compare
from benchmarks.cases.outcome import HANGS, RAISES, RIGHT, Case, Outcome, compare_values
from torch import Tensor, nn
from torch.nn import functional


def evaluate_adjacent(engine: Any) -> Outcome:
    """In a V, the last rank holds two stages that follow each other."""
    modules, (x, y) = build_blocks(count_stages("zbv", 2)), draw_batch()
    losses = engine.build(modules, "zbv", COUNT).eval(x, y).losses
    if dist.get_rank() != 0:  # the first and the last stage are on rank 0
        return Outcome(RIGHT, "losses equal")
    value = x
    for module in modules:
        value = module(value)
    wanted = [functional.mse_loss(out, target) for out, target in zip(value.tensor_split(COUNT), y.tensor_split(COUNT), strict=True)]
    return compare_values(torch.stack([loss.detach() for loss in losses]), torch.stack(wanted).detach(), "losses")


class FailsOnce(nn.Module):
    """Raises at one of its calls."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.linear, self.calls, self.call = nn.Linear(WIDTH, WIDTH), 0, call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise ValueError("this layer fails once")
        return self.linear(x)  # type: ignore[no-any-return]


def step_after_failure(engine: Any) -> Outcome:
    """A step that works, one that fails half-way, and one that must work again; on one rank with one stage."""
    modules: list[nn.Module] = [FailsOnce(0)]
    wanted, (x, y) = copy.deepcopy(modules), draw_batch()
    runner = engine.build(modules, "1f1b", COUNT)
    runner.step(x, y)
    modules[0].zero_grad()
    modules[0].call = modules[0].calls + 3  # type: ignore[assignment, operator]
    try:
        runner.step(x, y)
    except Exception:
        modules[0].zero_grad()
    else:
        return Outcome(RAISES, "the failure was swallowed")
    runner.step(x, y)
    run_loop(wanted, x, y)
    return compare_held("1f1b", modules, wanted)


def failure_on_another_rank(engine: Any) -> Outcome:
    """The last rank fails in a step and goes on living; the first must be told."""
    modules: list[nn.Module] = [FailsOnce(0), FailsOnce(0)]
    x, y = draw_batch()
    runner = engine.build(modules, "1f1b", COUNT)
    runner.step(x, y)
    if dist.get_rank() == 1:
        modules[1].call = modules[1].calls + 2  # type: ignore[assignment, operator]
    try:
        runner.step(x, y)
    except Exception as error:
        told = "this layer fails once" in str(error) or "this layer fails once" in str(error.__cause__)
        if told or dist.get_rank() == 1:
            return Outcome(RIGHT, "both ranks raise the failure")
        raise
    return Outcome(RAISES, "the failure was swallowed")


def uneven_batch(engine: Any) -> Outcome:
    return train_and_compare(engine, "1f1b", build_blocks(2), draw_batch(10))


def change_batch(engine: Any) -> Outcome:
    modules = build_blocks(2)
    wanted, batches = copy.deepcopy(modules), [draw_batch(8), draw_batch(12)]
    runner = engine.build(modules, "1f1b", COUNT)
    for x, y in batches:
        for module in (*modules, *wanted):
            module.zero_grad()
        runner.step(x, y)
        run_loop(wanted, x, y)
    return compare_held("1f1b", modules, wanted)


def target_tree(build: Callable[[Tensor], Any], engine: Any) -> Outcome:
    """Targets of another form than a tensor, with a loss function that reads them."""
    modules = build_blocks(2)
    wanted, (x, y) = copy.deepcopy(modules), draw_batch()
    target = build(y)

    def loss_fn(output: Tensor, *given: Any) -> Tensor:
        if target is None:
            return output.square().mean()
        values = given[0].values() if isinstance(given[0], dict) else given[0]
        return functional.mse_loss(output, sum(values) / 2)

    engine.build(modules, "1f1b", COUNT, loss_fn).step(x, target)
    run_loop(wanted, x, torch.zeros_like(y) if target is None else y)
    return compare_held("1f1b", modules, wanted)


class Reshapes(nn.Module):
    """Its output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(-1, WIDTH)).view(-1, 2, WIDTH // 2)  # type: ignore[no-any-return]


def view_output(engine: Any) -> Outcome:
    x, y = draw_batch()
    return train_and_compare(engine, "interleaved-zb", [Reshapes() for _ in range(4)], (x, y.view(-1, 2, WIDTH // 2)))


CASES = (
    Case("7", "eval of ZB-V: adjacent stages on a rank", RAISES, evaluate_adjacent),
    Case("8a", "a step after one that failed half-way", RAISES, step_after_failure, ranks=1),
    Case("8b", "a failure on another rank", HANGS, failure_on_another_rank, admitted={"drop-in": HANGS}),
    Case("9a", "10 rows in 4 microbatches", RAISES, uneven_batch),
    Case("9b", "batch size that changes between steps", RAISES, change_batch),
    Case("10a", "target that is a tuple", RAISES, partial(target_tree, lambda y: (y, y))),
    Case("10b", "target that is a dict", RAISES, partial(target_tree, lambda y: {"a": y, "b": y})),
    Case("10c", "no target", RAISES, partial(target_tree, lambda y: None)),
    Case("13", "stage output that is a view, zero bubble", RAISES, view_output),
)
