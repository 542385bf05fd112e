"""Helpers for torch's `DTensor`, of which each process holds a part.

In messages, each process sends its part to the process at the same mesh coordinates in the next stage.

Its modules take long to import and most pipelines do not use them, so they are looked up only if they have been imported elsewhere.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from penstock.errors import ScheduleError
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


# Messages -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DTensorLayout:
    """How a tensor is distributed over a mesh; the names of the mesh dimensions are the same in every stage."""

    names: tuple[str, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool


@dataclass(frozen=True)
class DTensorPart:
    """One process's part of a `DTensor`."""

    part: Any
    layout: DTensorLayout


pytree.register_pytree_node(
    DTensorPart,
    lambda packed: ([packed.part], packed.layout),
    lambda children, layout: DTensorPart(next(iter(children)), layout),
    serialized_type_name="penstock.runtime.tensors.dtensor.DTensorPart",
)


class DTensorPacker:
    """Packs the `DTensor`s of a message and unpacks them on the same dimensions of the pipeline's mesh."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._known: dict[tuple[str, ...], Any] = {}

    def pack(self, value: Any) -> Any:
        """Replace each `DTensor` by this process's part of it."""
        return value if type(value) is Tensor else pytree.tree_map(self._pack, value)

    def unpack(self, value: Any) -> Any:
        """Reverse `pack`, on this process's own part of the mesh."""
        return value if type(value) is Tensor else pytree.tree_map(self._unpack, value, is_leaf=lambda leaf: isinstance(leaf, DTensorPart))

    def _pack(self, leaf: Any) -> Any:
        if is_dtensor(leaf):
            names = self._list_names(leaf)
            layout = DTensorLayout(names, leaf.placements, tuple(leaf.shape), leaf.stride(), leaf.requires_grad)
            return DTensorPart(wait_for_collective(to_local(leaf.detach())), layout)
        return wait_for_collective(leaf)

    def _unpack(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensorPart):
            return leaf
        from torch.distributed.tensor import DTensor

        layout, mesh = leaf.layout, self._find_submesh(leaf.layout.names)
        whole = DTensor.from_local(leaf.part, mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride)  # type: ignore[arg-type]
        return whole.requires_grad_(layout.grad)

    def _find_submesh(self, names: tuple[str, ...]) -> Any:
        if names not in self._known:
            self._known[names] = self.mesh[names]
        return self._known[names]

    def _list_names(self, tensor: DTensor) -> tuple[str, ...]:
        """Return the dimensions of the pipeline's mesh that a tensor is distributed over."""
        mesh, own = tensor.device_mesh, tuple(self.mesh.mesh_dim_names)
        names = tuple(mesh.mesh_dim_names or ())
        if names and set(names) <= set(own) and self._find_submesh(names) == mesh:
            return names
        shown = ", ".join(f"{name}={size}" for name, size in zip(own, self.mesh.shape, strict=True))
        raise ScheduleError(
            f"a stage returns a tensor over processes {mesh.mesh.tolist()} (dimensions {list(names) or 'without names'}), which are not "
            f"those along dimensions of the pipeline's mesh ({shown}): the next stage has no such mesh; return full_tensor() or to_local()"
        )
