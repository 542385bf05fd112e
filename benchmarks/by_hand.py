"""GPipe and 1F1B on two ranks as one would write them by hand: the modules, their backwards and gloo's own calls, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps

ORDERS = ("gpipe", "1f1b")


def step(name: str, module: nn.Module, count: int) -> Callable[[Tensor, Tensor], None]:
    """A step of this rank, one stage a rank, without checks, deadlines, shapes that change or anything else that can go wrong."""
    rank = dist.get_rank()
    order = [(action.kind is ps.Kind.F, action.microbatch or 0) for action in ps.schedule(name, 2, count)[rank]]
    return _first(module, order, count) if rank == 0 else _last(module, order, count)


def _first(module: nn.Module, order: list[tuple[bool, int]], count: int) -> Callable[[Tensor, Tensor], None]:
    group = dist.group.WORLD

    def run(x: Tensor, y: Tensor) -> None:
        parts, made, sent = x.chunk(count), {}, []
        grads = [torch.empty_like(part) for part in parts]
        coming = [group.recv([grad], 1, 1) for grad in grads]
        for forward, microbatch in order:
            if forward:
                made[microbatch] = module(parts[microbatch])
                value = made[microbatch].detach()
                sent.append((group.send([value], 1, 0), value))
            else:
                coming[microbatch].wait()
                made.pop(microbatch).backward(grads[microbatch])
        _finish(module, sent)

    return run


def _last(module: nn.Module, order: list[tuple[bool, int]], count: int) -> Callable[[Tensor, Tensor], None]:
    group = dist.group.WORLD

    def run(x: Tensor, y: Tensor) -> None:
        targets, made, sent = y.chunk(count), {}, []
        inputs = [torch.empty_like(part) for part in x.chunk(count)]
        coming = [group.recv([value], 0, 0) for value in inputs]
        for forward, microbatch in order:
            value = inputs[microbatch]
            if forward:
                coming[microbatch].wait()
                made[microbatch] = functional.mse_loss(module(value.requires_grad_()), targets[microbatch]) / count
            else:
                made.pop(microbatch).backward()
                sent.append((group.send([value.grad], 0, 1), value))
        _finish(module, sent)

    return run


def _finish(module: nn.Module, sent: list[tuple[dist.Work, Tensor]]) -> None:
    for work, _ in sent:
        work.wait()
    module.zero_grad()
