"""Messages with `DTensor`s: each process sends its part to the process at the same mesh coordinates in the next stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import ScheduleError
from penstock.runtime.tensors.dtensor import to_local, wait_for_collective
from penstock.runtime.torch_internals import pytree


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
    serialized_type_name="penstock.runtime.tensors.dtensor_messages.DTensorPart",
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
        if isinstance(leaf, DTensor):
            names = self._names(leaf)
            layout = DTensorLayout(names, leaf.placements, tuple(leaf.shape), leaf.stride(), leaf.requires_grad)
            return DTensorPart(wait_for_collective(to_local(leaf.detach())), layout)
        return wait_for_collective(leaf)

    def _unpack(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensorPart):
            return leaf
        layout, mesh = leaf.layout, self._submesh(leaf.layout.names)
        whole = DTensor.from_local(leaf.part, mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride)  # type: ignore[arg-type]
        return whole.requires_grad_(layout.grad)

    def _submesh(self, names: tuple[str, ...]) -> Any:
        if names not in self._known:
            self._known[names] = self.mesh[names]
        return self._known[names]

    def _names(self, tensor: DTensor) -> tuple[str, ...]:
        """Return the dimensions of the pipeline's mesh that a tensor is distributed over."""
        mesh, own = tensor.device_mesh, tuple(self.mesh.mesh_dim_names)
        names = tuple(mesh.mesh_dim_names or ())
        if names and set(names) <= set(own) and self._submesh(names) == mesh:
            return names
        shown = ", ".join(f"{name}={size}" for name, size in zip(own, self.mesh.shape, strict=True))
        raise ScheduleError(
            f"a stage returns a tensor over processes {mesh.mesh.tolist()} (dimensions {list(names) or 'without names'}), which are not "
            f"those along dimensions of the pipeline's mesh ({shown}): the next stage has no such mesh; return full_tensor() or to_local()"
        )
