"""State carried from step to step, if each rank is a process with its own model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, rank
from penstock.runtime.launch.workers import Workers
from runtime.distributed import local_grads
from runtime.models import loop_step
from runtime.summing import COUNT, HALF, assert_rounded_once, model_of, terms


def test_copies_sum_in_the_dtype_on_processes(workers: Workers) -> None:
    schedule = ps.schedule("dualpipe", ranks=2, microbatches=COUNT)
    model, x, y = model_of(2, HALF, tied=True), torch.randn(16, 6).to(HALF), torch.randn(16, 6).to(HALF)
    wanted = terms(model, x, y)

    def train() -> tuple[dict[str, Tensor | None], list[bool]]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, accumulate_dtype=torch.float64)
        for _ in range(2):
            pipe.step(x, target=y)
        return local_grads(pipe), [p.grad.stride() == p.stride() for _, p in pipe.local_parameters()]  # type: ignore[union-attr]

    for grads, laid in workers.run(train, ranks=2):
        assert all(laid)
        for key, grad in grads.items():
            assert_rounded_once(grad, wanted["0.weight" if key == "1.weight" else key], 2, key)


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_running_statistics_of_both_copies(workers: Workers, name: str) -> None:
    """Those of the plain loop, on each process; each evaluates as the plain model does, for any number of microbatches."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))).double()
    x, y = torch.randn(12, 6).double() * 2 + 1, torch.randn(12, 6).double()
    schedule = ps.schedule(name, ranks=2, microbatches=4)

    def train() -> tuple[dict[str, Tensor], list[Tensor]]:
        mine = copy.deepcopy(model)
        pipe = Pipeline(mine, schedule, loss_fn=functional.mse_loss)
        for _ in range(2):
            pipe.step(x, target=y)
        return dict(mine.named_buffers()), [pipe.infer(x, microbatches=count) for count in (1, 3)]

    again = copy.deepcopy(model)
    for _ in range(2):
        loop_step(again, list(zip(x.chunk(4), y.chunk(4), strict=True)), [1 / 4] * 4, functional.mse_loss)
    for buffers, outputs in workers.run(train, ranks=2):
        torch.testing.assert_close(buffers, dict(again.named_buffers()), rtol=1e-12, atol=1e-14)
        for output in outputs:
            torch.testing.assert_close(output, again.eval()(x).detach(), rtol=1e-10, atol=1e-12)


class Counter(nn.Module):
    """Keeps state outside of what a state dict has; what it gives depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.runs = nn.Linear(6, 6), 0
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs, self.last = self.runs + 1, float(x.detach().mean())
        self.hidden += 1
        return self.map(x) * self.runs / self.hidden.clone()


@pytest.mark.parametrize("recompute", [False, True])
def test_parity_compares_the_state_of_all_ranks(workers: Workers, recompute: bool) -> None:
    """After steps, each rank's copies of the others' stages are out of date."""
    model = nn.Sequential(*(nn.Sequential(Counter(), nn.BatchNorm1d(6)) for _ in range(2)))
    x, y = torch.randn(12, 6), torch.randn(12, 6)

    def train() -> list[str]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss, recompute=recompute)
        found = []
        for _ in range(2):
            pipe.step(x, target=y)
            found.append(str(pipe.parity(x, target=y).loop))
        return [*found, str(model[rank()][0].runs)]

    for found in workers.run(train, ranks=2):
        assert found == ["microbatch loop: equal to the last bit"] * 2 + ["6"]
