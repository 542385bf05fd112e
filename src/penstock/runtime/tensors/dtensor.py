"""Helpers for torch's `DTensor`, of which each process holds a part.

Its modules take long to import and most pipelines do not use them, so they are looked up only if they have been imported elsewhere.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from penstock.runtime.torch_internals import pytree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_async_collective(value: object) -> bool:
    """Whether this is the result of a collective that may still be running."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(value, module.AsyncCollectiveTensor)


def wait_for_collective(value: Any) -> Any:
    """Return the value, once the collective that computes it has ended."""
    return value.wait() if is_async_collective(value) else value


def gather_full(value: Any) -> Any:
    """Replace every `DTensor` of a tree by the full tensor. Collective over its mesh."""
    if type(value) is Tensor:
        return value
    return pytree.tree_map(lambda leaf: leaf.full_tensor() if is_dtensor(leaf) else wait_for_collective(leaf), value)


def shard_coordinates(tensor: Tensor) -> tuple[tuple[str, int], ...]:
    """Return which part of a tensor this process holds: its index along each mesh dimension that shards the tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(f"dimension {dim}" for dim in range(mesh.ndim))
    assert coordinate is not None
    splits = [not placement.is_replicate() and not placement.is_partial() for placement in tensor.placements]  # strided shards too
    return tuple((names[dim], coordinate[dim]) for dim, split in enumerate(splits) if split)


def reduce_partial(tensor: Tensor) -> Tensor:
    """Sum a tensor along the mesh dimensions on which each process holds only one term of it."""
    if is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements):
        from torch.distributed.tensor import Replicate

        return tensor.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements])
    return tensor


def has_same_placements(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a gradient is distributed as its parameter is."""
    return not is_dtensor(tensor) or not is_dtensor(parameter) or tensor.placements == parameter.placements


def redistribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Distribute a gradient as its parameter is."""
    if is_dtensor(tensor) and is_dtensor(parameter) and tensor.placements != parameter.placements:
        return tensor.redistribute(placements=parameter.placements)
    return tensor


def from_local_like(parameter: DTensor, part: Tensor) -> DTensor:
    """Make a tensor that is distributed as the parameter is, from a copy of this process's part."""
    from torch.distributed.tensor import DTensor

    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part.clone(), parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
