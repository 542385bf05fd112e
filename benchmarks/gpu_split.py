"""The split backward of bf16 transformer blocks against the whole one, and torch's own split."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu_models import blocks
from benchmarks.gpu_time import wait
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.runtime.split_backward.deferrable import Deferrable, run_backward
from penstock.runtime.split_backward.deferral import Deferral

CASES = ((4096, 1, 4096), (4096, 4, 4096), (1024, 12, 1024), (512, 24, 1024))
"""Width, blocks, tokens."""
WANTED = 1.05


def split(device: Any, small: bool) -> dict[str, Any]:
    rows = []
    for wide, count, tokens in [(16, 1, 8), (16, 2, 8)] if small else CASES:
        model = blocks(count, wide, device)
        x = torch.randn(max(tokens // 512, 1), min(tokens, 512), wide, device=device, dtype=torch.bfloat16, requires_grad=True)
        case = _Case(model, x)
        whole, (ours_i, ours_w), (peer_i, peer_w), forwards = case.measure(2 if small else 15)
        ratio = (ours_i + ours_w) / whole
        rows.append(
            {
                "hidden": wide,
                "blocks": count,
                "tokens": tokens,
                "B ms": whole * 1e3,
                "I ms": ours_i * 1e3,
                "W ms": ours_w * 1e3,
                "(I+W)/B": ratio,
                "torch's": (peer_i + peer_w) / whole,
                "recorded F over plain F": forwards,
                "wanted": f"<= {WANTED}",
                "good": "yes" if ratio <= WANTED else "NO",
            }
        )
        del model, x, case
    return {
        "what": "bf16 blocks with attention by torch's own kernel; medians, each part from an idle device until it is idle.",
        "rows": rows,
    }


class _Case:
    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x, self.grad = model, x, torch.randn_like(x)
        self.deferrable = Deferrable(model)

    def measure(self, rounds: int) -> tuple[float, tuple[float, float], tuple[float, float], float]:
        for work in (self.whole, self.ours, self.torchs):
            for _ in range(2):
                work()
        found = [(self.whole(), self.ours(), self.torchs()) for _ in range(rounds)]
        wholes, ours, peers = zip(*found, strict=True)

        def middle(times: Any, at: int) -> float:
            return statistics.median(each[at] for each in times)

        pairs = [(middle(times, 1), middle(times, 2)) for times in (ours, peers)]
        return middle(wholes, 1), pairs[0], pairs[1], middle(ours, 0) / middle(wholes, 0)

    def whole(self) -> list[float]:
        made: list[Tensor] = []
        return _times(lambda: made.append(self.model(self.x)), lambda: run_backward(made, [self.grad]))

    def ours(self) -> list[float]:
        made: list[Tensor] = []
        deferral = Deferral()

        def forward() -> None:
            with self.deferrable.forward(deferral):
                made.append(self.model(self.x))

        return _times(forward, lambda: self.deferrable.backward_input(deferral, made, [self.grad]), deferral.run)

    def torchs(self) -> list[float]:
        made: list[Tensor] = []
        groups: list[Any] = []

        def backward() -> None:
            groups.extend(stage_backward_input(made, [self.grad], [self.x], self.model.parameters())[1])

        forward, weights = lambda: made.append(self.model(self.x)), lambda: stage_backward_weight(self.model.parameters(), groups)
        return _times(forward, backward, weights)


def _times(*works: Callable[[], Any]) -> list[float]:
    found = []
    for work in works:
        wait()
        start = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - start)
    return found
