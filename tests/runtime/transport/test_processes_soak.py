"""Many steps: nothing grows with them."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError
from penstock.runtime import Pipeline, rank
from penstock.runtime.launch.workers import Workers
from runtime.models import blocks

pytestmark = pytest.mark.slow

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    memory: int
    files: int
    threads: int
    tensors: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tensors = sum(isinstance(each, Tensor) for each in gc.get_objects())
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count(), tensors)

    @classmethod
    def after(cls, before: Held) -> Held:
        """The same, once what is being closed in the background is closed: asks again for some seconds if more is held than before."""
        until = time.monotonic() + 10.0
        while True:
            held = cls.now()
            if (held.files <= before.files and held.tensors <= before.tensors) or time.monotonic() > until:
                return held
            time.sleep(0.1)


def assert_no_growth(found: list[list[Held]], limit: int, files: int = 0) -> None:
    """Between two moments on each rank, of which the first comes after caches were filled; some `files` may be open that were not yet."""
    for before, after in found:
        assert after.files <= before.files + files, (before, after)
        assert after.threads <= before.threads
        assert after.tensors <= before.tensors + 8
        assert after.memory <= before.memory + limit, (before, after)


def test_120_steps(workers: Workers) -> None:
    """Of the same shape, as most training is."""
    schedule = ps.schedule("zbv", ranks=4, microbatches=6)
    model, x = blocks(schedule.stages, 32), torch.randn(48, 32)

    def train() -> list[Held]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        found = []
        for step in range(1, 121):
            pipe.step(x, target=x)
            for parameter in pipe.parameters():
                parameter.grad = None
            if step in (60, 120):
                found.append(Held.now())
        return found

    assert_no_growth(workers.run(train), 8 * MEBIBYTE)


def test_150_steps_of_all_kinds(workers: Workers) -> None:
    """Sizes and counts that change, evaluation, inference, recording, clipping."""
    model = blocks(4, 32)

    def train() -> list[Held]:
        pipe = Pipeline(model, schedule="interleaved-1f1b", microbatches=4, loss_fn=functional.mse_loss)
        found = []
        for step in range(1, 151):
            x = torch.randn(8 + step % 40, 32)
            pipe.record = step % 7 == 0
            result = pipe.step(x, target=x, microbatches=1 + step % 6, outputs=step % 3 == 0)
            assert result.loss is not None
            if step % 5 == 0:
                pipe.eval_step(x, target=x, microbatches=1 + step % 4)
                pipe.infer(x[:8])
            pipe.clip_grad_norm_(1.0)
            for parameter in pipe.parameters():
                parameter.grad = None
            if step in (60, 150):
                found.append(Held.now())
        return found

    assert_no_growth(workers.run(train, ranks=2), 4 * MEBIBYTE)


def test_many_failures(workers: Workers) -> None:
    """Every one ends a generation of connections; the next has what the one before had."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.fails = nn.Linear(32, 32), False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("now and then")
            return self.map(x)

    model, x = nn.Sequential(*(Odd() for _ in range(3))), torch.randn(12, 32)

    def train() -> list[Held]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, deadline=60.0)
        found = []
        for turn in range(1, 21):
            model[turn % 3].fails = turn % 3 == rank()
            with pytest.raises(PipelineError, match="now and then"):
                pipe.step(x, target=x)
            model[turn % 3].fails = False
            pipe.step(x, target=x)
            if turn == 9:
                found.append(Held.now())
        return [*found, Held.after(found[0])]

    # Connections open when they are first needed, which a failure may come before. One file per failure would be 11.
    assert_no_growth(workers.run(train, ranks=3), 4 * MEBIBYTE, files=8)


def test_many_tasks(workers: Workers) -> None:
    """Each task connects again and releases its connections."""
    found = []
    for _ in range(2):
        for _ in range(15):
            workers.run(rank)
        found.append(workers.run(Held.now))
    assert_no_growth([list(each) for each in zip(*found, strict=True)], 4 * MEBIBYTE)
