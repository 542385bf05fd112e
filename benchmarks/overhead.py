"""What the executor adds to each action: one rank with 4 stages of 8x8 linear maps and 32 microbatches, against a bare loop and torch.

Times are those of the processor for one thread: waiting for other processes does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.measure import alone, in_turn, summed
from benchmarks.rows import Case, Row
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline

STAGES, MICROBATCHES, WIDTH, EACH = 4, 32, 8, 4


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    pairs = {"interleaved-1f1b": ScheduleInterleaved1F1B, "interleaved-zb": ScheduleInterleavedZeroBubble}
    with alone():
        x, y = torch.randn(2, MICROBATCHES * EACH, WIDTH).unbind()
        rounds = 2 if short else 60
        yield [Case(name, lambda name=name, peer=peer: _rows(name, peer, x, y, rounds)) for name, peer in pairs.items()]


def _rows(name: str, peer: Any, x: Tensor, y: Tensor, rounds: int) -> list[Row]:
    schedule = ps.schedule(name, 1, MICROBATCHES, chunks=STAGES)
    split = any(action.kind is ps.Kind.I for action in schedule[0])
    bare, ours, theirs = _stages(), _stages(), _stages()
    order = _order(schedule)
    pipe = Pipeline(ours, schedule=schedule, loss_fn=functional.mse_loss)
    stages = [PipelineStage(module, k, STAGES, torch.device("cpu")) for k, module in enumerate(theirs)]
    for stage in stages:  # torch 2.11 connects a stage with its neighbours first, which gloo refuses if all are on one rank
        stage._get_init_p2p_neighbors_ops = list
    runner = peer(stages, MICROBATCHES, loss_fn=functional.mse_loss)
    (loop,), (mine,), (torchs,) = in_turn(
        rounds,
        [
            _timed(lambda: _bare(bare, order, x, y), bare),
            _timed(lambda: pipe.step(x, target=y), ours),
            _timed(lambda: runner.step(x, target=y), theirs),
        ],
    )
    each = f"{statistics.median(mine) / len(schedule[0]) * 1e6:.0f} us per action"
    full = f"the loop's {len(order)} actions have full backwards, ours are {len(schedule[0])}" if split else ""
    halfway = [part / 2 for part in summed(loop, torchs)]
    return [
        Row(f"{name}: a step", mine, loop, "a bare loop", limit=1.3, note="; ".join(filter(None, (each, full)))),
        Row(f"{name}: a step", mine, halfway, "halfway to torch", limit=1.0, note="at most half of what torch adds to the bare loop"),
        Row(f"{name}: a step", mine, torchs, note=each),
    ]


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)]


def _order(schedule: ps.Schedule) -> list[tuple[bool, int, int]]:
    """Whether it is a forward, of which stage and microbatch; I stands for the full backward."""
    kinds = (ps.Kind.F, ps.Kind.B, ps.Kind.I)
    return [(action.kind is ps.Kind.F, action.stage, action.microbatch or 0) for action in schedule[0] if action.kind in kinds]


def _timed(step: Callable[[], Any], modules: Sequence[nn.Module]) -> Callable[[], Sequence[float]]:
    def work() -> Sequence[float]:
        start = time.thread_time()
        step()
        seconds = time.thread_time() - start
        for module in modules:
            module.zero_grad()
        return (seconds,)

    return work


def _bare(modules: Sequence[nn.Module], order: Sequence[tuple[bool, int, int]], x: Tensor, y: Tensor) -> None:
    """The same forwards and full backwards in the same order, and nothing else."""
    inputs, targets = x.split(EACH), y.split(EACH)
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    grads: dict[tuple[int, int], Tensor | None] = {}
    for forward, stage, microbatch in order:
        key = stage, microbatch
        if forward:
            value = held[stage - 1, microbatch][1].detach().requires_grad_() if stage else inputs[microbatch]
            made = modules[stage](value)
            if stage == STAGES - 1:
                made = functional.mse_loss(made, targets[microbatch]) / MICROBATCHES
            held[key] = value, made
        else:
            value, made = held.pop(key)
            torch.autograd.backward(made, grads.pop(key, None))
            if stage:
                grads[stage - 1, microbatch] = value.grad
