"""What `on_step` adds to a step: one rank with 4 stages and 32 microbatches, with a callback, recorded, and without either.

Times are those of the processor for one thread, in turns in one run: waiting for other processes does not count. Run it by itself:
`python benchmarks/metrics.py`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline

STAGES, MICROBATCHES, EACH, ROUNDS = 4, 32, 4, 100
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "on_step": {"on_step": lambda metrics: None}, "record": {"record": True}}


def measure(width: int) -> dict[str, float]:
    """The median seconds of a step, by option."""
    x = torch.randn(MICROBATCHES * EACH, width)
    schedule = ps.schedule("interleaved-zb", 1, MICROBATCHES, chunks=STAGES)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(STAGES)))
    pipes = {name: Pipeline(model, schedule, loss_fn=functional.mse_loss, **options) for name, options in OPTIONS.items()}
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(ROUNDS):
        for name, pipe in pipes.items():
            begun = time.thread_time()
            pipe.step(x, target=x)
            times[name].append(time.thread_time() - begun)
    return {name: statistics.median(taken[5:]) for name, taken in times.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for width in (8, 256, 1024):
        found = measure(width)
        ratios = ", ".join(f"{name} {found[name] / found['plain']:.3f}" for name in ("on_step", "record"))
        print(f"width {width:4}: {found['plain'] * 1e3:6.2f} ms per step; relative to it: {ratios}")
