"""Small models split into stages, run by either package and by a plain loop over microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compat.torch.both import ON_A_V, SINGLE, Package

WIDTH = 6


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def blocks(count: int) -> list[nn.Module]:
    return [block() for _ in range(count)]


def data(size: int = 12, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    return torch.randn(size, width), torch.randn(size, width)


def stages(
    package: Package, modules: Sequence[nn.Module], indices: Sequence[int] | None = None, total: int | None = None, **kw: Any
) -> list[Any]:
    """Build one stage per module: all stages of the pipeline, or those with these indices out of `total`."""
    which = range(len(modules)) if indices is None else indices
    made = package.top.PipelineStage
    return [made(module, k, total or len(modules), torch.device("cpu"), **kw) for k, module in zip(which, modules, strict=True)]


def schedule(package: Package, name: str, held: list[Any], count: int, **options: Any) -> Any:
    return getattr(package.schedules, name)(held[0] if name in SINGLE or name == "_ScheduleForwardOnly" else held, count, **options)


def chunks_of(name: str) -> int:
    """Return how many stages the only rank of a pipeline holds."""
    return 1 if name in SINGLE else 2 if name in ON_A_V else 3


def held_by(name: str, rank: int, ranks: int) -> list[int]:
    """Return the indices of a rank's stages."""
    if name in ON_A_V:
        return [rank, 2 * ranks - 1 - rank]
    return [rank] if name in SINGLE or name == "_ScheduleForwardOnly" else [rank, rank + ranks]


@dataclass
class Outcome:
    """The results of a step."""

    output: Any = None
    losses: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)


def grads(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def run(
    package: Package,
    name: str,
    modules: Sequence[nn.Module],
    x: Any,
    target: Any,
    count: int,
    steps: int = 1,
    step: Any = None,
    **options: Any,
) -> Outcome:
    """Run steps on a copy of the modules, with all stages on this rank."""
    modules = copy.deepcopy(list(modules))
    made = schedule(package, name, stages(package, modules), count, **{"loss_fn": nn.functional.mse_loss, **options})
    found = Outcome()
    for _ in range(steps):
        found.output = made.step(x, target=target, losses=found.losses, **(step or {}))
    found.grads = grads(modules)
    return found


def loop(
    modules: Sequence[nn.Module],
    x: Tensor,
    target: Any,
    count: int,
    scale: bool = True,
    loss_fn: Callable[..., Any] = nn.functional.mse_loss,
) -> Outcome:
    """Run the unpipelined model over the same microbatches; with `scale`, each counts by its rows."""
    modules = copy.deepcopy(list(modules))
    found, outputs = Outcome(), []
    for piece, wanted in zip(torch.tensor_split(x, count), torch.tensor_split(target, count), strict=True):
        value = piece
        for module in modules:
            value = module(value)
        loss = loss_fn(value, wanted)
        even = not scale or len(x) % count == 0
        (loss if even else loss * (len(piece) * count / len(x))).backward()
        outputs.append(value.detach())
        found.losses.append(loss.detach())
    found.output = torch.cat(outputs)
    found.grads = [None if grad is None else grad / count if scale else grad for grad in grads(modules)]
    return found


def assert_same(found: Any, wanted: Any, *, exact: bool = False) -> None:
    """Compare trees of tensors: bitwise if `exact`, else within tolerances."""
    if isinstance(wanted, Outcome):
        for mine, theirs in ((found.output, wanted.output), (found.losses, wanted.losses), (found.grads, wanted.grads)):
            assert_same(mine, theirs, exact=exact)
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}))
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_same(mine, theirs, exact=exact)
    else:
        assert found == wanted
