"""Tensors of which each process holds a part: torch's `DTensor`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> tuple[tuple[str, int], ...]:
    """Which part of a tensor this process holds: its number along each dimension of the mesh that splits it."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(f"dimension {dim}" for dim in range(mesh.ndim))
    assert coordinate is not None
    splits = [not placement.is_replicate() and not placement.is_partial() for placement in tensor.placements]  # strided shards too
    return tuple((names[dim], coordinate[dim]) for dim, split in enumerate(splits) if split)


def whole_parts(tensor: Any) -> Any:
    """The tensor, summed over processes where each holds a term of a sum only."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=[Replicate() if each.is_partial() else each for each in tensor.placements])
    return tensor


def is_laid_as(tensor: Tensor, parameter: Tensor) -> bool:
    return not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor) or tensor.placements == parameter.placements


def laid_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A gradient laid out over processes as its parameter is."""
    if isinstance(tensor, DTensor) and isinstance(parameter, DTensor) and tensor.placements != parameter.placements:
        return tensor.redistribute(placements=parameter.placements)
    return tensor


def like_part(parameter: DTensor, part: Tensor) -> DTensor:
    """A tensor of the parameter's form, of which this process holds this part."""
    return DTensor.from_local(
        part.clone(), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
