"""Every family of schedules with every way to use more processes, or less precision: the numbers are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import penstock as ps
from composition.parallel import Outcome, batch, by_loop, check, mesh_of, perceptrons, schedule, split_over
from penstock.runtime import GradScaler, Pipeline
from penstock.runtime.workers import Workers
from runtime.models import Numbers, by_batch

pytestmark = pytest.mark.slow

FAMILIES = sorted(set(ps.available()) - {"inference", "data-parallel"})
FEATURES = ("replicate", "FSDP2", "HSDP", "tensor parallel", "autocast", "scaler")
EVEN = ("chimera", "dualpipe")
"""Run on an even number of ranks, so that four processes do not make a mesh of them for hybrid sharding."""
SIZES = {1: (13,), 2: (6, 7), 4: (5, 4, 7, 6)}
"""Rows of each data rank: none divides by the number of microbatches, nor are they equal."""

CASES = [
    pytest.param(family, feature, marks=pytest.mark.matrix(family=family, feature=feature), id=f"{family}-{feature}")
    for family in FAMILIES
    for feature in FEATURES
    if feature != "HSDP" or family not in EVEN
]


def data(ranks: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return batch(sum(SIZES[ranks]), dtype)


def model_for(family: str, ranks: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return perceptrons(schedule(family, ranks).stages, dtype)


def step(family: str, mesh: DeviceMesh, *, dtype: torch.dtype = torch.float64, **options: Any) -> Outcome:
    """One step on this process's part of the batch."""
    ranks, copies = mesh["pp"].size(), mesh.size() // mesh["pp"].size() // (mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1)
    model = model_for(family, ranks, dtype)
    if "tp" in mesh.mesh_dim_names:
        for layer in model:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    pipe = Pipeline(model, schedule(family, ranks), loss_fn=functional.mse_loss, mesh=mesh, **options)
    x, y = split_over(mesh, *data(copies, dtype), SIZES[copies])
    return Outcome.of(pipe, pipe.step(x, target=y))


def scaled(family: str, mesh: DeviceMesh) -> list[Any]:
    """Three updates: one that overflows on one process only, which all must skip, and two that do not."""
    model = model_for(family, 2, torch.float32)
    pipe = Pipeline(model, schedule(family, 2), loss_fn=functional.mse_loss, mesh=mesh)
    x, y = split_over(mesh, *data(2, torch.float32), SIZES[2])
    optimizer, scaler = torch.optim.SGD(pipe.parameters(), 0.1), GradScaler(pipe, init_scale=1024.0)
    scales = []
    for number in range(3):
        pipe.step(x, target=y)
        if number == 0 and mesh.get_rank() == 3:
            next(iter(pipe.parameters())).grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [scales, {name: parameter.detach() for name, parameter in pipe.local_parameters()}]


def everything(family: str) -> dict[str, Any]:
    """All features of one family, on meshes of these processes."""
    over_data, over_tensors = mesh_of(pp=2, dp=2), mesh_of(pp=2, tp=2)
    found = {
        "replicate": step(family, over_data),
        "FSDP2": step(family, over_data, shard=True),
        "tensor parallel": step(family, over_tensors),
        "scaler": scaled(family, over_data),
    }
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = step(family, over_data, dtype=torch.float32)
    if family not in EVEN:
        found["HSDP"] = step(family, mesh_of(pp=1, dp_replicate=2, dp_shard=2), shard=True)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[dict[str, Any]]]:
    """What every process found, by family: one run for all features."""
    return {}


@pytest.mark.parametrize(("family", "feature"), CASES)
def test_family(workers: Workers, outcomes: dict[str, list[dict[str, Any]]], family: str, feature: str) -> None:
    if family not in outcomes:
        outcomes[family] = workers.run(everything, (family,))
    found = [theirs[feature] for theirs in outcomes[family]]
    CHECKS[feature](family, found)


def _check(ranks: int, copies: int) -> Callable[[str, Any], None]:
    def against_the_whole_batch(family: str, found: Any) -> None:
        check(found, by_batch(model_for(family, ranks), *data(copies)))

    return against_the_whole_batch


def _check_autocast(family: str, found: Any) -> None:
    """The microbatches of both data ranks under autocast in one process, each with its backward outside; sums differ in their order."""
    model, (x, y) = model_for(family, 2, torch.float32), data(2, torch.float32)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, value: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(value)

    with_cast = by_loop(Cast(model), x, y, SIZES[2], 4, loss_fn)
    wanted = Numbers(with_cast.loss, with_cast.losses, {name.removeprefix("inner."): grad for name, grad in with_cast.grads.items()})
    check(found, wanted, 1e-5)
    plain = by_loop(model, x, y, SIZES[2], 4)
    name = next(iter(wanted.grads))
    assert float((wanted.grads[name] - plain.grads[name]).abs().max()) > 1e-4 * float(plain.grads[name].abs().max())  # not the same thing


def _check_scaler(family: str, found: Any) -> None:
    """The scale halves once; then two plain steps of the whole batch, as a scale that is a power of two changes no gradient."""
    model, (x, y) = copy.deepcopy(model_for(family, 2, torch.float32)), data(2, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for scales, parameters in found:
        assert scales == [512.0, 512.0, 512.0]
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, wanted[name], rtol=1e-5, atol=1e-6)


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "replicate": _check(2, 2),
    "FSDP2": _check(2, 2),
    "HSDP": _check(1, 4),
    "tensor parallel": _check(2, 1),
    "autocast": _check_autocast,
    "scaler": _check_scaler,
}
