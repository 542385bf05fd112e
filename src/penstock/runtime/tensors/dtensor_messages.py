"""Tensors in parts on their way between stages: each process sends its own part to its like in the next stage's mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime.tensors.dtensor import to_local, wait_for_collective


@dataclass(frozen=True)
class DTensorLayout:
    """How a tensor lies over the processes of a mesh, which is named by its dimensions and so the same in every stage."""

    names: tuple[str, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool


@dataclass(frozen=True)
class DTensorPart:
    """One process's part of a tensor."""

    part: Any
    layout: DTensorLayout


pytree.register_pytree_node(
    DTensorPart,
    lambda piece: ([piece.part], piece.layout),
    lambda children, layout: DTensorPart(next(iter(children)), layout),
    serialized_type_name="penstock.runtime.tensors.dtensor_messages.Piece",
)


class DTensorPacker:
    """Takes tensors apart and puts them together again on the pipeline's mesh."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._known: dict[tuple[str, ...], Any] = {}

    def apart(self, value: Any) -> Any:
        """The value with a piece in the place of each tensor in parts."""
        return value if type(value) is Tensor else pytree.tree_map(self._apart, value)

    def together(self, value: Any) -> Any:
        """The reverse, on this process's own part of the mesh."""
        return (
            value if type(value) is Tensor else pytree.tree_map(self._together, value, is_leaf=lambda leaf: isinstance(leaf, DTensorPart))
        )

    def _apart(self, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            names = self._names(leaf)
            layout = DTensorLayout(names, leaf.placements, tuple(leaf.shape), leaf.stride(), leaf.requires_grad)
            return DTensorPart(wait_for_collective(to_local(leaf.detach())), layout)
        return wait_for_collective(leaf)

    def _together(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensorPart):
            return leaf
        at, form = leaf.layout, self._submesh(leaf.layout.names)
        whole = DTensor.from_local(leaf.part, form, at.placements, run_check=False, shape=at.shape, stride=at.stride)  # type: ignore[arg-type]
        return whole.requires_grad_(at.grad)

    def _submesh(self, names: tuple[str, ...]) -> Any:
        if names not in self._known:
            self._known[names] = self.mesh[names]
        return self._known[names]

    def _names(self, tensor: DTensor) -> tuple[str, ...]:
        """The dimensions of the pipeline's mesh that a tensor lies over."""
        mesh, own = tensor.device_mesh, tuple(self.mesh.mesh_dim_names)
        names = tuple(mesh.mesh_dim_names or ())
        if names and set(names) <= set(own) and self._submesh(names) == mesh:
            return names
        shown = ", ".join(f"{name}={size}" for name, size in zip(own, self.mesh.shape, strict=True))
        raise ScheduleError(
            f"a stage passes on a tensor over processes {mesh.mesh.tolist()} (dimensions {list(names) or 'without names'}), which are not "
            f"those along dimensions of the pipeline's mesh ({shown}): the next stage has no such mesh; pass on full_tensor() or to_local()"
        )
