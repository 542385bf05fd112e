"""Every family of schedules on every kind of mesh and precision: the numbers equal those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from composition.matrix import FEATURES
from composition.parallel import Outcome, batch, by_loop, check, mesh_of, perceptrons, schedule, split_over
from penstock.runtime import Checkpoints, GradScaler, Pipeline
from penstock.runtime.launch.workers import Workers
from penstock.runtime.model.transforms import Recomputed
from penstock.schedules.registry import algorithms
from runtime.models import Numbers, by_batch

FAMILIES = [name for name, each in algorithms().items() if name != "inference" and not each.is_sliced]
EVEN = ("chimera", "dualpipe")
"""Run on an even number of ranks, so that four processes do not make a mesh of them for hybrid sharding."""
SIZES = {1: (13,), 2: (6, 7), 4: (5, 4, 7, 6)}
"""Rows of each data rank: unequal, and not multiples of the number of microbatches."""

CASES = [
    pytest.param(family, feature, marks=pytest.mark.matrix(family=family, feature=feature), id=f"{family}-{feature}")
    for family in FAMILIES
    for feature in FEATURES
    if feature != "HSDP" or family not in EVEN
]


def ranks_of(family: str) -> int:
    return 1 if family == "data-parallel" else 2


def data(copies: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return batch(sum(SIZES[copies]), dtype)


def model_for(family: str, ranks: int, dtype: torch.dtype = torch.float64, *, recompute: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = perceptrons(schedule(family, ranks).stages, dtype)
    return nn.Sequential(*map(Recomputed, model)) if recompute else model


def copies_in(mesh: DeviceMesh) -> int:
    return math.prod(mesh[name].size() for name in mesh.mesh_dim_names if name.startswith("dp"))


def step(family: str, mesh: DeviceMesh, *, dtype: torch.dtype = torch.float64, recompute: bool = False, **options: Any) -> Outcome:
    """One step on this process's part of the batch."""
    ranks, copies = mesh["pp"].size(), copies_in(mesh)
    model = model_for(family, ranks, dtype, recompute=recompute)
    if "tp" in mesh.mesh_dim_names:
        for layer in model:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    pipe = Pipeline(model, schedule(family, ranks), loss_fn=functional.mse_loss, mesh=mesh, **options)
    x, y = split_over(mesh, *data(copies, dtype), SIZES[copies])
    return Outcome.of(pipe, pipe.step(x, target=y))


def scaled(family: str, mesh: DeviceMesh) -> list[Any]:
    """Three updates: all processes skip one that overflows on a single process, and make the other two."""
    ranks, copies = mesh["pp"].size(), copies_in(mesh)
    pipe = Pipeline(model_for(family, ranks, torch.float32), schedule(family, ranks), loss_fn=functional.mse_loss, mesh=mesh)
    x, y = split_over(mesh, *data(copies, torch.float32), SIZES[copies])
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


def resumed(family: str, mesh: DeviceMesh, folder: Path) -> Outcome:
    """Sharded stages make an update and are saved; replicas with other values load the checkpoint and make another step."""
    ranks, copies = mesh["pp"].size(), copies_in(mesh)
    x, y = split_over(mesh, *data(copies), SIZES[copies])
    pipe = Pipeline(model_for(family, ranks), schedule(family, ranks), loss_fn=functional.mse_loss, mesh=mesh, shard=True)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.5)
    pipe.step(x, target=y)
    optimizer.step()
    Checkpoints(folder / family).save(pipe, optimizer, step=1)
    torch.manual_seed(5)
    other = Pipeline(perceptrons(pipe.table.stages), schedule(family, ranks), loss_fn=functional.mse_loss, mesh=mesh)
    Checkpoints(folder / family).load_latest(other, torch.optim.SGD(other.parameters(), 0.1, momentum=0.5))
    return Outcome.of(other, other.step(x, target=y))


def run_families(ranks: int, families: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """All features of families that run on as many ranks. They share the meshes, and with them what torch derives for sharded operators."""
    over_data, over_tensors = mesh_of(pp=ranks, dp=4 // ranks), mesh_of(pp=ranks, dp=2 // ranks, tp=2)
    hybrid = mesh_of(pp=1, dp_replicate=2, dp_shard=2)
    found = {}
    for family in families:
        try:
            found[family] = everything(family, over_data, over_tensors, hybrid, folder)
        except Exception as error:
            error.add_note(f"in the family {family}")
            raise
    return found


def everything(family: str, over_data: DeviceMesh, over_tensors: DeviceMesh, hybrid: DeviceMesh, folder: Path) -> dict[str, Any]:
    """All features of one family."""
    found = {
        "replicate": step(family, over_data),
        "FSDP2": step(family, over_data, shard=True),
        "tensor parallel": step(family, over_tensors),
        "activation checkpointing": step(family, over_data, shard=True, recompute=True),
        "scaler": scaled(family, over_data),
        "checkpoints": resumed(family, over_data, folder),
    }
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = step(family, over_data, dtype=torch.float32)
    if family not in EVEN:
        found["HSDP"] = step(family, hybrid, shard=True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, start_workers: Callable[[], Workers], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The results of every process, by family: one run for all families with the same number of ranks, of those whose tests are run."""
    cloudpickle.register_pickle_by_value(request.module)
    wanted = {item.callspec.params["family"] for item in request.session.items if item.nodeid.startswith(f"{request.node.nodeid}::")}
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (1, 2):
        families = [family for family in FAMILIES if family in wanted and ranks_of(family) == ranks]
        results = start_workers().run(run_families, (ranks, families, folder)) if families else []
        found |= {family: [theirs[family] for theirs in results] for family in families}
    return found


@pytest.mark.parametrize(("family", "feature"), CASES)
def test_family(outcomes: dict[str, list[dict[str, Any]]], folder: Path, family: str, feature: str) -> None:
    found, ranks = [theirs[feature] for theirs in outcomes[family]], ranks_of(family)
    if feature == "autocast":
        check_autocast(found, model_for(family, ranks, torch.float32), 4 // ranks)
    elif feature == "scaler":
        check_scaler(found, model_for(family, ranks, torch.float32), 4 // ranks)
    elif feature == "checkpoints":
        check_checkpoint(found, model_for(family, ranks), 4 // ranks, folder / family)
    else:
        ranks, copies = {"HSDP": (1, 4), "tensor parallel": (ranks, 2 // ranks)}.get(feature, (ranks, 4 // ranks))
        recompute = feature == "activation checkpointing"
        check(found, by_batch(model_for(family, ranks, recompute=recompute), *data(copies)))


class Cast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(value)


def check_autocast(found: Any, model: nn.Module, copies: int) -> None:
    """The microbatches of all data ranks under autocast in one process, each with its backward outside; sums differ in their order."""
    x, y = data(copies, torch.float32)
    cast, plain = by_loop(Cast(model), x, y, SIZES[copies], 4), by_loop(model, x, y, SIZES[copies], 4)
    wanted = {name.removeprefix("inner."): grad for name, grad in cast.grads.items()}
    check(found, Numbers(cast.loss, cast.losses, wanted), 1e-5)
    name = next(iter(wanted))
    assert float((wanted[name] - plain.grads[name]).abs().max()) > 1e-4 * float(plain.grads[name].abs().max())  # not the same thing


def check_scaler(found: Any, model: nn.Module, copies: int) -> None:
    """The scale halves once; then two plain steps of the whole batch, as a scale that is a power of two changes no gradient."""
    x, y = data(copies, torch.float32)
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


def check_checkpoint(found: Any, model: nn.Module, copies: int, folder: Path) -> None:
    """The second step equals that of the plain model after the same update."""
    x, y = data(copies)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    functional.mse_loss(model(x), y).backward()
    optimizer.step()
    check(found, by_batch(model, x, y))
    again = perceptrons(len(model))
    other = torch.optim.SGD(again.parameters(), 0.1, momentum=0.5)
    Checkpoints(folder).load_latest(again, other)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other.state[two], optimizer.state[one], rtol=1e-12, atol=1e-12)
