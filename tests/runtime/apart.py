"""Ranks that are not given the same: what each caller sees, whatever ranks are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, rank

RANKS = 3


def layers() -> list[nn.Linear]:
    """The same everywhere, also when threads draw random numbers at the same time."""
    found, source = [nn.Linear(6, 6) for _ in range(RANKS)], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in nn.ModuleList(found).parameters():
            parameter.uniform_(-0.4, 0.4, generator=source)
    return found


def made(**options: Any) -> Pipeline:
    torch.set_num_threads(1)
    return Pipeline(layers(), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, **({"deadline": 60.0} | options))


def number(k: int, rows: int = 4) -> torch.Tensor:
    return torch.full((rows, 6), float(k))


def tried(pipe: Pipeline, *args: Any, **kwargs: Any) -> Any:
    """The loss, or the name of the error and the first line of what it says."""
    try:
        return float(pipe.step(*args, **kwargs).loss)
    except (PipelineError, ScheduleError) as error:
        return type(error).__name__, str(error).splitlines()[0]


def skipping(victim: int, fault: str) -> list[Any]:
    """Five batches, of which one rank is given two in a row wrongly; all go on with the next."""
    pipe, seen = made(), []
    for k in range(5):
        x = target = number(k)
        options: dict[str, Any] = {"target": target}
        if k in (1, 2) and rank() == victim:
            options = {"sizes": {"target": target[:3]}, "target": {}, "count": {"target": target, "microbatches": 0}}[fault]
        seen.append(tried(pipe, x, **options))
    return seen


def alone(k: int) -> float:
    """The loss of a batch on one rank."""
    return functional.mse_loss(nn.Sequential(*layers())(number(k)), number(k)).item()


def other_sizes() -> list[Any]:
    """A batch that is shorter on the last rank, in a way that no shape shows; then the same on all; then none in the middle."""
    pipe = made()
    pipe.loss.fn = lambda out, target: (out - target.mean()).square().mean()
    x = number(1)
    first = tried(pipe, x, target=x)
    grads = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    rows = 2 if rank() == 2 else 4
    second = tried(pipe, x[:rows], target=x[:rows])
    assert all(torch.equal(p.grad, grad) for p, grad in zip(pipe.parameters(), grads, strict=True))
    third = tried(pipe, *([x] if rank() != 1 else [None]), **({"target": x} if rank() != 1 else {}))
    return [first, second, third]


def left_out() -> list[Any]:
    """A rank that leaves out a call is never mistaken for one that is at the same call."""
    pipe = made()
    x = number(1)
    pipe.step(x, target=x)
    if rank() == 0:  # as if the call had failed without a report
        pipe._calls += 1
    return [tried(pipe, x, target=x) for _ in range(2)]


def recorded() -> list[Any]:
    pipe = made()
    x = number(1)
    pipe.record = rank() == 1
    return [tried(pipe, x, target=x), setattr(pipe, "record", False) or tried(pipe, x, target=x)]


class Normed(nn.Module):
    """A stage with buffers that its forward changes."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.norm, self.stage, self.bad = nn.BatchNorm1d(6), stage, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(x)
        if self.bad:
            raise ValueError("bad")
        return made


def buffers() -> list[bool]:
    """Whether the buffers of this rank are what they were before a step that failed in the last stage."""
    model = [Normed(stage) for stage in range(RANKS)]
    pipe = Pipeline(model, schedule="gpipe", microbatches=3, loss_fn=functional.mse_loss, deadline=60.0)
    x = torch.arange(72.0).reshape(12, 6).sin()
    pipe.step(x, target=x)
    before = [buffer.clone() for buffer in model[rank()].buffers()]
    model[2].bad = True
    assert "ValueError: bad" in tried(pipe, x, target=x)[1]
    return [torch.equal(buffer, copy) for buffer, copy in zip(model[rank()].buffers(), before, strict=True)]


class SilentError(Exception):
    """One that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def silent() -> Any:
    pipe = made()
    if rank() == 1:
        pipe.stages[1].module.register_forward_pre_hook(_silent)
    return tried(pipe, number(1), target=number(1))


def _silent(*_: Any) -> None:
    raise SilentError
