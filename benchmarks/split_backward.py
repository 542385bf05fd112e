"""The split backward against the whole one, and against torch's own split, in the same run.

Times are those of the processor for one thread: waiting for other processes does not count.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from benchmarks.measure import in_turn, steady, summed
from benchmarks.rows import Case, Row
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral

FULL = "F + B"
Parts = Sequence[Sequence[float]]
"""The seconds of each part of a step, one a round."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    _keep_memory()
    torch.manual_seed(0)
    blocks, rounds = ((4, 1), 2) if short else ((48, 4), 10)
    with steady():
        yield [
            Case("small blocks", lambda: _small(blocks[0], 3 * rounds)),
            Case("wider blocks", lambda: [_middle(blocks[1], rounds)]),
            Case("wide linear maps", lambda: [_wide(256 if short else 1024, rounds)]),
        ]


@dataclass
class Stage:
    """A stage, its input and the gradient of its output; each method gives the seconds of each part of one step."""

    model: nn.Module
    x: Tensor

    def __post_init__(self) -> None:
        self.x.requires_grad_()
        self.grad = torch.randn_like(self.x)
        self.deferrable = Deferrable(self.model)

    def whole(self) -> Sequence[float]:
        """F, B."""
        start = time.thread_time()
        out = self.model(self.x)
        forward = time.thread_time()
        torch.autograd.backward([out], [self.grad])
        return forward - start, time.thread_time() - forward

    def split(self) -> Sequence[float]:
        """F, I, W."""
        start = time.thread_time()
        deferral = Deferral()
        with self.deferrable.forward(deferral):
            out = self.model(self.x)
        forward = time.thread_time()
        self.deferrable.backward_input(deferral, [out], [self.grad])
        middle = time.thread_time()
        deferral.run()
        return forward - start, middle - forward, time.thread_time() - middle

    def split_by_torch(self) -> Sequence[float]:
        """F, I, W."""
        start = time.thread_time()
        out = self.model(self.x)
        forward = time.thread_time()
        _, groups = stage_backward_input([out], [self.grad], [self.x], self.model.parameters())
        middle = time.thread_time()
        stage_backward_weight(self.model.parameters(), groups)
        return forward - start, middle - forward, time.thread_time() - middle


def _blocks(wide: int, count: int) -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(wide, 4, 4 * wide, dropout=0.0) for _ in range(count)))


def _small(count: int, rounds: int) -> list[Row]:
    stage = Stage(_blocks(64, count), torch.randn(16, 4, 64))
    whole, split, peer = in_turn(rounds, [stage.whole, stage.split, stage.split_by_torch])
    case, (_, back) = f"{count} blocks of 64", whole
    return [
        _whole_row(case, whole, split, 1.10),
        Row(f"F + I + W by torch, {case}", summed(*peer), summed(*whole), FULL, note="torch's own split"),
        Row(f"I + W, {case}", summed(*split[1:]), summed(*peer[1:])),
        Row(f"I + W, {case}", summed(*split[1:]), back, "B"),
    ]


def _whole_row(case: str, whole: Parts, split: Parts, limit: float) -> Row:
    (_, back), (_, i, w) = ([statistics.median(part) for part in parts] for parts in (whole, split))
    note = f"(I + W) / B {(i + w) / back:.2f}, I / B {i / back:.2f}"
    return Row(f"F + I + W, {case}", summed(*split), summed(*whole), FULL, limit=limit, note=note)


def _middle(count: int, rounds: int) -> Row:
    stage = Stage(_blocks(512, count), torch.randn(64, 8, 512))
    whole, split = in_turn(rounds, [stage.whole, stage.split])
    return _whole_row(f"{count} blocks of 512", whole, split, 1.03)


def _wide(width: int, rounds: int) -> Row:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    stage = Stage(nn.Sequential(*layers), torch.randn(256, width))
    (_, back), (_, i, _) = in_turn(rounds, [stage.whole, stage.split])
    return Row(f"I, 4 linear maps of {width}", i, back, "B", limit=0.6)


def _keep_memory() -> None:
    """Have the C library keep what is freed, as a device's allocator does: held tensors are not to be paid for by page faults."""
    trim_threshold, mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**31 - 1)
