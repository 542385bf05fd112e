"""Checkpoints of copies and shards: saved on a mesh, loaded on another one, on fewer processes, or into the plain model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from composition.parallel import WIDTH, full, mesh_of, perceptrons, schedule
from penstock.runtime import Checkpoints, DataOrder, GradScaler, Initial, Pipeline, Replayed
from penstock.runtime.launch.workers import Workers

SAMPLES, BATCH, LAYERS = 44, 18, 4
MESHES = {
    "replicate": ({"pp": 2, "dp": 2}, "zbv", False),
    "FSDP2": ({"pp": 2, "dp": 2}, "zbv", True),
    "HSDP": ({"pp": 1, "dp_replicate": 2, "dp_shard": 2}, "interleaved-1f1b", True),
}


class Run:
    """Everything that a run continues with. All data ranks draw the whole batch, and each takes its part."""

    def __init__(self, model: nn.Module | Pipeline, mesh: DeviceMesh | None = None) -> None:
        self.model, self.mesh = model, mesh
        self.optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        self.scheduler, self.data = StepLR(self.optimizer, 2, 0.5), DataOrder(SAMPLES, BATCH, seed=3)
        self.parts = {"scheduler": self.scheduler, "data": self.data}

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        x = samples()[next(self.data)]
        if isinstance(self.model, Pipeline):
            at, parts = self.place()
            mine = x.tensor_split(parts)[at]
            loss = self.model.step(mine, target=mine.flip(1)).loss
            self.model.clip_grad_norm_(0.5)
        else:
            loss = functional.mse_loss(self.model(x), x.flip(1))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def place(self) -> tuple[int, int]:
        """The index of this data rank's part, and the number of parts."""
        at, parts = 0, 1
        for name in [] if self.mesh is None else [each for each in self.mesh.mesh_dim_names or () if each.startswith("dp")]:
            at, parts = at * self.mesh[name].size() + self.mesh[name].get_local_rank(), parts * self.mesh[name].size()
        return at, parts


def samples() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return perceptrons(LAYERS)


def meshed(kind: str, seed: int) -> Run:
    dims, name, shard = MESHES[kind]
    mesh = mesh_of(**dims)
    return Run(Pipeline(layers(seed), schedule(name, dims["pp"]), loss_fn=functional.mse_loss, mesh=mesh, shard=shard), mesh)


def save(kind: str, folder: Path) -> tuple[list[float], Tensor]:
    run = meshed(kind, 0)
    torch.manual_seed(100 + torch.distributed.get_rank())
    losses = run.train(2)
    Checkpoints(folder).save(run.model, run.optimizer, step=2, **run.parts)
    return losses, torch.rand(3)


def resume(kind: str, folder: Path) -> tuple[list[float], Tensor]:
    run = meshed(kind, 1)
    found = Checkpoints(folder).load_latest(run.model, run.optimizer, **run.parts)
    assert found is not None
    assert (found.step, found.ranks) == (2, 4)
    drawn = torch.rand(3)
    state = [value for each in run.optimizer.state.values() for value in each.values() if value.ndim]
    assert all(isinstance(value, DTensor) == (kind != "replicate") for value in state)
    return run.train(3), drawn


def resume_without_mesh(folder: Path) -> list[float]:
    torch.set_num_threads(1)
    run = Run(Pipeline(layers(2), schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss))
    Checkpoints(folder).load_latest(run.model, run.optimizer, **run.parts)
    return run.train(3)


@pytest.mark.parametrize(("kind", "other"), [("replicate", "FSDP2"), ("FSDP2", "HSDP"), ("HSDP", "replicate")])
def test_the_curve_goes_on(workers: Workers, tmp_path: Path, kind: str, other: str) -> None:
    """On the same mesh, with the random streams of each process; on another; on two processes, one, and in the plain model."""
    wanted = Run(layers(0)).train(5)

    def near(found: list[float], first: int) -> None:
        assert found == pytest.approx(wanted[first : first + len(found)], rel=1e-11)

    saved = workers.run(save, (kind, tmp_path))
    again = workers.run(resume, (kind, tmp_path))
    for (losses, drawn), (later, drawn_again) in zip(saved, again, strict=True):
        near(losses, 0)
        near(later, 2)
        assert torch.equal(drawn, drawn_again)
    assert len({tuple(drawn.tolist()) for _, drawn in saved}) == 4
    for losses, _ in workers.run(resume, (other, tmp_path)):
        near(losses, 2)
    for ranks in (2, 1):
        for losses in workers.run(resume_without_mesh, (tmp_path,), ranks=ranks):
            near(losses, 2)
    plain = Run(layers(3))
    Checkpoints(tmp_path).load_latest(plain.model, plain.optimizer, **plain.parts)
    near(plain.train(3), 2)


def test_names_and_bytes(workers: Workers, tmp_path: Path) -> None:
    """The names of the plain model, each value once: copies are written by one of their holders, shards by each holder of one."""
    sizes = {}
    for kind in ("replicate", "HSDP"):
        workers.run(save, (kind, tmp_path / kind))
        metadata = FileSystemReader(tmp_path / kind / "step-00000002").read_metadata()
        names = {key.removeprefix("model.") for key in metadata.state_dict_metadata if key.startswith("model.")}
        assert names == set(layers(0).state_dict())
        held = [(index.fqn, str(index.offset)) for index in metadata.storage_data if index.fqn.startswith("model.")]
        assert len(held) == len(set(held))
        sizes[kind] = sum(
            chunk.sizes.numel() for key, value in metadata.state_dict_metadata.items() if key.startswith("model.") for chunk in value.chunks
        )
    assert set(sizes.values()) == {sum(parameter.numel() for parameter in layers(0).parameters())}


@pytest.mark.parametrize("weights", [Initial(seed=4), Replayed(lambda: nn.Sequential(*pair()), seed=4)], ids=["Initial", "Replayed"])
def test_stages_from_the_meta_device(workers: Workers, weights: Any) -> None:
    """Values come first, shards after: together they are those of the plain model, and copies are the same."""

    def build(shard: bool) -> dict[str, Tensor]:
        mesh = mesh_of(pp=2, dp=2)
        with torch.device("meta"):
            model = nn.Sequential(*pair())
        pipe = Pipeline(model, schedule("1f1b", 2), loss_fn=functional.mse_loss, mesh=mesh, shard=shard, weights=weights)
        return {name: full(parameter.detach()) for name, parameter in pipe.local_parameters()}

    torch.manual_seed(4)
    plain = nn.Sequential(*pair())
    if isinstance(weights, Initial):
        weights(plain)
    for shard in (False, True):
        for found in workers.run(build, (shard,)):
            assert found
            assert all(torch.equal(value, plain.get_parameter(name)) for name, value in found.items())


def pair() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)) for _ in range(2)]


def test_scaler_and_weights_go_on(workers: Workers, tmp_path: Path) -> None:
    """A gradient scaler is saved as any state is; loading gives every data rank the values, whatever it began with."""
    model = perceptrons(2, torch.float32)

    def train() -> Any:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), schedule("1f1b", 2), loss_fn=functional.mse_loss, mesh=mesh, shard=True)
        scaler, checkpoints = GradScaler(pipe, init_scale=64.0), Checkpoints(tmp_path)
        checkpoints.save(pipe, step=1, extra={"scaler": scaler})
        torch.manual_seed(mesh.get_rank())
        other = Pipeline(perceptrons(2, torch.float32), schedule("1f1b", 2), loss_fn=functional.mse_loss, mesh=mesh)
        fresh = GradScaler(other, init_scale=2.0)
        checkpoints.load_latest(other, extra={"scaler": fresh})
        return fresh.get_scale(), {name: full(parameter.detach()) for name, parameter in other.local_parameters()}

    for scale, parameters in workers.run(train):
        assert scale == 64.0
        for name, value in parameters.items():
            assert torch.equal(value, model.get_parameter(name))
