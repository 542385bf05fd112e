"""Steps on processes, and their results put together as those of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from penstock.ir.table import Table
from penstock.runtime import Pipeline, StepResult
from penstock.runtime.launch.workers import Workers
from runtime.models import Numbers, assert_equal, assert_same_results

Grads = dict[str, Tensor | None]


class Stage(nn.Module):
    """A linear map and a function that says what is made of it."""

    def __init__(self, forward: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.map, self.body = nn.Linear(width, width), forward

    def forward(self, *args: Any) -> Any:
        return self.body(self.map, *args)


def local_grads(pipe: Pipeline) -> Grads:
    """The gradients of this rank's parameters."""
    return {name: parameter.grad for name, parameter in pipe.local_parameters()}


def together(found: Sequence[Grads], names: Sequence[str]) -> Grads:
    """Every parameter's gradient (or any other tensor) over all ranks, which hold them all, and the same on several of them."""
    whole: Grads = {}
    for theirs in found:
        for name, value in theirs.items():
            assert_equal(value, whole.setdefault(name, value), name)
    assert sorted(whole) == sorted(names)
    return {name: whole[name] for name in names}


def numbers(model: nn.Module, found: Sequence[tuple[StepResult, Grads]]) -> Numbers:
    """One step's results and gradients by rank, as the numbers of the model; every rank must have the same result."""
    assert_same_results([result for result, _ in found])
    grads = together([grads for _, grads in found], [name for name, _ in model.named_parameters()])
    return Numbers(found[0][0].loss, found[0][0].losses, grads)


def by_processes(
    workers: Workers,
    model: nn.Module,
    schedule: Table,
    x: Any,
    y: Any,
    loss_fn: Any = functional.mse_loss,
    step: dict[str, Any] | None = None,
    **options: Any,
) -> Numbers:
    """One step of a copy of the model on each process."""

    def train() -> tuple[StepResult, Grads]:
        pipe = Pipeline(model, schedule, loss_fn=loss_fn, **options)
        return pipe.step(x, target=y, **(step or {})), local_grads(pipe)

    return numbers(model, workers.run(train, ranks=schedule.ranks))
