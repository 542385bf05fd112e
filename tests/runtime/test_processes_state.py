"""What is carried from step to step, where each rank is a process with a model of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline
from penstock.runtime.workers import Workers
from runtime.distributed import local_grads
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
