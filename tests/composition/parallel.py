"""Models on a device mesh of four processes, and the results of their steps."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, StepResult, add_loss
from runtime.models import Numbers, loop_step

WIDTH = 5
"""Odd, so that shards are of different sizes."""
SIZES = (6, 7)
"""Rows of two data ranks."""
FUNCTIONS = [name for name in dir(dist) if name.startswith(("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"))]


class Perceptron(nn.Module):
    """A layer with parameters of all sorts, whose middle can be split over tensor-parallel ranks."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)
        self.factor = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(self.norm(x)))) * self.factor)


class Sided(nn.Module):
    """A layer with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.map(x)
        add_loss(made.square().mean())
        return torch.tanh(made)


def perceptrons(count: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(*(Perceptron() for _ in range(count))).to(dtype)


def batch(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH, dtype=dtype), torch.randn(rows, WIDTH, dtype=dtype)


def mesh_of(**dims: int) -> DeviceMesh:
    """A mesh of all processes. Torch's caches of meshes of earlier tests are dropped."""
    torch.set_num_threads(1)
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def schedule(name: str, ranks: int, microbatches: int = 4) -> ps.Schedule:
    return ps.schedule(name, ranks=ranks, microbatches=microbatches)


def pipeline(model: Any, name: str, mesh: Any, **options: Any) -> Pipeline:
    return Pipeline(model, schedule(name, 2), mesh=mesh, **({"loss_fn": functional.mse_loss} | options))


def full(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@dataclass
class Outcome:
    """Results of a step on one process: the loss, the full gradients of its parameters, and the norm of all."""

    loss: Tensor | None
    grads: dict[str, Tensor | None]
    norm: float

    @classmethod
    def of(cls, pipe: Pipeline, result: StepResult) -> Outcome:
        norm = float(pipe.clip_grad_norm_(1e9))
        return cls(result.loss, {name: full(parameter.grad) for name, parameter in pipe.local_parameters()}, norm)


def split_over(mesh: DeviceMesh, x: Any, y: Any, sizes: Sequence[int]) -> tuple[Any, Any]:
    """This process's part of a batch."""
    dims = [name for name in mesh.mesh_dim_names or () if name.startswith("dp")]
    at = 0
    for name in dims:
        at = at * mesh[name].size() + mesh[name].get_local_rank()
    return x.split(list(sizes))[at], y.split(list(sizes))[at]


def check(found: Sequence[Outcome], wanted: Numbers, tolerance: float = 1e-12) -> None:
    """Every process has the loss and the norm of the whole batch, and the gradients of its parameters; together all of them."""
    seen: set[str] = set()
    assert wanted.loss is not None
    for outcome in found:
        assert outcome.loss is not None
        assert abs(float(outcome.loss - wanted.loss)) <= tolerance * max(1.0, abs(float(wanted.loss)))
        assert abs(outcome.norm - float(wanted.norm)) <= tolerance * max(1.0, float(wanted.norm))
        for name, grad in outcome.grads.items():
            seen.add(name)
            assert_near(name, grad, wanted.grads[name], tolerance)
    assert seen == set(wanted.grads)


def assert_near(name: str, found: Tensor | None, wanted: Tensor | None, tolerance: float) -> None:
    if found is None or wanted is None:
        assert found is wanted, name
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= tolerance * max(1e-30, float(wanted.abs().max())), name


def by_loop(model: nn.Module, x: Tensor, y: Tensor, sizes: Sequence[int], microbatches: int, loss_fn: Any = functional.mse_loss) -> Numbers:
    """The microbatches of all data ranks one after the other, in one process without a pipeline."""
    model = copy.deepcopy(model)
    model.zero_grad()
    parts = zip(x.split(list(sizes)), y.split(list(sizes)), strict=True)
    pieces = [piece for one, other in parts for piece in zip(one.tensor_split(microbatches), other.tensor_split(microbatches), strict=True)]
    return loop_step(model, pieces, [len(piece) / len(x) for piece, _ in pieces], loss_fn)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of each collective of torch.distributed in the block; nested calls count once."""
    found: Counter[str] = Counter()
    originals, depth = {name: getattr(dist, name) for name in FUNCTIONS}, [0]

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                found[name.replace("_into_tensor", "").replace("_single", "").replace("_tensor", "")] += depth[0] == 1
                return original(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(name, original))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
