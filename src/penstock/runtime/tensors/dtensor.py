"""Tensors of which each process holds a part: torch's `DTensor`.

Its modules take long to import and most pipelines have none, so that they are asked for only where someone else has imported them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def in_parts(value: object) -> TypeGuard[DTensor]:
    """Whether this is a tensor in parts."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if in_parts(tensor) else tensor


def is_gathering(value: object) -> bool:
    """Whether this is a tensor that torch is still gathering."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(value, module.AsyncCollectiveTensor)


def arrived(value: Any) -> Any:
    """The value, waited for if it is a tensor that torch is still gathering."""
    return value.wait() if is_gathering(value) else value


def complete(value: Any) -> Any:
    """The value with every tensor in parts put together in full, on each process."""
    if type(value) is Tensor:
        return value
    return pytree.tree_map(lambda leaf: leaf.full_tensor() if in_parts(leaf) else arrived(leaf), value)


def part_of(tensor: Tensor) -> tuple[tuple[str, int], ...]:
    """Which part of a tensor this process holds: its number along each dimension of the mesh that splits it."""
    if not in_parts(tensor):
        return ()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(f"dimension {dim}" for dim in range(mesh.ndim))
    assert coordinate is not None
    splits = [not placement.is_replicate() and not placement.is_partial() for placement in tensor.placements]  # strided shards too
    return tuple((names[dim], coordinate[dim]) for dim, split in enumerate(splits) if split)


def whole_parts(tensor: Tensor) -> Tensor:
    """The tensor, summed over processes where each holds a term of a sum only."""
    if in_parts(tensor) and any(placement.is_partial() for placement in tensor.placements):
        from torch.distributed.tensor import Replicate

        return tensor.redistribute(placements=[Replicate() if each.is_partial() else each for each in tensor.placements])
    return tensor


def is_laid_as(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a gradient lies over processes as its parameter does."""
    return not in_parts(tensor) or not in_parts(parameter) or tensor.placements == parameter.placements


def laid_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A gradient laid out over processes as its parameter is."""
    if in_parts(tensor) and in_parts(parameter) and tensor.placements != parameter.placements:
        return tensor.redistribute(placements=parameter.placements)
    return tensor


def like_part(parameter: DTensor, part: Tensor) -> DTensor:
    """A tensor of the parameter's form, of which this process holds this part."""
    from torch.distributed.tensor import DTensor

    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part.clone(), parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
