"""The split backward against the whole one, and against torch's own split, in the same run.

Times are those of the processor for one thread: waiting for other processes does not count.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from benchmarks.measure import Row, in_turn, steady
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.runtime.deferred import Deferral
from penstock.runtime.recording import Deferrable


def run() -> list[Row]:
    _keep_memory()
    torch.manual_seed(0)
    with steady():
        return [*_small(rounds=30), _middle(rounds=10), _wide(rounds=10)]


@dataclass
class Case:
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


def _small(rounds: int) -> list[Row]:
    case = Case(_blocks(64, 48), torch.randn(16, 4, 64))
    (f, b), (sf, si, sw), (tf, ti, tw) = in_turn(rounds, [case.whole, case.split, case.split_by_torch])
    note = f"(I + W) / B {(si + sw) / b:.2f}, I / B {si / b:.2f}; torch's (F + I + W) / (F + B) {(tf + ti + tw) / (f + b):.2f}"
    return [
        Row("F + I + W against F + B, 48 blocks of 64", sf + si + sw, f + b, wanted_share=1.10, note=note),
        Row("I + W against torch's split, 48 blocks of 64", si + sw, ti + tw, note=f"torch's (I + W) / B {(ti + tw) / b:.2f}"),
    ]


def _middle(rounds: int) -> Row:
    case = Case(_blocks(512, 4), torch.randn(64, 8, 512))
    (f, b), (sf, si, sw) = in_turn(rounds, [case.whole, case.split])
    note = f"(I + W) / B {(si + sw) / b:.2f}, I / B {si / b:.2f}"
    return Row("F + I + W against F + B, 4 blocks of 512", sf + si + sw, f + b, wanted_share=1.03, note=note)


def _wide(rounds: int) -> Row:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    case = Case(nn.Sequential(*layers), torch.randn(256, 1024))
    (f, b), (sf, si, sw) = in_turn(rounds, [case.whole, case.split])
    note = f"(I + W) / B {(si + sw) / b:.2f}, (F + I + W) / (F + B) {(sf + si + sw) / (f + b):.2f}"
    return Row("I against B, 4 linear maps of 1024", si, b, wanted_share=0.6, note=note)


def _keep_memory() -> None:
    """Have the C library keep what is freed, as a device's allocator does: held tensors are not to be paid for by page faults."""
    trim_threshold, mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**31 - 1)
